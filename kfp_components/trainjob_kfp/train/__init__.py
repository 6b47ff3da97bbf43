"""``train``: run a TrainJob as a step of a pipeline."""

from trainjob_kfp.train.component import train

__all__ = ["train"]
