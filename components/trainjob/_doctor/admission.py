"""Whether the API server accepts TrainJobs, by dry runs, which create nothing."""

from __future__ import annotations

import re
import secrets

from trainjob._backends.base import Backend, TrainJob
from trainjob._backends.kubernetes.errors import ApiError
from trainjob._doctor.findings import Finding, Level
from trainjob._manifest.render import render
from trainjob._spec import RuntimeRef, TrainJobSpec
from trainjob.errors import BackendUnavailable, LaunchError, RuntimeNotFound
from trainjob.status import QUEUE_LABEL
from trainjob.verdicts import RetryVerdict

# Invalid in two ways that only Trainer's webhook rejects, for every runtime: from 2.2 on a manager without a domain; in
# 2.1, which has no managers, a patch of a replicated job that no runtime has.
_WRONG_PATCH = {
    "manager": "no-domain",
    "trainingRuntimeSpec": {
        "template": {
            "spec": {
                "replicatedJobs": [
                    {
                        "name": "trainjob-doctor-no-such-job",
                        "template": {"spec": {"template": {"metadata": {"labels": {"trainjob-doctor": "probe"}}}}},
                    }
                ]
            }
        }
    },
}
_UNANSWERED = re.compile(r'failed calling webhook "([^"]+)"')
_DENIED = re.compile(r'admission webhook "([^"]+)" denied the request')
_NAMESPACE = re.compile(r'namespaces "([^"]+)" not found')
_OTHER_RUNTIME = "list the runtimes: kubectl get clustertrainingruntimes"


async def try_job(
    backend: Backend, namespace: str, runtime: RuntimeRef, queue: str = "", *, wrong: bool = False
) -> TrainJob:
    """A job of one node as the API server would store it.

    Args:
        backend: Backend of the cluster.
        namespace: Namespace of the job.
        runtime: Runtime of the job.
        queue: LocalQueue of the job.
        wrong: Make the job invalid, so that Trainer's webhook has to reject it.

    Raises:
        LaunchError: The job is rejected.
        BackendUnavailable: The API server gives no answer.
    """
    labels = {QUEUE_LABEL: queue} if queue else {}
    spec = TrainJobSpec.parse({"runtime": vars(runtime), "num_nodes": 1, "labels": labels})
    trainjob = render(spec, f"doctor/{secrets.token_hex(6)}", 1, namespace)
    if wrong:
        trainjob["spec"]["runtimePatches"] = [_WRONG_PATCH]
    return await backend.create(trainjob, dry_run=True)


async def webhooks(backend: Backend, namespace: str, runtime: RuntimeRef) -> Finding:
    """Whether the API server calls Trainer's webhooks and they answer: an invalid job has to be rejected."""
    try:
        await try_job(backend, namespace, runtime, wrong=True)
    except (LaunchError, BackendUnavailable) as error:
        message = _server_message(error)
        denied = _DENIED.search(message)
        if denied and "trainer.kubeflow.org" in denied[1]:
            return Finding("webhooks", Level.OK, f"{denied[1]} answers: it rejected an invalid job (dry run)")
        if finding := _general_failure(message):
            return finding
        message = f"an invalid job was rejected before Trainer's webhooks were called: {message}"
        return Finding("webhooks", Level.SKIPPED, message)
    return Finding(
        "webhooks",
        Level.FAILURE,
        "an invalid job would be accepted: the API server does not call Kubeflow Trainer's webhooks, so an invalid job "
        "would never get a status",
        "install Kubeflow Trainer's ValidatingWebhookConfiguration and MutatingWebhookConfiguration again, and check "
        "whether their namespaceSelector excludes this namespace",
    )


async def acceptance(backend: Backend, namespace: str, runtime: RuntimeRef) -> tuple[Finding, TrainJob | None]:
    """Whether a plain job would be accepted, and the object that would be stored; None if it is rejected."""
    try:
        stored = await try_job(backend, namespace, runtime)
    except RuntimeNotFound:
        return Finding("runtime", Level.FAILURE, f"{runtime.kind} {runtime.name} does not exist", _OTHER_RUNTIME), None
    except (LaunchError, BackendUnavailable) as error:
        message = _server_message(error)
        if finding := _general_failure(message):
            return finding, None
        advice = "ask an administrator of the cluster for its admission rules"
        if error.retry is RetryVerdict.QUOTA:
            advice = f"delete finished jobs, or have the quota raised: kubectl get resourcequota -n {namespace}"
        message = f"a job of {runtime.kind} {runtime.name} would be rejected: {message}"
        return Finding("admission", Level.FAILURE, message, advice, error.retry), None
    message = f"a job of {runtime.kind} {runtime.name} would be accepted (dry run, nothing was created)"
    return Finding("admission", Level.OK, message), stored


def _server_message(error: Exception) -> str:
    """The message of the server, without the name of the job of the dry run."""
    return error.__cause__.message if isinstance(error.__cause__, ApiError) else str(error)


def _general_failure(message: str) -> Finding | None:
    """A failure that does not depend on the job; None if it does."""
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
    return None


def _controller(webhook: str) -> str:
    """Part of the names of the pods that serve a webhook."""
    return next((name for name in ("kueue", "jobset") if name in webhook), "trainer")
