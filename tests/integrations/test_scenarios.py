"""Each scenario ends the same through each integration: state, message, result, and what becomes of the jobs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.integration import Fields, Integration
from tests.objects import ended, pod
from tests.processes import wait_until

from trainjob import JobRef, Phase, TrainJobClient
from trainjob._backends.base import Snapshot
from trainjob._backends.local import backend as on_this_machine
from trainjob._backends.local.backend import LocalBackend
from trainjob._diagnosis.evidence import Evidence
from trainjob._manifest.attempts import given_up
from trainjob.status import QUEUE_LABEL, Blocker, observe


def python(code: str, **fields: Any) -> dict[str, Any]:
    return {"runtime": "trainjob-step", "command": [sys.executable, "-c", code], **fields}


@dataclass(frozen=True)
class Scenario:
    """A training, and how it ends.

    Attributes:
        spec: What runs.
        options: Arguments of the operator, the component, the command or `TrainJobClient.wait`.
        tries: How often it may run.
        code: The exit code of the command line; other integrations have something that stands for it.
        certain: Whether the failure is certain to repeat.
        messages: Parts of the error.
        log: Parts of the log.
        task_log: Parts of the log of an Airflow task.
        result: Entries of the result.
        left: Phases of the jobs, by attempt.
        kept: The same for integrations that leave it to their callers what becomes of a job.
    """

    spec: Fields
    options: Fields = field(default_factory=dict)
    tries: int = 1
    code: int = 0
    certain: bool = False
    messages: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    task_log: tuple[str, ...] = ()
    result: Fields = field(default_factory=dict)
    left: tuple[str, ...] = ("Complete",)
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


REPORTS = """
from trainjob.progress import report
report(progress=100, metrics={'loss': 1 / 3, 'bad': 'nan', 'kind': 'x', 'steps': 7, 'stopped': True})
report(outputs={'model': 'file:///m', 'promoted': False, 'shards': 3})
print('trained')
"""
FAILS = """
import os, sys
if os.environ["JAX_PROCESS_ID"] == "1":
    print("about to break", flush=True)
    sys.exit(7)
"""
HANGS = """
import time
from trainjob import progress
progress.step(), progress.step()
def read_forever(): time.sleep(600)
read_forever()
"""
CRASHED = pod(1, last=ended(3))
ENDS_ITSELF = """
import sys, time
from trainjob import TrainJobClient
with TrainJobClient("local") as client:
    ref = client.find(client.list()[0]["metadata"]["name"])
    client.cancel(ref) if sys.argv[1] == "cancel" else client.call(lambda: client.backend.delete(ref))
time.sleep(60)
"""
WAITS = """
import os, time
while not os.path.exists(os.environ["FLAG"]): time.sleep(0.05)
"""
NEEDS_MEMORY = """
import os
if os.environ["MEMORY"] == "16Mi": raise MemoryError
print("memory", os.environ["MEMORY"])
"""
MEMORY = {"valueFrom": {"resourceFieldRef": {"resource": "limits.memory"}}}
QUEUED: dict[str, Any] = {"labels": {QUEUE_LABEL: "main"}, "suspend": True}
SCENARIOS = {
    "completes": Scenario(
        python(REPORTS),
        log=("[node-0] trained",),
        result={
            "attempt": 1,
            "metrics": {"loss": 1 / 3, "bad": "nan", "kind": "x", "steps": 7, "stopped": True},
            "outputs": {"model": "file:///m", "promoted": False, "shards": 3},
        },
    ),
    "rank fails": Scenario(
        python(FAILS, runtime="jax-distributed", num_nodes=2),
        code=1,
        messages=("node-1 exited with code 7", "  | about to break", "category: user code"),
        log=("[node-1] about to break",),
        left=("Failed",),
    ),
    "failure that may not repeat": Scenario(
        python("import os; os.kill(os.getpid(), 9)"), tries=2, code=3, left=("Failed", "Failed")
    ),
    "failure that repeats": Scenario(
        python("import no_such_module"),
        tries=2,
        code=1,
        certain=True,
        messages=("add the missing module to the image", "not retried: the same code would fail again"),
        left=("Failed",),
        kept={"cli": ("Failed", "Failed")},
    ),
    "hang": Scenario(
        python(HANGS, stall_timeout=1),
        code=1,
        messages=("no rank has made progress for 1s: node-0 makes no step in read_forever()", "category: hang"),
        task_log=("was suspended",),
        left=("Suspended",),
        kept={"client": ("Running",)},
    ),
    "run timeout": Scenario(
        python(HANGS),
        {"run_timeout": 1},
        code=4,
        messages=("did not end within run_timeout of 1s",),
        left=("Cancelled",),
        kept={"client": ("Running",), "cli": ("Running",)},
    ),
    "queue timeout": Scenario(
        python("pass", **QUEUED),
        {"queue_timeout": 1},
        code=4,
        messages=("was not admitted within queue_timeout of 1s", "waiting for admission in queue main"),
        left=("Cancelled",),
        kept={"client": ("Queued",), "cli": ("Queued",)},
    ),
    "timeout that keeps the job": Scenario(
        python("pass", **QUEUED),
        {"queue_timeout": 1, "cancel_on_timeout": False},
        code=4,
        task_log=("it keeps running",),
        left=("Queued",),
    ),
    "cancelled": Scenario(
        python(ENDS_ITSELF, args=["cancel"]),
        code=5,
        messages=("the job was cancelled with trainjob",),
        left=("Cancelled",),
    ),
    "deleted": Scenario(
        python(ENDS_ITSELF, args=["delete"]),
        code=5,
        messages=("the TrainJob was deleted before it finished",),
        left=(),
    ),
    "more memory": Scenario(
        python(
            NEEDS_MEMORY,
            env={"MEMORY": MEMORY},
            resources_per_node={"memory": "16Mi"},
            on_retry={"out_of_memory": {"memory_factor": 2, "max_memory": "1Gi"}},
        ),
        tries=2,
        log=(
            "can be retried: the next attempt changes memory 16Mi -> 32Mi",
            "on_retry changed this attempt: memory 16Mi -> 32Mi; because of out of memory",
            "[node-0] memory 32Mi",
        ),
        result={"attempt": 2},
        left=("Failed", "Complete"),
    ),
    "another queue": Scenario(
        python("pass", **QUEUED, on_retry={"quota": {"queue": "backfill"}}),
        {"queue_timeout": 1},
        tries=2,
        code=4,
        messages=("waiting for admission in queue backfill",),
        log=(
            "waiting for admission in queue main",
            "on_retry changed this attempt: queue main -> backfill",
        ),
        task_log=("the next try replaces it by a job with the changes of on_retry", "it was cancelled"),
        left=("Cancelled", "Cancelled"),
        kept={"client": ("Cancelled", "Queued"), "cli": ("Cancelled", "Queued")},
    ),
    "literal secret": Scenario(
        python("pass", env={"HF_TOKEN": "hf_0123456789abcdefghij"}),
        code=2,
        messages=("env.HF_TOKEN: is a literal secret",),
        left=(),
    ),
    "runtime that does not exist": Scenario(
        python("pass", runtime="jax-distribute"),
        code=2,
        messages=("runtime 'jax-distribute' does not exist on this machine",),
        left=(),
    ),
}
SLOW = {"another queue"}
"""Scenarios that take over 5 s in a task."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in SLOW else []) for name in SCENARIOS]
)
def test_a_training_ends_the_same_through_each_integration(integration: Integration, name: str) -> None:
    check(integration, SCENARIOS[name])


def check(integration: Integration, scenario: Scenario) -> None:
    """Run the scenario, and compare state, message, log, result and the jobs that are left."""
    ended = integration.train(scenario.spec, scenario.tries, **scenario.options)
    assert ended.outcome == integration.outcome(scenario.code, certain=scenario.certain), (ended, ended.log)
    assert [text for text in scenario.messages if text not in ended.message] == [], ended.message
    logged = scenario.log + (scenario.task_log if integration.name in ("worker", "deferred") else ())
    assert [text for text in logged if text not in ended.log] == [], ended.log
    assert {name: typed(ended.result[name]) for name in scenario.result} == {
        name: typed(value) for name, value in scenario.result.items()
    }
    left = list(scenario.kept.get(integration.name, scenario.left))
    wait_until(f"the jobs are {left}", lambda: phases() == left, 60)  # ranks take their time to end
    with TrainJobClient() as client:
        suspended = [job for job in client.list() if observe(job).phase is Phase.SUSPENDED]
    assert all(given_up(job) for job in suspended), "the object keeps the reason: its pods are gone"


def typed(value: object) -> str:
    """A value with its types: ``1 == True``."""
    return repr(sorted(value.items()) if isinstance(value, dict) else value)


def phases() -> list[str]:
    """Phases of all jobs, by attempt."""
    with TrainJobClient() as client:
        jobs = sorted(client.list(), key=lambda job: JobRef.of(job).attempt)
        return [str(observe(job).phase) for job in jobs]


# ---------------------------------------------------------------- what the local backend does not have: added to it


@pytest.fixture(autouse=True)
def full_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended job of a queue stays there: the local backend does not know it as one that it starts at once."""
    monkeypatch.setattr(on_this_machine, "QUEUE_LABEL", "")


@pytest.fixture
def crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank crashes while its job keeps running; its job ends (`WAITS`) once the waiter knows it."""
    flag = tmp_path / "flag"
    monkeypatch.setenv("FLAG", str(flag))
    evidence = Evidence(None, [CRASHED], {CRASHED["metadata"]["name"]: ["loading", "ValueError: the data is wrong"]})

    async def crashes(backend: LocalBackend, ref: JobRef) -> AsyncGenerator[Evidence]:
        while observe(await backend.get(ref.namespace, ref.name)).phase is not Phase.RUNNING:
            await asyncio.sleep(0.02)
        yield evidence
        flag.touch()  # the waiter has read the evidence and requests the next one
        await asyncio.sleep(600)

    monkeypatch.setattr(LocalBackend, "crashes", crashes)


A_CRASH = ("node-1 exited with code 3", "  | ValueError: the data is wrong", "category: user code")


@pytest.mark.usefixtures("crashes")
@pytest.mark.parametrize(
    ("action", "outcome", "left"),
    [
        ("suspend", ("was suspended",), ["Suspended"]),
        ("cancel", ("was cancelled",), ["Cancelled"]),
        ("keep", (), ["Running"]),
    ],
    ids=["suspend", "cancel", "keep"],
)
def test_the_first_crash_fails_the_training(
    integration: Integration, action: str, outcome: tuple[str, ...], left: list[str]
) -> None:
    options = {"fail_on_first_crash": True, "on_crash_action": action}
    check(
        integration,
        Scenario(
            python(HANGS),
            options,
            code=1,
            messages=A_CRASH,
            task_log=outcome,
            left=tuple(left),
            kept={"client": ("Running",)},
        ),
    )


@pytest.mark.usefixtures("crashes")
def test_a_crash_of_a_job_that_keeps_running_is_logged(integration: Integration) -> None:
    check(integration, Scenario(python(WAITS), log=("node-1 exited with code 3", "ValueError: the data is wrong")))


def test_fail_fast_fails_on_a_permanent_blocker(integration: Integration, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = Blocker("Inadmissible", "LocalQueue main doesn't exist", permanent=True)
    watch = LocalBackend.watch

    async def watched(backend: LocalBackend, ref: JobRef) -> AsyncGenerator[Snapshot]:
        async with aclosing(watch(backend, ref)) as snapshots:
            async for snapshot in snapshots:
                yield replace(snapshot, blocker=blocker)

    monkeypatch.setattr(LocalBackend, "watch", watched)
    kept = {"client": ("Queued",), "cli": ("Queued",)}
    messages = ("waiting for admission in queue main: LocalQueue main doesn't exist",)
    options = {"fail_fast": True}
    check(
        integration,
        Scenario(
            python("pass", **QUEUED),
            options,
            code=2,
            messages=messages,
            task_log=("it was cancelled",),
            left=("Cancelled",),
            kept=kept,
        ),
    )


# ---------------------------------------------------------------- several runs of the same work


def test_the_next_run_adopts_a_job_that_was_kept(
    integration: Integration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLAG", str(tmp_path / "flag"))
    spec = python(WAITS + REPORTS)
    first = integration.train(spec, run_timeout=1, cancel_on_timeout=False)
    assert first.outcome == integration.outcome(4)
    (tmp_path / "flag").touch()
    second = integration.train(spec)
    assert "adopted" in second.log
    assert (second.outcome, second.result["attempt"], second.result["metrics"]["steps"]) == (0, 1, 7)
    assert phases() == ["Complete"]


# ---------------------------------------------------------------- jobs that were launched elsewhere


@pytest.mark.parametrize(
    ("program", "code", "certain", "message", "left"),
    [
        (REPORTS, 0, False, "", "Complete"),
        ("raise SystemExit(3)", 1, True, "launched-elsewhere-", "Failed"),
        (HANGS, 1, False, "no rank has made progress for 1s: node-0 makes no step in read_forever()", "Running"),
    ],
    ids=["completes", "fails", "hangs"],
)
def test_a_wait_ends_with_the_job_and_does_not_change_it(
    integration: Integration, program: str, code: int, certain: bool, message: str, left: str
) -> None:
    with TrainJobClient() as client:
        ref = client.launch(python(program, stall_timeout=1), "launched-elsewhere")
    ended = integration.wait(ref.name)
    assert ended.outcome == integration.outcome(code, certain=certain), ended
    assert message in ended.message
    if not code:
        assert (ended.result["uid"], ended.result["metrics"]["steps"]) == (ref.uid, 7)
    assert phases() == [left]
