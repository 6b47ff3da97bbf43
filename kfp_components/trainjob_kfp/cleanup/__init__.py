"""``cleanup``: an exit handler that stops the jobs that a run has left running."""

from trainjob_kfp.cleanup.component import cleanup

__all__ = ["cleanup"]
