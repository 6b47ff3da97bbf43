"""Jobs whose task is ended by a person or a timeout, in a worker and deferred; on the local backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest
from tests.airflow.system.training import MODES, Training
from tests.airflow.versions import older_than
from tests.processes import wait_until

from trainjob.job import DELIVERED

FATES = {"failed": "cancel", "suspended": "suspend", "kept": "keep", "cleared": "cancel", "again": "cancel"}
"""Fate -> kind of DAG."""
if older_than("3.1"):  # a task that keeps its worker prevents others from starting, see conftest.py
    FATES = {"failed": "cancel"}

Both = dict[str, list[Training]]
"""Fate -> a training with a waiting worker, and a deferred one."""


@pytest.fixture(scope="module")
def runs(begin: Callable[..., list[Training]]) -> Both:
    """All trainings, started at once."""
    begun = iter(begin(*(f"{mode}_{kind}" for kind in FATES.values() for mode in MODES)))
    return {fate: [next(begun), next(begun)] for fate in FATES}


def test_marked_by_a_person(runs: Both) -> None:
    for it in runs["failed"]:
        it.mark("failed")
    wait_until("the jobs are gone", lambda: not any(it.jobs for it in runs["failed"]), 60)
    runs["failed"][0].until_logged("goodput ")
    assert [it.state for it in runs["failed"]] == ["failed", "failed"]


def is_suspended(it: Training) -> bool:
    return set(it.phases.values()) == {"Suspended"}


def is_acknowledged(it: Training) -> bool:
    with it.client() as client:
        return all(DELIVERED in job["metadata"]["annotations"] for job in client.list())


def keep(runs: Both) -> None:
    both = [*runs["suspended"], *runs["kept"]]
    names = [it.jobs for it in both]
    for it in both:
        it.mark("failed")
    for it in runs["suspended"]:
        it.until_logged("the task was killed")
        wait_until("it is suspended", partial(is_suspended, it), 60)
    for it in runs["kept"]:
        it.until_logged("keeps running (on_kill_action='keep')")
        assert set(it.phases.values()) == {"Running"}
    for it in both:
        it.clear()
    for it in both:
        it.until_up(2)
        assert set(it.phases.values()) == {"Running"}
    for it in both:
        it.finish()
        assert set(it.phases.values()) == {"Complete"}
    assert [it.jobs for it in both] == names, "the next try adopts the job"


def clear_while_it_runs(runs: Both) -> None:
    first = [it.jobs for it in runs["cleared"]]
    for it in runs["cleared"]:
        it.clear()
    for it, names in zip(runs["cleared"], first, strict=True):
        wait_until("there is another job", lambda it=it, names=names: it.jobs and it.jobs != names, 90)  # type: ignore[misc]
        assert len(it.jobs) == 1
    for it in runs["cleared"]:
        it.finish()
        assert list(it.phases.values()) == ["Complete"]


def clear_after_success(runs: Both) -> None:
    for it in runs["again"]:
        it.flag.touch()
    for it in runs["again"]:
        it.finish()
    first = [it.delivered for it in runs["again"]]
    for it in runs["again"]:  # a clear before that returns the same result again
        wait_until("its job is marked as delivered", partial(is_acknowledged, it), 60)
        it.clear()
    for it, name in zip(runs["again"], first, strict=True):
        wait_until("it trains again", lambda it=it: len(it.jobs) == 2, 90)  # type: ignore[misc]
        it.finish()
        assert list(it.phases.values()) == ["Complete", "Complete"]
        assert {name, it.delivered} == set(it.jobs)


ACTIONS = {"kept": keep, "cleared": clear_while_it_runs, "again": clear_after_success}


@pytest.fixture(scope="module")
def done(runs: Both) -> Iterator[dict[str, Future[None]]]:
    """Actions of people after the first test, all at once, since they mostly wait."""
    with ThreadPoolExecutor(len(ACTIONS)) as threads:
        yield {fate: threads.submit(act, runs) for fate, act in ACTIONS.items() if fate in FATES}


def test_a_job_that_is_kept(done: dict[str, Future[None]]) -> None:
    done["kept"].result()


def test_cleared_while_it_runs(done: dict[str, Future[None]]) -> None:
    done["cleared"].result()


def test_cleared_after_success(done: dict[str, Future[None]]) -> None:
    done["again"].result()
