"""Launch Kubeflow TrainJobs exactly once, wait for them at almost no cost, and say what went wrong.

::

    from trainjob import TrainJobClient

    with TrainJobClient(backend="local") as client:
        ref = client.launch({"runtime": "jax-distributed", "num_nodes": 2, "command": ["python", "train.py"]}, "demo")
        print(client.wait(ref).metrics)

Everything public is here; it is imported when it is first used, so that ``import trainjob`` costs a DAG file nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from trainjob.version import __version__

_HOME = {
    "Backend": "trainjob.backends.base",
    "Budgets": "trainjob.waiting",
    "Diagnosis": "trainjob.diagnosis",
    "InvalidSpec": "trainjob.errors",
    "JobRef": "trainjob.manifest",
    "LogLine": "trainjob.logs",
    "Observation": "trainjob.status",
    "Phase": "trainjob.status",
    "RetryVerdict": "trainjob.errors",
    "Settings": "trainjob.settings",
    "TrainJobClient": "trainjob.client",
    "TrainJobError": "trainjob.errors",
    "TrainJobFailed": "trainjob.errors",
    "TrainJobResult": "trainjob.waiting",
    "TrainJobSpec": "trainjob.spec",
    "connect": "trainjob.backends",
}

__all__ = [
    "Backend",
    "Budgets",
    "Diagnosis",
    "InvalidSpec",
    "JobRef",
    "LogLine",
    "Observation",
    "Phase",
    "RetryVerdict",
    "Settings",
    "TrainJobClient",
    "TrainJobError",
    "TrainJobFailed",
    "TrainJobResult",
    "TrainJobSpec",
    "__version__",
    "connect",
]

if TYPE_CHECKING:
    from trainjob.backends import connect
    from trainjob.backends.base import Backend
    from trainjob.client import TrainJobClient
    from trainjob.diagnosis import Diagnosis
    from trainjob.errors import InvalidSpec, TrainJobError, TrainJobFailed
    from trainjob.logs import LogLine
    from trainjob.manifest import JobRef
    from trainjob.settings import Settings
    from trainjob.spec import TrainJobSpec
    from trainjob.status import Observation, Phase
    from trainjob.verdicts import RetryVerdict
    from trainjob.waiting import Budgets, TrainJobResult
else:  # hidden from type checkers: they would take any name for one of this module

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOME[name]), name)
