"""How the time of an ended job was spent, and its slow ranks, as spans and metrics of OpenTelemetry.

The package ``opentelemetry-api`` is not required: a process that has not imported it has no SDK that could record
anything. Without an SDK, the API records nothing.

Spans: one for the job, from its creation to its end, with one child for each segment of `trainjob.goodput`, named as
its activity. The parent is the current span, if there is one.

Metrics: ``trainjob.activity.seconds``, a counter by ``trainjob.activity``, and ``trainjob.goodput.ratio``, a histogram.
Both also have ``k8s.namespace.name`` and ``trainjob.phase``. ``trainjob.stragglers`` counts ranks when they are found
to be slower than the others, by ``k8s.namespace.name`` and ``k8s.node.name``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trainjob._diagnosis.stragglers import Straggler
from trainjob.goodput import Goodput
from trainjob.job import JobRef
from trainjob.version import __version__

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

_log = logging.getLogger(__name__)

_FAILED = "TrainJob %s cannot be recorded by OpenTelemetry: %s: %s"
_SPANS = 500  # longest segments of a job: the queue of an exporter holds 2,048 by default
_RATIOS = [number / 10 for number in range(1, 10)]


def active() -> bool:
    """Whether this process uses OpenTelemetry."""
    return "opentelemetry.trace" in sys.modules or "opentelemetry.metrics" in sys.modules


def record_goodput(ref: JobRef, goodput: Goodput | None) -> None:
    """Record a job that has ended, or that its waiter ends; nothing if `goodput` is unknown.

    An error is logged: it must not fail the wait.
    """
    if goodput is None or not (active() and goodput.segments):
        return
    with _logged(ref):
        _record_spans(ref, goodput)
        _record_metrics(goodput)


def record_stragglers(ref: JobRef, found: Iterable[Straggler]) -> None:
    """Count ranks that are slower than the others. An error is logged, as by `record_goodput`."""
    if not active():
        return
    with _logged(ref):
        counter = _meter().create_counter(
            "trainjob.stragglers", "{rank}", "Ranks of TrainJobs that are slower than others"
        )
        for each in found:
            counter.add(1, {"k8s.namespace.name": ref.namespace, "k8s.node.name": each.node})


@contextmanager
def _logged(ref: JobRef) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - of any SDK and its exporters
        _log.warning(_FAILED, ref, type(error).__name__, error)


def _meter() -> Meter:
    from opentelemetry import metrics  # noqa: PLC0415 - may not be installed

    return metrics.get_meter("trainjob", __version__)


def _record_spans(ref: JobRef, goodput: Goodput) -> None:
    from opentelemetry import trace  # noqa: PLC0415 - may not be installed

    segments, tracer = goodput.segments, trace.get_tracer("trainjob", __version__)
    attributes: dict[str, str | float] = {
        "k8s.namespace.name": ref.namespace,
        "trainjob.name": ref.name,
        "trainjob.uid": ref.uid,
        "trainjob.attempt": ref.attempt,
        "trainjob.key": goodput.key,
        "trainjob.phase": str(goodput.phase),
        "trainjob.goodput.ratio": goodput.ratio or 0.0,
    }
    job = tracer.start_span(f"TrainJob {ref.name}", attributes=attributes, start_time=_nanoseconds(segments[0].start))
    within = trace.set_span_in_context(job)
    longest = sorted(segments, key=lambda each: each.seconds, reverse=True)[:_SPANS]
    for each in sorted(longest, key=lambda each: each.start) if job.is_recording() else ():
        known: dict[str, str | float] = {"trainjob.source": str(each.source), "trainjob.attempt": each.attempt}
        tracer.start_span(str(each.activity), within, attributes=known, start_time=_nanoseconds(each.start)).end(
            _nanoseconds(each.end)
        )
    job.end(_nanoseconds(segments[-1].end))


def _record_metrics(goodput: Goodput) -> None:
    meter = _meter()
    common = {"k8s.namespace.name": goodput.namespace, "trainjob.phase": str(goodput.phase)}
    spent = meter.create_counter("trainjob.activity.seconds", "s", "Time of ended TrainJobs by activity")
    for activity, seconds in goodput.seconds.items():
        if seconds:
            spent.add(seconds, {**common, "trainjob.activity": str(activity)})
    ratio = meter.create_histogram(
        "trainjob.goodput.ratio",
        "1",
        "Training that counted, divided by the time from the creation of a TrainJob to its end",
        explicit_bucket_boundaries_advisory=_RATIOS,
    )
    ratio.record(goodput.ratio or 0.0, common)


def _nanoseconds(time: float) -> int:
    return round(time * 1e9)
