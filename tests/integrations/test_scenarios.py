"""Each scenario ends the same through each integration: state, message, result, and what becomes of the jobs."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.integrations.integration import Fields, Integration

from trainjob import TrainJobClient
from trainjob.job import JobRef
from trainjob.status import observe


def python(code: str, **fields: Any) -> dict[str, Any]:
    return {"runtime": "trainjob-step", "command": [sys.executable, "-c", code], **fields}


@dataclass(frozen=True)
class Scenario:
    """
    Attributes:
        spec: What runs.
        options: Arguments of the operator, the component, the command or `TrainJobClient.wait`.
        code: The exit code of the command line; other integrations have something that stands for it.
        messages: Parts of the error.
        log: Parts of the log.
        result: Entries of the result.
        left: Phases of the jobs, by attempt.
        kept: The same where the caller of the integration decides about the jobs.
    """

    spec: Fields
    options: Fields = field(default_factory=dict)
    tries: int = 1
    code: int = 0
    messages: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    result: Fields = field(default_factory=dict)
    left: tuple[str, ...] = ("Complete",)
    kept: tuple[str, ...] = ()


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
progress.step()
def read_forever(): time.sleep(600)
read_forever()
"""
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
    "hang": Scenario(
        python(HANGS, stall_timeout=1),
        code=1,
        messages=("no rank has made progress for 1s: node-0 makes no step in read_forever()", "category: hang"),
        left=("Suspended",),
        kept=("Running",),
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_training_ends_the_same_through_each_integration(integration: Integration, name: str) -> None:
    scenario = SCENARIOS[name]
    ended = integration.train(scenario.spec, scenario.tries, **scenario.options)
    assert ended.outcome == integration.outcome(scenario.code), (ended, ended.log)
    assert [text for text in scenario.messages if text not in ended.message] == [], ended.message
    assert [text for text in scenario.log if text not in ended.log] == [], ended.log
    assert {key: typed(ended.result[key]) for key in scenario.result} == {
        key: typed(value) for key, value in scenario.result.items()
    }
    assert phases() == list(scenario.left if integration.decides else scenario.kept or scenario.left)


def typed(value: object) -> str:
    """A value with its types: ``1 == True``."""
    return repr(sorted(value.items()) if isinstance(value, dict) else value)


def phases() -> list[str]:
    """Phases of all jobs, by attempt."""
    with TrainJobClient() as client:
        jobs = sorted(client.list(), key=lambda job: JobRef.of(job).attempt)
        return [str(observe(job).phase) for job in jobs]
