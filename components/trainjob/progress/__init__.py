"""Reports progress, metrics and outputs of a training script.

Imports the standard library only.

::

    from trainjob import progress

    progress.report(step=400, total_steps=1000, metrics={"loss": 0.31})
    progress.report(outputs={"model": "s3://models/digits/7"})

This folder needs only the standard library and may be copied next to a script. It never ends a training: what cannot be
reported is left out, with one line on stderr for each reason; ``TRAINJOB_STRICT_PROGRESS=1`` raises `ValueError`.

Without a channel, on a laptop or in a notebook, `report` only checks its arguments. It selects its channels from the
environment at each call:

* Trainer's status API (gate ``TrainJobStatus``, Trainer >= 2.2), if ``KUBEFLOW_TRAINER_SERVER_URL``, ``_CA_CERT`` and
  ``_TOKEN`` are set. A background thread posts the latest state, at most once per second; the last state is posted at
  interpreter exit, within at most 5 s. This API has no field for outputs.
* The termination message of the container: the file named by ``TRAINJOB_TERMINATION_LOG``, or inside Kubernetes
  ``/dev/termination-log``. Written during the call, so it survives a SIGKILL right after it.

A metric or output is a bool, a number or text, and keeps its type for all readers.

If ``TRAINJOB_STALL_TIMEOUT`` (seconds) is set, a watchdog thread writes to stderr whether the rank makes progress, and
its stacks when it does not.

::

    message      the termination message: its format; how it is written and merged
    calls        the arguments of a call, and the steps of the process
    reading      `Report` and `read`
    trainer_api  posts to Trainer's status API
    reporter     the accumulated report, and its channels
    watchdog     the lines about the rank, and its stacks
    reporting    the functions of this package, and the state of the process
"""

# A training script imports this at its start. `typing`, `json` and `dataclasses` would take nine tenths of the import
# time, and most runs do not need them: `message` and `watchdog` import them where they are used, `reading` below.

from .reporting import flush, merge as merge, report, step, watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .reading import Report, read

__all__ = ["Report", "flush", "read", "report", "step", "watch"]


def __getattr__(name: str) -> object:
    if name not in ("Report", "read"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import reading

    return getattr(reading, name)
