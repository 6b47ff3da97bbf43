"""Reports progress, metrics and outputs of a training script.

Imports the standard library only.

::

    from trainjob import progress

    progress.report(step=400, total_steps=1000, metrics={"loss": 0.31})
    progress.report(outputs={"model": "s3://models/digits/7"})

This folder needs only the standard library and may be copied next to a script. Without a channel, on a laptop or in a
notebook, `report` only checks its arguments. It selects its channels from the environment at each call:

* Trainer's status API (gate ``TrainJobStatus``, Trainer >= 2.2), if ``KUBEFLOW_TRAINER_SERVER_URL``, ``_CA_CERT`` and
  ``_TOKEN`` are set. A background thread posts the latest state, at most once per second; the last state is posted at
  interpreter exit, within at most 5 s. This API has no field for outputs.
* The termination message of the container: the file named by ``TRAINJOB_TERMINATION_LOG``, or inside Kubernetes
  ``/dev/termination-log``. Written during the call, so it survives a SIGKILL right after it.

A metric or output is a bool, a number or text, and keeps its type for all readers.

If ``TRAINJOB_STALL_TIMEOUT`` (seconds) is set, a watchdog thread writes to stderr whether the rank makes progress, and
its stacks when it does not.

::

    counter      the number of steps
    message      the termination message: its format, `Report`, `read`
    trainer_api  posts to Trainer's status API
    reporter     the accumulated report, and its channels
    watchdog     the lines about the rank, and its stacks
    reporting    the functions of this package, and the state of the process
    returned     the return value of a function trainer
"""

# A training script imports this at its start. `typing`, `json` and `dataclasses` would take nine tenths of the import
# time, and most runs do not need them: the modules import them, the reporter and the watchdog where they are used.

from .message import Report, read
from .reporting import flush, report, report_returned as report_returned, step, watch

__all__ = ["Report", "flush", "read", "report", "step", "watch"]
