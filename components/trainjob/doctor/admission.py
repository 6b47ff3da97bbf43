"""Whether TrainJobs would be let in: dry runs, so that nothing is created."""

from __future__ import annotations

import re
import secrets

from trainjob.backends.base import Backend, TrainJob
from trainjob.backends.kubernetes.errors import ApiError
from trainjob.doctor.findings import Finding, Level
from trainjob.errors import BackendUnavailable, LaunchError, RuntimeNotFound
from trainjob.manifest import render
from trainjob.spec import RuntimeRef, TrainJobSpec
from trainjob.status import QUEUE_LABEL
from trainjob.verdicts import RetryVerdict

# Wrong in two ways that only Trainer's webhook objects to, whatever the runtime is: from 2.2 on to a manager without a
# domain, in 2.1, which knows no manager, to a patch of a job that no runtime has.
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
_SILENT = re.compile(r'failed calling webhook "([^"]+)"')
_DENIED = re.compile(r'admission webhook "([^"]+)" denied the request')
_NAMESPACE = re.compile(r'namespaces "([^"]+)" not found')
_OTHER_RUNTIME = "see which there are: kubectl get clustertrainingruntimes"


async def try_job(
    backend: Backend, namespace: str, runtime: RuntimeRef, queue: str = "", *, wrong: bool = False
) -> TrainJob:
    """A job of one node as the server would store it.

    Args:
        backend: Of the cluster.
        namespace: Where.
        runtime: Its runtime.
        queue: Its LocalQueue.
        wrong: Make it one that has to be refused.

    Raises:
        LaunchError: it is refused.
        BackendUnavailable: it is not, but there is no answer either.
    """
    labels = {QUEUE_LABEL: queue} if queue else {}
    spec = TrainJobSpec.parse({"runtime": vars(runtime), "num_nodes": 1, "labels": labels})
    trainjob = render(spec, f"doctor/{secrets.token_hex(6)}", 1, namespace)
    if wrong:
        trainjob["spec"]["runtimePatches"] = [_WRONG_PATCH]
    return await backend.create(trainjob, dry_run=True)


async def webhooks(backend: Backend, namespace: str, runtime: RuntimeRef) -> Finding:
    """Whether Trainer's webhooks are asked, and answer: a job that has to be refused is."""
    try:
        await try_job(backend, namespace, runtime, wrong=True)
    except (LaunchError, BackendUnavailable) as error:
        said = _said(error)
        denied = _DENIED.search(said)
        if denied and "trainer.kubeflow.org" in denied[1]:
            return Finding("webhooks", Level.OK, f"{denied[1]} answers: it refused a wrong job (dry run)")
        if finding := _known(said):
            return finding
        message = f"a wrong job was refused before Trainer's webhooks were asked: {said}"
        return Finding("webhooks", Level.SKIPPED, message)
    return Finding(
        "webhooks",
        Level.FAILURE,
        "a job that cannot be right would be accepted: Kubeflow Trainer's webhooks are not asked, so that a job with a "
        "mistake would stay without a status for ever",
        "install Kubeflow Trainer's ValidatingWebhookConfiguration and MutatingWebhookConfiguration again, and see "
        "whether they leave this namespace out",
    )


async def acceptance(backend: Backend, namespace: str, runtime: RuntimeRef) -> tuple[Finding, TrainJob | None]:
    """Whether a plain job would be accepted, and what would be stored; None if it would not."""
    try:
        stored = await try_job(backend, namespace, runtime)
    except RuntimeNotFound:
        return Finding("runtime", Level.FAILURE, f"there is no {runtime.kind} {runtime.name}", _OTHER_RUNTIME), None
    except (LaunchError, BackendUnavailable) as error:
        said = _said(error)
        if finding := _known(said):
            return finding, None
        advice = "ask whoever runs the cluster for its rules"
        if error.retry is RetryVerdict.QUOTA:
            advice = f"delete jobs that have ended, or have the quota raised: kubectl get resourcequota -n {namespace}"
        message = f"a job of {runtime.kind} {runtime.name} would be refused: {said}"
        return Finding("admission", Level.FAILURE, message, advice, error.retry), None
    message = f"a job of {runtime.kind} {runtime.name} would be accepted (dry run, nothing was created)"
    return Finding("admission", Level.OK, message), stored


def _said(error: Exception) -> str:
    """What the server said, without the name of the job that nobody asked for."""
    return error.__cause__.message if isinstance(error.__cause__, ApiError) else str(error)


def _known(said: str) -> Finding | None:
    """What is the same for whatever job."""
    if silent := _SILENT.search(said):
        return Finding(
            "webhooks",
            Level.FAILURE,
            f"webhook {silent[1]} does not answer, so that no job can be created: {said}",
            f"see whether its controller runs: kubectl get pods -A | grep {_controller(silent[1])}",
            RetryVerdict.INFRASTRUCTURE,
        )
    if missing := _NAMESPACE.search(said):
        advice = f"kubectl create namespace {missing[1]}, or name another one: --namespace or TRAINJOB_NAMESPACE"
        return Finding("namespace", Level.FAILURE, f"there is no namespace {missing[1]}", advice)
    if "cannot create resource" in said:
        return Finding("admission", Level.SKIPPED, "not tried: that takes the right to create trainjobs")
    return None


def _controller(webhook: str) -> str:
    """What the pods of a webhook are called."""
    return next((name for name in ("kueue", "jobset") if name in webhook), "trainer")
