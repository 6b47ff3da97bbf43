"""How the time of a piece of work was spent, over all its attempts and restarts. Pure: no clock, no I/O.

May import `_backends`, and the layers below.

Goodput is the time of training that counted, divided by the wall time; the rest is *badput*. These terms, and the
classes, are those of Google's ml-goodput-measurement (`Activity` names the counterparts), which records events in the
training; here the time is read from what Kubernetes and `trainjob.progress` report anyway.

Every second between the first launch and the result has one `Activity`, from the best `Source` that knows it:

* **Conditions** of the TrainJob tell when it was created, resumed last, suspended last and finished. They do not tell
  when it ran, and a second suspension replaces the times of the first one.
* **Observations** of a waiter tell each phase from the time at which it was observed.
* **Pods** tell when containers started and ended. Kubernetes keeps the current run of a container and the one before,
  and a JobSet that restarts all ranks deletes their pods. The job trains while no rank is down.
* **Steps** that the training reported divide the time in which it ran, see `measure`.

What no source can tell apart is `Activity.TRAINING` with `Source.ASSUMED`: goodput may be too high, never too low,
because of unknown time.

::

    spent     activities, segments, and their sums as seconds, GPU-hours and cost
    spans     times with one activity, laid over each other
    attempts  what conditions, observations and pods tell of one attempt
    steps     what the reported steps tell
    measure   all of these -> how the time of a piece of work was spent
"""

from trainjob._goodput.attempts import Attempt, gpus_of
from trainjob._goodput.measure import measure, pieces_of_work
from trainjob._goodput.steps import STALL_SECONDS
from trainjob.goodput import Activity, Goodput, Segment, Source, ratio_of, sums, total

__all__ = [
    "STALL_SECONDS",
    "Activity",
    "Attempt",
    "Goodput",
    "Segment",
    "Source",
    "gpus_of",
    "measure",
    "pieces_of_work",
    "ratio_of",
    "sums",
    "total",
]
