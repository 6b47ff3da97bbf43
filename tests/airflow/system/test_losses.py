"""Jobs survive the loss of workers, triggerers and other parts of Airflow; on the local backend."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import httpx
import pytest
from tests.airflow.system.airflow import Airflow
from tests.airflow.system.training import Training
from tests.airflow.versions import older_than
from tests.processes import wait_until

DAGS = {
    "drained": "worker_cancel",
    "killed": "worker_cancel",
    "unseen": "worker_cancel",
    "unseen by a trigger": "deferred_cancel",
    "ends elsewhere": "deferred_cancel",
    # These two run through all tests of this module.
    "in a worker": "worker_cancel",
    "deferred": "deferred_cancel",
}
if older_than("3.1"):  # a task that keeps its worker prevents others from starting, see conftest.py
    DAGS = {fate: DAGS[fate] for fate in ("drained", "unseen by a trigger", "ends elsewhere", "deferred")}

Runs = dict[str, Training]


@pytest.fixture(scope="module")
def runs(begin: Callable[..., list[Training]]) -> Runs:
    """All trainings, started at once."""
    return dict(zip(DAGS, begin(*DAGS.values()), strict=True))


def assert_still_runs(*trainings: Training) -> None:
    """The training still has only one job, which runs."""
    for it in trainings:
        (phase,) = it.phases.values()
        assert phase == "Running", it.namespace


def finish(*trainings: Training) -> None:
    for it in trainings:
        (name,) = it.jobs
        it.finish()
        assert it.phases == {name: "Complete"}, "nothing was trained twice"
        assert it.delivered == name


def test_a_worker_is_drained(runs: Runs) -> None:
    drained = runs["drained"]
    supervisor, task = drained.processes()
    # Old supervisors do not forward the signal; the end of a container may send it to all processes.
    (task if older_than("3.2") else supervisor).send_signal(signal.SIGTERM)
    drained.until_logged("the worker is terminating", 1)
    drained.until_up(2)
    assert_still_runs(drained)
    finish(drained)


def test_workers_are_killed(runs: Runs) -> None:
    killed, unseen = runs["killed"], runs["unseen"]
    for it in (killed, unseen):
        for process in it.processes():
            process.kill()
    unseen.flag.touch()
    wait_until("its job ends", lambda: list(unseen.phases.values()) == ["Complete"], 60)
    assert unseen.state == "running", "Airflow does not know yet"
    for it in (killed, unseen):
        it.airflow.age("task_instance", "last_heartbeat_at", id=it.task["id"])
    killed.until_up(2)
    assert_still_runs(killed)
    finish(killed, unseen)


def until_moved(it: Training, triggerer: object) -> None:
    """Wait until another triggerer runs the trigger."""

    def moved() -> bool:
        return it.triggerer not in (None, triggerer)

    wait_until("another has the trigger", moved, 240, poll=0.5, ignore=httpx.HTTPError)


def test_a_triggerer_is_restarted(runs: Runs, airflow: Airflow) -> None:
    first = runs["deferred"].triggerer
    airflow.restart("triggerer", signal.SIGTERM, alone=True)
    until_moved(runs["deferred"], first)
    assert_still_runs(runs["deferred"], runs["ends elsewhere"], runs["unseen by a trigger"])


def test_a_triggerer_is_killed(runs: Runs, airflow: Airflow) -> None:
    first, unseen = runs["deferred"].triggerer, runs["unseen by a trigger"]
    airflow.parts["triggerer"].kill()
    unseen.flag.touch()
    wait_until("its job ends", lambda: list(unseen.phases.values()) == ["Complete"], 60)
    airflow.age("job", "latest_heartbeat", id=first)
    airflow.parts["triggerer"].start()
    until_moved(runs["deferred"], first)
    finish(unseen)
    assert_still_runs(runs["deferred"], runs["ends elsewhere"])


def test_two_triggerers_run_one_trigger(runs: Runs, airflow: Airflow) -> None:
    """One hangs, counts as lost, and wakes up again when the other one runs its triggers."""
    waits, ends = runs["deferred"], runs["ends elsewhere"]
    first, hangs = waits.triggerer, airflow.parts["triggerer"]
    second = airflow.program("another-triggerer", "triggerer")
    assert hangs.pid is not None
    os.killpg(hangs.pid, signal.SIGSTOP)
    airflow.age("job", "latest_heartbeat", id=first)
    try:
        second.start()
        taken = lambda: {waits.triggerer, ends.triggerer}.isdisjoint({None, first})  # noqa: E731
        wait_until("another has the triggers", taken, 240, poll=0.5, ignore=httpx.HTTPError)
        finish(ends)
        os.killpg(hangs.pid, signal.SIGCONT)
        waits.until_logged("keeps running: its task still waits for it")
        assert_still_runs(waits)
        assert ends.state == "success"
    finally:
        os.killpg(hangs.pid, signal.SIGCONT)
        second.kill()


def test_a_scheduler_is_lost(runs: Runs, airflow: Airflow) -> None:
    """Its workers keep running; the next scheduler does not know them, restarts their tasks and ends the old ones."""
    task = runs["in a worker"].task["id"]
    airflow.end("scheduler", alone=True)
    airflow.age("job", "latest_heartbeat", job_type="SchedulerJob", state="running")
    airflow.parts["scheduler"].start()
    wait_until(
        "there is another try", lambda: runs["in a worker"].task["id"] != task, 240, poll=0.5, ignore=httpx.HTTPError
    )
    runs["in a worker"].until_logged("the worker is terminating", 1)
    runs["in a worker"].until_up()
    assert_still_runs(runs["in a worker"], runs["deferred"])


def test_parts_of_airflow_are_restarted(runs: Runs, airflow: Airflow) -> None:
    for part in ("scheduler", "api-server", "database"):
        if (database := airflow.database) is not None and part == "database":
            database.server.kill(signal.SIGINT)
            database.start()
        else:
            airflow.restart(part, signal.SIGTERM)
        airflow.until_healthy()
        assert_still_runs(runs["in a worker"], runs["deferred"])
    finish(runs["in a worker"], runs["deferred"])
