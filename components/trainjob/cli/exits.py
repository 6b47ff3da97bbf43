"""Exit codes: which of them an error has, and their table for the help."""

from __future__ import annotations

import errno
import signal

from trainjob.errors import ModelNotFound, NotFound, RetryVerdict, Stuck, TimedOut, TrainJobError, TrainJobFailed

USER, USAGE, INFRASTRUCTURE, TIMEOUT, NOT_FOUND, BUG = 1, 2, 3, 4, 5, 70
INTERRUPTED = 128 + signal.SIGINT
PIPE_CLOSED = 128 + signal.SIGPIPE
STILL_STOPPING = TIMEOUT

EXIT_CODES = """\
\b
Exit codes:
  0    success
  1    the training failed by itself
  2    usage, spec or configuration: a person has to change something
  3    infrastructure, preemption or quota: a retry may help
  4    a timeout expired; the job keeps running
  5    no such job or model, or the job was cancelled or deleted during the wait
  70   a bug in trainjob
  130  interrupted (143 by SIGTERM)

Without a cluster, TRAINJOB_BACKEND=local or --backend local runs jobs on this machine."""

_PERMANENT = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
)
"""Errors that a retry meets again: a path that does not exist, is of another kind, or may not be used."""


def exit_code(error: TrainJobError | OSError) -> int:
    """The exit code that tells a script who has to act next."""
    if isinstance(error, OSError):
        return USAGE if error.errno in _PERMANENT else INFRASTRUCTURE
    if isinstance(error, TimedOut) and not isinstance(error, Stuck):
        return TIMEOUT
    deleted = isinstance(error, TrainJobFailed) and error.diagnosis.category == "deleted"
    if deleted or isinstance(error, NotFound | ModelNotFound):
        return NOT_FOUND
    if error.retry in (RetryVerdict.USER, RetryVerdict.UNKNOWN):
        return USER
    return INFRASTRUCTURE if error.retry.retryable else USAGE
