"""Permissions in a namespace, by SelfSubjectAccessReview, and what does not work without them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from trainjob._backends.kubernetes.client import ApiClient, Request
from trainjob._doctor.findings import Finding, Level
from trainjob._support.kube_objects import mapping

_PATH = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_USER = "system:serviceaccount:"


@dataclass(frozen=True)
class Permission:
    """One verb on one resource.

    Attributes:
        resource: Resource as in a Role, such as ``pods/log``.
        verb: One verb.
        without: What does not work without it.
        level: Level of the finding if it is missing.
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
    "jobsets": "jobset.x-k8s.io",
}

PERMISSIONS = (
    Permission("trainjobs", "create", "no job can be launched"),
    Permission("trainjobs", "get", "jobs cannot be waited for, shown or cancelled"),
    Permission("trainjobs", "list", "no job can be launched or waited for: both look for the jobs of a namespace"),
    Permission("trainjobs", "watch", "changes of jobs are noticed up to 30 s late", Level.WARNING),
    Permission("trainjobs", "patch", "jobs cannot be suspended, resumed or marked as delivered"),
    Permission("trainjobs", "delete", "jobs cannot be cancelled"),
    Permission("trainingruntimes", "get", "a missing runtime of a waiting job is not reported", Level.WARNING),
    Permission(
        "jobsets",
        "get",
        "a launch does not see whether a deleted job of the same name has left a JobSet",
        Level.WARNING,
    ),
    Permission(
        "leases",
        "create",
        "unattended jobs are not ended: no waiting process can be recorded; a cancel does not stop a launch that is"
        " underway",
        Level.WARNING,
    ),
    Permission(
        "leases", "list", "a launch that is underway does not see that its key was cancelled meanwhile", Level.WARNING
    ),
    Permission(
        "leases",
        "patch",
        "unattended jobs are not ended: no Lease can be renewed; a cancel does not stop a launch that is underway",
        Level.WARNING,
    ),
    Permission("leases", "delete", "Leases of processes that have ended are not removed", Level.WARNING),
    Permission(
        "pods",
        "list",
        "logs, diagnosis and the end of a cancellation are not available, and a new attempt does not wait for the ranks"
        " of an earlier one",
    ),
    Permission("pods", "watch", "crashes are noticed up to 30 s late, when the log may be lost", Level.WARNING),
    Permission("pods/log", "get", "logs are not available, nor in a diagnosis", Level.WARNING),
    Permission("events", "list", "the reason why pods do not start is not reported", Level.WARNING),
    Permission(
        "workloads",
        "list",
        "neither the reason why a job waits in its queue nor its training before a preemption is known",
        Level.WARNING,
    ),
)
"""The permissions of the Role in `trainjob._install`, with the use of each."""


async def check(client: ApiClient, namespace: str, user: str, *, queues: bool) -> list[Finding]:
    """One finding for each resource with its allowed verbs, and one for each missing permission.

    Args:
        client: The connection.
        namespace: Where jobs are to run.
        user: Name of the user by the API server; empty if unknown.
        queues: Whether the cluster has Kueue.

    Raises:
        ApiError: The server does not answer access reviews.
    """
    wanted = [each for each in PERMISSIONS if queues or each.resource != "workloads"]
    refusals = await asyncio.gather(*(_refusal(client, namespace, each) for each in wanted))
    missing = {each: reason for each, reason in zip(wanted, refusals, strict=True) if reason is not None}
    findings = []
    for resource in dict.fromkeys(each.resource for each in wanted):
        verbs = [each.verb for each in wanted if each.resource == resource and each not in missing]
        if verbs:
            findings.append(Finding("rights", Level.OK, f"may {', '.join(verbs)} {resource} in {namespace}"))
    advice = _advice(namespace, user)
    for each, reason in missing.items():
        detail = f" ({reason})" if reason else ""
        message = f"may not {each.verb} {each.resource} in {namespace}{detail}: {each.without}"
        findings.append(Finding("rights", each.level, message, advice))
    return findings


async def _refusal(client: ApiClient, namespace: str, permission: Permission) -> str | None:
    """None if allowed, else the reason by the server, which is usually empty."""
    resource, _, subresource = permission.resource.partition("/")
    attributes: Mapping[str, str] = {
        "namespace": namespace,
        "group": GROUPS.get(resource, ""),
        "resource": resource,
        "subresource": subresource,
        "verb": permission.verb,
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
