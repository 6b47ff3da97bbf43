"""Writes deferred task instances and their triggers into Airflow's database, as deferring tasks do.

``deferred.py RUN KUBECONFIG CLASSPATH RATE``, the arguments of one trigger as JSON on each line of stdin, RATE of which
are written each second. The task instances are those of one mapped task; RUN is the id of their run. Also creates their
connections.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime

from airflow.models import Connection
from airflow.models.dag_version import DagVersion
from airflow.models.dagbundle import DagBundleModel
from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance
from airflow.models.trigger import Trigger
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG
from airflow.utils.session import create_session
from airflow.utils.state import DagRunState, TaskInstanceState
from airflow.utils.types import DagRunTriggeredByType, DagRunType
from tests.airflow.versions import dag_serialization, store


def main(run: str, kubeconfig: str, classpath: str, rate: str) -> None:
    with DAG(run) as dag:
        EmptyOperator(task_id="train")
    now = datetime.now(UTC)
    with create_session() as session:
        session.merge(DagBundleModel(name="testing"))
        session.commit()
        store([dag], session)
        session.flush()
        for name, kind in (("trainjob_default", "trainjob"), ("kubernetes_default", "kubernetes")):
            session.query(Connection).filter_by(conn_id=name).delete()
            extra = {"kube_config_path": kubeconfig} | ({"backend": "kubernetes"} if kind == "trainjob" else {})
            session.add(Connection(conn_id=name, conn_type=kind, extra=json.dumps(extra)))
        version = DagVersion.get_latest_version(run, session=session)
        assert version is not None
        task = dag_serialization().from_dict(dag_serialization().to_dict(dag)).task_dict["train"]
        session.add(
            DagRun(
                dag_id=run,
                run_id=run,
                run_after=now,
                start_date=now,
                state=DagRunState.RUNNING,
                run_type=DagRunType.MANUAL,
                triggered_by=DagRunTriggeredByType.TEST,
            )
        )
        session.flush()
        began = time.monotonic()
        for index, line in enumerate(sys.stdin):
            session.commit()
            time.sleep(max(0, began + index / float(rate) - time.monotonic()))
            instance = TaskInstance(task, version.id, run, TaskInstanceState.DEFERRED, index)
            instance.start_date, instance.try_number, instance.next_method = now, 1, "execute_complete"
            instance.trigger = Trigger(classpath, json.loads(line))
            session.add(instance)


if __name__ == "__main__":
    main(*sys.argv[1:])
