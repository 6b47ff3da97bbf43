"""The command line with several attempts of a key, with cancels of keys, and with jobs that nobody waits for."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from typing import Any

import anyio
import pytest
from tests import objects
from tests.fakes.kube.direct import DirectBackend
from tests.unit.program import Program, launched

from trainjob import JobRef, Phase, TrainJobSpec, cancel_key
from trainjob._jobs.cancellation import give_up
from trainjob._manifest.attempts import cancel_of
from trainjob._manifest.unattended import LABEL
from trainjob.errors import Category, Diagnosis, Rejected, RetryVerdict
from trainjob.job import DELIVERED, key_hash
from trainjob.status import CANCELLED, observe

SPEC = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"]})
RUN = ["run", "--runtime", "torch-distributed"]
CRASH = Diagnosis(Category.USER_CODE, RetryVerdict.USER, "node-0 exited with code 1")


def ends_at_creation(backend: DirectBackend) -> None:
    def end(request: str) -> None:
        if request == "POST trainjobs":
            backend.end(JobRef.of(next(iter(backend.jobs.values()))))

    backend.after = end


# ---------------------------------------------------------------- launch


@pytest.mark.parametrize(
    ("options", "spec", "action"),
    [
        ([], {}, "suspend"),
        (["--on-interrupt", "keep"], {}, None),
        (["--detach"], {}, None),
        ([], {"unattended": "keep"}, "keep"),
        ([], {"unattended": "cancel"}, "cancel"),
        (["--detach"], {"unattended": "cancel"}, "cancel"),
    ],
)
def test_a_job_that_run_waits_for_has_a_policy(
    backend: DirectBackend,
    program: Program,
    tmp_path: Any,
    options: list[str],
    spec: dict[str, Any],
    action: str | None,
) -> None:
    ends_at_creation(backend)
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({"runtime": "torch-distributed", "command": ["train"], **spec}))
    assert program("run", *options, str(path))[0] == 0
    (job,) = backend.jobs.values()
    assert job["metadata"]["labels"].get(LABEL) == action


def test_a_generated_key_needs_no_look_before_the_create(backend: DirectBackend, program: Program) -> None:
    assert program(*RUN, "--detach", "--", "train")[0] == 0
    assert "LIST trainjobs" not in backend.requests[: backend.requests.index("POST trainjobs")]
    backend.requests.clear()
    assert program(*RUN, "--detach", "--key", "key", "--", "train")[0] == 0
    assert "LIST trainjobs" in backend.requests[: backend.requests.index("POST trainjobs")]


@pytest.mark.parametrize("command", ["run", "wait"])
@pytest.mark.parametrize("as_json", [False, True])
def test_the_attempt_that_replaces_a_job_is_followed(
    backend: DirectBackend, program: Program, command: str, as_json: bool
) -> None:
    refs: list[JobRef] = []

    def change(request: str) -> None:
        if request == "WATCH trainjobs" and not refs:
            first = JobRef.of(next(iter(backend.jobs.values())))
            refs.extend([first, backend.replaced(first, SPEC)])
        elif request == "WATCH trainjobs":
            backend.end(refs[1])

    if command == "wait":
        words = ["wait", launched(backend).name]
    else:
        words = ["run", "--runtime", "torch-distributed", "--key", "key", "--", "train"]
    backend.before = change
    if as_json:
        words.insert(1, "--json")
    code, out, err = program(*words)
    first, second = refs
    assert code == 0
    notice = f"TrainJob {first} was replaced by {second}, which is waited for from now on"
    assert notice in (out if as_json else err)
    if as_json:
        events = [json.loads(line) for line in out.splitlines()]
        (followed,) = [each for each in events if each["event"] == "followed"]
        assert (followed["name"], followed["instead_of"]) == (second.name, first.name)
        assert events[-1]["name"] == second.name
    else:
        assert f"report: trainjob report default/{second.name}" in err or f"report {second.name}" in err
    delivered = DELIVERED in backend.job(second)["metadata"]["annotations"]
    assert delivered is (command == "run")


# ---------------------------------------------------------------- cancel of a key


def test_cancel_of_a_key_stops_all_its_attempts(backend: DirectBackend, program: Program) -> None:
    given_up, other = launched(backend), launched(backend, "other")
    asyncio.run(give_up(backend, given_up, CRASH))
    running = backend.replaced(given_up, SPEC, deleted=False)
    code, out, _ = program("cancel", "--key", "key")
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("cancelled")] == [
        f"cancelled {given_up}",
        f"cancelled {running}",
    ]
    assert "  phase     Running" in out, "the last state of the running attempt"
    assert [name for _, name in backend.jobs] == [other.name]
    assert backend.cancelled == [key_hash("key")]


def test_cancel_of_a_key_suspends(backend: DirectBackend, program: Program) -> None:
    ref = launched(backend)
    answer = json.loads(program("cancel", "--key", "key", "--suspend", "--json")[1])
    assert answer == {
        "key": "key",
        "jobs": [{"namespace": "default", "name": ref.name, "uid": ref.uid, "attempt": 1}],
        "stopped": True,
        "message": f"suspended {ref}",
    }
    assert observe(backend.job(ref)).phase is Phase.SUSPENDED


def test_cancel_of_a_key_without_jobs_says_so(backend: DirectBackend, program: Program) -> None:
    code, out, _ = program("cancel", "--key", "key")
    assert code == 0
    assert out == "nothing runs under key key; a launch that began before now is cancelled, too\n"
    assert backend.cancelled == [key_hash("key")]


@pytest.mark.parametrize("words", [[], ["x-1", "--key", "key"]])
def test_cancel_needs_a_name_or_a_key(backend: DirectBackend, program: Program, words: list[str]) -> None:
    code, _, err = program("cancel", *words)
    assert code == 2
    assert "give either the NAME of a job or --key" in err
    assert backend.requests == []


def test_ranks_that_are_still_terminating_are_reported(
    backend: DirectBackend, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = launched(backend)
    backend.pod(ref)

    async def cancel(*words: Any, **given: Any) -> Any:
        return await cancel_key(*words, **given, timeout_seconds=0.1)

    monkeypatch.setattr("trainjob._jobs.cancellation.cancel_key", cancel)
    code, out, _ = program("cancel", "--key", "key", "--suspend")
    assert code == 4
    assert out.startswith(f"suspended {ref}, but its last ranks are still terminating")


def test_an_interrupted_launch_leaves_nothing_running(
    backend: DirectBackend, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the request is on its way; the API server creates the job 0.3 s later."""
    late: list[asyncio.Task[Any]] = []
    create = backend.create

    async def slow(trainjob: Any, *, dry_run: bool = False) -> Any:
        async def arrive() -> None:
            await anyio.sleep(0.3)
            await create(trainjob, dry_run=dry_run)

        late.append(asyncio.get_running_loop().create_task(arrive()))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        await anyio.sleep_forever()

    monkeypatch.setattr(backend, "create", slow)
    code, _, err = program(*RUN, "--key", "key", "--", "train")
    assert code == 130
    assert late[0].done()
    assert backend.jobs == {}
    assert "cancelled default/" in err
    assert backend.cancelled, "the record for a launch that is later still"


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize("gives_up", [False, True])
def test_an_attempt_that_another_one_replaced_is_not_resumed(
    backend: DirectBackend, program: Program, gives_up: bool
) -> None:
    first = launched(backend)
    if gives_up:
        asyncio.run(give_up(backend, first, CRASH))
    else:
        asyncio.run(backend.patch(first, {"spec": {"suspend": True}}))
    second = backend.replaced(first, SPEC, deleted=False)
    code, _, err = program("resume", first.name)
    assert code == 2
    text = " ".join(err.split())
    assert f"{first} cannot be resumed: {second} (Running) is the attempt of its key that counts" in text
    assert backend.job(first)["spec"]["suspend"]
    asyncio.run(backend.delete(second))
    assert program("resume", first.name)[0] == 0
    assert not backend.job(first)["spec"]["suspend"]


def test_a_resume_carries_the_version(backend: DirectBackend, program: Program) -> None:
    """Between the look and the PATCH another attempt appears and this one is changed."""
    first = launched(backend)
    asyncio.run(backend.patch(first, {"spec": {"suspend": True}}))

    def change(request: str) -> None:
        if request == "PATCH trainjobs":
            backend.before = lambda _: None
            backend.replaced(first, SPEC, deleted=False)
            backend.status(first)

    backend.before = change
    code, _, err = program("resume", first.name)
    assert (code, "is the attempt of its key that counts" in " ".join(err.split())) == (2, True)
    assert backend.job(first)["spec"]["suspend"]


def test_a_resume_is_newer_than_the_cancels_before_it(backend: DirectBackend, program: Program) -> None:
    ref = launched(backend)
    asyncio.run(cancel_key(backend, "key", namespace="default", action="suspend", timeout_seconds=0))
    _, (record,) = asyncio.run(backend.cancels("default", key_hash("key")))
    assert backend.job(ref)["metadata"]["annotations"][CANCELLED] == record.mark
    code, _, _ = program("resume", ref.name)
    assert code == 0
    job = backend.job(ref)
    assert not job["spec"]["suspend"]
    assert CANCELLED not in job["metadata"]["annotations"]
    assert cancel_of([record], job) is None


def test_a_resume_is_repeated_after_another_change(backend: DirectBackend, program: Program) -> None:
    ref = launched(backend)
    asyncio.run(backend.patch(ref, {"spec": {"suspend": True}}))
    changes = iter(range(2))

    def change(request: str) -> None:
        if request == "PATCH trainjobs" and next(changes, None) is not None:
            backend.status(ref)

    backend.before = change
    assert program("resume", ref.name)[1] == f"resumed {ref}\n"
    backend.before = lambda request: backend.status(ref) if request == "PATCH trainjobs" else None
    asyncio.run(backend.patch(ref, {"spec": {"suspend": True}}))
    code, _, err = program("resume", ref.name)
    assert code == 5
    assert "was changed 5 times" in err


# ---------------------------------------------------------------- many jobs


def test_many_waits_follow_the_attempt_that_counts(backend: DirectBackend, program: Program) -> None:
    """The name that the caller wrote is printed, also if both attempts were named."""
    first = launched(backend)
    second = backend.replaced(first, SPEC, deleted=False)

    def change(request: str) -> None:
        if request == "WATCH trainjobs" and backend.requests.count(request) == 2 and len(backend.jobs) == 2:
            backend.store.delete("trainjobs", first.name, {}, "Background")
        if request == "GET trainjobs" and len(backend.jobs) == 1:
            backend.end(second)

    backend.before = change
    code, out, err = program("wait", first.name, second.name)
    assert code == 0
    assert sorted(line.split("\t")[0] for line in out.splitlines()) == [first.name, second.name]
    assert f"TrainJob {first} was replaced by {second}, which is waited for from now on" in err


@pytest.mark.parametrize("as_json", [False, True])
def test_many_waits_report_a_job_that_was_given_up(backend: DirectBackend, program: Program, as_json: bool) -> None:
    ref, other = launched(backend), launched(backend, "other")
    asyncio.run(give_up(backend, ref, CRASH))
    backend.end(other)
    code, out, err = program("wait", ref.name, other.name, *(["--json"] if as_json else []))
    assert code == 1
    assert "node-0 exited with code 1" in (out if as_json else err)
    if as_json:
        (event,) = [each for each in map(json.loads, out.splitlines()) if each["event"] == "failed"]
        assert (event["name"], event["diagnosis"]["category"]) == (ref.name, "user code")


def test_many_waits_take_names_and_keys(backend: DirectBackend, program: Program) -> None:
    named, keyed = launched(backend), launched(backend, "Team/Train_v1")
    for ref in (named, keyed):
        backend.end(ref)
    words = (named.name, "Team/Train_v1", keyed.name, f"default/{keyed.name}")
    code, out, _ = program("wait", *words)
    waited = sorted([named.name, "Team/Train_v1"])
    assert (code, sorted(line.split("\t")[0] for line in out.splitlines())) == (0, waited), "once for each job"
    code, _, err = program("wait", *words, "gone")
    assert (code, "there is no TrainJob default/gone" in err) == (5, True)


@pytest.mark.parametrize("namespace", ["default", "nightly"])
def test_many_waits_refuse_a_name_that_is_the_key_of_another_job(
    backend: DirectBackend, program: Program, namespace: str
) -> None:
    text = "train" if namespace == "default" else f"{namespace}/train"
    backend.store.put("trainjobs", objects.trainjob(name="train", namespace=namespace), "ADDED")
    keyed, other = launched(backend, text), launched(backend, "other")
    backend.end(other)
    code, out, err = program("wait", text, other.name)
    assert (code, out.split("\t")[0]) == (2, other.name)
    assert f"{text!r} is the name of TrainJob {namespace}/train and the key of TrainJob {keyed}" in err


def test_many_waits_find_keys_that_look_like_jobs_of_a_forbidden_namespace(
    backend: DirectBackend, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = backend.refs

    async def forbidden(namespace: str, names: set[str]) -> tuple[dict[str, JobRef], set[str]]:
        if namespace != "default":
            raise Rejected("trainjobs is forbidden")
        return await refs(namespace, names)

    monkeypatch.setattr(backend, "refs", forbidden)
    keyed, other = launched(backend, "nightly/train"), launched(backend, "other")
    for each in (keyed, other):
        backend.end(each)
    code, out, _ = program("wait", "nightly/train", other.name)
    assert (code, len(out.splitlines())) == (0, 2)
