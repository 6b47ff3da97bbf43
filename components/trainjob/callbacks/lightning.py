"""Reports what a ``LightningModule`` logs.

::

    from trainjob.callbacks.lightning import ProgressCallback

    Trainer(..., callbacks=[ProgressCallback()])
"""

from __future__ import annotations

import math
import time
from typing import Any

from lightning.pytorch.callbacks import Callback

from trainjob import progress
from trainjob.callbacks.metrics import numbers


class ProgressCallback(Callback):  # type: ignore[misc]  # lightning is in no environment with mypy
    """Reports the step and the metrics of ``self.log``, at most once per second; on global rank 0 only.

    Every rank counts its steps, for the detection of hangs.
    """

    def __init__(self) -> None:
        self._reported = -math.inf
        self._last: dict[str, float] = {}

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Watch this rank, also before its first step."""
        del trainer
        progress.watch()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Count and report the step and changed metrics: those of the last validation stay in `callback_metrics`."""
        progress.step(trainer.global_step)
        if time.monotonic() - self._reported >= 1:
            metrics = numbers(trainer.callback_metrics)
            self._report(trainer, dict(metrics.items() - self._last.items()))

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        """Report what was logged in the epoch, its validation included."""
        self._report(trainer, numbers(trainer.callback_metrics))

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        """Report that the training is complete, also after an early stop."""
        if trainer.is_global_zero:
            progress.report(progress=100)

    def _report(self, trainer: Any, metrics: dict[str, float]) -> None:
        if not trainer.is_global_zero:
            return
        total = trainer.estimated_stepping_batches
        progress.report(step=trainer.global_step, total_steps=total if 0 < total < math.inf else None, metrics=metrics)
        self._last |= metrics
        self._reported = time.monotonic()
