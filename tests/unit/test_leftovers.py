"""Jobs left suspended on a cluster: which are removed, and what happens beside a removal."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from hypothesis import given, strategies as st
from tests.unit.program import exit_of

from trainjob import JobRef, TrainJobSpec
from trainjob._backends.base import Cluster, TrainJob, Waiter
from trainjob._jobs.leftovers import KEEP_FOR, Leftover, leftover, remove_leftovers
from trainjob._manifest.attempts import failure_record
from trainjob._manifest.render import render
from trainjob.status import CANCELLED, GIVEN_UP, QUEUE_LABEL

pytestmark = pytest.mark.anyio

NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)
DAY = timedelta(days=1)
OLD, NEW = NOW - 40 * DAY, NOW - 20 * DAY

MARKS: Mapping[str, dict[str, str]] = {
    "given up": {GIVEN_UP: "{}"},
    "cancel of a key": {CANCELLED: "4711"},
    "kill of a try": {CANCELLED: "try:2"},
    "reaper": {CANCELLED: "unattended"},
    "cancel of an older version": {CANCELLED: "true"},
}


def text(time: datetime) -> str:
    return f"{time:%Y-%m-%dT%H:%M:%SZ}"


def condition(kind: str, time: datetime = OLD, status: str = "True") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": kind, "message": kind, "lastTransitionTime": text(time)}


def job(
    key: str = "a",
    *,
    mark: Mapping[str, str] | None = None,
    conditions: tuple[dict[str, str], ...] = (condition("Suspended"),),
    suspend: bool = True,
    manager: str = "trainjob",
    **metadata: Any,
) -> dict[str, Any]:
    """A job of 50 days ago that was suspended 40 days ago."""
    spec = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"], "suspend": suspend})
    made = render(spec, key, 1, "ns")
    made["metadata"]["annotations"] |= MARKS["reaper"] if mark is None else mark
    fields = {"manager": manager, "fieldsV1": {"f:spec": {"f:suspend": {}}}}
    other = {"manager": "trainer", "fieldsV1": {"f:status": {}}}
    own = {"uid": f"uid-{key}", "creationTimestamp": text(NOW - 50 * DAY), "resourceVersion": "1"}
    made["metadata"] |= {**own, "managedFields": [other, fields], **metadata}
    made["status"] = {"conditions": list(conditions)}
    return made


def record() -> dict[str, Any]:
    made = failure_record(job(), "{}")
    made["metadata"] |= {"uid": "uid-record", "creationTimestamp": text(OLD), "resourceVersion": "1"}
    return made


def removed(trainjob: Mapping[str, Any], *waiters: Waiter, keep_for: timedelta = KEEP_FOR) -> Leftover | None:
    return leftover(trainjob, waiters, NOW, keep_for)


def waiter(renewed: datetime, at: datetime | None = None, uid: str = "uid-a") -> Waiter:
    """The Lease of a process that waits for the job, or has left it at a time."""
    return Waiter("x", renewed, {uid: at or renewed}, frozenset() if at else frozenset({uid}))


# ---------------------------------------------------------------- the rule


@pytest.mark.parametrize("mark", MARKS.values(), ids=MARKS)
def test_jobs_that_trainjob_suspended_are_removed(mark: Mapping[str, str]) -> None:
    found = removed(job(mark=mark))
    assert found is not None
    assert (found.since, found.age) == (OLD, 40 * DAY)
    without_managers = job(mark=mark)
    del without_managers["metadata"]["managedFields"]
    assert removed(without_managers) is not None


def test_reasons_are_named() -> None:
    found = [removed(job(mark=MARKS[each])) for each in ("given up", "cancel of a key", "reaper")]
    assert [each.reason for each in found if each] == [
        "its step gave it up",
        "it was cancelled",
        "it was suspended because no process waited for it",
    ]
    failed = removed(job(mark=MARKS["given up"], conditions=(condition("Failed"),)))
    assert failed is not None
    assert str(failed) == f"TrainJob {JobRef.of(job())} was removed: it failed, not used for 40d00h"
    assert failed.as_dict() == {
        "job": str(JobRef.of(job())),
        "done": "removed",
        "reason": "it failed",
        "unused": 40 * 24 * 3600.0,
    }


def test_records_of_failures_are_removed() -> None:
    found = removed(record())
    assert found is not None
    assert found.reason == "it records why a deleted job failed"
    assert removed(record(), keep_for=41 * DAY) is None


@pytest.mark.parametrize(
    "trainjob",
    [
        job(mark={}),
        job(mark={}, conditions=(condition("Failed"),)),
        job(manager="kubectl-patch"),
        job(manager="kueue"),
        job(labels={**job()["metadata"]["labels"], QUEUE_LABEL: "gpus"}),
        job(labels={}),
        job(labels={"app.kubernetes.io/managed-by": "another"}),
        job(suspend=False),
        job(suspend=False, conditions=(condition("Failed"),)),
        job(conditions=(condition("Complete"),)),
        job(conditions=(condition("Suspended", status="False"),)),
        job(conditions=()),
        job(conditions=(condition("Suspended", NEW),)),
        job(conditions=(condition("Suspended"), condition("Failed", NEW))),
        job(deletionTimestamp=text(OLD)),
    ],
    ids=[
        "suspended by a person",
        "failed, suspended by a person",
        "resumed and suspended by a person",
        "suspended by Kueue without a queue label",
        "in a queue",
        "not trainjob's",
        "of another program",
        "resumed",
        "failed, not suspended",
        "complete",
        "suspended just now",
        "not seen by Trainer",
        "suspended 20 days ago",
        "failed 20 days ago",
        "being deleted",
    ],
)
def test_other_jobs_are_kept(trainjob: dict[str, Any]) -> None:
    assert removed(trainjob) is None


def test_jobs_that_are_waited_for_are_kept() -> None:
    assert removed(job(), waiter(NOW)) is None
    assert removed(job(), waiter(NOW - timedelta(hours=23)), keep_for=timedelta(0)) is None, "an outage of the server"
    assert removed(job(), waiter(NOW - timedelta(hours=1), NOW - 20 * DAY)) is None, "left 20 days ago"
    assert removed(job(), waiter(NOW - 31 * DAY)) is not None, "the process died 31 days ago"
    assert removed(job(), waiter(NOW, NOW - 31 * DAY)) is not None, "left 31 days ago by a process that lives"
    assert removed(job(), waiter(NOW, uid="another")) is not None


@given(
    suspend=st.booleans(),
    mark=st.sampled_from([{}, *MARKS.values()]),
    managed=st.sampled_from(["trainjob", "another", None]),
    queue=st.booleans(),
    manager=st.sampled_from(["trainjob", "kubectl-edit", None]),
    ended=st.sampled_from(["Failed", "Complete", None]),
    changed=st.integers(0, 60),
    attended=st.one_of(st.none(), st.integers(0, 60)),
    waits=st.booleans(),
    keep_for=st.integers(0, 60),
)
def test_what_is_removed_was_suspended_by_trainjob_and_not_used_since(
    suspend: bool,
    mark: dict[str, str],
    managed: str | None,
    queue: bool,
    manager: str | None,
    ended: str | None,
    changed: int,
    attended: int | None,
    waits: bool,
    keep_for: int,
) -> None:
    conditions = [condition("Suspended", NOW - 60 * DAY)]
    conditions += [condition(ended, NOW - changed * DAY)] if ended else []
    if not ended:
        conditions = [condition("Suspended", NOW - changed * DAY)]
    trainjob = job(mark=mark, suspend=suspend, conditions=tuple(conditions), manager=manager or "")
    labels = {"app.kubernetes.io/managed-by": managed} if managed else {}
    trainjob["metadata"]["labels"] = {**labels, **({QUEUE_LABEL: "gpus"} if queue else {})}
    if manager is None:
        del trainjob["metadata"]["managedFields"]
    waiters = []
    if attended is not None:
        time = NOW - attended * DAY
        waiters = [waiter(time) if waits else waiter(NOW, time)]
    found = leftover(trainjob, waiters, NOW, keep_for * DAY)
    ours = suspend and bool(mark) and managed == "trainjob" and manager in ("trainjob", None)
    idle = ended == "Failed" or (ended is None and not queue)
    used = min(50, changed, *([attended] if attended is not None else []))
    waited = attended is not None and waits and attended < 1
    assert (found is not None) == (ours and idle and used > keep_for and not waited)


# ---------------------------------------------------------------- removal


class FakeCluster:
    """Jobs and Leases of a namespace."""

    home = None

    def __init__(self, *jobs: dict[str, Any]) -> None:
        self.jobs = {each["metadata"]["name"]: copy.deepcopy(each) for each in jobs}
        self.leases: list[Waiter] = []
        self.before: Callable[[str], None] = lambda _: None
        """Called with the name of each request before it is served."""
        self.closed = False

    @property
    def cluster(self) -> Cluster:
        return cast(Cluster, self)

    @property
    def default_namespace(self) -> str:
        return "ns"

    def now(self) -> datetime:
        return NOW

    async def find(self, namespace: str, labels: Mapping[str, str]) -> list[TrainJob]:
        self.before("find")
        found = [copy.deepcopy(each) for each in self.jobs.values() if each["metadata"]["namespace"] == namespace]
        for each in found:
            each["metadata"].pop("managedFields", None)
        return [*found]

    async def get(self, namespace: str, name: str) -> TrainJob | None:
        self.before("get")
        return copy.deepcopy(self.jobs.get(name))

    async def waiters(self, namespace: str) -> list[Waiter]:
        self.before("waiters")
        return self.leases

    async def delete(self, ref: JobRef, version: str = "") -> None:
        self.before("delete")
        metadata = self.jobs.get(ref.name, {}).get("metadata", {})
        if (metadata.get("uid"), metadata.get("resourceVersion")) == (ref.uid, version):
            del self.jobs[ref.name]

    async def aclose(self) -> None:
        self.closed = True


async def test_leftovers_are_removed_and_nothing_else() -> None:
    gone = [job("given-up", mark=MARKS["given up"]), job("cancelled"), record()]
    kept = [
        job("person", mark={}),
        job("again", manager="kubectl-patch"),
        job("new", conditions=(condition("Suspended", NEW),)),
    ]
    fake = FakeCluster(*gone, *kept)
    names = {JobRef.of(each).name for each in gone}
    would = await remove_leftovers(fake.cluster, "ns", KEEP_FOR, dry_run=True)
    assert ({each.ref.name for each in would}, len(fake.jobs)) == (names, 6)
    shown: list[Leftover] = []
    assert await remove_leftovers(fake.cluster, "ns", KEEP_FOR, on_removed=shown.append) == shown
    assert {each.ref.name for each in shown} == names
    assert fake.jobs.keys() == {JobRef.of(each).name for each in kept}
    assert await remove_leftovers(fake.cluster, "ns", KEEP_FOR) == []


@pytest.mark.parametrize("moment", ["waiters", "get", "delete"])
@pytest.mark.parametrize("change", ["adopted", "resumed", "replaced", "waited for", "deleted"])
async def test_a_job_that_is_used_meanwhile_is_kept(moment: str, change: str) -> None:
    """Whatever happens before each request; a wait alone changes nothing on the job."""
    fake = FakeCluster(job())
    name = JobRef.of(job()).name
    done: list[str] = []

    def happens(request: str) -> None:
        if request != moment or done:
            return
        done.append(request)
        metadata = fake.jobs[name]["metadata"]
        match change:
            case "adopted":
                metadata |= {"resourceVersion": "2", "annotations": {"trainjob.dev/adopted": "f00d"}}
            case "resumed":
                fake.jobs[name]["spec"]["suspend"] = False
                metadata["resourceVersion"] = "2"
            case "replaced":
                metadata |= {"uid": "uid-b", "resourceVersion": "2"}
            case "waited for":
                fake.leases.append(waiter(NOW))
            case "deleted":
                del fake.jobs[name]

    fake.before = happens
    found = await remove_leftovers(fake.cluster, "ns", KEEP_FOR)
    assert done
    if change == "deleted":
        assert fake.jobs == {}
    elif change == "replaced":
        assert fake.jobs[name]["metadata"]["uid"] == "uid-b"
    elif (change, moment) != ("waited for", "delete"):
        assert found == []
        assert name in fake.jobs


# ---------------------------------------------------------------- the command


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    made = FakeCluster(job("old", mark=MARKS["given up"]), job("person", mark={}))
    monkeypatch.setattr("trainjob.cli.session.connect", lambda *_, **__: made)
    return made


def test_gc_removes_leftovers_of_a_cluster(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    old, person = JobRef.of(job("old")), JobRef.of(job("person"))
    assert exit_of(capsys, "gc", "--dry-run")[:2] == (0, f"would remove {old}: its step gave it up, 40d00h ago\n")
    assert exit_of(capsys, "gc", "--older-than", "41d")[1:] == (
        "",
        "no job in namespace ns was left suspended by trainjob for more than 41d00h\n",
    )
    assert len(fake.jobs) == 2
    assert exit_of(capsys, "gc", "--older-than", "30d")[:2] == (0, f"removed {old}: its step gave it up, 40d00h ago\n")
    assert fake.jobs.keys() == {person.name}
    assert fake.closed


def test_gc_answers_in_json(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(exit_of(capsys, "gc", "--json")[1])
    assert (answer["dry_run"], answer["leftovers"]) == (False, [])
    (found,) = answer["removed"]
    assert (found["name"], found["phase"]) == (JobRef.of(job("old")).name, "Suspended")


def test_reap_removes_leftovers_on_request(
    fake: FakeCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: object, **__: object) -> list[object]:
        return []

    monkeypatch.setattr("trainjob._jobs.reaper.reap", nothing)
    assert exit_of(capsys, "reap")[:2] == (0, "")
    assert exit_of(capsys, "reap", "--keep-for", "P41D")[:2] == (0, "")
    assert len(fake.jobs) == 2
    code, out, _ = exit_of(capsys, "reap", "--keep-for", "P30D", "--json")
    assert (code, json.loads(out)["job"]) == (0, str(JobRef.of(job("old"))))
    assert len(fake.jobs) == 1


@pytest.mark.parametrize("command", ["reap", "install"])
@pytest.mark.parametrize("words", ["P1M", "P", "PT", "30", "PT59M", "59m", "-1d", "soon", "P1Y"])
def test_too_short_and_invalid_times_are_refused(
    command: str, words: str, fake: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = exit_of(capsys, command, f"--keep-for={words}")
    assert (code, out) == (2, "")
    assert "--keep-for" in err
