"""Launch Kubeflow TrainJobs exactly once, wait for them at almost no cost, and diagnose failures.

::

    from trainjob import TrainJobClient

    with TrainJobClient(backend="local") as client:
        ref = client.launch({"runtime": "jax-distributed", "num_nodes": 2, "command": ["python", "train.py"]}, "demo")
        print(client.wait(ref).metrics)

The public names are listed in ``__init__.pyi``. Each is imported on first use, so that ``import trainjob`` does not
slow down a DAG file. `trainjob.data`, `trainjob.registry`, `trainjob.progress` and `trainjob.checkpoints` are public,
too; `trainjob.integration` is public for authors of integrations. All other modules are private: their names may change
in any release.
"""

import warnings
from importlib import import_module

from trainjob._support.lazy import lazy
from trainjob.version import __version__ as __version__

_get, __dir__ = lazy(__name__, __file__)


def __getattr__(name: str) -> object:
    if name == "Budgets":  # deprecated, so neither in __dir__ nor in __all__
        warnings.warn("trainjob.Budgets is deprecated: use trainjob.WaitOptions", DeprecationWarning, stacklevel=2)
        return import_module("trainjob.wait_options").Budgets
    return _get(name)
