"""Errors that the programs of this package write to their termination message, for the diagnosis of the job.

::

    {"trainjob": 1, "error": {"type": "StoreUnavailable", "retry": "infrastructure", "message": "s3://data: ..."}}
"""

from __future__ import annotations

from dataclasses import dataclass

from trainjob._diagnosis.meaning import Meaning
from trainjob._support.foreign import Unreadable, mapping_of
from trainjob._support.kube_objects import mapping
from trainjob.errors import Category, RetryVerdict
from trainjob.progress.message import MAX_BYTES, VERSION, clean, encode, header

_BEGIN = '{"trainjob":'
_CHARACTERS = 1000  # of a message

_OUTAGE = "check whether the store or registry named in the message is reachable and has free space"
_BUG = "read the log of the step; if the error repeats, report it to the trainjob project"
_CHANGE = "fix the location, name, key or permission that the message names"


@dataclass(frozen=True)
class Verdict:
    """A failure that a program reported.

    Attributes:
        message: The error.
        meaning: Category, retry verdict and advice.
    """

    message: str
    meaning: Meaning


def message_of(error: Exception) -> bytes:
    """The termination message of a program that fails with this error."""
    retry = getattr(error, "retry", None)  # of a TrainJobError, whose module this one does not import: no circle
    if isinstance(retry, RetryVerdict):
        message = _line(str(error))
    else:
        retry, message = RetryVerdict.UNKNOWN, _line(f"{type(error).__name__}: {error}")
    while True:
        text = encode({**header(), "error": {"type": type(error).__name__, "retry": str(retry), "message": message}})
        if len(text) <= MAX_BYTES:
            return text
        message = message[: len(message) // 2]


def problem_of(message: str, rank: str) -> str:
    """Why a termination message in this format exceeds a limit; empty if it does not, or has another format."""
    try:
        if message.startswith(_BEGIN):
            mapping_of(message, f"the termination message of {rank}")
    except Unreadable as error:  # without a limit it is a message whose writer was killed: `trainjob.progress` reads it
        return str(error) if error.limit else ""
    return ""


def verdict_of(message: str) -> Verdict | None:
    """The verdict in a termination message; None if the message has none."""
    if not message.startswith(_BEGIN):
        return None
    try:
        given = mapping_of(message, "a termination message")
        verdict = RetryVerdict(str(mapping(given, "error").get("retry")))
    except ValueError:
        return None
    report = mapping(given, "error")
    if given["trainjob"] != VERSION:
        return None
    if verdict is RetryVerdict.UNKNOWN:
        meaning = Meaning(Category.UNKNOWN, verdict, _BUG)
    elif verdict.retryable:
        meaning = Meaning(Category.OUTAGE, verdict, _OUTAGE)
    else:
        meaning = Meaning(Category.CONFIGURATION, verdict, _CHANGE)
    return Verdict(_line(str(report.get("message") or "")), meaning)


def _line(text: str) -> str:
    return " ".join(str(clean(text)).split())[:_CHARACTERS]
