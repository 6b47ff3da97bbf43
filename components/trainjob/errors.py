"""All errors that ``trainjob`` raises, and the values that they carry: `RetryVerdict`, `Category`, `Diagnosis`.

Each error has a `retry` verdict: who has to act before another attempt can succeed. Orchestrators map it to their own
retry rule (Airflow: ``AirflowFailException`` or a retry; KFP: next attempt or the same failure again). Only an error
that is certain to repeat is final.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from trainjob._support.masking import public
from trainjob.status import Phase

if TYPE_CHECKING:
    from trainjob.goodput import Goodput

CUT = " characters more)"
"""End of a line that is shown in part."""


class RetryVerdict(StrEnum):
    """Whether another attempt of the same spec can be expected to end differently."""

    USER = "user"
    """The training code failed and would fail again: a module is missing, an argument is unknown."""
    UNKNOWN = "unknown"
    """The training failed, and the failure may not repeat: the orchestrator's own retries decide."""
    INFRASTRUCTURE = "infrastructure"
    """A node, network or service failed; another attempt may succeed."""
    PREEMPTED = "preempted"
    """The job was preempted; another attempt can succeed when capacity is available."""
    QUOTA = "quota"
    """The request exceeds the quota; wait, or request less."""
    CONFIGURATION = "configuration"
    """The spec, the permissions or the cluster's configuration is wrong. It is permanent: a person has to change it."""

    @property
    def retryable(self) -> bool:
        """Whether an automatic retry of the unchanged spec may succeed."""
        return self not in (RetryVerdict.USER, RetryVerdict.CONFIGURATION)

    def retried(self, *, user_errors: bool) -> bool:
        """Whether an orchestrator retries.

        Args:
            user_errors: Retry also after a failure of the training code that may not repeat.
        """
        return self.retryable and (user_errors or self is not RetryVerdict.UNKNOWN)

    @property
    def words(self) -> str:
        """Whether a retry makes sense, and why."""
        return _WORDS[self]


_WORDS = {
    RetryVerdict.USER: "not retried: the same code would fail again",
    RetryVerdict.UNKNOWN: "can be retried: the failure may not repeat",
    RetryVerdict.INFRASTRUCTURE: "can be retried: the cause is outside the job's own code",
    RetryVerdict.PREEMPTED: "can be retried once capacity is available",
    RetryVerdict.QUOTA: "can be retried once quota is available",
    RetryVerdict.CONFIGURATION: "not retried: the configuration must be changed first",
}


class Category(StrEnum):
    """The kind of a failure. The values are a stable contract."""

    USER_CODE = "user code"
    OUT_OF_MEMORY = "out of memory"
    IMAGE = "image"
    SCHEDULING = "scheduling"
    QUOTA = "quota"
    PREEMPTED = "preempted"
    NODE_LOST = "node lost"
    ADMISSION = "admission"
    CONFIGURATION = "configuration"
    DEADLINE = "deadline"
    DELETED = "deleted"
    OUTAGE = "outage"
    """A service that the job needs did not answer, or a disk had an error."""
    HANG = "hang"
    """No rank made progress for `stall_timeout`."""
    UNKNOWN = "unknown"
    NONE = "none"
    """No failure: the job is running or complete."""


@dataclass(frozen=True)
class Diagnosis:
    """Why a job failed, or what blocks it.

    Attributes:
        category: Kind of failure.
        retry: Who has to act before another attempt can succeed.
        summary: One line.
        rank: The rank that is the root cause, as ``node-1``; empty if no rank is.
        exit_code: Its exit code; None if there is none. A signal N counts as 128 + N.
        log: The last lines of its log; for an earlier error, the lines up to that error, too.
        job: ``namespace/name``.
        advice: What to do, for people.
        unseen: Evidence that could not be read.
        phase: Phase of the job; a running job can be diagnosed, too.
        pod: Name of the rank's pod.
        node: Name of the Kubernetes node that the rank ran on; empty if it is unknown.
        node_memory: More memory in `resources_per_node` would help.
        change: What the next attempt changes, by `on_retry` of the spec; empty if nothing.
    """

    category: Category
    retry: RetryVerdict
    summary: str
    rank: str = ""
    exit_code: int | None = None
    log: tuple[str, ...] = ()
    advice: str = ""
    job: str = ""
    unseen: tuple[str, ...] = ()
    phase: Phase = Phase.FAILED
    pod: str = ""
    node: str = ""
    node_memory: bool = False
    change: str = ""

    @property
    def failed(self) -> bool:
        """Whether the job ended without success."""
        return self.phase in (Phase.FAILED, Phase.CANCELLED, Phase.DELETED)

    def text(self) -> str:
        """The diagnosis as text, for a task log or a terminal."""
        ended = "failed" if self.failed and self.phase is not Phase.CANCELLED else f"is {self.phase}"
        lines = [f"TrainJob {self.job} {ended}: {self.summary}"]
        if self.log:
            lines.append(self.log_heading)
            lines += [f"  | {line}" for line in self.log]
            if any(line.endswith(CUT) for line in self.log):
                lines.append(self.whole_log)
        if self.advice:
            lines.append(f"what to do: {self.advice}")
        if self.category is not Category.NONE:
            lines.append(f"category: {self.category}; {self.outlook}")
        lines += [f"not seen: {what}" for what in self.unseen]
        return "\n".join(lines)

    @property
    def whole_log(self) -> str:
        """Where complete lines can be read."""
        rank = f" --rank {self.rank}" if self.rank else ""
        return f"some lines are cut; for complete lines, while the pods exist: trainjob logs {self.job}{rank}"

    @property
    def log_heading(self) -> str:
        """The line above `log`."""
        return "stacks:" if self.category is Category.HANG else f"last lines of {self.rank or 'its log'}:"

    @property
    def outlook(self) -> str:
        """Whether a retry makes sense, and why."""
        if self.change:
            return f"can be retried: the next attempt changes {self.change}"
        return self.retry.words

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis as JSON values. A job that has not failed has no ``retry``."""
        return asdict(self) | ({"retry": None} if self.category is Category.NONE else {})


class TrainJobError(Exception):
    """Base of all errors of this package."""

    retry: RetryVerdict = RetryVerdict.CONFIGURATION

    def __str__(self) -> str:
        """The message without control sequences and secrets, since it may quote a server, a log or a spec."""
        return public(super().__str__())


@dataclass(frozen=True)
class Problem:
    """One problem of a spec.

    Attributes:
        path: The field, as the author wrote it (``env.HF_TOKEN``, ``runtime_patches[0].manager``).
        message: What is wrong.
        instead: What to write instead; may be empty.
    """

    path: str
    message: str
    instead: str = ""

    def __str__(self) -> str:
        hint = f" ({self.instead})" if self.instead else ""
        return f"{self.path}: {self.message}{hint}" if self.path else f"{self.message}{hint}"


_SHOWN_PROBLEMS, _SHOWN_CHARACTERS = 100, 500
"""Limits of an error, since the problems of a spec may be as large as the spec."""


class InvalidSpec(TrainJobError):
    """A spec is invalid. Lists all problems at once, at most 100."""

    _what = "TrainJob spec"

    def __init__(self, problems: Sequence[Problem], left_out: int = 0) -> None:
        self._listed = tuple(map(_shown, problems[:_SHOWN_PROBLEMS]))
        self._left_out = more = left_out + max(0, len(problems) - _SHOWN_PROBLEMS)
        self.problems = self._listed
        if more:
            self.problems += (Problem("", f"and {more} more problem{'s' if more > 1 else ''}"),)
        if len(self.problems) == 1 and not self.problems[0].path:
            super().__init__(f"invalid {self._what}: {self.problems[0]}")
        else:
            super().__init__(f"invalid {self._what}:" + "".join(f"\n  - {problem}" for problem in self.problems))

    def __reduce__(self) -> tuple[type[InvalidSpec], tuple[tuple[Problem, ...], int]]:
        return (type(self), (self._listed, self._left_out))


class InvalidGate(InvalidSpec):
    """The rules of a gate are invalid. Lists all problems at once."""

    _what = "gate"


class InvalidStudy(InvalidSpec):
    """A study is invalid, or was changed since it began. Lists all problems at once."""

    _what = "study"


def _shown(problem: Problem) -> Problem:
    """The problem without secrets; long text is cut in its middle."""
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
        what: The feature that needs the package.
        packages: The package, or several.
        extra: The extra of trainjob that installs it.
    """
    return ConfigurationError(
        f"{what} needs {packages}, not installed here: pip install 'trainjob[{extra}]' (in a checkout of trainjob: "
        f"pip install -c constraints/main.txt '.[{extra}]'), or use an image that has it"
    )


class LaunchError(TrainJobError):
    """The job could not be created."""


class RuntimeNotFound(LaunchError):
    """The runtime that the spec names does not exist."""


class Rejected(LaunchError):
    """The API server, an admission webhook or this machine refused the job, or a request about one."""


class AlreadyExists(LaunchError):
    """A job of that name exists or existed. A name is never used twice."""


class SpecMismatch(LaunchError):
    """The key was launched before with another spec, and that job is still the current one."""


class NotFound(TrainJobError):
    """The job does not exist, or not anymore, or it was changed since the version that a request names."""


class RanksRemain(TrainJobError):
    """Ranks of an earlier attempt of the key run, and the caller of `trainjob.launch` does not wait for them.

    Attributes:
        seconds: How long a launch would wait for them at most: their grace period and 30 s.
        began: What the next call of `trainjob.launch` gets as ``began``; None if cancels cannot be read.
    """

    retry = RetryVerdict.INFRASTRUCTURE

    def __init__(self, message: str = "", seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.began: int | None = None
        super().__init__(message)


class BackendUnavailable(TrainJobError):
    """The backend was unreachable for longer, and more often, than its two outage limits allow."""

    retry = RetryVerdict.INFRASTRUCTURE


class TimedOut(TrainJobError):
    """A timeout of the waiter expired. The job keeps running: only the caller may cancel it.

    Attributes:
        goodput: How the time of the attempt was spent until then, as in `trainjob.TrainJobResult`; empty if it is
            unknown.
        spent: The same with its segments, for `trainjob._jobs.telemetry`; None if it was not measured.
    """

    retry = RetryVerdict.INFRASTRUCTURE
    spent: Goodput | None = None

    def __init__(self, message: str = "") -> None:
        self.goodput: Mapping[str, Any] = {}
        super().__init__(message)


class QueueTimeout(TimedOut):
    """The job was not admitted within ``queue_timeout`` after its creation, or after it was suspended again."""

    retry = RetryVerdict.QUOTA


class StartTimeout(TimedOut):
    """The job was admitted, but no rank was running within ``start_timeout``."""


class RunTimeout(TimedOut):
    """The job did not finish within ``run_timeout`` after its admission."""

    retry = RetryVerdict.USER


class Stuck(TimedOut):
    """The job is blocked by something that cannot resolve itself, and ``fail_fast`` is set."""

    retry = RetryVerdict.CONFIGURATION


class TrainJobFailed(TrainJobError):
    """The job ended without success.

    Attributes:
        diagnosis: Category, first failing rank, last lines of its log, advice and retry verdict.
        goodput: How the time of the attempt was spent, as in `trainjob.TrainJobResult`; empty if it is unknown.
        spent: The same with its segments, if a wait has measured it before the job ended, else None; for
            `trainjob._jobs.telemetry`.
    """

    spent: Goodput | None = None

    def __init__(self, diagnosis: Diagnosis, goodput: Mapping[str, Any] | None = None) -> None:
        self.diagnosis = diagnosis
        self.goodput = goodput or {}
        self.retry = diagnosis.retry
        super().__init__(diagnosis.text())

    def __reduce__(self) -> tuple[type[TrainJobFailed], tuple[Any, ...]]:
        return (type(self), (self.diagnosis, self.goodput))


class RankCrashed(TrainJobFailed):
    """A rank crashed, and ``fail_on_first_crash`` is set.

    The job keeps running, and its runtime may restart the rank. The caller decides about the job, see
    `trainjob._jobs.cancellation.give_up`.
    """


class JobHung(RankCrashed):
    """No rank made progress for ``stall_timeout``.

    The job keeps running, and the caller decides about it as after the crash of a rank.
    """


class DataError(TrainJobError):
    """A dataset or model could not be transferred, or its content is wrong."""


class SourceNotFound(DataError):
    """The source location is empty, or nothing there matches."""


class ChecksumMismatch(DataError):
    """The content does not match its checksum."""


class CorruptData(DataError):
    """The source is truncated, incomplete, or has another format than expected."""


class OutOfSpace(DataError):
    """The target has no space left."""

    retry = RetryVerdict.INFRASTRUCTURE


class UnsafePath(DataError):
    """A path points outside its target."""


class StoreUnavailable(DataError):
    """The store was unreachable, or responded with errors, for too long.

    Attributes:
        retry_after: The server's Retry-After in seconds; None if the server sent none.
    """

    retry = RetryVerdict.INFRASTRUCTURE
    retry_after: float | None = None


class StudyFailed(TrainJobError):
    """A hyperparameter search has ended, and none of its trials has completed."""

    retry = RetryVerdict.USER


class RegistryError(TrainJobError):
    """A model registry refused a request."""


class RegistryUnavailable(RegistryError):
    """The registry was unreachable, or its database is locked."""

    retry = RetryVerdict.INFRASTRUCTURE


class RegistryConflict(RegistryError):
    """The name or id to write is used for other content in the registry."""


class ModelNotFound(RegistryError):
    """The model, version or alias does not exist."""
