"""The limits in docs/how-to/airflow-pools.md are those of the installed Airflow."""

from __future__ import annotations

from pathlib import Path

import pytest
from airflow.configuration import conf
from airflow.models.pool import Pool
from airflow.utils.state import TaskInstanceState
from tests.airflow.versions import since

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "airflow-pools.md"


@pytest.mark.parametrize(
    ("section", "option"),
    [
        ("core", "default_pool_task_slot_count"),
        ("core", "max_active_tasks_per_dag"),
        ("core", "parallelism"),
        ("triggerer", "capacity"),
    ],
)
def test_the_defaults_that_the_page_names(airflow_home: Path, section: str, option: str) -> None:
    row = next(line for line in PAGE.read_text().splitlines() if f"`[{section}] {option}`" in line)
    default = conf.get_default_value(section, option)  # type: ignore[no-untyped-call, unused-ignore]  # Airflow has no types here
    assert f" {default} " in row


def test_a_pool_counts_deferred_tasks_only_with_include_deferred(airflow_home: Path) -> None:
    for include in (False, True):
        pool = Pool(pool="gpu", slots=4, include_deferred=include)
        states = pool.get_occupied_states()  # type: ignore[no-untyped-call, unused-ignore]  # Airflow has no types here
        assert TaskInstanceState.RUNNING in states
        assert (TaskInstanceState.DEFERRED in states) is include
        assert TaskInstanceState.SCHEDULED not in states, "a task that resumes needs a slot again"
    (default,) = [pool for pool in Pool.get_pools() if pool.pool == "default_pool"]
    assert not default.include_deferred


@since("3.2.2", "limits of a task that count deferred tries")
def test_limits_of_a_task_count_deferred_tries(airflow_home: Path) -> None:
    from airflow.ti_deps.dependencies_states import ACTIVE_STATES

    assert TaskInstanceState.DEFERRED in ACTIVE_STATES
