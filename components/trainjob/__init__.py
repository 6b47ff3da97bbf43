"""Launch Kubeflow TrainJobs exactly once, wait for them at almost no cost, and diagnose failures.

::

    from trainjob import TrainJobClient

    with TrainJobClient(backend="local") as client:
        ref = client.launch({"runtime": "jax-distributed", "num_nodes": 2, "command": ["python", "train.py"]}, "demo")
        print(client.wait(ref).metrics)

The public names are listed in ``__init__.pyi``. Each is imported on first use, so that ``import trainjob`` does not
slow down a DAG file. `trainjob.data`, `trainjob.registry`, `trainjob.tuning`, `trainjob.evaluation`,
`trainjob.progress`, `trainjob.callbacks` and `trainjob.checkpoints` are public, too. All other modules are private:
their names may change in any release.
"""

from trainjob._support.lazy import lazy
from trainjob.version import __version__ as __version__

__getattr__, __dir__ = lazy(__name__, __file__)
