"""Evidence -> `Diagnosis`. Pure: it takes plain dicts and returns a value; it never raises, whatever the evidence is.

May import `job`, and the layers below.

::

    evidence              what is known of a job
    cluster               objects, Events -> how each container ended, and by whom
    tracebacks            the exceptions that ended a process
    output                end of a log -> exceptions, a launcher's report, the last own line
    log_patterns          the forms of lines in it
    markers               lines of the watchdogs -> steps, stacks
    ranks                 all three in one record for each process, and which failed first
    rules                 three tables: reasons of objects, exceptions by class and package, last lines and signals
    meaning               what a row means: category, retry verdict, advice
    termination_messages  failures that the programs of this package report themselves
    blockers              what blocks a job: its pods, Events, Kueue's Workload
    root_cause            what the end of the first rank means, and its words
    verdict               all of these -> Diagnosis
    hangs                 which rank of a running job hangs
    stragglers            which of them are slower than the others
    serialization         diagnosis and evidence as JSON that outlives the pods
"""

from trainjob._diagnosis.evidence import Evidence
from trainjob._diagnosis.output import READ_LINES, TAIL_LINES
from trainjob._diagnosis.verdict import ON_RETRY, diagnosis_of, with_change, with_node

__all__ = ["ON_RETRY", "READ_LINES", "TAIL_LINES", "Evidence", "diagnosis_of", "with_change", "with_node"]
