"""Differences between the oldest supported Airflow and the newest one."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from packaging.version import Version

if TYPE_CHECKING:
    from airflow.dag_processing.dagbag import DagBag
    from airflow.sdk import DAG

AIRFLOW = Version(version("apache-airflow-core"))


def since(first: str, what: str) -> pytest.MarkDecorator:
    """Skip a test if Airflow is older than `first`, which introduced `what`."""
    return pytest.mark.skipif(Version(first) > AIRFLOW, reason=f"Airflow {first} introduced {what}; this is {AIRFLOW}")


def older_than(first: str) -> bool:
    """Whether the installed Airflow is older than `first`."""
    return Version(first) > AIRFLOW


def dag_bag(folder: Path) -> DagBag:
    """The DAGs of a folder of files."""
    module = "airflow.models.dagbag" if older_than("3.2") else "airflow.dag_processing.dagbag"
    bag: DagBag = import_module(module).DagBag(folder)
    return bag


def dag_serialization() -> Any:
    """The class with ``to_dict`` and ``from_dict``."""
    name = "SerializedDAG" if older_than("3.2") else "DagSerialization"
    return getattr(import_module("airflow.serialization.serialized_objects"), name)


def serde() -> Any:
    """The module that serializes arguments of triggers."""
    return import_module("airflow.serialization.serde" if older_than("3.2") else "airflow.sdk.serde")


def store(dags: list[DAG], session: Any) -> None:
    """Store DAGs as the DAG processor does with the DAGs of a file of bundle ``testing``."""
    from airflow.dag_processing.collection import update_dag_parsing_results_in_db
    from airflow.serialization.serialized_objects import LazyDeserializedDAG

    if older_than("3.2"):
        for dag in dags:
            dag.relative_fileloc = "testing.py"
        old = [LazyDeserializedDAG(data=dag_serialization().to_dict(dag)) for dag in dags]
        duration = () if older_than("3.1") else (None,)
        update_dag_parsing_results_in_db("testing", None, old, {}, *duration, set(), session)  # type: ignore[call-arg, arg-type]
    else:
        found = [LazyDeserializedDAG.from_dag(dag) for dag in dags]
        update_dag_parsing_results_in_db("testing", None, found, {}, None, set(), session)
