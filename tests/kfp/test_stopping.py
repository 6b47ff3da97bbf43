"""What a step does at SIGTERM, and what the exit handler of a run does, against a cluster in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import anyio
import pytest
from tests.kfp.memory_cluster import MemoryCluster
from tests.processes import eventually

from trainjob import JobRef, Phase, TimedOut, TrainJobClient, TrainJobFailed, TrainJobSpec, launch
from trainjob._jobs.cancellation import give_up
from trainjob._jobs.leftovers import leftover
from trainjob._manifest.attempts import given_up, is_stale
from trainjob._manifest.render import render
from trainjob._manifest.workflow_labels import KFP_RUN, STUDY
from trainjob.errors import NotFound, Rejected
from trainjob.job import key_hash
from trainjob.status import CANCELLED, GIVEN_UP, QUEUE_LABEL, observe
from trainjob.tuning import Trial
from trainjob.verdicts import Category, Diagnosis, RetryVerdict
from trainjob_kfp import exit_handler, stop_requests, stopping
from trainjob_kfp.execution import run_label
from trainjob_kfp.exit_handler import stop_all
from trainjob_kfp.sharing import SharedJobs
from trainjob_kfp.stopping import StopWithStep
from trainjob_kfp.stopping_studies import StopTrialsWithStep

RUN, OTHER_RUN = "0d9f8a9e-run", "7c1e-other"
KEY = f"kfp/{RUN}/uuid/train"
SPEC = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"]})
CRASH = Diagnosis(Category.USER_CODE, RetryVerdict.USER, "node-0 exited with code 1")


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster()


@pytest.fixture
def client(cluster: MemoryCluster) -> Iterator[TrainJobClient]:
    with TrainJobClient(cluster, "ns") as made:
        yield made


def launched(
    client: TrainJobClient, key: str = KEY, labels: dict[str, str] | None = None, spec: TrainJobSpec = SPEC
) -> JobRef:
    """A running job with these labels."""
    ref = client.launch(spec, key, origin=labels)
    assert isinstance(client.backend, MemoryCluster)
    client.backend.running(ref)
    return ref


def created(client: TrainJobClient, key: str, attempt: int, labels: dict[str, str] | None = None) -> JobRef:
    """A running attempt that no launch of this test has made."""
    return JobRef.of(client.call(lambda: client.backend.create(render(SPEC, key, attempt, "ns", origin=labels))))


def given_up_job(client: TrainJobClient, key: str = KEY, labels: dict[str, str] | None = None) -> JobRef:
    ref = launched(client, key, labels)
    client.call(lambda: give_up(client.backend, ref, CRASH))
    return ref


def phases(cluster: MemoryCluster) -> dict[str, Phase]:
    return {name: observe(job).phase for (_, name), job in cluster.jobs.items()}


@pytest.fixture
def last_line(monkeypatch: pytest.MonkeyPatch) -> Callable[[StopWithStep], str]:
    """What a step writes last after SIGTERM."""

    def end(line: str, code: int) -> None:
        assert code == 143
        raise SystemExit(line)

    monkeypatch.setattr(stopping, "end_process", end)

    def terminate(stop: StopWithStep) -> str:
        with pytest.raises(SystemExit) as ended:
            stop._stop(15, None)
        return str(ended.value)

    return terminate


# ---------------------------------------------------------------- the job of a step


@pytest.mark.parametrize(("action", "left"), [("suspend", {"2": Phase.SUSPENDED}), ("cancel", {})])
def test_terminate_during_a_launch_stops_what_it_creates(
    client: TrainJobClient, cluster: MemoryCluster, action: str, left: dict[str, Phase]
) -> None:
    """Case 02: the retry of a step is terminated before its attempt exists; the first attempt was given up."""
    first = given_up_job(client)

    async def late() -> None:
        await anyio.sleep(0.2)
        await cluster.create(render(SPEC, KEY, 2, "ns"))

    with StopWithStep(client, KEY, action) as stop:
        creating = client.start(late)
        client.call(stop.request)
        creating.result(5)
    found = phases(cluster)
    assert {name[-1]: phase for name, phase in found.items() if name != first.name} == left


def test_a_launch_that_began_before_terminate_stops_what_it_creates_later(
    client: TrainJobClient, cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "LOOK_SECONDS", 0.05)
    create = cluster.create

    async def slow(trainjob: Any, *, dry_run: bool = False) -> Any:
        await anyio.sleep(0.5)
        return await create(trainjob, dry_run=dry_run)

    monkeypatch.setattr(cluster, "create", slow)
    launching: Future[JobRef] = client.start(lambda: launch_key(cluster))
    time.sleep(0.2)
    with StopWithStep(client, KEY, "suspend") as stop:
        outcome = client.call(stop.request)
    assert "trainjob cancel -n ns --key" in outcome, "the stop is not confirmed"
    with pytest.raises(TrainJobFailed, match="its key was cancelled"):
        launching.result(5)
    assert list(phases(cluster).values()) == [Phase.SUSPENDED]


async def launch_key(cluster: MemoryCluster) -> JobRef:
    return await launch(cluster, SPEC, KEY, namespace="ns")


def test_a_stop_by_new_requests_leaves_a_record_for_the_reaper(client: TrainJobClient, cluster: MemoryCluster) -> None:
    ref = launched(client)
    with StopWithStep(client, KEY, "suspend") as stop:
        stop.job = client.get(ref)
        assert client.call(stop.request) == "the TrainJob was asked to stop (suspend)"
    assert phases(cluster) == {ref.name: Phase.SUSPENDED}
    assert [work for _, work, _ in cluster.records] == [key_hash(KEY)]


def test_the_last_line_names_the_job_and_the_command_if_the_stop_was_refused(
    client: TrainJobClient, cluster: MemoryCluster, last_line: Callable[[StopWithStep], str]
) -> None:
    ref = launched(client)

    def refuse(request: str) -> None:
        if request in ("patch", "delete"):
            raise Rejected("admission webhook denied the request")

    with StopWithStep(client, KEY, "suspend") as stop:
        stop.job = client.get(ref)
        cluster.before = refuse
        line = last_line(stop)
        stop.job = None
        unknown = last_line(stop)
    assert line == (
        f"SIGTERM: cannot stop TrainJob {ref}, which may keep running: admission webhook denied the request; "
        f"stop it: trainjob cancel -n ns {ref.name}"
    )
    assert unknown.endswith(f"stop it: trainjob cancel -n ns --key {KEY}")


def test_the_last_line_says_that_the_stop_was_not_confirmed(
    client: TrainJobClient,
    cluster: MemoryCluster,
    last_line: Callable[[StopWithStep], str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    ref = launched(client)
    message = tmp_path / "message"
    monkeypatch.setenv("TRAINJOB_TERMINATION_LOG", str(message))
    monkeypatch.setattr(stopping, "_CANCEL_SECONDS", 0.2)

    async def hang(*_: object) -> None:
        await anyio.sleep_forever()

    with StopWithStep(client, KEY, "suspend") as stop:
        stop.job = client.get(ref)
        monkeypatch.setattr(cluster, "patch", hang)
        line = last_line(stop)
    assert f"TrainJob {ref}, which may keep running: the API server has not confirmed it within 0.2 s" in line
    assert f"trainjob cancel -n ns {ref.name}" in line
    assert f"trainjob cancel -n ns {ref.name}" in message.read_text(), "written before, if the process is killed"


def test_prepared_requests_are_those_of_the_attempt_that_counts(
    client: TrainJobClient, cluster: MemoryCluster, last_line: Callable[[StopWithStep], str]
) -> None:
    first = launched(client)
    with StopWithStep(client, KEY, "suspend") as stop:
        stop.job = client.get(first)
        client.start(stop.keep_ready)
        eventually(lambda: {each.ref.name for each in cluster.prepared} == {first.name})
        second = created(client, KEY, 2)
        client.call(lambda: followed(stop, second))
        eventually(lambda: {each.ref.name for each in cluster.prepared} == {second.name})
        eventually(lambda: stop.job is not None)
        assert last_line(stop) == "SIGTERM: the TrainJob was asked to stop (suspend)"
    assert cluster.sent == [(second.name, "suspend")]


async def followed(stop: StopWithStep, ref: JobRef) -> None:
    stop.follow(ref)


def test_a_late_suspend_of_a_terminated_step_is_undone_by_the_next_one(
    client: TrainJobClient, cluster: MemoryCluster
) -> None:
    """The PATCH arrives after "Retry run" has launched the key again."""
    ref = launched(client)
    with StopWithStep(client, KEY, "suspend") as stop:
        stop.job = client.get(ref)
        client.start(stop.keep_ready)
        eventually(lambda: len(cluster.prepared) == 2)
        patch = next(each.patch for each in cluster.prepared if each.patch)
    cluster.version += 1
    assert client.launch(SPEC, KEY) == ref
    client.call(lambda: cluster.patch(ref, patch))
    assert is_stale(cluster.job(ref)), "its waiter resumes it"


def test_a_suspend_of_a_terminated_step_is_not_undone_by_another_waiter(
    client: TrainJobClient, cluster: MemoryCluster
) -> None:
    ref = launched(client)
    cluster.version += 1
    with StopWithStep(client, KEY, "suspend") as stop:
        stop.job = client.get(ref)
        client.start(stop.keep_ready)
        eventually(lambda: len(cluster.prepared) == 2)
        patch = next(each.patch for each in cluster.prepared if each.patch)
    client.call(lambda: cluster.patch(ref, patch))
    assert not is_stale(cluster.job(ref))
    assert client.launch(SPEC, KEY) == ref
    assert not cluster.job(ref)["spec"]["suspend"], '"Retry run" resumes it'


def test_terminate_by_a_prepared_request_stops_the_other_attempts_of_the_key(
    client: TrainJobClient, cluster: MemoryCluster, last_line: Callable[[StopWithStep], str]
) -> None:
    first = launched(client)
    second = created(client, KEY, 2)
    with StopWithStep(client, KEY, "cancel") as stop:
        stop.job = client.get(first)
        client.start(stop.keep_ready)
        eventually(lambda: bool(cluster.prepared))
        cluster.jobs.pop((first.namespace, first.name))  # the effect of the prepared request
        cluster.requests.clear()
        assert last_line(stop) == "SIGTERM: the TrainJob was asked to stop (cancel)"
    assert cluster.sent == [(first.name, "delete")]
    assert second.name not in phases(cluster)
    assert [work for _, work, _ in cluster.records] == [key_hash(KEY)], "a launch on its way reads the record"


def test_terminate_by_a_prepared_request_cancels_a_launch_on_its_way(
    client: TrainJobClient, cluster: MemoryCluster, last_line: Callable[[StopWithStep], str]
) -> None:
    """Another pod of the step begins its launch, and creates the next attempt after Terminate."""
    first = launched(client)
    with StopWithStep(client, KEY, "suspend") as stop:
        stop.job = client.get(first)
        client.start(stop.keep_ready)
        eventually(lambda: len(cluster.prepared) == 2)
        version, _ = client.call(lambda: cluster.cancels("ns", key_hash(KEY)))
        last_line(stop)
    assert phases(cluster) == {first.name: Phase.SUSPENDED}
    (record,) = cluster.records.values()
    assert record.applies(version, 1)
    assert (record.action, record.tried) == ("suspend", None)
    assert cluster.job(first)["metadata"]["annotations"][CANCELLED] == record.mark


@pytest.mark.parametrize("request_name", ["find", "announce_cancel", "patch"])
def test_terminate_by_a_prepared_request_sends_it_first_and_ends_in_time(
    client: TrainJobClient,
    cluster: MemoryCluster,
    last_line: Callable[[StopWithStep], str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    request_name: str,
) -> None:
    ref = launched(client)
    message = tmp_path / "message"
    monkeypatch.setenv("TRAINJOB_TERMINATION_LOG", str(message))
    monkeypatch.setattr(stopping, "_CANCEL_SECONDS", 0.8)
    sent_before: list[bool] = []
    messages: list[str] = []

    async def hang(*_: object) -> None:
        sent_before.append(cluster.sent == [(ref.name, "suspend")])
        await anyio.sleep(0.2)
        messages.append(message.read_text())
        await anyio.sleep_forever()

    with StopWithStep(client, KEY, "suspend") as stop:
        stop.job = client.get(ref)
        client.start(stop.keep_ready)
        eventually(lambda: len(cluster.prepared) == 2)
        monkeypatch.setattr(cluster, request_name, hang)
        began = time.monotonic()
        line = last_line(stop)
        took = time.monotonic() - began
    assert line == "SIGTERM: the TrainJob was asked to stop (suspend)", "the job was stopped"
    assert sent_before == [True]
    assert messages == [line], "written before, if the process is killed"
    assert 0.7 < took < 8


def test_terminate_by_a_prepared_request_reports_it_if_the_others_cannot_be_stopped(
    client: TrainJobClient, cluster: MemoryCluster, last_line: Callable[[StopWithStep], str]
) -> None:
    ref = launched(client)

    def refuse(request: str) -> None:
        raise Rejected(f"{request} is forbidden")

    with StopWithStep(client, KEY, "suspend") as stop:
        stop.job = client.get(ref)
        client.start(stop.keep_ready)
        eventually(lambda: len(cluster.prepared) == 2)
        cluster.before = refuse
        assert last_line(stop) == "SIGTERM: the TrainJob was asked to stop (suspend)"
        cluster.before = lambda _: None
    assert cluster.sent == [(ref.name, "suspend")]


# ---------------------------------------------------------------- suspensions by new requests that arrive late


def stop_step(client: TrainJobClient, ref: JobRef) -> None:
    """Terminate of a step that knows its job and has no prepared request."""
    with StopWithStep(client, KEY, "suspend") as stop:
        stop.job = client.get(ref)
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


SHARED = "digits/0"
SHARED_LABELS = {STUDY: key_hash("digits")} | run_label(RUN)
STOPS = pytest.mark.parametrize(
    ("key", "stop"), [(KEY, stop_step), (SHARED, stop_study), (SHARED, stop_run)], ids=["step", "study", "run"]
)


@STOPS
def test_a_late_suspend_by_a_new_request_is_refused_after_the_next_step_has_begun(
    client: TrainJobClient,
    cluster: MemoryCluster,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    stop: Callable[[TrainJobClient, JobRef], None],
) -> None:
    """The PATCH arrives after "Retry run" has adopted the job."""
    ref = launched(client, key, SHARED_LABELS)
    late: list[Any] = []

    async def delay(_: JobRef, patch: Any) -> None:
        late.append(patch)

    with monkeypatch.context() as delayed:
        delayed.setattr(cluster, "patch", delay)
        stop(client, ref)
    assert late
    cluster.version += 1  # of any other request
    assert client.launch(SPEC, key) == ref
    for patch in late:
        with pytest.raises(NotFound, match="was changed"):
            client.call(partial(cluster.patch, ref, patch))


@STOPS
def test_a_suspend_by_a_new_request_is_not_undone_by_another_waiter(
    client: TrainJobClient, cluster: MemoryCluster, key: str, stop: Callable[[TrainJobClient, JobRef], None]
) -> None:
    ref = launched(client, key, SHARED_LABELS)
    stop(client, ref)
    assert phases(cluster) == {ref.name: Phase.SUSPENDED}
    assert not is_stale(cluster.job(ref))
    assert client.launch(SPEC, key) == ref
    assert not cluster.job(ref)["spec"]["suspend"], '"Retry run" resumes it'


@STOPS
@pytest.mark.parametrize("answer", ["refused", "forbidden", "slow"])
def test_a_suspend_by_a_new_request_does_not_depend_on_the_records(
    client: TrainJobClient,
    cluster: MemoryCluster,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    stop: Callable[[TrainJobClient, JobRef], None],
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

    marks: list[str] = []
    patch = cluster.patch

    async def record(ref: JobRef, change: Any) -> None:
        marks.append(change["metadata"]["annotations"][CANCELLED])
        await patch(ref, change)

    monkeypatch.setattr(cluster, "cancels", unknown)
    monkeypatch.setattr(cluster, "patch", record)
    stop(client, ref)
    assert phases(cluster) == {ref.name: Phase.SUSPENDED}
    assert any(mark.startswith("unknown:") for mark in marks)


def test_a_deletion_by_a_new_request_does_not_wait_for_the_records(
    client: TrainJobClient, cluster: MemoryCluster
) -> None:
    ref = launched(client)
    with StopWithStep(client, KEY, "cancel") as stop:
        stop.job = client.get(ref)
        cluster.requests.clear()
        client.call(stop.request)
    assert phases(cluster) == {}
    assert "cancels" not in cluster.requests


# ---------------------------------------------------------------- trials


def trial(number: int, ref: JobRef | None = None) -> Trial:
    return Trial(number, {}, job=ref.name if ref else "")


def study_of(client: TrainJobClient, key: str, count: int, run: str = RUN) -> list[JobRef]:
    labels = {STUDY: key_hash(key)} | run_label(run)
    return [launched(client, f"{key}/{number}", labels) for number in range(count)]


def test_terminate_stops_no_trial_that_another_run_waits_for(
    client: TrainJobClient, cluster: MemoryCluster, last_line: Callable[[StopWithStep], str]
) -> None:
    mine, shared = study_of(client, "digits", 2)
    theirs = launched(client, "digits/2", {STUDY: key_hash("digits")} | run_label(OTHER_RUN))
    unlabeled = launched(client, "digits/3", {STUDY: key_hash("digits")})
    cluster.waits(shared)
    cluster.waits(mine, shared, own=True)
    with StopTrialsWithStep(client, "digits", "suspend", RUN) as stop:
        stop.change([trial(number, ref) for number, ref in enumerate((mine, shared, theirs, unlabeled))])
        client.start(stop.keep_ready)
        eventually(lambda: {each.ref.name for each in cluster.prepared if each.patch} == set(phases(cluster)))
        eventually(lambda: "waiters" in cluster.requests)
        line = last_line(stop)
    assert "the trials were asked to stop (suspend)" in line
    assert {name for name, _ in cluster.sent} == {mine.name, unlabeled.name}
    found = phases(cluster)
    assert (found[mine.name], found[unlabeled.name]) == (Phase.SUSPENDED, Phase.SUSPENDED)
    assert (found[shared.name], found[theirs.name]) == (Phase.RUNNING, Phase.RUNNING)
    assert not cluster.records, "a record would end another run's launch of the same trial"


def test_terminate_stops_trials_whose_launch_is_on_its_way(client: TrainJobClient, cluster: MemoryCluster) -> None:
    key = f"kfp/{RUN}/uuid/tune"
    (running,) = study_of(client, key, 1)

    async def late() -> None:
        await anyio.sleep(0.3)
        await cluster.create(render(SPEC, f"{key}/1", 1, "ns", origin={STUDY: key_hash(key)}))

    with StopTrialsWithStep(client, key, "cancel", RUN) as stop:
        stop.change([trial(0, running), trial(1)])
        creating = client.start(late)
        client.call(stop.request)
        creating.result(5)
    assert phases(cluster) == {}
    assert {work for _, work, _ in cluster.records} == {key_hash(f"{key}/1")}
    assert "waiters" not in cluster.requests, "no other run has these trials"


def test_the_last_line_names_the_trials_that_may_keep_running(
    client: TrainJobClient, cluster: MemoryCluster, last_line: Callable[[StopWithStep], str]
) -> None:
    first, second = study_of(client, "digits", 2)

    def refuse(request: str) -> None:
        if request in ("patch", "delete"):
            raise Rejected("denied")

    cluster.waits(second, age=3600)  # a process that was killed long ago
    with StopTrialsWithStep(client, "digits", "suspend", RUN) as stop:
        stop.change([trial(0, first), trial(1, second)])
        cluster.before = refuse
        line = last_line(stop)
    assert line == (
        "SIGTERM: cannot stop all trials of study digits, which may keep running: denied; stop them: "
        f"for job in {first.name} {second.name}; do trainjob cancel -n ns $job; done"
    )


@pytest.mark.parametrize(
    ("label", "waits", "listed", "stopped"),
    [
        (RUN, "", True, True),
        (RUN, "other", True, False),
        (RUN, "own", True, True),
        (RUN, "same run", True, True),
        (RUN, "dead", True, True),
        (RUN, "other", False, True),
        (OTHER_RUN, "", True, False),
        (OTHER_RUN, "", False, False),
        ("", "", True, True),
        ("", "other", True, False),
        ("", "", False, False),
    ],
)
def test_which_shared_jobs_a_run_stops(
    client: TrainJobClient,
    cluster: MemoryCluster,
    monkeypatch: pytest.MonkeyPatch,
    label: str,
    waits: str,
    listed: bool,
    stopped: bool,
) -> None:
    monkeypatch.setenv("KFP_POD_NAME", "digits-x7k2p-system-container-impl-1")
    cluster.owners = [{"kind": "Workflow", "name": "digits-x7k2p"}]
    ref = launched(client, "digits/0", run_label(label) if label else {})
    if waits:
        holder = "digits-x7k2p-system-container-impl-2" if waits == "same run" else "digits-x7k2q-impl-1"
        cluster.waits(ref, holder=holder, age=600 if waits == "dead" else 60, own=waits == "own")
    if not listed:
        cluster.leases = Rejected("leases is forbidden")
    jobs = SharedJobs(client, RUN)
    client.call(jobs.refresh)
    job = client.get(ref)
    assert job is not None
    assert jobs.may_stop(job) is stopped


def test_jobs_of_one_run_alone_are_always_stopped(client: TrainJobClient, cluster: MemoryCluster) -> None:
    ref = launched(client, KEY, run_label(RUN))
    cluster.waits(ref)
    jobs = SharedJobs(client, RUN)
    client.call(jobs.refresh)
    job = client.get(ref)
    assert job is not None
    assert jobs.may_stop(job)


# ---------------------------------------------------------------- the exit handler


def test_the_exit_handler_stops_active_attempts_first_and_suspends_failed_ones(
    client: TrainJobClient, cluster: MemoryCluster
) -> None:
    label = run_label(RUN)
    failed = launched(client, f"kfp/{RUN}/uuid/failed", label)
    cluster.end(failed, 1)
    old = given_up_job(client, KEY, label)
    running = created(client, KEY, 2, label)
    cluster.running(running)
    only_given_up = given_up_job(client, f"kfp/{RUN}/uuid/other", label)
    deleted: list[str] = []
    delete = cluster.delete

    async def record(ref: JobRef, version: str = "") -> None:
        deleted.append(ref.name)
        await delete(ref, version)

    cluster.delete = record  # type: ignore[method-assign]
    assert stop_all(client, RUN, "cancel", 10) == sorted([old.name, running.name, only_given_up.name])
    assert deleted[0] == running.name
    assert set(deleted) == {old.name, running.name, only_given_up.name}
    assert cluster.job(failed)["spec"]["suspend"], "Trainer up to 2.3 can take Failed back"
    assert key_hash(KEY) in {work for _, work, _ in cluster.records}, "a launch on its way reads the record"


def test_the_exit_handler_suspends_failed_jobs_with_their_diagnosis(
    client: TrainJobClient, cluster: MemoryCluster
) -> None:
    ref = launched(client, KEY, run_label(RUN))
    cluster.end(ref, 1)
    assert stop_all(client, RUN, "suspend", 10) == []
    job = cluster.job(ref)
    assert job["spec"]["suspend"]
    assert GIVEN_UP in job["metadata"]["annotations"]
    month = timedelta(days=30)
    assert leftover(job, [], cluster.now() + 2 * month, month) is not None, "`trainjob gc` removes it"
    job["status"]["conditions"] = [each for each in job["status"]["conditions"] if each["type"] != "Failed"]
    why = given_up(job)
    assert why is not None, "after Trainer has taken Failed back"
    assert why.failed
    assert not is_stale(job), "no waiter resumes it"


def test_the_exit_handler_suspends_a_failed_job_that_is_changed_meanwhile(
    client: TrainJobClient, cluster: MemoryCluster
) -> None:
    ref = launched(client, KEY, run_label(RUN))
    cluster.end(ref, 1)
    changes = iter(range(1))

    def change(request: str) -> None:
        if request == "patch" and next(changes, None) is not None:
            cluster.status(ref)

    cluster.before = change
    assert stop_all(client, RUN, "suspend", 0) == []
    assert cluster.job(ref)["spec"]["suspend"]
    assert GIVEN_UP in cluster.job(ref)["metadata"]["annotations"]


def test_the_exit_handler_suspends_other_failed_jobs_if_one_is_refused(
    client: TrainJobClient, cluster: MemoryCluster
) -> None:
    refs = [launched(client, f"kfp/{RUN}/uuid/{name}", run_label(RUN)) for name in ("first", "second")]
    for ref in refs:
        cluster.end(ref, 1)
    evidence = cluster.evidence

    async def refuse(ref: JobRef) -> Any:
        if ref == refs[0]:
            raise Rejected("the evidence cannot be read")
        return await evidence(ref)

    cluster.evidence = refuse  # type: ignore[method-assign]  # this object only
    assert stop_all(client, RUN, "suspend", 0) == []
    assert cluster.job(refs[1])["spec"]["suspend"]


def test_the_exit_handler_leaves_what_another_run_waits_for(
    client: TrainJobClient, cluster: MemoryCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, shared = study_of(client, "digits", 2)
    cluster.waits(shared)
    assert stop_all(client, RUN, "suspend", 10) == [mine.name]
    assert phases(cluster) == {mine.name: Phase.SUSPENDED, shared.name: Phase.RUNNING}
    assert f"TrainJob {shared} keeps running: another run waits for it" in capsys.readouterr().out
    assert not cluster.records


def test_the_exit_handler_keeps_the_mark_of_its_cancel(client: TrainJobClient, cluster: MemoryCluster) -> None:
    ref = launched(client, KEY, run_label(RUN))
    assert stop_all(client, RUN, "suspend", 10) == [ref.name]
    (record,) = cluster.records.values()
    assert cluster.job(ref)["metadata"]["annotations"][CANCELLED] == str(record.version)
    assert exit_handler.stop_all(client, RUN, "suspend", 10) == []


def test_a_job_in_a_queue_is_deleted(client: TrainJobClient, cluster: MemoryCluster) -> None:
    spec = TrainJobSpec.parse({**SPEC.model_dump(exclude_unset=True), "labels": {QUEUE_LABEL: "main"}})
    launched(client, KEY, run_label(RUN), spec)
    assert len(stop_all(client, RUN, "suspend", 10)) == 1
    assert cluster.jobs == {}


def test_a_given_up_job_stays_given_up(client: TrainJobClient, cluster: MemoryCluster) -> None:
    ref = given_up_job(client, KEY, run_label(RUN))
    assert stop_all(client, RUN, "suspend", 10) == []
    assert given_up(cluster.job(ref)) is not None
    assert cluster.job(ref)["metadata"]["labels"][KFP_RUN] == RUN
