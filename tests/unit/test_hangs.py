"""Which rank hangs: from markers and stacks of the ranks' logs. Never a wrong rank with confidence."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tests import objects

from trainjob._diagnosis import diagnosis_of
from trainjob._diagnosis.cluster import Termination
from trainjob._diagnosis.evidence import Evidence
from trainjob._diagnosis.hangs import hang_of, judge
from trainjob._diagnosis.markers import Frame, Marker, marker_of
from trainjob._diagnosis.ranks import Rank, ranks_in, with_pod
from trainjob._diagnosis.serialization import pack_diagnosis, unpack_diagnosis
from trainjob.errors import Category, RetryVerdict

TORCH = "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py"


def stack(*frames: tuple[str, str]) -> tuple[Frame, ...]:
    return tuple(Frame(file, "1", function) for file, function in frames)


IN_TRAIN = ("/app/train.py", "train")
WAITING = stack((TORCH, "_wait"), (TORCH, "all_reduce"), ("/x/torch/distributed/c10d_logger.py", "wrapper"), IN_TRAIN)
IN_BARRIER = stack((TORCH, "barrier"), IN_TRAIN)
LOADING = stack(("/app/data.py", "load"), IN_TRAIN)
LOCKED = stack(("/usr/lib/python3.11/threading.py", "wait"), ("/app/data.py", "take"), IN_TRAIN)
IN_BACKWARD = stack(
    ("/x/torch/autograd/graph.py", "_engine_run_backward"), ("/x/torch/_tensor.py", "backward"), IN_TRAIN
)
ON_DEVICE = stack(("/x/torch/cuda/__init__.py", "synchronize"), IN_TRAIN)
IN_JAX = stack(
    ("/x/jax/_src/array.py", "_value"), ("/x/jax/experimental/multihost_utils.py", "sync_global_devices"), IN_TRAIN
)
COMPUTING = stack(("/x/torch/nn/functional.py", "linear"), ("/x/torch/distributed/fsdp/api.py", "forward"), IN_TRAIN)


def rank(which: int, world: int = 4, **more: Any) -> Rank:
    known = {"count": 10, "step": ("step", 10), "stalled": True, "stack": WAITING}
    code = more.pop("exit_code", None)
    ends = Termination(f"node-{which}", f"x-{which}", exit_code=code)
    of_pod = {name: more.pop(name) for name in ("lost", "shared") if name in more}
    return Rank((f"node-{which}", which), Marker(world, **{**known, **more}), ends, **of_pod)


def job(culprit: dict[str, Any], world: int = 4, number: int = 2) -> list[Rank]:
    return [rank(each, world, **(culprit if each == number else {})) for each in range(world)]


def number(state: Rank | None) -> int | None:
    return None if state is None else state.process[1]


# ---------------------------------------------------------------- verdicts


SILENT: dict[str, Any] = {"stalled": False, "stack": ()}
KINDS: dict[str, tuple[dict[str, Any], RetryVerdict, str]] = {
    "silent": (SILENT, RetryVerdict.INFRASTRUCTURE, "does not respond any more"),
    "ended": ({**SILENT, "ended": True}, RetryVerdict.UNKNOWN, "ended"),
    "ended early": ({**SILENT, "ended": True, "step": ("step", 9)}, RetryVerdict.UNKNOWN, "ended"),
    "loop": ({"stack": LOADING}, RetryVerdict.UNKNOWN, "is in load() (data.py, line 1)"),
    "loop, behind": ({"stack": LOADING, "step": ("step", 8)}, RetryVerdict.UNKNOWN, "at step 8"),
    "lock": ({"stack": LOCKED}, RetryVerdict.UNKNOWN, "is in take() (data.py, line 1)"),
    "computing": ({"stack": COMPUTING}, RetryVerdict.UNKNOWN, "is in linear()"),
    "behind": ({"step": ("step", 7)}, RetryVerdict.UNKNOWN, "at step 10 or later"),
    "behind, without a stack": ({"stack": (), "step": ("step", 9)}, RetryVerdict.UNKNOWN, "is at step 9"),
}


@pytest.mark.parametrize("world", [2, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rank_that_keeps_the_others_waiting_is_named(world: int, kind: str) -> None:
    culprit, retry, words = KINDS[kind]
    found = judge(job(culprit, world, number=1), world)
    assert (number(found.culprit), found.meaning.retry) == (1, retry)
    assert words in found.summary
    assert number(found.waiting) != 1
    assert found.waiting is not None
    assert found.waiting.waits_in == "all_reduce"


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([], id="nothing is known"),
        pytest.param([rank(0, stack=LOADING)], id="only rank 0 counts steps"),
        pytest.param([rank(0, stack=LOADING), rank(1, count=0, step=None)], id="rank 1 does not count"),
        pytest.param(job({"stack": LOADING})[:3], id="a rank is unknown"),
        pytest.param([rank(0), rank(1), rank(2, stack=LOADING), rank(3, stack=LOADING)], id="two ranks are elsewhere"),
        pytest.param([rank(0), rank(1), rank(2, stack=LOADING), rank(3, stack=())], id="a stack is unknown"),
        pytest.param([rank(0), rank(1), rank(2, stack=LOADING), rank(3, stack=ON_DEVICE)], id="a device is waited for"),
        pytest.param([rank(0), rank(1), rank(2, stack=LOADING), rank(3, step=("step", 9))], id="contradictory"),
        pytest.param([rank(each, step=("step", 10 + each % 2)) for each in range(4)], id="ranks that finish in turn"),
        pytest.param([rank(each, stack=LOADING) for each in range(4)], id="all ranks at the same place"),
        pytest.param([rank(each, stalled=False) for each in range(4)], id="all ranks are silent"),
        pytest.param(
            [rank(0, step=("steps", 3)), *(rank(each, stack=()) for each in (1, 2, 3))], id="steps of two kinds"
        ),
        pytest.param(
            [rank(0, 2, ended=True, stalled=False), rank(1, 2, stack=ON_DEVICE)], id="one ended, and one is unknown"
        ),
    ],
)
def test_no_rank_is_named_without_evidence_against_it_alone(ranks: list[Rank]) -> None:
    assert judge(ranks, 4).culprit is None


IN_OWN_BARRIER = stack(("/app/train.py", "barrier"), IN_TRAIN)


def test_a_rank_that_ended_is_named_where_the_others_wait_in_a_barrier_of_their_own() -> None:
    waits = [rank(each, stack=IN_OWN_BARRIER) for each in (0, 2, 3)]
    found = judge([*waits, rank(1, stalled=False, stack=(), exit_code=0)], 4)
    assert (number(found.culprit), found.summary) == (
        1,
        "node-1 ended with code 0 at step 10 or later, while 3 ranks wait in barrier() (train.py, line 1)",
    )
    complete = rank(1, stalled=False, stack=(), exit_code=0, step=("step", 100))
    assert judge([*waits, complete], 4).culprit is None, "it has made all of its steps"


NATIVE = (
    "0x7fdb8ac98e51 (libc.so.6)",
    "0x7fdb8ac9 (libc.so.6)",
    "cuEventSynchronize (libcuda.so)",
    "T" * 900,
    "f (a.py:1)",
)


def test_native_stacks_begin_with_named_frames_and_frames_are_short() -> None:
    log = hang_of(judge([rank(0, 1, native=NATIVE)], 1), 5.0, "ns/x").log
    assert "cuEventSynchronize" in log[1]
    assert max(map(len, log)) < 220


@pytest.mark.parametrize(
    ("frames", "waits"),
    [
        (WAITING, "all_reduce"),
        (IN_BACKWARD, "backward"),
        (IN_JAX, "sync_global_devices"),
        (LOADING, ""),
        (LOCKED, ""),
        (COMPUTING, ""),
        (ON_DEVICE, None),
        ((), None),
    ],
)
def test_a_stack_shows_whether_a_rank_waits_for_others(frames: tuple[Frame, ...], waits: str | None) -> None:
    assert rank(0, stack=frames).waits_in == waits


@given(
    kind=st.sampled_from(sorted(KINDS)),
    world=st.integers(2, 40),
    at=st.integers(0, 39),
    seed=st.integers(0, 10**6),
    lost=st.floats(0, 1),
)
@settings(max_examples=200)
def test_a_culprit_is_right_or_not_named_whatever_evidence_is_lost(
    kind: str, world: int, at: int, seed: int, lost: float
) -> None:
    """Markers or stacks of the other ranks are lost at random, and they come in any order."""
    at, chance = at % world, random.Random(seed)
    ranks = []
    for state in job(KINDS[kind][0], world, at):
        if number(state) != at and chance.random() < lost:
            if chance.random() < 0.5:
                continue
            ranks.append(replace(state, marker=replace(state.marker, stack=())))
        else:
            ranks.append(state)
    chance.shuffle(ranks)
    found = judge(ranks, world)
    assert number(found.culprit) in (at, None)
    assert number(judge(job(KINDS[kind][0], world, at), world).culprit) == at, "with all evidence, it is named"


# ---------------------------------------------------------------- logs


def line(number: int, **content: Any) -> str:
    return f"trainjob.rank {json.dumps({'rank': number, **content})}"


def stack_lines(number: int, *threads: Sequence[str]) -> list[str]:
    frames = [
        text
        for i, functions in enumerate(threads)
        for text in (
            f"{'Main thread' if i == 0 else f'Thread 0x{i}'} (most recent call first):",
            *(f'  File "/app/{name}.py", line 7 in {name}' for name in functions),
        )
    ]
    return [f"trainjob.stack {number}| {text}" for text in frames]


LOG = [
    line(3, time=1.5),
    "loading",
    line(3, world=4, count=2, step=40, step_seconds=0.1, time=2.5),
    line(3, world=4, count=9, step=47, stalled_seconds=9.5, time=12.5),
    *stack_lines(3, ["inner", "outer"], ["worker"]),
]


def test_the_main_thread_of_the_latest_stall_is_read() -> None:
    (state,) = ranks_in("node-3", LOG).values()
    assert (state.process, state.marker.world, state.marker.count, state.marker.step) == (
        ("node-3", 3),
        4,
        9,
        ("step", 47),
    )
    assert state.stalled
    assert [frame.function for frame in state.marker.stack] == ["inner", "outer"]
    (state,) = ranks_in("node-3", [*LOG, line(3, count=10, step=48)]).values()
    assert (state.stalled, state.marker.stack) == (False, ()), "it makes steps again"


def test_counters_that_go_backwards_after_a_restart_are_taken_as_they_are() -> None:
    (state,) = ranks_in("node-3", [*LOG, line(3, time=99)]).values()
    assert (state.marker.count, state.marker.step, state.stalled) == (0, None, False)


def test_processes_of_one_pod_are_kept_apart() -> None:
    """Lines of torchrun's workers are mixed, and may have a prefix."""
    mixed = [line(0, count=1, stalled_seconds=3), line(1, count=1, stalled_seconds=3)]
    for first, second in zip(stack_lines(0, ["a", "b"]), stack_lines(1, ["c", "d"]), strict=True):
        mixed += [f"[default0]:{first}", f"[default1]:{second}"]
    states = ranks_in("node-0", mixed)
    assert {name: [frame.function for frame in state.marker.stack] for name, state in states.items()} == {
        ("node-0", 0): ["a", "b"],
        ("node-0", 1): ["c", "d"],
    }
    gone = replace(states["node-0", 0], marker=replace(states["node-0", 0].marker, ended=True, stack=()))
    assert "rank 0 (node-0) ended" in judge([gone, rank(1, 2)]).summary


def test_a_rank_that_reports_for_another_is_another_process() -> None:
    states = ranks_in("node-0", [line(0, count=5)]) | ranks_in("node-1", [line(0, count=5, stalled_seconds=9)])
    found = judge([*states.values()], 2)
    assert found.culprit is not None
    assert found.culprit.process == ("node-0", 0)
    assert "node-0 does not respond" in found.summary


@pytest.mark.parametrize(
    ("text", "marker"),
    [
        (f"45%|####      | 3/7 {line(1, count=3)}", {"rank": 1, "count": 3}),  # after a progress bar
        *((f"trainjob.rank{text}", None) for text in ("", " {", " {}", " []")),
        *((f'trainjob.rank {{"rank": {value}}}', None) for value in ('"0"', "-1", "true")),
        ("the trainjob.rank of this run", None),
    ],
)
def test_which_lines_are_markers(text: str, marker: dict[str, Any] | None) -> None:
    assert marker_of(text) == marker


@given(
    cut=st.integers(0, 400),
    noise=st.lists(st.tuples(st.integers(0, 20), st.text(max_size=60)), max_size=10),
    wrong=st.dictionaries(
        st.sampled_from(["world", "count", "step", "steps", "ended"]), st.none() | st.text() | st.floats()
    ),
)
@settings(max_examples=50)
def test_any_log_can_be_read(cut: int, noise: list[tuple[int, str]], wrong: dict[str, Any]) -> None:
    lines = [*LOG, line(3, **wrong)]
    for place, text in noise:
        lines.insert(place, text)
    text = "\n".join(lines)
    for part in (text[cut:], text[:-cut] if cut else text):
        states = ranks_in("node-3", part.split("\n"))
        assert all(name[0] == "node-3" for name in states)
        judge([*states.values()], 1)


def test_a_thousand_ranks_are_named_in_one_short_line() -> None:
    silent = [rank(each, 1000, **SILENT) for each in range(990)]
    diagnosis = hang_of(judge([*silent, *(rank(each, 1000) for each in range(990, 1000))]), 900, "ns/x")
    assert "node-0, node-1, node-2 and 987 more do not respond any more" in diagnosis.summary
    assert len(diagnosis.summary) < 400


# ---------------------------------------------------------------- pods and the diagnosis


@pytest.mark.parametrize("in_barrier", [0, 1])
def test_of_two_ranks_in_different_collectives_none_is_named(in_barrier: int) -> None:
    found = judge(job({"stack": IN_BARRIER}, 2, in_barrier))
    first, second = [("barrier", "all_reduce"), ("all_reduce", "barrier")][in_barrier]
    assert (found.culprit, found.meaning.retry) == (None, RetryVerdict.UNKNOWN)
    waits = f"node-0 waits in {first}, and node-1 waits in {second}"
    assert found.summary == f"mismatched collectives: {waits}; it is unknown which rank is wrong"


UNREADY = objects.pod(2, node="gpu-7", conditions=[objects.condition("Ready", value="False")])
LOST = [with_pod(each, UNREADY) if number(each) == 2 else each for each in job(SILENT)]
FINISHED = with_pod(rank(2), objects.pod(2, objects.ended(0)))
LOOPS = [*(rank(each, ended=True, stalled=False) for each in range(3)), rank(3, stack=LOADING, step=("step", 9))]


@pytest.mark.parametrize(
    ("ranks", "culprit", "retry", "summary"),
    [
        (job({"stack": IN_BARRIER}), 2, RetryVerdict.UNKNOWN,
         "mismatched collectives: node-2 waits in barrier, and node-0, node-1 and node-3 wait in all_reduce"),
        ([rank(each) for each in range(4)], None, RetryVerdict.INFRASTRUCTURE,
         "4 ranks wait in all_reduce, and it is unknown for which rank"),
        ([rank(0, 1, stack=LOADING)], 0, RetryVerdict.UNKNOWN,
         "node-0 makes no step in load() (data.py, line 1) at step 10"),
        (job(SILENT | {"count": 0, "step": None}), 2, RetryVerdict.INFRASTRUCTURE,
         "node-2 does not respond any more, while 3 ranks reported that they wait"),
        (LOST, 2, RetryVerdict.INFRASTRUCTURE,
         "node-2 does not respond any more at step 10 or later: its pod on gpu-7 is not ready, while 3 ranks reported "
         "that they wait"),
        ([rank(0), rank(1), FINISHED, rank(3)], 2, RetryVerdict.UNKNOWN,
         "node-2 ended with code 0 at step 10 or later, while 3 ranks wait in all_reduce"),
        (LOOPS, None, RetryVerdict.UNKNOWN, "it is unknown which rank hangs"),
    ],
    ids=[
        *("another collective", "the network", "a single rank"),
        *("silent before its first step", "silent on a lost node", "ended", "loops after the others have ended"),
    ],
)  # fmt: skip
def test_the_cause_of_a_hang(ranks: list[Rank], culprit: int | None, retry: RetryVerdict, summary: str) -> None:
    found = judge(ranks)
    assert (number(found.culprit), found.meaning.retry, found.summary) == (culprit, retry, summary)
    assert (found.waiting is None) is (len(ranks) == 1)
    assert ("check the network" in found.meaning.advice) is (summary.startswith("4 ranks"))


def test_the_diagnosis_shows_the_stack_of_the_culprit_and_of_one_that_waits() -> None:
    diagnosis = hang_of(judge(job({"stack": LOADING * 20})), 900, "ns/x")
    assert (diagnosis.category, diagnosis.rank) == (Category.HANG, "node-2")
    assert diagnosis.summary.startswith("no rank has made progress for 15m00s: node-2 is in load() (data.py, line 1)")
    text = diagnosis.text()
    assert "stack of node-2 (the rank that hangs), innermost frame first:" in text
    assert "stack of node-0 (waits), innermost frame first:" in text
    assert "last lines of" not in text
    assert unpack_diagnosis(pack_diagnosis(diagnosis)) == diagnosis, "it fits into an annotation"


def test_other_diagnoses_do_not_show_the_lines_of_a_watchdog() -> None:
    ended = objects.pod(0, objects.ended(1))
    evidence = Evidence(objects.trainjob(objects.FAILED), [ended], {ended["metadata"]["name"]: ["no data", *LOG]})
    diagnosis = diagnosis_of(evidence)
    assert "last log line: loading" in diagnosis.summary
    assert diagnosis.log == ("no data", "loading")
