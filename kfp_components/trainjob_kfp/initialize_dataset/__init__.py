"""``initialize_dataset``: download a dataset for the training."""

from trainjob_kfp.initialize_dataset.component import initialize_dataset

__all__ = ["initialize_dataset"]
