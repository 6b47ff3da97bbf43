"""``tune``: search hyperparameters; each trial is a TrainJob."""

from trainjob_kfp.tune.component import tune

__all__ = ["tune"]
