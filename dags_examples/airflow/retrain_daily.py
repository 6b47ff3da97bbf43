"""Retrain every night on the data of the past day, and backfill earlier days.

Each run is for one day: its data interval is in the job's inputs, outputs and labels. The run for a day in March trains
on the data of that day, even if it runs later::

    airflow backfill create --dag-id retrain_daily --from-date 2026-03-01 --to-date 2026-03-31 --max-active-runs 4

The data of a day are in ``$DIGITS_BY_DAY/<day>``. To try it on this machine::

    export TRAINJOB_BACKEND=local TRAINJOB_REGISTRY=mlflow+sqlite:///$HOME/registry.db
    export DIGITS_BY_DAY=file://$HOME/digits
    mkdir -p $HOME/digits/2026-03-01 && cp dags_examples/data/digits.csv.gz $HOME/digits/2026-03-01
    airflow dags test retrain_daily 2026-03-02

Needs Airflow 3.3 for the retry policy.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from airflow.sdk import DAG, CronDataIntervalTimetable

from trainjob_airflow.operators.data import ModelExportOperator
from trainjob_airflow.operators.trainjob import TrainJobOperator
from trainjob_airflow.retries import TrainJobRetryPolicy

# As in retrain_digits.py; on a cluster, set the variables to locations that its nodes can reach.
EXAMPLES = Path(os.environ.get("TRAINJOB_EXAMPLES", Path(__file__).resolve().parents[1]))
HOME = Path(os.environ.get("TRAINJOB_HOME", Path.home() / ".trainjob")).absolute()
WORKSPACE = os.environ.get("TRAINJOB_WORKSPACE", (HOME / "workspace").as_uri())
MODELS = os.environ.get("TRAINJOB_MODELS", (HOME / "models").as_uri())
RUNTIME = os.environ.get("TRAINJOB_RUNTIME", "jax-distributed")
DATA = os.environ.get("DIGITS_BY_DAY", "s3://data/digits")

DAY = "{{ data_interval_start | ds }}"

with DAG(
    "retrain_daily",
    # Not schedule="@daily": since Airflow 3.0 that has an empty data interval.
    schedule=CronDataIntervalTimetable("@daily", timezone="UTC"),
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,  # missing days are trained only by a backfill
    max_active_runs=4,
    tags=["trainjob"],
    doc_md=__doc__,
    default_args={
        "retries": 4,
        # A preempted job is soon admitted again; a lost node takes longer to replace; bad code is not retried.
        "retry_policy": TrainJobRetryPolicy(preempted=timedelta(seconds=30), infrastructure=timedelta(minutes=5)),
    },
):
    train = TrainJobOperator(
        task_id="train",
        runtime=RUNTIME,
        num_nodes=2,
        command=["trainjob", "exec", "--", "python", f"{EXAMPLES}/training/digits_jax.py"],
        args=["--dataset=$(TRAINJOB_INPUT_DATASET)", "--output=$(TRAINJOB_OUTPUT_MODEL)"],
        inputs={"dataset": f"{DATA}/{DAY}/digits.csv.gz"},
        outputs={"model": f"{WORKSPACE}/retrain_daily/{DAY}"},
        labels={"digits.example/day": DAY},
        deferrable=True,
    )

    ModelExportOperator(
        task_id="export_model",
        source=f"{WORKSPACE}/retrain_daily/{DAY}",
        target=MODELS,
        name="digits",
        metrics=train.output,
        alias="champion",
        metric="accuracy",  # a backfill of bad days registers versions, but no champion
        provenance={"day": DAY},
        deferrable=True,
    )
