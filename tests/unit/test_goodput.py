"""Goodput: every second of a piece of work has one activity, and the right one where it is known."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
from tests.objects import SUSPENDED, pod
from tests.unit.generated_histories import BEGIN, GPUS, Known, Run, message_of, pods_of, simulate, text, trainjob

from trainjob._diagnosis.evidence import Evidence
from trainjob._goodput import Attempt, gpus_of, measure, pieces_of_work, sums, total
from trainjob._goodput.history import CHECKPOINT
from trainjob.goodput import Activity, Goodput, Source
from trainjob.status import GIVEN_UP, STALL_TIMEOUT, Phase


def at(time: float) -> datetime:
    return datetime.fromtimestamp(time, UTC)


def check_sums(found: Goodput) -> Goodput:
    """Without gap or overlap, so all sums equal the wall time."""
    assert all(segment.end > segment.start for segment in found.segments)
    assert all(before.end == after.start for before, after in pairwise(found.segments))
    assert math.fsum(found.seconds.values()) == pytest.approx(found.wall_seconds, abs=1e-3)
    return found


@pytest.mark.parametrize(("known", "skew"), [("waiter", 0), ("both", 0), ("both", 20), ("pods", 0), ("pods", 5)])
def test_generated_histories_are_divided_as_they_were(known: Known, skew: float) -> None:
    largest = list[float]()
    for seed in range(100):  # 500 in all
        history = simulate(seed, known, skew=skew)
        found = check_sums(measure(history.attempts, at(history.now)))
        assert found.wall_seconds == pytest.approx(sum(history.truth.values()), rel=0.01, abs=2)
        # Unknown time counts as training, so goodput is never too low.
        assert found.seconds[Activity.TRAINING] >= history.truth[Activity.TRAINING] - history.tolerance, seed
        if history.complete:
            assert found.seconds == pytest.approx(history.truth, abs=history.tolerance), seed
            off = max(abs(found.seconds[each] - history.truth[each]) for each in Activity)
            largest.append(off / found.wall_seconds)
    assert len(largest) >= 25
    assert median(largest) < 0.01  # of the wall time


def test_generated_histories_have_everything() -> None:
    truths = [simulate(seed, "both").truth for seed in range(200)]
    for activity in set(Activity) - {Activity.STOPPED}:
        assert sum(truth[activity] > 0 for truth in truths) >= 5


# ---------------------------------------------------------------- single rules


Report = tuple[int, float, str]
"""A step, its time in seconds after `BEGIN`, and the series."""


def running(
    *reports: Report,
    end: float,
    done: bool | None = True,
    annotations: Mapping[str, str] | None = None,
    hangs: bool = False,
) -> Goodput:
    """One attempt, created at 0 and running from 10 on; times are seconds after `BEGIN`."""
    run = Run(BEGIN + 10, BEGIN + end if done is not None else 0.0, failed=done is False)
    run.reports += [(number, BEGIN + time, name) for number, time, name in reports]
    ended = BEGIN + end if done is not None else None
    job = trainjob(BEGIN, ended=ended, done=done is True)
    job["metadata"]["annotations"] |= annotations or {}
    reported = message_of(run) if done is None else ""
    return check_sums(measure([Attempt(Evidence(job, one_pod(run), reported=reported), hangs=hangs)], at(BEGIN + end)))


def one_pod(*runs: Run) -> list[dict[str, Any]]:
    return pods_of(runs, 0.0, random.Random(0))[:1]


def spent(found: Goodput) -> dict[str, float]:
    return {str(each): round(seconds) for each, seconds in found.seconds.items() if round(seconds)}


def steady(count: int, begin: float = 20, every: float = 10) -> list[Report]:
    """Reports of 10 steps each, the first one at `begin`."""
    return [(10 * (number + 1), begin + every * number, "loss") for number in range(count)]


def paused(*reports: Report) -> list[Report]:
    """Five reports, and then others."""
    return [*steady(5), *reports]


def saved_slowly() -> list[Report]:
    """Ten steps in 10 s each, a checkpoint of 5 s after every twenty, and a stall before the sixth one."""
    reports, time = list[Report](), 10.0
    for number in range(1, 9):
        reports += [(20 * number - 10, time + 10, "loss"), (20 * number, time + 20, "loss")]
        time += 25 + (2000 if number == 6 else 0)
        reports.append((20 * number, time, CHECKPOINT))
    return reports


SHORT_PAUSE = paused((60, 130.0, "loss"), (70, 140.0, "loss"))


@pytest.mark.parametrize(
    ("reports", "options", "expected"),
    [
        ([], {"end": 110}, {"starting": 10, "training": 100}),
        # 10 s for 10 steps, so the first step began at 30: time before it belongs to the start.
        (steady(9, begin=40), {"end": 120}, {"starting": 30, "training": 90}),
        # Evaluations and checkpoints end the intervals that they lengthen.
        ([*steady(4), (40, 80.0, "eval_loss"), (50, 110.0, CHECKPOINT), (60, 120.0, "loss")], {"end": 120},
         {"starting": 10, "training": 60, "evaluating": 30, "checkpointing": 20}),
        # A pause that is a small part of the steps is noise; one of ten minutes is a stall.
        ([*steady(4), (50, 60.2, CHECKPOINT), (60, 70.0, "loss")], {"end": 70}, {"starting": 10, "training": 60}),
        (paused((60, 660.0, "loss"), (70, 670.0, "loss")), {"end": 670}, {"starting": 10, "training": 660}),
        (paused((60, 680.0, "loss"), (70, 690.0, "loss")), {"end": 690},
         {"starting": 10, "training": 70, "stalled": 610}),
        (SHORT_PAUSE, {"end": 140}, {"starting": 10, "training": 130}),
        (SHORT_PAUSE, {"end": 140, "annotations": {STALL_TIMEOUT: "45"}},
         {"starting": 10, "training": 70, "stalled": 60}),
        (saved_slowly(), {"end": 2210}, {"starting": 10, "training": 160, "checkpointing": 40, "stalled": 2000}),
        # Counters of one process that go backwards count epochs.
        ([(10 * (number % 5 + 1), 20.0 + 10 * number, "loss") for number in range(20)], {"end": 210},
         {"starting": 10, "training": 200}),
        # Steps that stop are a stall unless the job completes: the last report is at 60, the next one was due at 70.
        (steady(5), {"end": 1070, "done": None}, {"starting": 10, "training": 60, "stalled": 1000}),
        (steady(5), {"end": 1070, "done": False}, {"starting": 10, "training": 60, "stalled": 1000}),
        (steady(5), {"end": 1070}, {"starting": 10, "training": 1060}),
    ],
)  # fmt: skip
def test_reports_divide_the_time_of_a_run(
    reports: list[Report], options: dict[str, Any], expected: dict[str, float]
) -> None:
    assert spent(running(*reports, **options)) == expected


HANG = '{"category": "hang"}'


@pytest.mark.parametrize("reports", [[], steady(5)])
@pytest.mark.parametrize(
    ("given_up", "hangs", "stalled"),
    [
        (HANG, False, 45),
        ("", True, 45),
        *((other, False, 0) for other in ("", '{"category": "user-code"}', "{", "[1]", "null", "[" * 100_000)),
    ],
)
def test_a_job_that_hangs_or_was_given_up_for_a_hang_has_stalled(
    reports: list[Report], given_up: str, hangs: bool, stalled: float
) -> None:
    """Its ranks count steps for the waiter, but report none."""
    known = {STALL_TIMEOUT: "45"} | ({GIVEN_UP: given_up} if given_up else {})
    found = running(*reports, end=110, done=None, annotations=known, hangs=hangs)
    assert spent(found) == {"starting": 10, "training": 100 - stalled} | ({"stalled": stalled} if stalled else {})


def test_the_sources_of_the_times_are_known() -> None:
    found = running(end=110)
    assert found.ratio == pytest.approx(100 / 110)
    assert found.sources == {Activity.STARTING: {Source.PODS: 10.0}, Activity.TRAINING: {Source.PODS: 100.0}}
    job = trainjob(BEGIN, queue=True, admitted=BEGIN + 30, ended=BEGIN + 100)
    without_pods = measure([Attempt(Evidence(job))], at(BEGIN + 500))
    assert spent(without_pods) == {"queued": 30, "training": 70}
    assert without_pods.sources[Activity.TRAINING] == {Source.ASSUMED: 70.0}


def test_history_that_was_cut_is_no_stall() -> None:
    job = trainjob(BEGIN, ended=BEGIN + 5000, done=False)
    history = {"loss": [[step, BEGIN + time, 1.0] for step, time, _ in steady(5)]}
    found = measure([Attempt(Evidence(job), [(BEGIN + 10, Phase.RUNNING)], history)], at(BEGIN + 5000))
    assert "stalled" not in spent(found)
    assert Source.ASSUMED in found.sources[Activity.TRAINING]


def restarted(second: list[Report], *, end: float = 300) -> Goodput:
    """A run that failed at 65 after 50 steps, and another one from 80 on."""
    first = Run(BEGIN + 10, BEGIN + 65, failed=True, reports=[(s, BEGIN + t, n) for s, t, n in steady(5)])
    again = Run(BEGIN + 80, BEGIN + end, reports=[(s, BEGIN + t, n) for s, t, n in second])
    job = trainjob(BEGIN, ended=BEGIN + end)
    return check_sums(measure([Attempt(Evidence(job, one_pod(first, again)))], at(BEGIN + end)))


@pytest.mark.parametrize(("begin", "repeated"), [(1, 50), (4, 20)], ids=["from the start", "from a checkpoint"])
def test_steps_before_the_highest_one_are_repeated_after_a_restart(begin: int, repeated: float) -> None:
    second = [(10 * (number + begin), 110.0 + 10 * number, "loss") for number in range(20)]
    expected = {"starting": 10, "training": 255 - repeated, "restarting": 35, "repeated": repeated}
    assert spent(restarted(second)) == expected


def test_a_waiter_sees_restarts_only_by_counters() -> None:
    job = trainjob(BEGIN, ended=BEGIN + 200)
    points = [[step, BEGIN + time, 1.0] for step, time, _ in (*steady(5), *steady(10, begin=110))]
    found = measure([Attempt(Evidence(job), [(BEGIN + 10, Phase.RUNNING)], {"loss": points})], at(BEGIN + 300))
    assert spent(found)["repeated"] == 50
    assert spent(found)["restarting"] == 40  # from the last report until the steps began again


def attempt(number: int, begin: float, end: float | None, **fields: Any) -> Attempt:
    done = fields.pop("done", False)
    ended = None if end is None else BEGIN + end
    job = trainjob(BEGIN + begin, number, ended=ended, done=done)
    return Attempt(Evidence(job), **fields)


def test_time_between_attempts_is_restarting_without_gpus() -> None:
    found = check_sums(measure([attempt(3, 300, 400, done=True), attempt(1, 0, 100)], at(BEGIN + 9999)))
    assert spent(found) == {"training": 200, "restarting": 200}
    assert found.missing == [2]
    assert found.attempts == 2
    assert found.gpu_hours is not None
    assert found.gpu_hours[Activity.TRAINING] == pytest.approx(GPUS * 200 / 3600)
    assert found.gpu_hours[Activity.RESTARTING] == 0


def test_attempts_whose_clocks_overlap_are_cut() -> None:
    overlapping = [attempt(1, 0, 150), attempt(2, 100, 90), attempt(3, 95, 200, done=True)]
    assert check_sums(measure(overlapping, at(BEGIN))).wall_seconds == 200
    runs = measure([attempt(1, 0, None)], at(BEGIN + 50))
    assert (runs.wall_seconds, runs.phase) == (50, Phase.RUNNING), "it ends now"


def test_no_time_has_no_ratio() -> None:
    for attempts in ([], [attempt(1, 0, 0)], [attempt(1, 10, None)]):
        found = measure(attempts, at(BEGIN))
        assert found.ratio is None
        assert found.wall_seconds == 0
        assert found.as_dict()["goodput"] is None


@pytest.mark.parametrize("skew", [-86_400, -3600, 3600, 86_400])
def test_clocks_that_disagree_make_no_negative_time(skew: float) -> None:
    first = Run(BEGIN + skew + 10, BEGIN + skew + 65, failed=True)
    first.reports += [(step, BEGIN - 2 * skew + time, "loss") for step, time, _ in steady(5)]
    again = Run(BEGIN + skew + 80, BEGIN + skew + 300)
    job = trainjob(BEGIN, queue=True, admitted=BEGIN - skew, ended=BEGIN + 300)
    points = {"loss": [[step, BEGIN + 3 * skew + time, 1.0] for step, time, _ in steady(9)]}
    phases = [(BEGIN + skew, Phase.QUEUED), (BEGIN - skew, Phase.RUNNING), (BEGIN + 2 * skew, Phase.COMPLETE)]
    found = check_sums(measure([Attempt(Evidence(job, one_pod(first, again)), phases, points)], at(BEGIN - skew)))
    assert found.wall_seconds == 300


JUNK: tuple[Any, ...] = (
    *(None, "", 0, -1, 1e308, math.inf, 10**400, True, [], {}, [None], {"a": 1}, "x", "NaN", "9" * 400),
    *("0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2026-13-01", "2026-01-31T12:00:00", "2026-01-31T12:00:00+14:00"),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each place in nested JSON values, as its container and its key there."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in pairs:
        yield value, key
        yield from places(each)


def test_a_wait_does_not_fail_because_of_malformed_objects() -> None:
    chance = random.Random(0)
    for seed in range(150):
        attempt = chance.choice(simulate(seed % 20, "both").attempts)
        given: Any = copy.deepcopy([attempt.evidence.trainjob, *attempt.evidence.pods])
        for _ in range(chance.randint(1, 4)):
            container, key = chance.choice([each for each in places(given) if each[0] is not given])
            container[key] = copy.deepcopy(chance.choice(JUNK))
        found = check_sums(measure([replace(attempt, evidence=Evidence(given[0], given[1:]))], at(BEGIN)))
        json.dumps(found.summary(), allow_nan=False)


def test_a_container_that_was_lost_with_its_node_may_have_trained() -> None:
    lost = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown", "startedAt": None, "finishedAt": None}}
    pod = one_pod(Run(BEGIN + 10, BEGIN + 100))[0]
    pod["status"]["containerStatuses"][0]["state"] = lost
    job = trainjob(BEGIN, ended=BEGIN + 100)
    assert spent(measure([Attempt(Evidence(job, [pod]))], at(BEGIN + 100))) == {"training": 100}


def test_a_suspended_job_is_stopped_and_one_that_was_given_up_has_ended() -> None:
    job = trainjob(BEGIN)
    job["spec"]["suspend"] = True
    job["status"]["conditions"] = [SUSPENDED | {"lastTransitionTime": text(BEGIN + 60)}]
    found = measure([Attempt(Evidence(job))], at(BEGIN + 100))
    assert spent(found) == {"training": 60, "stopped": 40}
    assert found.gpu_hours is not None
    assert found.gpu_hours[Activity.STOPPED] == 0
    job["metadata"]["annotations"][GIVEN_UP] = "{}"
    assert measure([Attempt(Evidence(job))], at(BEGIN + 100)).wall_seconds == 60


@pytest.mark.parametrize(("status", "reason"), [("True", "WaitingInQueue"), ("False", "Admitted")])
def test_a_job_of_this_machine_that_waits_for_gpus_is_queued(status: str, reason: str) -> None:
    job = trainjob(BEGIN)
    condition = {
        "reason": reason,
        "status": status,
        "lastTransitionTime": text(BEGIN + (0 if status == "True" else 60)),
    }
    job["status"]["conditions"] = [SUSPENDED | condition]
    assert spent(measure([Attempt(Evidence(job))], at(BEGIN + 100)))["queued"] == (100 if status == "True" else 60)


# ---------------------------------------------------------------- jobs that Kueue preempted


def preempted(admitted: object, *, holds: bool = False, phases: Sequence[tuple[float, Phase]] = ()) -> Goodput:
    """A job that has been in a queue since 0 and was suspended or resumed at 300; measured at 400."""
    job = trainjob(BEGIN, queue=True, admitted=BEGIN + 300, ended=None)
    job["spec"]["suspend"] = holds
    job["status"]["conditions"][0]["status"] = str(holds)
    pods = [] if holds else one_pod(Run(BEGIN + 310, 0.0))
    workload = {"status": {"accumulatedPastExecutionTimeSeconds": admitted}}
    seen = [(BEGIN + time, phase) for time, phase in phases]
    return check_sums(measure([Attempt(Evidence(job, pods, workload=workload), seen)], at(BEGIN + 400)))


def test_training_before_a_preemption_is_counted_by_kueue() -> None:
    assert spent(preempted(100)) == {"queued": 200, "training": 190, "restarting": 10}
    waits = preempted(100, holds=True)
    assert spent(waits) == {"queued": 300, "training": 100}
    assert [each.activity for each in waits.segments] == [Activity.QUEUED, Activity.TRAINING, Activity.QUEUED]
    for admitted, queued in {9999: 1, 0: 300, -1: 300, "x": 300, None: 300}.items():
        assert spent(preempted(admitted))["queued"] == queued, "no more than there was time"


def test_a_waiter_has_observed_a_part_of_the_training_before_a_preemption() -> None:
    phases = [(150, Phase.QUEUED), (250, Phase.RUNNING), (280, Phase.QUEUED), (300, Phase.RUNNING)]
    assert spent(preempted(100, phases=phases)) == {"queued": 200, "training": 190, "restarting": 10}
    assert spent(preempted(20, phases=phases))["queued"] == 270
    assert spent(preempted(100, phases=[(0, Phase.QUEUED), (300, Phase.RUNNING)]))["queued"] == 300


@pytest.mark.parametrize(
    ("trainer", "containers", "gpus"),
    [
        ({"numNodes": 3, "resourcesPerNode": {"limits": {"nvidia.com/gpu": "2"}}}, None, 6),
        ({"numNodes": 2, "resourcesPerNode": {"requests": {"amd.com/gpu": 1}}}, None, 2),
        ({"numNodes": 2, "resourcesPerNode": {"limits": {"nvidia.com/mig-1g.5gb": 3}}}, None, 6),
        ({"numNodes": 1, "resourcesPerNode": {"limits": {"gpu.intel.com/xe": 1}}}, None, 1),
        ({"numNodes": 2, "resourcesPerNode": {"limits": {"cpu": "4"}}}, None, 0),
        ({"numNodes": 2}, [{"name": "node", "resources": {"limits": {"nvidia.com/gpu": "4"}}}], 4),
        ({"resourcesPerNode": {"limits": {"nvidia.com/gpu": "4"}}}, [{"name": "node"}], 4),
        ({"numNodes": 2}, [{"name": "node"}], None),
        ({"numNodes": 2}, None, None),
    ],
)
def test_gpus_are_those_of_the_spec_or_of_the_pods(trainer: Any, containers: Any, gpus: float | None) -> None:
    pods = [pod(spec={"containers": containers})] if containers else []
    assert gpus_of(Evidence({"spec": {"trainer": trainer}}, pods)) == gpus


def test_cost_is_the_price_of_all_gpu_hours() -> None:
    found = running(end=3610)
    assert found.as_dict()["cost"] is None
    values = found.as_dict(price=2.5)
    assert values["cost"]["training"] == pytest.approx(GPUS * 2.5)
    assert values["gpu_hours"]["training"] == pytest.approx(GPUS)
    times = {"start": "2026-01-31T12:00:00.000Z", "end": "2026-01-31T12:00:10.000Z"}
    assert values["segments"][0] == {"activity": "starting", "attempt": 1, "source": "pods", "gpus": GPUS, **times}


def test_totals_name_the_works_whose_gpus_are_unknown() -> None:
    known, other = running(end=110), attempt(1, 0, 50)
    without = {**(other.evidence.trainjob or {}), "spec": {}}
    seconds, hours, unknown = total([known, measure([Attempt(Evidence(without))], at(BEGIN + 50))])
    assert (seconds[Activity.TRAINING], unknown) == (150, 1)
    assert hours[Activity.TRAINING] == pytest.approx(GPUS * 100 / 3600)
    assert sums(seconds, None)["goodput"] == pytest.approx(150 / 160)


def test_attempts_are_grouped_until_one_is_complete() -> None:
    jobs = [attempt(n, 100 * n, 100 * n + 50, done=n in (2, 3)).evidence for n in (4, 2, 1, 3)]
    alone = attempt(1, 1000, None).evidence
    metadata = {**(alone.trainjob or {})["metadata"], "annotations": {}, "name": "by-hand"}
    alone = replace(alone, trainjob={**(alone.trainjob or {}), "metadata": metadata})
    found = [
        [str((job.trainjob or {})["metadata"]["name"]) for job in piece]
        for piece in pieces_of_work([*jobs, alone, Evidence(None)])
    ]
    assert found == [["by-hand"], ["train-4"], ["train-3"], ["train-1", "train-2"]]


def restarted_soon(resumed: int, *, message: bool) -> Goodput:
    """Step 30 ends at 40 s, a restart lasts 4 s, and the steps continue after `resumed`, one a second, until step 60.

    A waiter has seen the phases and the first run, and with `message` only its pods tell the second one.
    """
    end = 44 + 60 - resumed
    first = [(step, BEGIN + 10 + step, "loss") for step in range(1, 31)]
    second = [(step, BEGIN + 44 + step - resumed, "loss") for step in range(resumed + 1, 61)]
    seen = first if message else [*first, *second]
    phases = [(10, Phase.RUNNING), (40, Phase.RESTARTING), (44, Phase.RUNNING), (end, Phase.COMPLETE)]
    runs = [Run(BEGIN + 10, BEGIN + 40, failed=True, replaced=True), Run(BEGIN + 44, BEGIN + end, reports=second)]
    job = trainjob(BEGIN, ended=BEGIN + end)
    attempt = Attempt(
        Evidence(job, pods_of(runs, 0.0, random.Random(0))[:1] if message else []),
        [(BEGIN, Phase.STARTING), *((BEGIN + time, phase) for time, phase in phases)],
        {"loss": [(step, time, 1.0) for step, time, _ in seen]},
    )
    return check_sums(measure([attempt], at(BEGIN + end)))


@pytest.mark.parametrize("message", [False, True])
@pytest.mark.parametrize("resumed", [30, 20])
def test_runs_on_both_sides_of_a_short_restart_are_kept_apart(resumed: int, message: bool) -> None:
    """A waiter sees reports late, but not those of the next run, nor those before a restart that it saw."""
    assert restarted_soon(resumed, message=message).seconds[Activity.REPEATED] == pytest.approx(30 - resumed, abs=0.5)


def seen(points: Iterable[tuple[int, float]], *phases: tuple[float, Phase]) -> Goodput:
    """What a waiter saw of a complete job: steps and phases, each with its time; the 5th step was a checkpoint."""
    end, _ = phases[-1]
    history = {"loss": [(step, BEGIN + time, 1.0) for step, time in points], CHECKPOINT: [(5, BEGIN + 15, 5.0)]}
    job = trainjob(BEGIN, ended=BEGIN + end)
    observed = [(BEGIN + time, phase) for time, phase in [(0, Phase.STARTING), (10, Phase.RUNNING), *phases]]
    return check_sums(measure([Attempt(Evidence(job), observed, history)], at(BEGIN + end)))


THIRTY = [(step, 10 + step) for step in range(1, 31)]  # one a second, from 10 s on


def test_a_report_before_a_waiter_sees_its_run_is_of_that_run() -> None:
    """Ranks end 8 seconds after step 30; those of the next run report step 21 before the waiter sees Running."""
    points = [*THIRTY, *((step, 31 + step) for step in range(21, 61))]
    found = seen(points, (48, Phase.RESTARTING), (52.5, Phase.RUNNING), (91, Phase.COMPLETE))
    assert found.seconds[Activity.REPEATED] == pytest.approx(9, abs=1)
    assert found.seconds[Activity.TRAINING] == pytest.approx(38 + 30, abs=1)


def test_the_time_until_a_late_last_report_is_not_repeated() -> None:
    """A process repeats 4 of 5 steps, one a second, and reports the first at once, the fourth 9 seconds later."""
    points = [*THIRTY, (26, 45), (29, 54), *((step, 34 + step) for step in range(26, 61))]
    restarts = (40, Phase.RESTARTING), (44, Phase.RUNNING), (54, Phase.RESTARTING), (59, Phase.RUNNING)
    found = seen(points, *restarts, (94, Phase.COMPLETE))
    assert found.seconds[Activity.REPEATED] == pytest.approx(4 + 5, abs=1)
