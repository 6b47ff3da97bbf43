"""What a step does at SIGTERM: it stops its job, or the trials of its study."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.kfp.step_backend import StepBackend
from tests.kfp.stopped_runs import KEY, RUN, SPEC, launched, made, phases
from tests.processes import eventually

from trainjob import JobRef, Phase, TimedOut, TrainJobClient
from trainjob._manifest.attempts import is_stale
from trainjob._manifest.workflow_labels import STUDY
from trainjob.errors import NotFound, Rejected
from trainjob.job import key_hash
from trainjob.status import CANCELLED
from trainjob.tuning import Trial
from trainjob_kfp import stop_requests, stopping
from trainjob_kfp.execution import run_label
from trainjob_kfp.exit_handler import stop_all
from trainjob_kfp.stopping import StopWithStep
from trainjob_kfp.stopping_studies import StopTrialsWithStep

SUSPENDED = "SIGTERM: the TrainJob was asked to stop (suspend)"


@pytest.fixture(autouse=True)
def last_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A process is not ended, and leaves its last line in this file."""

    def end(line: str, code: int) -> None:
        assert code == 143
        raise SystemExit(line)

    monkeypatch.setattr(stopping, "end_process", end)
    monkeypatch.setenv("TRAINJOB_TERMINATION_LOG", str(tmp_path / "message"))
    return tmp_path / "message"


def terminated(stop: StopWithStep) -> str:
    """What a step writes last after SIGTERM."""
    with pytest.raises(SystemExit) as ended:
        stop._stop(15, None)
    return str(ended.value)


@contextmanager
def step_of(client: TrainJobClient, ref: JobRef | None, action: str = "suspend") -> Iterator[StopWithStep]:
    """A step that knows its job and has no prepared request."""
    with StopWithStep(client, KEY, action) as stop:
        stop.job = client.get(ref) if ref is not None else None
        yield stop


@contextmanager
def ready_step_of(client: TrainJobClient, ref: JobRef, action: str = "suspend") -> Iterator[StopWithStep]:
    """A step that has prepared its requests."""
    assert isinstance(client.backend, StepBackend)
    prepared = client.backend.prepared
    with step_of(client, ref, action) as stop:
        client.start(stop.keep_ready)
        eventually(lambda: len(prepared) == (2 if action == "suspend" else 1))
        yield stop


def refusing(*requests: str) -> Callable[[str], None]:
    def refuse(request: str) -> None:
        if not requests or request in requests:
            raise Rejected("a webhook denied it")

    return refuse


async def created_later(backend: StepBackend, key: str, attempt: int, **origin: str) -> None:
    await anyio.sleep(0.2)
    await backend.create(made(key, attempt, origin))


# ---------------------------------------------------------------- a launch on its way


def test_terminate_before_an_attempt_exists_leaves_a_record_and_is_not_confirmed(
    client: TrainJobClient, backend: StepBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch that began before reads the record once it has created its job (tests/unit/test_launch_protocol.py)."""
    monkeypatch.setattr(stopping, "LOOK_SECONDS", 0.05)
    with step_of(client, None) as stop:
        outcome = client.call(stop.request)
    assert "its launch has not created it yet; stop it: trainjob cancel -n ns --key" in outcome
    assert backend.cancelled == [key_hash(KEY)]


# ---------------------------------------------------------------- the last line


def test_the_last_line_names_the_job_and_the_command_if_the_stop_was_refused(
    client: TrainJobClient, backend: StepBackend
) -> None:
    ref = launched(client)
    with step_of(client, ref) as stop:
        backend.before = refusing("PATCH trainjobs", "DELETE trainjobs")
        line = terminated(stop)
        stop.job = None
        unknown = terminated(stop)
    assert line == (
        f"SIGTERM: cannot stop TrainJob {ref}, which may keep running: a webhook denied it; "
        f"stop it: trainjob cancel -n ns {ref.name}"
    )
    assert unknown.endswith(f"stop it: trainjob cancel -n ns --key {KEY}")


def test_the_last_line_says_that_the_stop_was_not_confirmed(
    client: TrainJobClient, backend: StepBackend, monkeypatch: pytest.MonkeyPatch, last_line: Path
) -> None:
    ref = launched(client)
    monkeypatch.setattr(stopping, "_CANCEL_SECONDS", 0.2)
    with step_of(client, ref) as stop:
        backend.turn = partial(hang_at, "PATCH trainjobs")
        line = terminated(stop)
    assert f"TrainJob {ref}, which may keep running: the API server has not confirmed it within 0.2 s" in line
    assert f"trainjob cancel -n ns {ref.name}" in line
    assert f"trainjob cancel -n ns {ref.name}" in last_line.read_text(), "written before, if the process is killed"


async def hang_at(wanted: str, request: str) -> None:
    if request == wanted:
        await anyio.sleep_forever()


# ---------------------------------------------------------------- prepared requests


def test_prepared_requests_are_those_of_the_attempt_that_counts(client: TrainJobClient, backend: StepBackend) -> None:
    first = launched(client)
    with ready_step_of(client, first) as stop:
        assert {each.ref for each in backend.prepared} == {first}
        second = JobRef.of(client.call(lambda: backend.create(made(KEY, 2))))
        client.call(partial(followed, stop, second))
        eventually(lambda: {each.ref.name for each in backend.prepared} == {second.name})
        assert terminated(stop) == SUSPENDED
    assert backend.sent == [("PATCH", second.name)]


async def followed(stop: StopWithStep, ref: JobRef) -> None:
    stop.follow(ref)


def test_terminate_by_a_prepared_request_stops_the_other_attempts_of_the_key(
    client: TrainJobClient, backend: StepBackend
) -> None:
    first = launched(client)
    client.call(lambda: backend.create(made(KEY, 2)))
    with ready_step_of(client, first, "cancel") as stop:
        assert terminated(stop) == "SIGTERM: the TrainJob was asked to stop (cancel)"
    assert backend.sent == [("DELETE", first.name)]
    assert phases(backend) == {}
    assert backend.cancelled == [key_hash(KEY)], "a launch on its way reads the record"


@pytest.mark.parametrize("request_", ["LIST trainjobs", "POST leases", "PATCH trainjobs"])
def test_terminate_by_a_prepared_request_sends_it_first_and_ends(
    client: TrainJobClient,
    backend: StepBackend,
    monkeypatch: pytest.MonkeyPatch,
    last_line: Path,
    request_: str,
) -> None:
    ref = launched(client)
    monkeypatch.setattr(stopping, "_CANCEL_SECONDS", 0.8)
    before: list[tuple[bool, str]] = []
    written = last_line.read_text

    async def turn(request: str) -> None:
        if request == request_:
            sent = backend.sent == [("PATCH", ref.name)]
            await anyio.sleep(0.2)
            before.append((sent, written()))
            await anyio.sleep_forever()

    with ready_step_of(client, ref) as stop:
        backend.turn = turn
        line = terminated(stop)
    assert line == SUSPENDED, "the job was stopped"
    assert before == [(True, line)], "the message is written before, if the process is killed"


# ---------------------------------------------------------------- suspensions that arrive late


def stop_by_prepared_request(client: TrainJobClient, ref: JobRef) -> None:
    """Terminate of a step; its process is killed before it sends another request."""
    with ready_step_of(client, ref):
        assert isinstance(client.backend, StepBackend)
        patch = next(each.patch for each in client.backend.prepared if each.patch is not None)
    client.call(partial(client.backend.patch, ref, patch))


def stop_step(client: TrainJobClient, ref: JobRef) -> None:
    """Terminate of a step that knows its job and has no prepared request."""
    with step_of(client, ref) as stop:
        client.call(stop.request)


def stop_study(client: TrainJobClient, ref: JobRef) -> None:
    """Terminate of a study that has no prepared request for a trial."""
    with StopTrialsWithStep(client, "digits", "suspend", RUN) as stop:
        stop.change([trial(0, ref)])
        client.call(stop.request)


def stop_run(client: TrainJobClient, ref: JobRef) -> None:
    """The exit handler of the run."""
    del ref
    with suppress(TimedOut):
        stop_all(client, RUN, "suspend", 0)


Stop = Callable[[TrainJobClient, JobRef], None]
SHARED = "digits/0"
SHARED_LABELS = {STUDY: key_hash("digits")} | run_label(RUN)
BY_NEW_REQUESTS = {"step": (KEY, stop_step), "study": (SHARED, stop_study), "run": (SHARED, stop_run)}
STOPS = {**BY_NEW_REQUESTS, "step by a prepared request": (KEY, stop_by_prepared_request)}
each_stop = pytest.mark.parametrize(("key", "stop"), STOPS.values(), ids=STOPS)
each_new_request = pytest.mark.parametrize(("key", "stop"), BY_NEW_REQUESTS.values(), ids=BY_NEW_REQUESTS)


@each_new_request
def test_a_late_suspend_by_a_new_request_is_refused_after_the_next_step_has_begun(
    client: TrainJobClient, backend: StepBackend, monkeypatch: pytest.MonkeyPatch, key: str, stop: Stop
) -> None:
    """The PATCH arrives after "Retry run" has adopted the job."""
    ref = launched(client, key, SHARED_LABELS)
    late: list[Any] = []

    async def delay(_: JobRef, patch: Any) -> None:
        late.append(patch)

    with monkeypatch.context() as delayed:
        delayed.setattr(backend, "patch", delay)
        stop(client, ref)
    assert late
    backend.store.version += 1  # of any other request
    assert client.launch(SPEC, key) == ref
    for patch in late:
        with pytest.raises(NotFound, match="was changed"):
            client.call(partial(backend.patch, ref, patch))


@each_stop
def test_a_suspend_is_not_undone_by_another_waiter(
    client: TrainJobClient, backend: StepBackend, key: str, stop: Stop
) -> None:
    ref = launched(client, key, SHARED_LABELS)
    stop(client, ref)
    assert phases(backend) == {ref.name: Phase.SUSPENDED}
    assert not is_stale(backend.job(ref))
    assert client.launch(SPEC, key) == ref
    assert not backend.job(ref)["spec"]["suspend"], '"Retry run" resumes it'


@each_new_request
@pytest.mark.parametrize("answer", ["refused", "forbidden", "slow"])
def test_a_suspend_by_a_new_request_does_not_depend_on_the_records(
    client: TrainJobClient,
    backend: StepBackend,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    stop: Stop,
    answer: str,
) -> None:
    ref = launched(client, key, SHARED_LABELS)
    monkeypatch.setattr(stop_requests, "_MARK_SECONDS", 0.05)

    async def unknown(*_: object) -> tuple[None, list[object]]:
        if answer == "refused":
            raise Rejected("cannot list Leases")
        if answer == "slow":
            await anyio.sleep_forever()
        return None, []

    monkeypatch.setattr(backend, "cancels", unknown)
    stop(client, ref)
    assert phases(backend) == {ref.name: Phase.SUSPENDED}
    patches = [each.body or {} for each in backend.store.log if each.method == "PATCH" and each.plural == "trainjobs"]
    marks = [patch["metadata"]["annotations"][CANCELLED] for patch in patches]
    assert any(mark.startswith("unknown:") for mark in marks)


def test_a_deletion_by_a_new_request_does_not_wait_for_the_records(
    client: TrainJobClient, backend: StepBackend
) -> None:
    ref = launched(client)
    with step_of(client, ref, "cancel") as stop:
        backend.requests.clear()
        client.call(stop.request)
    assert phases(backend) == {}
    assert "LIST leases" not in backend.requests


# ---------------------------------------------------------------- trials


def trial(number: int, ref: JobRef | None = None) -> Trial:
    return Trial(number, {}, job=ref.name if ref else "")


def study_of(client: TrainJobClient, key: str, count: int) -> list[JobRef]:
    labels = {STUDY: key_hash(key)} | run_label(RUN)
    return [launched(client, f"{key}/{number}", labels) for number in range(count)]


def test_terminate_stops_no_trial_that_another_run_waits_for(client: TrainJobClient, backend: StepBackend) -> None:
    mine, shared = study_of(client, "digits", 2)
    theirs = launched(client, "digits/2", {STUDY: key_hash("digits")} | run_label("7c1e-other"))
    unlabeled = launched(client, "digits/3", {STUDY: key_hash("digits")})
    backend.waits(shared)
    client.call(partial(attended, backend, mine, shared))
    with StopTrialsWithStep(client, "digits", "suspend", RUN) as stop:
        stop.change([trial(number, ref) for number, ref in enumerate((mine, shared, theirs, unlabeled))])
        client.start(stop.keep_ready)
        eventually(lambda: {each.ref.name for each in backend.prepared if each.patch} == set(phases(backend)))
        eventually(lambda: stop._jobs._waits is not None)
        line = terminated(stop)
    assert "the trials were asked to stop (suspend)" in line
    assert {name for _, name in backend.sent} == {mine.name, unlabeled.name}
    stopped = {ref.name: Phase.SUSPENDED for ref in (mine, unlabeled)}
    assert phases(backend) == stopped | {ref.name: Phase.RUNNING for ref in (shared, theirs)}
    assert backend.cancelled == [], "a record would end another run's launch of the same trial"


async def attended(backend: StepBackend, *refs: JobRef) -> None:
    """This process waits for jobs."""
    for ref in refs:
        backend.attend(ref)


def test_terminate_stops_trials_whose_launch_is_on_its_way(client: TrainJobClient, backend: StepBackend) -> None:
    key = f"kfp/{RUN}/uuid/tune"
    (running,) = study_of(client, key, 1)
    backend.requests.clear()
    with StopTrialsWithStep(client, key, "cancel", RUN) as stop:
        stop.change([trial(0, running), trial(1)])
        creating = client.start(lambda: created_later(backend, f"{key}/1", 1, **{STUDY: key_hash(key)}))
        client.call(stop.request)
        creating.result(5)
        assert stop._jobs._waits is None, "no other run has these trials"
    assert phases(backend) == {}
    assert backend.cancelled == [key_hash(f"{key}/1")]


def test_the_last_line_names_the_trials_that_may_keep_running(client: TrainJobClient, backend: StepBackend) -> None:
    first, second = study_of(client, "digits", 2)
    backend.waits(second, age=3600)  # a process that was killed long ago
    with StopTrialsWithStep(client, "digits", "suspend", RUN) as stop:
        stop.change([trial(0, first), trial(1, second)])
        backend.before = refusing("PATCH trainjobs", "DELETE trainjobs")
        line = terminated(stop)
    assert line == (
        "SIGTERM: cannot stop all trials of study digits, which may keep running: a webhook denied it; "
        f"stop them: for job in {first.name} {second.name}; do trainjob cancel -n ns $job; done"
    )
