"""Hyperparameter searches in DAGs: real trials on the local backend, a real journal."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, Asset
from tests.airflow.conftest import Run, jobs, python
from tests.airflow.tasks import both, stored
from tests.airflow.triggers import Triggerer, only_event, rebuilt
from tests.airflow.versions import since
from tests.processes import wait_until

from trainjob import connect
from trainjob._jobs.steps import unpack_error
from trainjob.errors import StudyFailed
from trainjob.job import key_hash
from trainjob.tuning.journal import journal_location, open_journal
from trainjob.tuning.trial_jobs import find_trials
from trainjob_airflow.exceptions import TrainJobFatal, TrainJobTimeout
from trainjob_airflow.hooks.trainjob import Target
from trainjob_airflow.operators.data import ModelExportOperator
from trainjob_airflow.operators.tuning import TrainJobTuningOperator
from trainjob_airflow.study import bounded
from trainjob_airflow.triggers.tuning import TrainJobStudyTrigger

TRAIN = """
import os
from trainjob import progress
x = float(os.environ["KUBEFLOW_TRAINER_OPT_X"])
progress.report(step=1, total_steps=1, metrics={"loss": (x - 2) ** 2})
"""
SLEEP = "import time; time.sleep(60)"
STUDY: dict[str, Any] = {
    "space": {"x": {"type": "float", "low": 1, "high": 3, "step": 1}},
    "metric": "loss",
    "direction": "minimize",
    "sampler": {"name": "grid"},
    "max_trials": 3,
    "parallel": 3,
}


def search(code: str = TRAIN, **fields: Any) -> TrainJobTuningOperator:
    given = {"study": STUDY, "runtime": "trainjob-step", "command": python(code)}
    return TrainJobTuningOperator(task_id="search", **{**given, **fields})


def dag_of(name: str, code: str = TRAIN, **fields: Any) -> DAG:
    with DAG(name) as dag:
        search(code, **fields)
    return dag


def files(key: str, folder: str) -> list[str]:
    """Names of the journal's files in one folder."""
    with open_journal(journal_location(key_hash(key))) as journal:
        return sorted(journal.all(folder))


@pytest.mark.timeout(300)
@both
def test_the_best_trial_becomes_the_result(run: Run, home: Path, deferrable: bool) -> None:
    dag = dag_of(
        f"tuned_{deferrable}", deferrable=deferrable, outputs={"model": "file:///m"}, outlets=[Asset("searched")]
    )
    done = run(dag)
    assert done.state == "success", done.log[-6000:]
    result = done.xcoms["search"]
    key = f"airflow/http://airflow.test:8080/{dag.dag_id}/{done.run_id}/-1/search"
    assert (result["key"], result["journal"]) == (key, journal_location(key_hash(key)))
    assert (result["best"]["parameters"], result["best"]["value"]) == ({"x": 2.0}, 0.0)
    assert result["best"]["outputs"] == {"model": f"file:///m/{result['best']['number']}"}
    assert (result["counts"], len(result["trials"])) == ({"complete": 3}, 3)
    assert len(jobs(home)) == 3
    assert "Result: loss 0 of trial" in done.log
    assert done.log.count(" is complete, loss ") == 3

    kept = stored(done.run_id, "xcom")
    best = kept["best"]
    assert (best["name"], best["metrics"]) == (result["best"]["job"], {"loss": 0.0})
    export = ModelExportOperator(task_id="export", source="s", target="t", name="n", metrics=best).options("k")
    assert export["metrics"] == {"loss": 0.0}
    assert export["provenance"]["trainjob"]["uid"] == best["uid"] != ""
    document = kept["trainjob_training"]
    assert (document["kind"], document["state"], document["best"]) == ("study", "ended", result["best"]["number"])
    assert document["importances"] == result["importances"]


@pytest.mark.timeout(300)
def test_a_study_with_a_key_continues_in_another_run_and_its_xcom_stays_short(run: Run, home: Path) -> None:
    study = {**STUDY, "sampler": {"name": "random"}, "max_trials": 1}
    first = run(dag_of("tuned_key", study=study, key="wide/{{ dag.dag_id }}"))
    assert first.xcoms["search"]["key"] == "wide/tuned_key", first.log[-6000:]
    assert len(jobs(home)) == 1
    with open_journal(first.xcoms["search"]["journal"]) as journal:
        one = journal.all("ended")["00000"]
        for number in range(1, 60):  # as other launchers record them
            journal.create(f"asked/{number:05}", {"parameters": {"x": 1.0}})
            journal.create(f"ended/{number:05}", {**one, "value": float(number + 1), "values": [[1, number + 1.0]]})
    again = run(dag_of("tuned_key", study={**study, "max_trials": 60}, key="wide/{{ dag.dag_id }}"))
    assert again.state == "success", again.log[-6000:]
    result = again.xcoms["search"]
    assert (result["counts"], len(result["trials"])) == ({"complete": 60}, 50)
    assert result["best"] == first.xcoms["search"]["best"]
    assert len(jobs(home)) == 1, "no trial is run twice"
    changed = run(dag_of("tuned_key", study={**study, "metric": "other"}, key="wide/{{ dag.dag_id }}"))
    assert isinstance(changed.errors["search"], TrainJobFatal)
    assert "use another key" in str(changed.errors["search"])


@pytest.mark.timeout(300)
def test_execution_timeout_cancels_the_trials(run: Run, home: Path) -> None:
    done = run(dag_of("tuned_late", SLEEP, execution_timeout=timedelta(seconds=4)))
    assert isinstance(done.errors["search"], TrainJobTimeout)
    assert "did not end within execution_timeout; it was cancelled" in str(done.errors["search"])
    wait_until("the trials are cancelled", lambda: jobs(home) == [], 30, poll=0.1)


@pytest.mark.timeout(300)
def test_values_of_templates_are_checked_in_the_run(run: Run) -> None:
    study = {**STUDY, "max_trials": "{{ params.trials }}"}
    with DAG("tuned_template", params={"trials": 3}) as dag:
        task = search(study=study)
    spec, unknown = task.sample_spec()
    assert spec is not None
    assert unknown == []
    done = run(dag, trials=0)
    assert isinstance(done.errors["search"], TrainJobFatal)
    assert "study.max_trials" in str(done.errors["search"])


def test_a_document_is_bounded() -> None:
    trial = {"state": "complete", "values": [[n, 1.0] for n in range(300)], "reason": "x" * 99}
    trials = [{**trial, "number": n, "value": n} for n in range(900)]
    document = {"notes": [], "direction": "maximize", "trials": trials}
    made = bounded(document)
    assert len(json.dumps(made)) <= 100_000
    numbers = [each["number"] for each in made["trials"]]
    assert (numbers, numbers[-1]) == (sorted(numbers), 899), "the best and latest"
    assert len(made["notes"]) == 2
    assert bounded({**document, "trials": [trials[0] | {"values": [[1, 1.0]]}]})["notes"] == []


# ---------------------------------------------------------------- triggers


def trigger_of(code: str, **fields: Any) -> TrainJobStudyTrigger:
    given = {
        "trainjob_conn_id": "trainjob_default", "namespace": "default", "key": "k",
        "journal": journal_location(key_hash("k")), "study": STUDY,
        "template": {"runtime": "trainjob-step", "command": python(code)}, "origin": {"task_id": "search"},
    }  # fmt: skip
    return TrainJobStudyTrigger(**{**given, **fields})


def test_a_rebuilt_trigger_is_the_same() -> None:
    target = Target("local", "ns").as_json()
    more = {"deadline": "2026-11-21T10:00:00+00:00", "resumed": 2, "target": target, "queue_timeout": 60}
    for trigger in (trigger_of(TRAIN), trigger_of(TRAIN, on_kill_action="keep", stored=False, **more)):
        assert rebuilt(trigger).serialize() == trigger.serialize()


async def _until_trials_run(count: int) -> list[str]:
    backend = connect("local")
    while True:
        found = await find_trials(backend, "k", namespace="default")
        if len(found) == count:
            return sorted(str(each["metadata"]["name"]) for each in found)
        await asyncio.sleep(0.1)


@pytest.mark.usefixtures("no_connection")
def test_another_triggerer_continues_the_study(airflow_home: Path, tmp_path: Path, home: Path) -> None:
    flag = tmp_path / "flag"
    wait = f"import os, time\nwhile not os.path.exists({str(flag)!r}):\n    time.sleep(0.1)\n"

    async def scenario() -> dict[str, Any]:
        trigger = trigger_of(wait + TRAIN)
        waiting = Triggerer().start(rebuilt(trigger))
        names = await _until_trials_run(3)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        flag.touch()
        another = Triggerer()
        await another.start(rebuilt(trigger))
        assert jobs(home) == names
        (event,) = another.events
        payload: dict[str, Any] = event.payload
        return payload

    payload = asyncio.run(scenario())
    assert payload["result"]["best"]["parameters"] == {"x": 2.0}
    assert files("k", "launches") == ["00000", "00001"]


@since("3.3", "triggers with on_kill")
@pytest.mark.usefixtures("no_connection")
@pytest.mark.parametrize(("action", "left"), [("cancel", 0), ("keep", 3)])
def test_a_person_kills_a_deferred_study(airflow_home: Path, home: Path, action: str, left: int) -> None:
    async def scenario() -> None:
        from airflow.jobs.triggerer_job_runner import _USER_ACTION_CANCEL_MSG

        waiting = Triggerer().start(rebuilt(trigger_of(SLEEP, on_kill_action=action)))
        await _until_trials_run(3)
        waiting.cancel(_USER_ACTION_CANCEL_MSG)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(20):
            while len(jobs(home)) != left:
                await asyncio.sleep(0.05)
        await TrainJobStudyTrigger.cancel(trigger_of(SLEEP), connect("local"))

    asyncio.run(scenario())
    assert files("k", "ended") == [], "the next launch runs them again"


@pytest.mark.usefixtures("no_connection")
def test_a_study_that_fails_is_an_event(airflow_home: Path) -> None:
    failed = asyncio.run(only_event(trigger_of("1 / 0")))
    error = unpack_error(failed["error"])
    assert (type(error), failed["key"]) == (StudyFailed, "k")
    assert "ZeroDivisionError" in str(error)
    wrong = asyncio.run(only_event(trigger_of("1 / 0", study={**STUDY, "metric": "other"})))
    error = unpack_error(wrong["error"])
    assert not error.retry.retryable
    assert "use another key" in str(error)
