"""``evaluate_model``: evaluate a model beside the current champion, and apply a gate."""

from trainjob_kfp.evaluate_model.component import evaluate_model

__all__ = ["evaluate_model"]
