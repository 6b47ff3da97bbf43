"""One MLflow run for each TrainJob whose model is registered: its parameters, metrics over time and tags.

The tag ``trainjob.dev/uid`` identifies the run. A run becomes ``FINISHED`` after everything is written. MLflow stores a
metric's value once per step and time, so that a retry may write everything again.

The server orders versions, but not runs. If two exports of one job create a run each at the same instant, the run of
the registered version remains, and `tidy` removes the other.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainjob._support.foreign import Unreadable, mapping_of
from trainjob.registry.base import History
from trainjob.registry.provenance import PREFIX

_UID = "trainjob.dev/uid"
_EXPERIMENT = "trainjob"
_LONGEST = 5000  # characters of a value; MLflow's limits are 6,000 (parameters) and 8,000 (tags)
_BATCH = 100  # MLflow's limit of parameters per request; that of metrics is 1,000


@dataclass(frozen=True)
class Run:
    """The run of a TrainJob to record.

    Attributes:
        uid: UID of the TrainJob.
        name: Name of the TrainJob.
        metrics: Measured metrics of the model.
        history: Metrics over time.
        params: Hyperparameters.
        tags: Everything else, for MLflow's search.
    """

    uid: str
    name: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    history: History = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


def run_of(tags: Mapping[str, str], metrics: Mapping[str, float], history: History) -> Run | None:
    """Make the run of the job that trained a model; None if the job is not known.

    Args:
        tags: Tags of the model's version. Those of its provenance contain the job (``trainjob``: ``uid``, ``name``, …),
            its hyperparameters (``parameters``) and the code (``code``: ``uri``, ``revision``).
        metrics: Measured metrics of the model.
        history: The job's metrics over time.
    """
    job, params, code = (_mapping(tags.get(f"{PREFIX}{name}", "")) for name in ("trainjob", "parameters", "code"))
    uid = str(job.get("uid") or "")
    if not re.fullmatch(r"[\w.-]+", uid):  # it must be safe in a search filter
        return None
    found = {f"trainjob.dev/{name}": _text(value) for name, value in job.items() if name != "uid"}
    found |= {"trainjob.dev/run": tags.get(f"{PREFIX}run", "")}
    found |= {
        "mlflow.source.git.commit": _text(code.get("revision") or ""),
        "mlflow.source.name": _text(code.get("uri") or ""),
    }
    return Run(
        uid,
        str(job.get("name") or uid),
        {_name(name): value for name, value in metrics.items()},
        {_name(name): points for name, points in history.items()},
        {_name(name): _text(value)[:_LONGEST] for name, value in params.items()},
        {_name(name): value[:_LONGEST] for name, value in found.items() if value},
    )


def record(client: Any, run: Run, database: Path | None) -> str:
    """Create or complete the run; returns its ID.

    Args:
        client: An ``MlflowClient``.
        run: The run.
        database: The SQLite file, None on a server.
    """
    experiment = _experiment(client, database)
    found = _find(client, [experiment], run.uid)
    if not found:
        times = [moment for points in run.history.values() for _, moment, _ in points] or [time.time()]
        began = round(1000 * min(times))
        client.create_run(experiment, began, {_UID: run.uid, **run.tags}, run_name=run.name)
        found = _find(client, [experiment], run.uid)  # of duplicates, every export takes the same
    kept = found[0]
    if kept.info.status != "FINISHED":
        _write(client, kept, run)
    return str(kept.info.run_id)


def tidy(client: Any, run: Run, kept: str) -> None:
    """Remove duplicates of the run `kept` that no version refers to."""
    experiment = client.get_run(kept).info.experiment_id
    for duplicate in _find(client, [experiment], run.uid):
        run_id = duplicate.info.run_id
        if run_id != kept and not client.search_model_versions(f"run_id='{run_id}'", max_results=1):
            client.delete_run(run_id)


def _experiment(client: Any, database: Path | None) -> str:
    """ID of the experiment in ``MLFLOW_EXPERIMENT_NAME``, by default `trainjob`; creates it if needed."""
    from mlflow.exceptions import MlflowException

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _EXPERIMENT
    found = client.get_experiment_by_name(name)
    if found is None:
        # Beside the file: MLflow's default is the current directory of the process.
        place = str(database.parent / "mlruns") if database else None
        try:
            return str(client.create_experiment(name, artifact_location=place))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another export was faster
                raise
            found = client.get_experiment_by_name(name)
    return str(found.experiment_id)


def _find(client: Any, experiments: Sequence[str], uid: str) -> list[Any]:
    found = client.search_runs(experiments, f"tags.`{_UID}` = '{uid}'")
    return sorted(found, key=lambda run: (run.info.start_time, run.info.run_id))


def _write(client: Any, found: Any, run: Run) -> None:
    from mlflow.entities import Metric, Param, RunTag

    run_id, began = found.info.run_id, found.info.start_time
    metrics = [
        Metric(name, value, round(1000 * moment), step)
        for name, points in run.history.items()
        for step, moment, value in points
    ]
    ended = max((metric.timestamp for metric in metrics), default=began)
    metrics += [Metric(name, value, ended, 0) for name, value in run.metrics.items() if name not in run.history]
    params = [Param(name, value) for name, value in run.params.items()]
    tags = [RunTag(name, value) for name, value in run.tags.items()]
    client.log_batch(run_id, metrics=metrics, tags=tags)
    for start in range(0, len(params), _BATCH):
        client.log_batch(run_id, params=params[start : start + _BATCH])
    client.set_terminated(run_id, "FINISHED", end_time=ended)


def _mapping(text: str) -> Mapping[str, Any]:
    try:
        return mapping_of(text, "a value in the registry")
    except Unreadable:
        return {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _name(name: str) -> str:
    """A name that MLflow accepts: allowed characters only, and as a path normalized and relative."""
    known = re.sub(r"[^\w.\- /]", "_", name)[:250]
    path = posixpath.normpath(known)
    return known if path == known and not path.startswith((".", "/")) else re.sub(r"[/.]", "_", known)
