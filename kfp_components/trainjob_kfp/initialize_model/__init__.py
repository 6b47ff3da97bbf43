"""``initialize_model``: download a base model for the training."""

from trainjob_kfp.initialize_model.component import initialize_model

__all__ = ["initialize_model"]
