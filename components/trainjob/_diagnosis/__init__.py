"""Evidence -> `Diagnosis`. Pure: it takes plain dicts and returns a value; it never raises, whatever the evidence is.

::

    reasons               reason -> category, retry verdict, advice; the only table of them
    known                 known error messages and what they mean
    tracebacks            exceptions that ended a process, apart from handled ones
    log_tails             the last lines of a log: exceptions, lost peers
    termination_messages  failures that the programs of this package report themselves
    terminations          containers and pods that failed, which was the first, and what its termination means
    kills                 containers that the kubelet killed
    blockers              what blocks a job: its pods, Events, Kueue's Workload
    hangs                 ranks that make no progress, and which of them hangs
    diagnose              all of these -> Diagnosis
"""

from trainjob._diagnosis.diagnose import CUT, ON_RETRY, Diagnosis, Evidence, diagnose, with_change, with_node
from trainjob._diagnosis.log_tails import TAIL_LINES
from trainjob._diagnosis.reasons import Category
from trainjob._diagnosis.terminations import READ_LINES

__all__ = [
    "CUT",
    "ON_RETRY",
    "READ_LINES",
    "TAIL_LINES",
    "Category",
    "Diagnosis",
    "Evidence",
    "diagnose",
    "with_change",
    "with_node",
]
