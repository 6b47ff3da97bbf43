"""The job and the state that `TrainJobSensor` waits for, and what it does as a waiter."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainjob import Backend, Diagnosis, JobRef, Observation
    from trainjob._backends.base import TrainJob

_RECORDS = 3  # of a wait by short processes, in the time after which an unattended job is ended
_RECORD_SECONDS = 2.0  # until the record is written


@dataclass(frozen=True)
class Wanted:
    """A job in a state.

    Attributes:
        name: Name of the job; empty if `labels` select it.
        labels: Labels that the job has. If several jobs match, the newest is used.
        phases: Phases of which the job must reach one. Ignored if `condition` is set.
        condition: Type of a status condition that must be true, such as ``Suspended``.
    """

    name: str = ""
    labels: Mapping[str, str] | None = None
    phases: tuple[str, ...] = ("Complete",)
    condition: str = ""

    def __str__(self) -> str:
        return self.name or "with " + ", ".join(f"{name}={value}" for name, value in (self.labels or {}).items())

    @property
    def state(self) -> str:
        """The state in words, after "it can no longer"."""
        return f"have condition {self.condition}" if self.condition else f"be {' or '.join(self.phases)}"

    @property
    def is_end(self) -> bool:
        """Whether only the end of a job is waited for, which a job that hangs does not reach."""
        from trainjob import Phase

        return not self.condition and all(Phase(phase).terminal for phase in self.phases)

    @property
    def is_suspension(self) -> bool:
        """Whether a suspension is waited for: then the job need not run, and nothing resumes it."""
        return self.condition == "Suspended" or (not self.condition and "Suspended" in self.phases)

    async def find(self, backend: Backend, namespace: str) -> TrainJob | None:
        """The current job; None if none matches."""
        if self.name:
            return await backend.get(namespace, self.name)
        found = await backend.find(namespace, self.labels or {})
        return max(found, key=lambda job: str(job["metadata"].get("creationTimestamp")), default=None)

    def reached(self, trainjob: Mapping[str, Any] | None, observation: Observation) -> bool:
        """Whether the job is or was in the state: a short job can pass through Running between two polls."""
        if self.condition:
            conditions = ((trainjob or {}).get("status") or {}).get("conditions") or []
            return any(each.get("type") == self.condition and each.get("status") == "True" for each in conditions)
        if observation.phase.value in self.phases:
            return True
        return "Running" in self.phases and (observation.has_run or observation.phase.value == "Complete")


class Wait:
    """The wait for one job: what `follow` does (see `trainjob._jobs.following`), for a state that need not be its end.

    While the job may run, this process counts as one that waits for it, so that it is not unattended. A suspension that
    is older than the latest launch, or that happened because nothing waited, is undone. A wait for a suspension does
    neither.

    Args:
        backend: Backend of the job.
        ref: The job.
        sought: What is waited for.
        lasts: Whether this process waits for longer than a moment; otherwise see `record`.
    """

    def __init__(self, backend: Backend, ref: JobRef, sought: Wanted, *, lasts: bool = True) -> None:
        self.ref = ref
        self._lasts = lasts
        self._backend = backend
        self._sought = sought
        self._trainjob: TrainJob | None = None
        self._latest: Observation | None = None
        self._attended = False
        self._resumed = ""

    async def observe(self, trainjob: TrainJob | None, blocker: Any = None) -> tuple[Observation, str]:
        """The observation of the job as it is now, and a notice for people, which may be empty.

        Args:
            trainjob: The job; None if it is gone.
            blocker: What keeps it from running, if that is known.

        Raises:
            JobReplaced: The job is gone or was given up, and another attempt of its key counts.
            TrainJobFailed: Another process has given up the job, or its end is that of another job.
        """
        from trainjob._jobs.successors import (
            check_given_up,
            check_verdict,
            last_observation,
            resume_if_stale,
        )
        from trainjob._manifest.unattended import policy_of
        from trainjob.status import observe

        if self._sought.is_suspension:
            self._latest = observe(trainjob, self._latest, blocker)
            return self._latest, ""
        notice = ""
        if trainjob is None:
            self._latest = await last_observation(self._backend, self.ref, self._latest, self._trainjob)
        else:
            self._trainjob = trainjob
            await check_given_up(self._backend, self.ref, trainjob)
            if self._lasts and policy_of(trainjob) is not None and not observe(trainjob).phase.terminal:
                self._attend()
            before, self._resumed = self._resumed, await resume_if_stale(self._backend, self.ref, trainjob)
            notice = self._resumed if self._resumed != before else ""
        self._latest = observe(trainjob, self._latest, blocker)
        await check_verdict(self._backend, self.ref, self._latest)
        return self._latest, notice

    async def record(self) -> None:
        """Record that a process has waited for the job, if the latest record is old: each is a separate object.

        For a sensor whose process ends after each look at the job.
        """
        import anyio

        from trainjob._manifest.unattended import policy_of, unattended_for

        trainjob, ended = self._trainjob, self._latest is not None and self._latest.phase.terminal
        if trainjob is None or ended or (policy := policy_of(trainjob)) is None:
            return
        if (cluster := self._backend.cluster) is not None:
            waiters = await cluster.waiters(self.ref.namespace)
            times = [waiter.jobs[self.ref.uid] for waiter in waiters if self.ref.uid in waiter.jobs]
            if unattended_for(trainjob, max(times, default=None), cluster.now()) < policy.after / _RECORDS:
                return
        self._attend()
        await anyio.sleep(_RECORD_SECONDS)
        self.leave()

    def _attend(self) -> None:
        if not self._attended:
            self._attended = True
            self._backend.attend(self.ref)

    def leave(self) -> None:
        """End the wait."""
        if self._attended:
            self._attended = False
            self._backend.leave(self.ref, ended=self._latest is not None and self._latest.phase.terminal)


async def diagnosis_of_end(backend: Backend, ref: JobRef, final: Observation | None) -> Diagnosis | None:
    """Why a job has failed; None if it has not, or cannot be read any more.

    Args:
        backend: Backend of the job.
        ref: The job.
        final: Its last observation.
    """
    from trainjob import Phase, TrainJobError
    from trainjob._diagnosis import diagnosis_of

    if final is None or final.phase is not Phase.FAILED:
        return None
    with suppress(TrainJobError):
        return replace(diagnosis_of(await backend.evidence(ref), final), job=str(ref))
    return None


def wanted(
    job: str | None, labels: Mapping[str, str] | None, phases: str | Sequence[str], condition: str | None
) -> Wanted:
    """Build what a sensor waits for from its rendered fields.

    Raises:
        ConfigurationError: The name is not a valid job name.
        ValueError: Not exactly one of job and labels is set, or labels, phases or condition are invalid.
    """
    from trainjob import Phase, names
    from trainjob._spec.checks import metadata_problems

    if bool(job) == bool(labels):
        raise ValueError("set exactly one of job and labels")
    if job:
        names.job(job)
    if labels and not isinstance(labels, Mapping):
        raise ValueError(f"labels must be a mapping of strings to strings, not {labels!r}")
    for problem in metadata_problems(labels or {}, {}, own=True):
        raise ValueError(str(problem))
    named = [phases] if isinstance(phases, str) else list(phases) if isinstance(phases, Collection) else []
    known = [phase.value for phase in Phase]
    if not named and not condition:
        raise ValueError(f"phases must be one of {', '.join(known)}, or a list of them, not {phases!r}")
    if wrong := [phase for phase in named if phase not in known]:
        raise ValueError(f"phases: {wrong[0]!r} is not a phase; use {', '.join(known)}")
    return Wanted(job or "", dict(labels) if labels else None, tuple(named), condition or "")
