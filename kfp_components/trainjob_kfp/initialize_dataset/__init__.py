"""``initialize_dataset``: bring a dataset to where training finds it."""

from trainjob_kfp.initialize_dataset.component import initialize_dataset

__all__ = ["initialize_dataset"]
