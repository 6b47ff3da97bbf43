"""Crashes of running jobs: reports, stored evidence, and `fail_on_first_crash`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import anyio
import pytest
from tests import objects
from tests.fakes.kube.direct import DirectBackend
from tests.unit.virtually import virtually

from trainjob import Diagnosis, JobRef, Phase, RetryVerdict, TrainJobFailed, TrainJobSpec, WaitOptions
from trainjob._backends.kubernetes.pods import crashes_of
from trainjob._diagnosis import diagnosis_of, output, serialization
from trainjob._diagnosis.evidence import Evidence
from trainjob._diagnosis.serialization import pack_diagnosis, unpack_diagnosis, warning
from trainjob._jobs import launching as flow, waiting
from trainjob._jobs.cancellation import CrashAction, give_up
from trainjob._manifest.attempts import given_up
from trainjob._support.control_characters import one_line
from trainjob.errors import BackendUnavailable, Category, NotFound, RankCrashed
from trainjob.status import GIVEN_UP, QUEUE_LABEL, Observation, observe

LONGEST = serialization.LINE_CHARACTERS
HOSTILE = [
    "\x1b[31mred\x1b[0m and \x1b]0;title\x07plain",
    "10%\r20%\r30%\r",
    "<script>alert(1)</script>\x00\x9b",
    "lone \udc80 surrogate, \u202eturned\u2066",
    "x" * (1 << 20),
]


def test_a_line_is_one_line_of_bounded_length() -> None:
    shown = [one_line(output.shown(line), LONGEST) for line in HOSTILE]
    assert shown[:4] == [
        "red and plain",
        "30%",
        "<script>alert(1)</script>\ufffd",
        "lone \ufffd surrogate, \ufffdturned\ufffd",
    ]
    assert shown[4] == "x" * LONGEST + f" … ({(1 << 20) - LONGEST} characters more)"
    assert one_line("a\tb\n", 9) == "a    b"
    for line in shown:
        line.encode()


def test_a_warning_shows_rank_exit_code_and_last_lines() -> None:
    text = "\n".join(warning(diagnosis(log=("loading", "\x1b[2JValueError: no"))))
    assert "node-1 exited with code 3; the job keeps running if" in text
    assert text.endswith("last lines of node-1:\n  | loading\n  | ValueError: no")
    assert len(warning(diagnosis(log=()))) == 1


def diagnosis(**changes: Any) -> Diagnosis:
    made = Diagnosis(
        Category.USER_CODE,
        RetryVerdict.UNKNOWN,
        "node-1 exited with code 3",
        rank="node-1",
        exit_code=3,
        log=("ValueError: no",),
        advice="fix it",
        job="ns/x",
        unseen=("events: forbidden",),
    )
    return replace(made, **changes)


def test_a_diagnosis_survives_as_json() -> None:
    assert unpack_diagnosis(json.loads(json.dumps(pack_diagnosis(diagnosis())))) == diagnosis()
    large = pack_diagnosis(diagnosis(log=tuple(HOSTILE * 100), summary="s" * 10_000))
    assert len(json.dumps(large)) < 20_000
    assert len(unpack_diagnosis(large).log) == 20


@pytest.mark.parametrize(
    "packed", [None, [], "x", {}, {"category": "of a later version", "retry": 7, "summary": "s", "colour": "red"}]
)
def test_any_json_unpacks_to_a_diagnosis(packed: object) -> None:
    again = unpack_diagnosis(packed)
    assert (again.category, again.retry) == (Category.UNKNOWN, RetryVerdict.CONFIGURATION)
    assert again.text()


def crashed(code: int = 3, rank: int = 1, time: str = "2026-11-21T10:00:10Z", **ended: Any) -> objects.Object:
    return objects.pod(rank, last=objects.ended(code, finishedAt=time, **ended))


CRASHED = crashed()["metadata"]["name"]
FAILED = Observation(Phase.FAILED)


def test_a_terminated_container_has_not_crashed() -> None:
    pod = crashed()
    assert len(crashes_of(pod)) == 1
    deletion = {"deletionTimestamp": "2026-11-21T10:00:40Z", "deletionGracePeriodSeconds": 30}  # requested at :10
    pod["metadata"] |= deletion
    assert crashes_of(pod) == set()
    before = crashed(time="2026-11-21T10:00:09Z")
    before["metadata"] |= deletion
    assert len(crashes_of(before)) == 1
    assert crashes_of({}) == crashes_of({"status": {"containerStatuses": [{"state": None}, 3]}}) == set()


# ---------------------------------------------------------------- giving up


@pytest.fixture
def backend(prompt: None) -> DirectBackend:
    return DirectBackend()


SPEC = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"]})
FAIL_ON_FIRST_CRASH = WaitOptions(fail_on_first_crash=True)


async def running(backend: DirectBackend, **fields: Any) -> JobRef:
    spec = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"], **fields})
    ref = await flow.launch(backend, spec, "key", namespace="ns")
    backend.running(ref)
    return ref


@virtually
async def test_the_first_crash_fails_the_wait_with_fail_on_first_crash(backend: DirectBackend) -> None:
    ref = await running(backend)
    backend.crash(ref, 1, 3, "ValueError: no")
    with pytest.raises(RankCrashed, match="node-1 exited with code 3") as caught:
        await waiting.wait(backend, ref, FAIL_ON_FIRST_CRASH, on_log=lambda _: None)
    assert isinstance(caught.value, TrainJobFailed)
    assert (caught.value.retry, caught.value.diagnosis.log) == (RetryVerdict.UNKNOWN, ("ValueError: no",))
    assert caught.value.diagnosis.job == str(ref)
    assert observe(backend.job(ref)).phase is Phase.RUNNING, "the caller decides about the job"


@virtually
async def test_root_cause_may_be_the_last_reported_crash(backend: DirectBackend) -> None:
    """All first crashes are kept: the job deletes its pods when it fails."""
    ref = await running(backend)
    codes = [143, 143, 3]
    reported: list[Diagnosis] = []

    def note(diagnosis: Diagnosis) -> None:
        reported.append(diagnosis)
        if len(reported) < len(codes):
            backend.crash(ref, len(reported), codes[len(reported)], "the last line")
        else:
            backend.remove_pods()
            backend.condition(ref, "Failed", "FailedJobs")

    backend.crash(ref, 0, codes[0], "the last line")
    with pytest.raises(TrainJobFailed) as failed:
        await waiting.wait(backend, ref, on_crash=note)
    assert (failed.value.diagnosis.rank, failed.value.diagnosis.exit_code) == ("node-2", 3)


@virtually
async def test_every_crash_is_reported_and_a_limited_number_is_kept(backend: DirectBackend) -> None:
    """A job of thousands of ranks with many restarts must not exhaust the waiter's memory."""
    ref = await running(backend)
    reported: list[Diagnosis] = []

    def note(diagnosis: Diagnosis) -> None:
        reported.append(diagnosis)
        if len(reported) < 40:
            backend.crash(ref, len(reported), 3, "the last line")
        else:
            backend.end(ref)

    backend.crash(ref, 0, 3, "the last line")
    watched, _, kept = await waiting.attend(backend, ref, on_crash=note)
    assert watched == ref
    assert kept is not None
    assert len(kept.pods) == 32
    assert {diagnosis.job for diagnosis in reported} == {str(ref)}


@virtually
async def test_a_rank_that_the_cluster_restarts_is_not_a_crash(backend: DirectBackend) -> None:
    ref = await running(backend)
    lost = objects.condition("DisruptionTarget", "DeletionByTaintManager")
    backend.crash(ref, 1, 137, "the last line", conditions=[lost])
    warned: list[Diagnosis] = []

    def end(diagnosis: Diagnosis) -> None:
        warned.append(diagnosis)
        backend.end(ref)

    assert (await waiting.wait(backend, ref, FAIL_ON_FIRST_CRASH, on_crash=end)).uid == ref.uid
    assert [diagnosis.category for diagnosis in warned] == [Category.NODE_LOST]


@virtually
async def test_unreadable_crashes_are_reported_and_not_final(
    backend: DirectBackend, caplog: pytest.LogCaptureFixture
) -> None:
    ref = await running(backend)
    backend.store.forbidden = (frozenset({"pods"}), frozenset())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(waiting.wait, backend, ref, FAIL_ON_FIRST_CRASH)
        await anyio.sleep(10)
        backend.end(ref)
    assert f"crashes of ranks of TrainJob {ref} cannot be reported while it runs: " in caplog.text
    assert "pods is forbidden" in caplog.text


@pytest.mark.parametrize(
    ("action", "queue", "phase", "text"),
    [
        ("suspend", "", Phase.SUSPENDED, "was suspended"),
        ("suspend", "q", None, "was deleted: Kueue would start it again"),
        ("cancel", "", None, "was deleted"),
        ("keep", "", Phase.RUNNING, "keeps running"),
    ],
)
@virtually
async def test_give_up_applies_the_crash_action(
    backend: DirectBackend, action: CrashAction, queue: str, phase: Phase | None, text: str
) -> None:
    ref = await running(backend, labels={QUEUE_LABEL: queue} if queue else {})
    assert await give_up(backend, ref, diagnosis(), action) == f"{ref} {text}"
    left = await backend.get(ref.namespace, ref.name)
    assert (observe(left).phase if left else None) is phase


@virtually
async def test_a_given_up_job_keeps_its_diagnosis_and_counts_as_failed(backend: DirectBackend) -> None:
    ref = await running(backend)
    final = diagnosis(retry=RetryVerdict.USER, log=("ValueError: Größe",))
    await give_up(backend, ref, final)
    assert "Größe" in backend.job(ref)["metadata"]["annotations"][GIVEN_UP], "people read it with kubectl"
    assert given_up(backend.job(ref)) == final
    with pytest.raises(TrainJobFailed, match="node-1 exited with code 3"):
        await flow.launch(backend, SPEC, "key", namespace="ns", after_failure="verdict")
    fixed = SPEC.model_copy(update={"command": ["train", "better"]})
    second = await flow.launch(backend, fixed, "key", namespace="ns")
    assert (second.attempt, observe(backend.job(ref)).phase) == (2, Phase.SUSPENDED)


AWAY = BackendUnavailable("the API server is away")


@pytest.mark.parametrize(
    ("request_", "error", "text"),
    [
        ("", AWAY, "could not be stopped and keeps running: the API server is away"),
        ("PATCH trainjobs", NotFound("deleted between two requests"), "has ended"),
    ],
    ids=["an outage", "a deletion"],
)
@virtually
async def test_give_up_never_raises(backend: DirectBackend, request_: str, error: Exception, text: str) -> None:
    ref = await running(backend)

    def fail(request: str) -> None:
        if request_ in ("", request):
            raise error

    backend.before = fail
    assert await give_up(backend, ref, diagnosis()) == f"{ref} {text}"


@virtually
async def test_a_job_that_has_ended_or_is_another_one_is_not_given_up(backend: DirectBackend) -> None:
    ref = await running(backend)
    backend.requests.clear()
    assert await give_up(backend, replace(ref, uid="another"), diagnosis()) == f"{ref} has ended"
    assert backend.requests == ["GET trainjobs"], "the name belongs to another job now"
    assert observe(backend.job(ref)).phase is Phase.RUNNING
    backend.end(ref, 3)
    assert await give_up(backend, ref, diagnosis()) == f"{ref} has ended"


@pytest.mark.parametrize(
    "line",
    [
        "psycopg2: cannot log in with password=hunter2",
        "GET https://b.s3.amazonaws.com/k?X-Amz-Signature=hunter2hunter2hunter2 403",
        "\x1b[31mpass\x1b[0mword=hunter2",
    ],
)
def test_secrets_in_logs_are_masked(line: str) -> None:
    pod = crashed(1, message=f"the reason: {line}")
    log = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', f"ValueError: {line}"]
    evidence = Evidence(None, [pod], {pod["metadata"]["name"]: [line, *log]})
    why = diagnosis_of(evidence, Observation(Phase.FAILED, message=line))
    kept = [json.dumps(pack_diagnosis(why)), why.text(), str(TrainJobFailed(why)), *warning(why)]
    assert "hunter2" not in "".join(kept)
    assert "***" in why.summary
    assert len(why.log) == 4
    assert "hunter2" not in str(BackendUnavailable(f"the server said: {line}"))
    assert "hunter2" not in observe(None, Observation(Phase.RUNNING, message=line)).message
