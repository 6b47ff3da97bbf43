"""Every error that ``trainjob`` raises on purpose.

::

    TrainJobError
      x InvalidSpec                 what was asked for cannot be; lists every problem with its path
      x ConfigurationError          settings, credentials or an installed extra are missing or wrong
      x LaunchError                 the job could not be created
        + RuntimeNotFound
        + Rejected                  the API server or the machine refused the object
        + AlreadyExists             a job of that name is there (the launch flow resolves it by itself)
        + SpecMismatch              the same key was launched before with another spec
      x NotFound                    no such job
      x BackendUnavailable          an outage outlasted both of its budgets
      x TimedOut                    a budget of the waiter ran out; the job itself goes on
        + QueueTimeout
        + StartTimeout
        + RunTimeout
        + Stuck                     it would wait for something that only a person can change
      x TrainJobFailed              the job ended without success; carries the diagnosis
        + RankCrashed               a rank did, and what becomes of the job was not to be waited for: it goes on
      x DataError                   a dataset or model could not be moved or is not what it should be
        + SourceNotFound
        + ChecksumMismatch
        + CorruptData
        + OutOfSpace
        + UnsafePath
        + StoreUnavailable
      x RegistryError
        + RegistryUnavailable
        + RegistryConflict
        + ModelNotFound

Each error has a `retry` verdict: who has to act before another attempt can succeed. Orchestrators turn it into
their own retry rule (Airflow: ``AirflowFailException`` or a retry; KFP: next attempt or the same failure again). Only
what is certain to fail again is final.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainjob.masking import public
from trainjob.verdicts import RetryVerdict

if TYPE_CHECKING:
    from trainjob.diagnosis import Diagnosis


class TrainJobError(Exception):
    """Base of all errors of this package."""

    retry: RetryVerdict = RetryVerdict.CONFIGURATION

    def __str__(self) -> str:
        """The message without control sequences and secrets: it may quote a server, a log or a spec."""
        return public(super().__str__())


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a spec.

    Attributes:
        path: The field, as the author wrote it (``env.HF_TOKEN``, ``runtime_patches[0].manager``).
        message: What is wrong.
        instead: What to write instead; empty where there is nothing to say.
    """

    path: str
    message: str
    instead: str = ""

    def __str__(self) -> str:
        hint = f" ({self.instead})" if self.instead else ""
        return f"{self.path}: {self.message}{hint}" if self.path else f"{self.message}{hint}"


_SHOWN_PROBLEMS, _SHOWN_CHARACTERS = 100, 500
"""Of an invalid spec: what is wrong with it may be as large as the spec."""


class InvalidSpec(TrainJobError):
    """A spec that no cluster could run as meant. Lists its problems at once, the first 100 if there are more."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        more = len(problems) - _SHOWN_PROBLEMS
        self.problems = tuple(map(_shown, problems[:_SHOWN_PROBLEMS]))
        if more > 0:
            self.problems += (Problem("", f"and {more} more problems"),)
        if len(self.problems) == 1 and not self.problems[0].path:
            super().__init__(f"invalid TrainJob spec: {self.problems[0]}")
        else:
            super().__init__("invalid TrainJob spec:" + "".join(f"\n  - {problem}" for problem in self.problems))

    def __reduce__(self) -> tuple[type[InvalidSpec], tuple[tuple[Problem, ...]]]:
        return (type(self), (self.problems,))


def _shown(problem: Problem) -> Problem:
    """The problem without secrets, and with what is long cut in its middle."""
    problem = replace(problem, message=public(problem.message), instead=public(problem.instead))
    parts = {name: text for name, text in vars(problem).items() if len(text) > _SHOWN_CHARACTERS}
    half = _SHOWN_CHARACTERS // 2
    cut = {name: f"{text[:half]} … ({len(text):,} characters) … {text[-half:]}" for name, text in parts.items()}
    return replace(problem, **cut) if cut else problem


class ConfigurationError(TrainJobError):
    """Settings, credentials or an installed extra are missing or wrong."""


def missing(what: str, packages: str, extra: str) -> ConfigurationError:
    """The error for a package that is not installed, with the command that installs it.

    Args:
        what: What needs it.
        packages: The package, or several.
        extra: The extra of this package that brings it.
    """
    return ConfigurationError(
        f"{what} needs {packages}, not installed here: install trainjob[{extra}] (in a checkout of trainjob: "
        f"pip install -c constraints/main.txt '.[{extra}]'), or use an image that has it"
    )


class LaunchError(TrainJobError):
    """The job could not be created."""


class RuntimeNotFound(LaunchError):
    """The runtime that the spec names is not there."""


class Rejected(LaunchError):
    """The API server, an admission webhook or this machine refused the job."""


class AlreadyExists(LaunchError):
    """A job of that name exists or existed; a name is never used twice."""


class SpecMismatch(LaunchError):
    """The key was launched before with another spec, and that job is still the current one."""


class NotFound(TrainJobError):
    """There is no such job (any more)."""


class BackendUnavailable(TrainJobError):
    """The backend could not be reached for longer, and more often, than its two outage budgets allow."""

    retry = RetryVerdict.INFRASTRUCTURE


class TimedOut(TrainJobError):
    """A budget of the waiter ran out. The job is left as it is: cancelling it is the caller's decision."""

    retry = RetryVerdict.INFRASTRUCTURE


class QueueTimeout(TimedOut):
    """Not admitted within ``queue_timeout`` of its creation (or of being suspended again)."""

    retry = RetryVerdict.QUOTA


class StartTimeout(TimedOut):
    """Admitted, but no rank was running within ``start_timeout``."""


class RunTimeout(TimedOut):
    """Not finished within ``run_timeout`` of its admission."""

    retry = RetryVerdict.USER


class Stuck(TimedOut):
    """Something is in its way that will not go away by itself, and the waiter was asked to wait for no such thing."""

    retry = RetryVerdict.CONFIGURATION


class TrainJobFailed(TrainJobError):
    """The job ended without success.

    Attributes:
        diagnosis: Category, first failing rank, last lines of its log, advice and retry verdict.
    """

    def __init__(self, diagnosis: Diagnosis) -> None:
        self.diagnosis = diagnosis
        self.retry = diagnosis.retry
        super().__init__(diagnosis.text())

    def __reduce__(self) -> tuple[type[TrainJobFailed], tuple[Diagnosis]]:
        return (type(self), (self.diagnosis,))


class RankCrashed(TrainJobFailed):
    """A rank crashed, and the waiter was asked to wait no longer (``fail_on_first_crash``).

    The job goes on, and its runtime may start the rank again: what becomes of it is the caller's decision, see
    `trainjob.lifecycle.give_up`.
    """


class DataError(TrainJobError):
    """A dataset or model could not be moved, or is not what it should be."""


class SourceNotFound(DataError):
    """Nothing is at the source location, or nothing there matches."""


class ChecksumMismatch(DataError):
    """The bytes are not those that were promised."""


class CorruptData(DataError):
    """The source is truncated, half written, or not of the format that it should have."""


class OutOfSpace(DataError):
    """The target has no room left."""

    retry = RetryVerdict.INFRASTRUCTURE


class UnsafePath(DataError):
    """A name would be written outside its target."""


class StoreUnavailable(DataError):
    """The store could not be reached, or answered with errors for too long.

    Attributes:
        retry_after: Seconds after which the server asked to be tried again; None where it said nothing.
    """

    retry = RetryVerdict.INFRASTRUCTURE
    retry_after: float | None = None


class RegistryError(TrainJobError):
    """A model registry refused a request."""


class RegistryUnavailable(RegistryError):
    """The registry could not be reached, or its database is locked."""

    retry = RetryVerdict.INFRASTRUCTURE


class RegistryConflict(RegistryError):
    """The registry holds something else under the name or id that was to be written."""


class ModelNotFound(RegistryError):
    """No such model, version or alias."""
