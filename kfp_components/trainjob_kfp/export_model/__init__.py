"""``export_model``: store, register and promote what was trained."""

from trainjob_kfp.export_model.component import export_model

__all__ = ["export_model"]
