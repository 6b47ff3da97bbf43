"""Whether the API server accepts TrainJobs, by a dry run, which creates nothing."""

from __future__ import annotations

import re
import secrets

from trainjob._backends.base import Backend
from trainjob._backends.kubernetes.errors import ApiError
from trainjob._doctor.findings import Finding, Level
from trainjob._manifest.render import render
from trainjob._spec import RuntimeRef, TrainJobSpec
from trainjob._support.kube_objects import mapping
from trainjob.errors import BackendUnavailable, LaunchError, RetryVerdict, RuntimeNotFound
from trainjob.status import QUEUE_LABEL

_UNANSWERED = re.compile(r'failed calling webhook "([^"]+)"')
_NAMESPACE = re.compile(r'namespaces "([^"]+)" not found')


async def check(backend: Backend, namespace: str, runtime: RuntimeRef, queue: str = "") -> Finding:
    """Whether a job of one node would be accepted, and whether Kueue would hold it.

    Args:
        backend: Backend of the cluster.
        namespace: Namespace of the job.
        runtime: Runtime of the job.
        queue: LocalQueue of the job; empty if it names none.
    """
    job = f"a job of {runtime.kind} {runtime.name}" + (f" for queue {queue}" if queue else "")
    labels = {QUEUE_LABEL: queue} if queue else {}
    spec = TrainJobSpec.parse({"runtime": vars(runtime), "num_nodes": 1, "labels": labels})
    try:
        stored = await backend.create(render(spec, f"doctor/{secrets.token_hex(6)}", 1, namespace), dry_run=True)
    except RuntimeNotFound:
        advice = f"list the runtimes: kubectl get clustertrainingruntimes,trainingruntimes -n {namespace}"
        return Finding("runtime", Level.FAILURE, f"{runtime.kind} {runtime.name} does not exist", advice)
    except (LaunchError, BackendUnavailable) as error:
        return _refusal(error, job, namespace)
    if not queue:
        return Finding("admission", Level.OK, f"{job} would be accepted (dry run, nothing was created)")
    if mapping(stored, "spec").get("suspend") is True:
        message = f"{job} would be accepted and wait for its admission (dry run, nothing was created)"
        return Finding("admission", Level.OK, message)
    advice = "add trainer.kubeflow.org/trainjob to integrations.frameworks in Kueue's configuration, and restart Kueue"
    return Finding(
        "queueing", Level.FAILURE, f"{job} would start at once: this Kueue does not manage TrainJobs", advice
    )


def _refusal(error: LaunchError | BackendUnavailable, job: str, namespace: str) -> Finding:
    # The message of the server lacks the name of the job, which does not exist.
    message = error.__cause__.message if isinstance(error.__cause__, ApiError) else str(error)
    if unanswered := _UNANSWERED.search(message):
        return Finding(
            "webhooks",
            Level.FAILURE,
            f"webhook {unanswered[1]} does not answer, so no job can be created: {message}",
            f"check whether its controller runs: kubectl get pods -A | grep {_controller(unanswered[1])}",
            RetryVerdict.INFRASTRUCTURE,
        )
    if missing := _NAMESPACE.search(message):
        advice = f"kubectl create namespace {missing[1]}, or set another one: --namespace or TRAINJOB_NAMESPACE"
        return Finding("namespace", Level.FAILURE, f"namespace {missing[1]} does not exist", advice)
    if "cannot create resource" in message:
        return Finding("admission", Level.SKIPPED, "not checked: it requires the permission to create trainjobs")
    advice = "ask an administrator of the cluster for its admission rules"
    if error.retry is RetryVerdict.QUOTA:
        advice = f"delete finished jobs, or have the quota raised: kubectl get resourcequota -n {namespace}"
    return Finding("admission", Level.FAILURE, f"{job} would be rejected: {message}", advice, error.retry)


def _controller(webhook: str) -> str:
    """Part of the names of the pods that serve a webhook."""
    return next((name for name in ("kueue", "jobset") if name in webhook), "trainer")
