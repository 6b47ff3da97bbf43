"""What may be done in a namespace, by SelfSubjectAccessReview, and what does not work without it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from trainjob.backends.kubernetes.client import ApiClient, Request
from trainjob.doctor.findings import Finding, Level
from trainjob.kube_objects import mapping

_PATH = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_USER = "system:serviceaccount:"


@dataclass(frozen=True)
class Right:
    """One verb on one resource.

    Attributes:
        resource: As a Role has it, e.g. ``pods/log``.
        verb: One verb.
        without: What happens where it is missing.
        level: How much that matters.
    """

    resource: str
    verb: str
    without: str
    level: Level = Level.FAILURE


GROUPS = {
    "trainjobs": "trainer.kubeflow.org",
    "trainingruntimes": "trainer.kubeflow.org",
    "workloads": "kueue.x-k8s.io",
    "leases": "coordination.k8s.io",
}

RIGHTS = (
    Right("trainjobs", "create", "no job can be launched"),
    Right("trainjobs", "get", "a job cannot be waited for, looked at or cancelled"),
    Right("trainjobs", "list", "a key cannot be launched twice, and what happens to a job is noticed up to 30 s late"),
    Right("trainjobs", "watch", "what happens to a job is noticed up to 30 s late", Level.WARNING),
    Right("trainjobs", "patch", "a job cannot be suspended or resumed, nor its result marked as delivered"),
    Right("trainjobs", "delete", "a job cannot be cancelled"),
    Right("trainingruntimes", "get", "nothing says that the runtime of a job that waits is gone", Level.WARNING),
    Right("leases", "create", "a job that nobody waits for is kept: nobody can be seen to wait", Level.WARNING),
    Right("leases", "patch", "a job that nobody waits for is kept: a Lease cannot be renewed", Level.WARNING),
    Right("leases", "delete", "the Leases of processes that waited are left", Level.WARNING),
    Right("pods", "list", "there are no logs and no diagnosis, and cancelling cannot tell when it is done"),
    Right("pods", "watch", "a crash is noticed up to 30 s late, when its log may be gone", Level.WARNING),
    Right("pods/log", "get", "there are no logs, and none in a diagnosis", Level.WARNING),
    Right("events", "list", "nothing says why pods do not start", Level.WARNING),
    Right("workloads", "list", "nothing says why a job waits in its queue", Level.WARNING),
)
"""What the Role in `trainjob.install` gives, and what each part of it is for."""


async def check(client: ApiClient, namespace: str, user: str, *, queues: bool) -> list[Finding]:
    """A line for each resource with what may be done, and one for each right that is missing.

    Args:
        client: The connection.
        namespace: Where jobs are to run.
        user: Who asks, as the server calls it; empty if it does not say.
        queues: Whether there is Kueue.

    Raises:
        ApiError: the server does not answer questions about rights.
    """
    rights = [right for right in RIGHTS if queues or right.resource != "workloads"]
    answers = await asyncio.gather(*(_allowed(client, namespace, right) for right in rights))
    missing = {right: why for right, why in zip(rights, answers, strict=True) if why is not None}
    findings = []
    for resource in dict.fromkeys(right.resource for right in rights):
        verbs = [right.verb for right in rights if right.resource == resource and right not in missing]
        if verbs:
            findings.append(Finding("rights", Level.OK, f"may {', '.join(verbs)} {resource} in {namespace}"))
    advice = _advice(namespace, user)
    for right, why in missing.items():
        said = f" ({why})" if why else ""
        message = f"may not {right.verb} {right.resource} in {namespace}{said}: {right.without}"
        findings.append(Finding("rights", right.level, message, advice))
    return findings


async def _allowed(client: ApiClient, namespace: str, right: Right) -> str | None:
    """None if it is allowed, else what the server says to it, which is mostly nothing."""
    resource, _, subresource = right.resource.partition("/")
    attributes: Mapping[str, str] = {
        "namespace": namespace,
        "group": GROUPS.get(resource, ""),
        "resource": resource,
        "subresource": subresource,
        "verb": right.verb,
    }
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    status = mapping(await client.send(Request("POST", _PATH, body=body)), "status")
    return None if status.get("allowed") else str(status.get("reason") or status.get("evaluationError") or "")


def _advice(namespace: str, user: str) -> str:
    install = f"trainjob install --only rbac -n {namespace}"
    apply = "kubectl apply --server-side -f -"
    if user.startswith(_USER):
        return f"{install} --service-account {user.removeprefix(_USER)} | {apply}"
    bind = f"kubectl create rolebinding trainjob -n {namespace} --role=trainjob --user={user or '<you>'}"
    return f"{install} | {apply}, then {bind}"
