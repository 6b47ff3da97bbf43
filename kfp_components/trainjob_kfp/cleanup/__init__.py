"""``cleanup``: stop what a run has left running, as its exit handler."""

from trainjob_kfp.cleanup.component import cleanup

__all__ = ["cleanup"]
