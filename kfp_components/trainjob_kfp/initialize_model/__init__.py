"""``initialize_model``: bring a base model to where training finds it."""

from trainjob_kfp.initialize_model.component import initialize_model

__all__ = ["initialize_model"]
