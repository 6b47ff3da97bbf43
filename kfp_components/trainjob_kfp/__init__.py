"""Kubeflow Pipelines components for TrainJobs.

::

    from kfp import dsl
    from trainjob_kfp import train

    @dsl.pipeline
    def nightly() -> None:
        train(runtime="torch-distributed", command=["torchrun", "train.py"], num_nodes=2)
"""

import os

# In a step's process KFP does not define its authoring API, such as `dsl.component` (kfp/dsl/__init__.py).
if os.environ.get("_KFP_RUNTIME") != "true":
    from trainjob_kfp.cleanup import cleanup
    from trainjob_kfp.component import LostByKfp, UnseenByCache
    from trainjob_kfp.distributed import distributed
    from trainjob_kfp.evaluate_model import evaluate_model
    from trainjob_kfp.export_model import export_model
    from trainjob_kfp.image import STEP_IMAGE
    from trainjob_kfp.initialize_dataset import initialize_dataset
    from trainjob_kfp.initialize_model import initialize_model
    from trainjob_kfp.loading import load
    from trainjob_kfp.retries import retry
    from trainjob_kfp.train import train
    from trainjob_kfp.tune import tune
    from trainjob_kfp.wait import wait

    __all__ = [
        "STEP_IMAGE",
        "LostByKfp",
        "UnseenByCache",
        "cleanup",
        "distributed",
        "evaluate_model",
        "export_model",
        "initialize_dataset",
        "initialize_model",
        "load",
        "retry",
        "train",
        "tune",
        "wait",
    ]
