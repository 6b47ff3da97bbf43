"""Evidence -> `Diagnosis`. Pure: it takes plain dicts and returns a value; it never raises, whatever the evidence is.

May import `job`, and the layers below.

::

    meaning               what a failure or a blocker means: category, retry verdict, advice
    reasons               reason -> meaning; the only table of them, for failures and for blockers
    rules                 known error messages and what they mean
    tracebacks            exceptions that ended a process, apart from handled ones
    log_tails             the last lines of a log: exceptions, lost peers
    termination_messages  failures that the programs of this package report themselves
    kills                 containers that the kubelet killed
    crashes               containers and pods that failed, and which was the first
    terminations          what the termination of the first one means
    blockers              what blocks a job: its pods, Events, Kueue's Workload
    rank_states           the processes of a job that runs: their steps, stacks and ends
    hangs                 which of them hangs
    stragglers            which of them are slower than the others
    diagnose              all of these -> Diagnosis
"""

from trainjob._diagnosis.diagnose import ON_RETRY, diagnosis_of, with_change, with_node
from trainjob._diagnosis.log_tails import READ_LINES, TAIL_LINES
from trainjob.verdicts import CUT, Category, Diagnosis, Evidence

__all__ = [
    "CUT",
    "ON_RETRY",
    "READ_LINES",
    "TAIL_LINES",
    "Category",
    "Diagnosis",
    "Evidence",
    "diagnosis_of",
    "with_change",
    "with_node",
]
