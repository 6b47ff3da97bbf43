"""A mapped task has the index of its item as identity; its checkpoints belong to the item."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from airflow.sdk import DAG, task
from tests.airflow.conftest import LONG_AGO, publish

from trainjob import JobRef, TrainJobClient
from trainjob_airflow.operators.trainjob import TrainJobOperator

TRAINING = """
mkdir -p "$TRAINJOB_CHECKPOINT" && cd "$TRAINJOB_CHECKPOINT"
echo "$REGION begins with $(cat weights 2>/dev/null || echo nothing)"
echo "weights of $REGION" > weights
[ "$REGION" != north ] || [ -e "$DONE" ]
"""


@pytest.mark.full
@pytest.mark.usefixtures("airflow_home")
def test_an_index_that_names_another_item_begins_anew(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run over [north, south] fails; then its list is [east, north, south], and all its tasks run again."""
    from airflow.models.dagrun import DagRun

    regions, done = tmp_path / "regions.json", tmp_path / "done"

    with DAG("mapped-checkpoints") as dag:

        @task
        def items() -> list[dict[str, str]]:
            return [{"REGION": region, "DONE": str(done)} for region in json.loads(regions.read_text())]

        TrainJobOperator.partial(
            task_id="train",
            runtime="trainjob-step",
            command=["sh", "-c", TRAINING],
            checkpoints=(tmp_path / "checkpoints").as_uri(),
        ).expand(env=items())

    def ran(*names: str) -> tuple[str, list[str]]:
        """Run all tasks, in the same run as after a clear; its state, and the log by map index and attempt."""
        regions.write_text(json.dumps(names))
        publish(dag)
        state = str(dag.test(logical_date=LONG_AGO).state)
        with TrainJobClient("local") as client:
            jobs = sorted(
                client.list(), key=lambda job: (job["metadata"]["labels"]["map_index"], JobRef.of(job).attempt)
            )
            return state, [line.text for job in jobs for line in client.logs(JobRef.of(job))]

    monkeypatch.setattr(DagRun, "generate_run_id", lambda **_: "manual__1")
    assert ran("north", "south") == ("failed", ["north begins with nothing", "south begins with nothing"])
    done.touch()
    state, lines = ran("east", "north", "south")
    assert state == "success"
    assert lines == [
        *("north begins with nothing", "east begins with nothing"),
        *("south begins with nothing", "north begins with nothing"),
        "south begins with nothing",
    ]
    state, lines = ran("north", "south", "east")
    assert state == "success"
    assert lines[2] == "north begins with weights of north", "half of its training is still there"
