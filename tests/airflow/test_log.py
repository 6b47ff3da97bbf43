"""The log of a task: groups that Airflow's UI folds, and what a failing task shows first."""

from __future__ import annotations

import asyncio
import re
import threading
import traceback
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG
from tests.airflow.conftest import Run, python
from tests.airflow.tasks import FAIL_ON_RANK_1, REPORT, both, step
from tests.airflow.versions import older_than

from trainjob import LogLine, Observation, Phase
from trainjob_airflow.operators.trainjob import TrainJobOperator
from trainjob_airflow.tasklog import progress_logger
from trainjob_airflow.triggers.lines import Lines

if TYPE_CHECKING:
    from airflow.sdk import Context

# In Airflow 3.0, ``dag.test()`` writes the lines of operators in a format of its own, and no line of the task runner.
LINE = re.compile(
    r"^\S+Z \[(\w+) *\] (.*?) *\[(?:airflow\.task|task|trainjob_airflow)[\w.]*\] "
    r"|^\[\S+\] \{\w+\.py:\d+\} (\w+) - (.*)$",
    re.MULTILINE,
)


def lines_of(log: str) -> list[tuple[str, str]]:
    """Level and text of the lines of a task."""
    return [(found[1] or found[3].lower(), found[2] or found[4]) for found in LINE.finditer(log)]


def modules_of(error: BaseException) -> list[str]:
    """The modules of the frames of the traceback that Airflow logs."""
    return [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]


def groups_of(log: str) -> dict[str, list[str]]:
    """Groups of the task: title -> lines. Lines outside have the title ``""``."""
    found: dict[str, list[str]] = {"": []}
    title = ""
    for _, line in lines_of(log):
        if line.startswith("::group::"):
            assert not title, f"{line} is inside {title}"
            title = line.removeprefix("::group::")
            found[title] = []
        elif line == "::endgroup::":
            title = ""
        else:
            found[title].append(line)
    assert not title, f"{title} is still open"
    return found


@both
def test_launch_phases_and_result_are_groups(run: Run, deferrable: bool) -> None:
    with DAG("grouped") as dag:
        step(code=f"print('up', flush=True)\n{REPORT}", deferrable=deferrable)
    ran = run(dag)
    assert ran.state == "success"
    groups, result = groups_of(ran.log), ran.xcoms["train"]
    launch = groups[f"TrainJob default/{result['name']} (attempt 1)"]
    assert launch[0] == f"uid: {result['uid']}"
    assert launch[-1] == f"more about it: trainjob diagnose default/{result['name']}"
    (complete,) = [title for title in groups if title.startswith("TrainJob is Complete")]
    assert groups[complete][0].startswith("reason: ")
    assert any(line.startswith("ended: 2") for line in groups[complete])
    summary = groups["Result: loss 0.333333, bad nan, kind x, steps 7, 1 more"]
    assert "loss: 0.333333" in summary
    assert "model: file:///m" in summary
    assert any(line.startswith("total: ") for line in summary)
    assert "[node-0] up" in groups[""], "people watch the lines of the ranks while they are written"


@both
def test_the_first_error_is_why_the_training_failed(run: Run, deferrable: bool) -> None:
    with DAG("fails") as dag:
        step(code=FAIL_ON_RANK_1, runtime="jax-distributed", num_nodes=2, deferrable=deferrable)
    ran = run(dag)
    errors = [text for level, text in lines_of(ran.log) if level == "error"]
    assert errors[0] == "node-1 exited with code 1; last log line: the data is wrong"
    assert older_than("3.1") or errors[-1] == "Task failed with exception"
    assert "failed: node-1" in str(ran.errors["train"]), "callbacks get the name of the job, too"
    assert groups_of(ran.log), "no group is open"
    modules = modules_of(ran.errors["train"])
    assert modules[0] == "airflow.sdk.execution_time.task_runner"
    assert {name.partition(".")[0] for name in modules} == {"airflow"}, "frames of Airflow are kept"
    assert older_than("3.1") or "trainjob_airflow/" not in ran.log


def test_tracebacks_keep_the_frames_of_other_code_and_of_bugs(run: Run) -> None:
    class Careful(TrainJobOperator):
        def execute(self, context: Context) -> object:
            return super().execute(context)

    class Broken(TrainJobOperator):
        def _spec(self, *_: object) -> Any:
            raise KeyError("a bug")

    fields: dict[str, Any] = {"runtime": "trainjob-step", "command": python("raise ValueError('no labels')")}
    with DAG("frames") as dag:
        Careful(task_id="careful", **fields)
        Broken(task_id="broken", **fields)
    modules = {name: modules_of(error) for name, error in run(dag).errors.items()}
    assert __name__ in modules["careful"]
    assert modules["careful"][-1].startswith("airflow.")
    assert "trainjob_airflow.operators.base" in modules["broken"]


def test_a_log_that_nobody_reads_does_not_block_the_triggers() -> None:
    read, written = threading.Event(), list[str]()

    def write(event: str, *args: object) -> None:
        assert read.wait(30)
        written.append(event % args)

    log: Any = SimpleNamespace(info=write, warning=write)

    async def triggers() -> None:
        first, second = Lines(log), Lines(log)
        for number in range(3):
            first.info("%d", number)
            second.info("%d", number)
        second.warning("last")
        for _ in range(100):  # turns of the event loop
            await asyncio.sleep(0)
        assert written == []
        read.set()
        await first.written()
        await second.written()

    asyncio.run(triggers())
    assert sorted(written) == ["0", "0", "1", "1", "2", "2", "last"]
    assert [text for text in written if text in "012"][-1] == "2", "in their order"


def test_a_log_that_fails_does_not_fail_the_trigger() -> None:
    def write(event: str, *_: object) -> None:
        raise BrokenPipeError(event)

    async def trigger() -> None:
        lines = Lines(SimpleNamespace(info=write, warning=write))
        lines.info("one")
        await lines.written()
        lines.warning("two")
        await lines.written()

    asyncio.run(trigger())


def test_a_group_needs_lines_and_a_rank_opens_none() -> None:
    lines: list[str] = []
    log: Any = SimpleNamespace(info=lambda event, *args: lines.append(event % args if args else event))
    log.warning = log.info
    progress = progress_logger(log)
    day = datetime(2026, 11, 26, tzinfo=UTC)
    progress.change(Observation(Phase.STARTING))
    progress.change(Observation(Phase.QUEUED, message="position 2", advice="ask", created=day))
    progress.change(Observation(Phase.QUEUED, message="position 1", advice="ask"))
    progress.change(Observation(Phase.RUNNING, created=day, admitted=day))
    for text in ("::group::mine", "x ::endgroup::", "a::b"):
        progress.line(LogLine("t", "node-0", text))
    assert lines == [
        "TrainJob is Starting",
        "::group::TrainJob is Queued: position 2",
        "what to do: ask",
        "created: 2026-11-26 00:00:00 UTC",
        "::endgroup::",
        "TrainJob is Queued: position 1",
        "TrainJob is Running (admitted: 2026-11-26 00:00:00 UTC)",
        "[node-0] : :group::mine",
        "[node-0] x : :endgroup::",
        "[node-0] a::b",
    ]
