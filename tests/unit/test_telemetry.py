"""Spans and metrics of jobs that ended, recorded by the real SDK of OpenTelemetry."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from tests import objects

from trainjob import JobRef, Observation, Phase, TrainJobFailed
from trainjob._diagnosis.evidence import Evidence
from trainjob._diagnosis.stragglers import Straggler
from trainjob._goodput.history import MetricHistory
from trainjob._jobs import telemetry
from trainjob._jobs.results import conclude
from trainjob.goodput import Activity, Goodput, Segment, Source

pytest.importorskip("opentelemetry.sdk", reason="the SDK of OpenTelemetry comes with Airflow")

REF = JobRef("ns", "train-1", "uid-1", 2)
BEGIN = 1_770_000_000.0
SECOND = 1_000_000_000


class Recorded:
    """What an SDK has recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from opentelemetry import metrics, trace
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._spans, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers, self.meters = TracerProvider(), MeterProvider([self._reader])
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        # A process can set its provider only once.
        monkeypatch.setattr(trace, "get_tracer", self.tracers.get_tracer)
        monkeypatch.setattr(metrics, "get_meter", self.meters.get_meter)

    def spans(self) -> list[Any]:
        return list(self._spans.get_finished_spans())

    def points(self, name: str) -> list[Any]:
        data = self._reader.get_metrics_data()
        assert data is not None
        return [
            point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


def goodput(*spans: tuple[Activity, float]) -> Goodput:
    at, segments = BEGIN, []
    for activity, seconds in spans:
        segments.append(Segment(activity, at, at + seconds, 2, Source.STEPS))
        at += seconds
    return Goodput("ns", "train-1", "nightly/train", Phase.COMPLETE, segments)


COUNTS = {"Complete": 2, "Failed": 1}
HALF = goodput((Activity.QUEUED, 30), (Activity.STARTING, 20), (Activity.TRAINING, 50))


def test_a_job_is_a_span_with_its_segments_as_children(recorded: Recorded) -> None:
    with recorded.tracers.get_tracer("caller").start_as_current_span("task") as task:
        telemetry.record_goodput(REF, HALF)
    *children, job, _ = recorded.spans()
    assert job.parent.span_id == task.get_span_context().span_id
    assert job.name == "TrainJob train-1"
    assert (job.start_time, job.end_time) == (BEGIN * SECOND, (BEGIN + 100) * SECOND)
    assert dict(job.attributes) == {
        "k8s.namespace.name": "ns",
        "trainjob.name": "train-1",
        "trainjob.uid": "uid-1",
        "trainjob.attempt": 2,
        "trainjob.key": "nightly/train",
        "trainjob.phase": "Complete",
        "trainjob.goodput.ratio": 0.5,
    }
    assert [each.name for each in children] == ["queued", "starting", "training"]
    assert {each.parent.span_id for each in children} == {job.context.span_id}
    assert [(each.end_time - each.start_time) / SECOND for each in children] == [30, 20, 50]
    assert {each.attributes["trainjob.source"] for each in children} == {"steps"}


def test_metrics_sum_the_time_by_activity(recorded: Recorded, caplog: pytest.LogCaptureFixture) -> None:
    for each in (HALF, HALF, replace(HALF, phase=Phase.FAILED)):
        telemetry.record_goodput(REF, each)
    spent = {
        (each.attributes["trainjob.activity"], each.attributes["trainjob.phase"]): each.value
        for each in recorded.points("trainjob.activity.seconds")
    }
    complete = {("queued", "Complete"): 60, ("starting", "Complete"): 40, ("training", "Complete"): 100}
    assert spent == complete | {(name, "Failed"): seconds / 2 for (name, _), seconds in complete.items()}
    ratios = {each.attributes["trainjob.phase"]: each for each in recorded.points("trainjob.goodput.ratio")}
    assert (ratios["Complete"].count, ratios["Complete"].sum) == (2, 1.0)
    assert ratios["Complete"].explicit_bounds[4] == 0.5
    assert not caplog.records, "an instrument is created once"


def test_the_spans_of_one_job_are_bounded(recorded: Recorded) -> None:
    telemetry.record_goodput(REF, Goodput("", "", "", Phase.DELETED))  # without a known time
    assert recorded.spans() == []
    many = goodput(*[(Activity.TRAINING, 10), (Activity.CHECKPOINTING, 1)] * 2000)
    telemetry.record_goodput(REF, many)
    *children, job = recorded.spans()
    assert len(children) == 500
    assert {each.name for each in children} == {"training"}
    assert [each.start_time for each in children] == sorted(each.start_time for each in children)
    assert job.end_time == (BEGIN + 22_000) * SECOND


def test_an_error_of_the_sdk_does_not_fail_the_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from opentelemetry import trace

    def fail(*_: object) -> None:
        raise RuntimeError("no exporter")

    monkeypatch.setattr(trace, "get_tracer", fail)
    with caplog.at_level(logging.WARNING):
        telemetry.record_goodput(REF, HALF)
    assert "TrainJob ns/train-1 cannot be recorded by OpenTelemetry: RuntimeError: no exporter" in caplog.text


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["Complete", "Failed"])
async def test_a_wait_records_the_end_of_its_job_once(recorded: Recorded, kind: str) -> None:
    condition = objects.condition(kind, time="2026-11-21T10:01:40Z")
    evidence = Evidence(objects.trainjob(condition, name="train-1", metadata={"uid": "uid-1"}))
    begin, seen = datetime(2026, 11, 21, 10, tzinfo=UTC).timestamp(), MetricHistory()
    for second, phase in ((0, Phase.STARTING), (25, Phase.RUNNING)):
        seen.observe(Observation(phase), begin + second)

    class Ended:
        async def evidence(self, ref: JobRef) -> Evidence:
            del ref
            return evidence

        def now(self) -> datetime:
            return datetime.now(UTC)

    if kind == "Complete":
        result = await conclude(Ended(), REF, history=seen)  # type: ignore[arg-type]  # only these two are used
        assert result.goodput["ratio"] == 0.75
    else:
        with pytest.raises(TrainJobFailed) as failed:
            await conclude(Ended(), REF, history=seen)  # type: ignore[arg-type]  # only these two are used
        assert pickle.loads(pickle.dumps(failed.value)).goodput["ratio"] == 0.75
    assert [each.name for each in recorded.spans()] == ["starting", "training", "TrainJob train-1"]
    assert [each.value for each in recorded.points("trainjob.activity.seconds")] == [25, 75]


def test_stragglers_are_counted_by_node(recorded: Recorded) -> None:
    found = [Straggler(f"node-{number}", number, f"node-{number}", "gpu-3", 2.0, 1.0, 2.0) for number in range(2)]
    telemetry.record_stragglers(REF, found)
    (point,) = recorded.points("trainjob.stragglers")
    assert (point.value, dict(point.attributes)) == (2, {"k8s.namespace.name": "ns", "k8s.node.name": "gpu-3"})


def test_a_process_without_opentelemetry_does_not_import_it() -> None:
    code = """
import sys
from trainjob._jobs import telemetry, waiting
print(telemetry.active(), 'opentelemetry' in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.split() == ["False", "False"]
