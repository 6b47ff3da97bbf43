"""``@task.trainjob`` in real task runs."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import DAG, task
from tests.airflow.conftest import Run

from trainjob import InvalidSpec


def test_a_function_runs_as_the_training(run: Run) -> None:
    with DAG("decorated") as dag:

        @task
        def rates() -> list[float]:
            return [0.1, 0.2]

        @task.trainjob(runtime="trainjob-step", env={"SCALE": "{{ dag.dag_id }}"})
        def train(
            rate: float, ds: str, *, logical_date: str | None = None, run_id: str | None = None, **more: float
        ) -> None:
            import os

            from trainjob.progress import report

            own = {"ds": str(ds), "when": str(logical_date), "run_id": str(run_id), "scale": os.environ["SCALE"]}
            report(metrics={"rate": rate * 10, **more}, outputs=own)

        mapped: Any = train
        mapped.expand(rate=rates())
        mapped.override(task_id="one")(0.5, run_id="mine", extra=7)
    ran = run(dag)
    assert ran.state == "success", ran.log[-3000:]
    tasks = ("train[0]", "train[1]", "one")
    assert [ran.xcoms[name]["metrics"]["rate"] for name in tasks] == [1, 2, 5]
    assert ran.xcoms["one"]["metrics"]["extra"] == 7
    assert [ran.xcoms[name]["outputs"]["run_id"] for name in tasks] == [ran.run_id, ran.run_id, "mine"]
    for name in tasks:
        outputs = ran.xcoms[name]["outputs"]
        assert outputs["ds"] == outputs["when"][:10] != "None"
        assert outputs["scale"] == "decorated"


def test_a_value_of_outside_is_given_by_an_argument_of_the_call(airflow_home: object) -> None:
    rate = 0.5

    @task.trainjob(runtime="jax-distributed")
    def train() -> None:
        print(rate)

    with DAG("closure"), pytest.raises(InvalidSpec, match=r"inside the function, or pass it as an argument$"):
        train()


@pytest.mark.parametrize("deferrable", [False, True], ids=["worker", "deferred"])
def test_the_return_value_is_the_xcom(run: Run, deferrable: bool) -> None:
    with DAG("returned") as dag:

        @task.trainjob(runtime="jax-distributed", num_nodes=2, deferrable=deferrable)
        def train(epochs: int) -> dict[str, float]:
            import os

            from trainjob.progress import report

            report(metrics={"loss": 1 / epochs})
            return {"epochs": epochs, "rank": int(os.environ["JAX_PROCESS_ID"])}

        @task
        def show(value: dict[str, float], epochs: int, result: dict[str, Any]) -> list[Any]:
            return [value, epochs, result["metrics"], result["attempt"]]

        trained: Any = train(4)
        show(trained, trained["epochs"], trained["result"])
    ran = run(dag)
    assert ran.state == "success", ran.errors
    value = {"epochs": 4, "rank": 0}
    assert ran.xcoms == {"train": value, "show": [value, 4, {"loss": 0.25}, 1]}


def test_without_a_return_value_both_xcoms_are_the_result(run: Run) -> None:
    with DAG("nothing-returned") as dag:

        @task.trainjob(runtime="trainjob-step")
        def train() -> None:
            pass

        @task
        def show(one: dict[str, Any], other: dict[str, Any]) -> bool:
            return one == other and one["attempt"] == 1

        trained: Any = train()
        show(trained, trained["result"])
    assert run(dag).xcoms["show"] is True
