"""Reports what Hugging Face's ``Trainer`` logs.

::

    from trainjob.callbacks.huggingface import ProgressCallback

    Trainer(..., callbacks=[ProgressCallback()])
"""

from __future__ import annotations

import math
import time
from typing import Any

from transformers import TrainerCallback

from trainjob import progress
from trainjob.callbacks.metrics import numbers


class ProgressCallback(TrainerCallback):  # type: ignore[misc]  # transformers is in no environment with mypy
    """Reports the step, at most once per second, and all metrics that the trainer logs; on rank 0 only.

    Every rank counts its steps, for the detection of hangs.
    """

    def __init__(self) -> None:
        self._reported = -math.inf

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Watch this rank, also before its first step."""
        del args, state, control, kwargs
        progress.watch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step; report it."""
        del args, control, kwargs
        progress.step(state.global_step)
        if state.is_world_process_zero and time.monotonic() - self._reported >= 1:
            self._report(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Report what the trainer logs: every ``logging_steps``, after an evaluation and at the end."""
        del args, control, kwargs
        if state.is_world_process_zero:
            self._report(state, numbers(logs or {}))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report a checkpoint, which the trainer has just written."""
        del args, control, kwargs
        if state.is_world_process_zero:
            progress.report(step=state.global_step, checkpoint=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report that the training is complete, also after an early stop."""
        del args, control, kwargs
        if state.is_world_process_zero:
            progress.report(progress=100)

    def _report(self, state: Any, metrics: dict[str, float] | None = None) -> None:
        self._reported = time.monotonic()
        progress.report(step=state.global_step, total_steps=state.max_steps or None, metrics=metrics)
