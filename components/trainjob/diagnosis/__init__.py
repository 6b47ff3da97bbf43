"""Evidence -> `Diagnosis`. Pure: plain dicts in, a value out; it never raises, whatever the evidence looks like.

::

    meanings    reason -> category, retry verdict, advice: the one table of all of them
    obstacles   what is in a job's way: its pods, Events, Kueue's Workload
    crashes     containers and pods that ended badly, and which of them was the first
    tracebacks  exceptions that ended a process, told apart from handled ones
    verdicts    failures that the programs of this package report themselves
    known       known errors and their meaning
    tails       what the last lines of a log say: exceptions, peers that were lost
    ends        how the first of them ended, in words
    judge       all of these -> Diagnosis
"""

from trainjob.diagnosis.crashes import READ_LINES, rank_of
from trainjob.diagnosis.judge import CUT, Diagnosis, Evidence, diagnose
from trainjob.diagnosis.meanings import Category
from trainjob.diagnosis.tails import TAIL_LINES

__all__ = ["CUT", "READ_LINES", "TAIL_LINES", "Category", "Diagnosis", "Evidence", "diagnose", "rank_of"]
