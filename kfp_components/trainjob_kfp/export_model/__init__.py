"""``export_model``: store, register and promote a trained model."""

from trainjob_kfp.export_model.component import export_model

__all__ = ["export_model"]
