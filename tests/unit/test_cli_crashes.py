"""The command line with crashed ranks and for diagnoses: messages, exit codes, final state of the job."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import pytest
from tests import objects
from tests.fakes.kube.direct import DirectBackend
from tests.unit.program import Program

from trainjob import JobRef, Phase, TrainJobSpec
from trainjob._jobs import launching as flow
from trainjob._manifest.attempts import given_up
from trainjob.status import observe
from trainjob.verdicts import Evidence

pytestmark = pytest.mark.usefixtures("prompt")


class EndingBackend(DirectBackend):
    """Completes a job whose crash was reported."""

    ends = False

    async def crashes(self, ref: JobRef) -> AsyncGenerator[Evidence]:
        async with aclosing(super().crashes(ref)) as found:
            async for evidence in found:
                yield evidence
                if self.ends:
                    self.end(ref)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> EndingBackend:
    backend = EndingBackend()
    monkeypatch.setattr("trainjob.cli.session.connect", lambda *_, **__: backend)
    return backend


@pytest.fixture
def job(backend: EndingBackend) -> JobRef:
    """A running job."""
    spec = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"]})
    ref = asyncio.run(flow.launch(backend, spec, "key", namespace="default"))
    backend.running(ref)
    return ref


@pytest.fixture
def crashing(backend: EndingBackend, job: JobRef) -> JobRef:
    """A running job whose second rank has crashed once."""
    backend.crash(job, 1, 3, "loading", "ValueError: no")
    return job


@pytest.mark.parametrize(
    ("options", "outcome"),
    [
        ([], (Phase.RUNNING, "keeps running")),
        (["--on-crash-action", "keep"], (Phase.RUNNING, "keeps running")),
        (["--on-crash-action", "suspend"], (Phase.SUSPENDED, "was suspended")),
        (["--on-crash-action", "cancel"], (None, "was deleted")),
    ],
)
def test_wait_fails_at_the_first_crash(
    program: Program,
    backend: EndingBackend,
    crashing: JobRef,
    options: list[str],
    outcome: tuple[Phase | None, str],
) -> None:
    phase, text = outcome
    code, _, err = program("wait", crashing.name, "--fail-on-first-crash", *options)
    assert code == 1
    assert f"{crashing} {text}" in err
    assert "node-1 exited with code 3" in err
    assert "  | ValueError: no" in err
    left = [job for (_, name), job in backend.jobs.items() if name == crashing.name]
    assert [observe(job).phase for job in left] == ([phase] if phase else [])


def test_run_suspends_its_crashed_job(program: Program, backend: EndingBackend, crashing: JobRef) -> None:
    words = ["--runtime", "torch-distributed", "--key", "key", "--fail-on-first-crash", "--", "train"]
    code, _, err = program("run", *words)
    assert (code, f"{crashing} was suspended" in err) == (1, True)
    assert given_up(backend.job(crashing)) is not None
    code, out, _ = program("diagnose", crashing.name)
    assert (code, "ValueError: no" in out) == (1, True)


def test_a_crash_of_a_job_that_keeps_running_is_reported(
    program: Program, backend: EndingBackend, crashing: JobRef
) -> None:
    backend.ends = True
    code, out, err = program("wait", crashing.name, "--no-logs")
    assert (code, "Complete" in out) == (0, True)
    assert "node-1 exited with code 3; the job keeps running if" in err
    assert "last lines of node-1:\n  | loading\n  | ValueError: no" in err


def test_json_output_has_a_crash_event(program: Program, backend: EndingBackend, crashing: JobRef) -> None:
    backend.ends = True
    _, out, _ = program("wait", crashing.name, "--json", "--no-logs")
    (crash,) = [each for each in map(json.loads, out.splitlines()) if each["event"] == "crash"]
    assert (crash["rank"], crash["exit_code"], crash["log"]) == ("node-1", 3, ["loading", "ValueError: no"])


# ---------------------------------------------------------------- diagnose


def failed(backend: DirectBackend, job: JobRef) -> None:
    backend.write(job, 1, "loading", "ValueError: no")
    backend.pod(job, 1, 3)
    backend.condition(job, "Failed", "FailedJobs")


def broken_image(backend: DirectBackend, job: JobRef) -> None:
    backend.status(job, jobsStatus=[objects.counts(active=1)])
    backend.pod(job, 1, state=objects.waiting("InvalidImageName", "couldn't parse image"), phase="Pending")


def fine(backend: DirectBackend, job: JobRef) -> None:
    backend.pod(job)


def gone(backend: DirectBackend, job: JobRef) -> None:
    unknown(backend, job)
    backend.event(job, "Odd", "was")


def unknown(backend: DirectBackend, job: JobRef) -> None:
    backend.store.delete("trainjobs", job.name, {}, "Background", job.namespace)


@pytest.mark.parametrize(
    "case",
    [
        (failed, 1, "node-1 exited with code 3"),
        (broken_image, 2, "InvalidImageName"),
        (fine, 0, "is Running: nothing blocks the job"),
        (DirectBackend.end, 0, "Complete"),
        (gone, 5, "Odd"),
        (unknown, 5, ""),
    ],
    ids=lambda case: case[0].__name__,
)
def test_diagnose_exit_code_depends_on_the_job(
    program: Program,
    backend: EndingBackend,
    job: JobRef,
    case: tuple[Callable[[DirectBackend, JobRef], None], int, str],
) -> None:
    make, exit_code, text = case
    make(backend, job)
    code, out, _ = program("diagnose", job.name)
    assert (code, text in out) == (exit_code, True), out
    code, out, _ = program("diagnose", job.name, "--json")
    answer: dict[str, Any] = json.loads(out)
    assert code == exit_code
    if make is not unknown:
        status = json.loads(program("status", job.name, "--json")[1])
        seconds = [each.pop("seconds") for each in (answer, status)]
        assert status == {name: answer[name] for name in status}, "status and diagnose agree"
        assert seconds[0].keys() == seconds[1].keys()
