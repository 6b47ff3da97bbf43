"""Whatever a training reports or returns, and whatever it writes into its message, can be stored everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import make_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from tests.unstorable import unstorable

from trainjob import Observation, Phase
from trainjob._diagnosis import termination_messages
from trainjob._diagnosis.evidence import Evidence
from trainjob._jobs.results import check_report, result_of
from trainjob._support.numbers import is_finite
from trainjob.job import JobRef
from trainjob.progress import calls, message, read, report, reporter, reporting
from trainjob.registry.base import check_metrics, storable_metrics
from trainjob.status import observe

REF = JobRef("ns", "job", "uid")
NOW = datetime(2026, 11, 30, tzinfo=UTC)
TEXT = st.text(st.characters() | st.sampled_from("\x00\x1b\x7f\x9b\n\ud83d\ude00\udce9\u2028$"), max_size=90)
KEYS = TEXT | st.sampled_from(["__classname__", "__id__", "__type", "trainjob.step", "loss"])
JSON = st.recursive(
    st.none() | st.booleans() | TEXT | st.floats() | st.integers(-(10**400), 10**400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
OTHER: list[Callable[[], object]] = [
    *(set, Path, object, bytearray, lambda: (each for each in "ab"), lambda: np.zeros(3), lambda: np.float32(0.5)),
    *(lambda: np.datetime64(1, "s"), make_dataclass("Point", []), lambda: {(1, 2): 3}, lambda: {1: {np.int64(2): 3}}),
]
VALUES = JSON | st.builds(lambda make: make(), st.sampled_from(OTHER)) | st.lists(JSON, max_size=3).map(tuple)
STRICT = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def cycle() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def result(text: str) -> dict[str, Any]:
    """The result of a complete job with this termination message of rank 0."""
    evidence = Evidence(None, [], reported=text)
    check_report(REF, evidence)
    return result_of(REF, evidence, Observation(Phase.COMPLETE), NOW).as_dict()


@STRICT
@given(
    metrics=st.dictionaries(KEYS, VALUES, max_size=4), outputs=st.dictionaries(KEYS, VALUES, max_size=4), value=VALUES
)
@example(metrics={"a\ud800": 1.0}, outputs={"f": "s3://b/caf\udce9", "g": "s3://b/x\x00y"}, value={"a": "x\x00y"})
@example(metrics={}, outputs={}, value={"epochs": 10**25, "lr": float("inf")})
@example(metrics={"loss": float("nan")}, outputs={"x": float("nan"), "y": 10**400}, value=nested(100))
@example(metrics={}, outputs={"model": "s3://m"}, value=cycle())
def test_what_a_training_reports_and_returns_can_be_stored(
    log: Path, metrics: dict[str, Any], outputs: dict[str, Any], value: Any
) -> None:
    reporting._reporter = reporter.Reporter(calls.warn_once)
    log.unlink(missing_ok=True)
    report(metrics=metrics, outputs=outputs)
    message.report_returned("train", value)
    text = log.read_text(encoding="ascii")
    assert len(text) <= 4096
    assert read(text) is not None
    assert unstorable(result(text)) == []


@STRICT
@given(fields=st.dictionaries(st.sampled_from(["metrics", "outputs", "returned", "history", "lastUpdatedTime"]), JSON))
@example(fields={"outputs": {"a\x00": "\ud800", "b": 10**400}, "returned": nested(100), "metrics": [{"name": "\x00"}]})
@example(fields={"metrics": [{"name": "\ud800", "value": "\x00"}, {"name": "n", "value": 10**400}]})
@example(fields={"history": {"a\x00": [[1, 2, 3]]}, "lastUpdatedTime": "\x00\ud800", "returned": {"__id__": 1}})
def test_what_another_writer_puts_into_the_message_can_be_stored(fields: dict[str, Any]) -> None:
    assert unstorable(result(json.dumps({"trainjob": 1, **fields}))) == []


@STRICT
@given(entries=JSON | st.lists(st.fixed_dictionaries({"name": JSON, "value": JSON}), max_size=4))
def test_what_another_program_posts_to_trainers_api_can_be_stored(entries: Any) -> None:
    found = observe({"metadata": {}, "status": {"trainerStatus": {"metrics": entries}}})
    assert unstorable(result_of(REF, Evidence(None), found, NOW).as_dict()) == []


@STRICT
@given(text=TEXT)
def test_errors_of_our_programs_arrive_without_what_cannot_be_stored(text: str) -> None:
    verdict = termination_messages.verdict_of(termination_messages.message_of(ValueError(text)).decode("ascii"))
    assert verdict is not None
    assert unstorable(verdict.message) == []


def test_a_merge_keeps_what_another_program_has_written(log: Path) -> None:
    log.write_text('{"outputs":{"a":"b"},"metrics":{"no":"list"},"trainjob":1} and more')
    message.merge("returned", [1])
    assert log.read_text().startswith('{"trainjob":1,')
    found = read(log.read_text())
    assert found is not None
    assert (found.outputs, found.returned) == ({"a": "b"}, [1])


@STRICT
@given(metrics=st.dictionaries(KEYS, VALUES, max_size=4))
@example(metrics={"top@5": 0.5, "a/../b": 1, "loss": 0.25, "n\ud800": 1})
def test_every_registry_accepts_the_metrics_of_a_training(log: Path, metrics: dict[str, Any]) -> None:
    lines: list[str] = []
    reporting._reporter = reporter.Reporter(calls.warn_once)
    log.unlink(missing_ok=True)
    report(metrics=metrics)
    reported = result(log.read_text())["metrics"]
    stored = storable_metrics(reported, lines.append)
    assert check_metrics(stored) == stored
    assert bool(lines) == any(is_finite(value) and name not in stored for name, value in reported.items())


@pytest.mark.parametrize("value", [nested(21), nested(3000), cycle(), {1, 2}, [float("nan")], 10**64, np.zeros(2)])
def test_what_is_not_json_is_lost_with_a_line(log: Path, capsys: pytest.CaptureFixture[str], value: object) -> None:
    report(progress=50, outputs={"model": "s3://m"})
    message.report_returned("train", value)
    found = read(log.read_text())
    assert found is not None
    assert (found.progress, found.outputs, found.returned) == (50, {"model": "s3://m"}, None)
    assert capsys.readouterr().err.startswith("trainjob.progress: the return value of train() is lost: ")


@pytest.mark.parametrize(
    ("given", "kept"), [(nested(20), nested(20)), ({"é\n\t": "\r😀"},) * 2, (np.float32(0.5), 0.5)]
)
def test_what_is_json_is_kept(log: Path, given: object, kept: object) -> None:
    message.report_returned("train", given)
    assert result(log.read_text())["returned"] == kept
