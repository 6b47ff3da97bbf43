"""Which jobs of a run its exit handler stops, and in which order."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest
from tests.kfp.step_backend import StepBackend
from tests.kfp.stopped_runs import KEY, RUN, given_up_job, launched, made, phases
from tests.processes import eventually

from trainjob import JobRef, Phase, TrainJobClient
from trainjob._jobs.leftovers import leftover
from trainjob._manifest.attempts import given_up, is_stale
from trainjob._manifest.workflow_labels import KFP_RUN
from trainjob.errors import Rejected
from trainjob.job import key_hash
from trainjob.status import GIVEN_UP
from trainjob_kfp.execution import run_label
from trainjob_kfp.exit_handler import stop_all
from trainjob_kfp.sharing import SharedJobs

LABEL = run_label(RUN)
POD = "digits-x7k2p-system-container-impl-1"


def failed(client: TrainJobClient, backend: StepBackend, key: str = KEY) -> JobRef:
    ref = launched(client, key, LABEL)
    backend.write(ref, 0, "ValueError: no")
    backend.end(ref, 1)
    return ref


def may_stop(client: TrainJobClient, ref: JobRef) -> bool:
    jobs = SharedJobs(client, RUN)
    client.call(jobs.refresh)
    job = client.get(ref)
    assert job is not None
    return jobs.may_stop(job)


async def attended(backend: StepBackend, ref: JobRef) -> None:
    backend.attend(ref)


@pytest.mark.parametrize(
    ("label", "waits", "listed", "stopped"),
    [
        (RUN, "", True, True),
        (RUN, "other", True, False),
        (RUN, "own", True, True),
        (RUN, "same run", True, True),
        (RUN, "dead", True, True),
        (RUN, "other", False, True),
        ("7c1e-other", "", True, False),
        ("7c1e-other", "", False, False),
        ("", "", True, True),
        ("", "other", True, False),
        ("", "", False, False),
    ],
)
def test_which_shared_jobs_a_run_stops(
    client: TrainJobClient,
    backend: StepBackend,
    monkeypatch: pytest.MonkeyPatch,
    label: str,
    waits: str,
    listed: bool,
    stopped: bool,
) -> None:
    monkeypatch.setenv("KFP_POD_NAME", POD)
    owners = [{"kind": "Workflow", "name": "digits-x7k2p"}]
    pod = {"name": POD, "namespace": backend.default_namespace, "labels": {}, "ownerReferences": owners}
    backend.store.put("pods", {"metadata": pod}, "ADDED")
    ref = launched(client, "digits/0", run_label(label) if label else {})
    if waits == "own":
        client.call(partial(attended, backend, ref))
        eventually(lambda: backend.store.items("leases"))
    elif waits:
        holder = f"{POD[:-1]}2" if waits == "same run" else "digits-x7k2q-impl-1"
        backend.waits(ref, holder=holder, age=600 if waits == "dead" else 60)
    if not listed:
        backend.store.forbidden = (frozenset({"leases"}), frozenset())
    assert may_stop(client, ref) is stopped


def test_active_attempts_are_stopped_first_and_failed_ones_are_suspended(
    client: TrainJobClient, backend: StepBackend
) -> None:
    ended = failed(client, backend, f"kfp/{RUN}/uuid/failed")
    old = given_up_job(client, KEY, LABEL)
    running = JobRef.of(client.call(lambda: backend.create(made(KEY, 2, LABEL))))
    backend.running(running)
    only_given_up = given_up_job(client, f"kfp/{RUN}/uuid/other", LABEL)
    names = [old.name, running.name, only_given_up.name]
    assert stop_all(client, RUN, "cancel", 10) == sorted(names)
    deleted = [each.name for each in backend.store.log if (each.method, each.plural) == ("DELETE", "trainjobs")]
    assert deleted[0] == running.name
    assert set(deleted) == set(names)
    assert backend.job(ended)["spec"]["suspend"], "Trainer up to 2.3 can take Failed back"
    assert key_hash(KEY) in backend.cancelled, "a launch on its way reads the record"


def test_failed_jobs_are_suspended_with_their_diagnosis(client: TrainJobClient, backend: StepBackend) -> None:
    ref = failed(client, backend)
    assert stop_all(client, RUN, "suspend", 10) == []
    job = backend.job(ref)
    assert job["spec"]["suspend"]
    assert GIVEN_UP in job["metadata"]["annotations"]
    month = timedelta(days=30)
    assert leftover(job, [], backend.now() + 2 * month, month) is not None, "`trainjob gc` removes it"
    job["status"]["conditions"] = [each for each in job["status"]["conditions"] if each["type"] != "Failed"]
    why = given_up(job)
    assert why is not None, "after Trainer has taken Failed back"
    assert why.failed
    assert not is_stale(job), "no waiter resumes it"


def test_a_failed_job_that_is_changed_meanwhile_is_suspended(client: TrainJobClient, backend: StepBackend) -> None:
    ref = failed(client, backend)
    changes = iter(range(1))

    def change(request: str) -> None:
        if request == "PATCH trainjobs" and next(changes, None) is not None:
            backend.status(ref, changed=True)

    backend.before = change
    assert stop_all(client, RUN, "suspend", 0) == []
    assert backend.job(ref)["spec"]["suspend"]
    assert GIVEN_UP in backend.job(ref)["metadata"]["annotations"]


def test_other_failed_jobs_are_suspended_if_one_is_refused(client: TrainJobClient, backend: StepBackend) -> None:
    refs = [failed(client, backend, f"kfp/{RUN}/uuid/{name}") for name in ("first", "second")]

    def refuse(request: str) -> None:
        if request == "GET trainjobs" and backend.requests.count(request) == 1:
            raise Rejected("the evidence cannot be read")

    backend.requests.clear()
    backend.before = refuse
    assert stop_all(client, RUN, "suspend", 0) == []
    assert sorted(bool(backend.job(ref)["spec"].get("suspend")) for ref in refs) == [False, True]


def test_what_another_run_waits_for_keeps_running(
    client: TrainJobClient, backend: StepBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, shared = (launched(client, f"digits/{number}", LABEL) for number in range(2))
    backend.waits(shared)
    assert stop_all(client, RUN, "suspend", 10) == [mine.name]
    assert phases(backend) == {mine.name: Phase.SUSPENDED, shared.name: Phase.RUNNING}
    assert f"TrainJob {shared} keeps running: another run waits for it" in capsys.readouterr().out
    assert backend.cancelled == []


def test_a_given_up_job_stays_given_up(client: TrainJobClient, backend: StepBackend) -> None:
    ref = given_up_job(client, KEY, LABEL)
    assert stop_all(client, RUN, "suspend", 10) == []
    assert given_up(backend.job(ref)) is not None
    assert backend.job(ref)["metadata"]["labels"][KFP_RUN] == RUN
