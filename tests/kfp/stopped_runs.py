"""Jobs of a run that is stopped: by its steps (test_stopping) or by its exit handler (test_exit_handler)."""

from __future__ import annotations

from collections.abc import Mapping

from tests.kfp.step_backend import StepBackend

from trainjob import JobRef, Phase, TrainJobClient, TrainJobSpec
from trainjob._backends.base import TrainJob
from trainjob._jobs.cancellation import give_up
from trainjob._manifest.render import render
from trainjob.errors import Category, Diagnosis, RetryVerdict
from trainjob.status import observe

RUN = "0d9f8a9e-run"
KEY = f"kfp/{RUN}/uuid/train"
SPEC = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"]})
CRASH = Diagnosis(Category.USER_CODE, RetryVerdict.USER, "node-0 exited with code 1")


def launched(
    client: TrainJobClient, key: str = KEY, labels: dict[str, str] | None = None, spec: TrainJobSpec = SPEC
) -> JobRef:
    """A running job with these labels."""
    ref = client.launch(spec, key, origin=labels)
    assert isinstance(client.backend, StepBackend)
    client.backend.running(ref)
    return ref


def made(key: str, attempt: int, labels: Mapping[str, str] | None = None) -> TrainJob:
    """An attempt that no launch of a test makes."""
    return render(SPEC, key, attempt, "ns", origin=labels)


def given_up_job(client: TrainJobClient, key: str = KEY, labels: dict[str, str] | None = None) -> JobRef:
    """A job that its waiter has given up after a crash."""
    ref = launched(client, key, labels)
    client.call(lambda: give_up(client.backend, ref, CRASH))
    return ref


def phases(backend: StepBackend) -> dict[str, Phase]:
    """The phase of each job."""
    return {name: observe(job).phase for (_, name), job in backend.jobs.items()}
