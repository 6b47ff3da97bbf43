"""The job and the state that `TrainJobSensor` waits for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainjob import Backend, Observation
    from trainjob.integration import TrainJob


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


def wanted(
    name: str | None, labels: Mapping[str, str] | None, phases: str | Sequence[str], condition: str | None
) -> Wanted:
    """Build what a sensor waits for from its rendered fields.

    Raises:
        ConfigurationError: The name is not a valid job name.
        ValueError: Not exactly one of name and labels is set, or labels, phases or condition are invalid.
    """
    from trainjob import Phase
    from trainjob.integration import metadata_problems, names

    if bool(name) == bool(labels):
        raise ValueError("set exactly one of name and labels")
    if name:
        names.job(name)
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
    return Wanted(name or "", dict(labels) if labels else None, tuple(named), condition or "")
