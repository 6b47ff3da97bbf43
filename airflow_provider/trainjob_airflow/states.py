"""What is waited for of a job that somebody else launched: which job, and in which state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainjob import Backend, Observation
    from trainjob.backends.base import TrainJob


@dataclass(frozen=True)
class Wanted:
    """A job in a state.

    Attributes:
        name: Of the job; empty where `labels` say which.
        labels: All of which the job has; of several jobs the youngest is meant.
        phases: Any of which it has to be in, or to have passed. Not with `condition`.
        condition: Type of a condition that has to be true, as the controllers write it: ``Suspended``.
    """

    name: str = ""
    labels: Mapping[str, str] | None = None
    phases: tuple[str, ...] = ("Complete",)
    condition: str = ""

    def __str__(self) -> str:
        return self.name or "with " + ", ".join(f"{name}={value}" for name, value in (self.labels or {}).items())

    @property
    def state(self) -> str:
        """In words."""
        return f"have condition {self.condition}" if self.condition else f"be {' or '.join(self.phases)}"

    async def find(self, backend: Backend, namespace: str) -> TrainJob | None:
        """The job as it stands, if there is one."""
        if self.name:
            return await backend.get(namespace, self.name)
        found = await backend.find(namespace, self.labels or {})
        return max(found, key=lambda job: str(job["metadata"].get("creationTimestamp")), default=None)

    def reached(self, trainjob: Mapping[str, Any] | None, observation: Observation) -> bool:
        """Whether it is so, or was: a short job can pass through Running between two looks."""
        if self.condition:
            conditions = ((trainjob or {}).get("status") or {}).get("conditions") or []
            return any(each.get("type") == self.condition and each.get("status") == "True" for each in conditions)
        if observation.phase.value in self.phases:
            return True
        return "Running" in self.phases and (observation.has_run or observation.phase.value == "Complete")


def wanted(
    name: str | None, labels: Mapping[str, str] | None, phases: str | Sequence[str], condition: str | None
) -> Wanted:
    """What is waited for, from fields that are rendered.

    Raises:
        ConfigurationError, ValueError: they say nothing, or too much, or a name is none.
    """
    from trainjob import names
    from trainjob.spec.checks import metadata_problems
    from trainjob.status import Phase

    if bool(name) == bool(labels):
        raise ValueError("say which job by name or by labels: one of the two")
    if name:
        names.job(name)
    if labels and not isinstance(labels, Mapping):
        raise ValueError(f"labels are a mapping of names and values, not {labels!r}")
    for problem in metadata_problems(labels or {}, {}, own=True):
        raise ValueError(str(problem))
    named = [phases] if isinstance(phases, str) else list(phases) if isinstance(phases, Collection) else []
    known = [phase.value for phase in Phase]
    if not named and not condition:
        raise ValueError(f"phases is one of {', '.join(known)}, or a list of such, not {phases!r}")
    if wrong := [phase for phase in named if phase not in known]:
        raise ValueError(f"there is no phase {wrong[0]!r}; there are: {', '.join(known)}")
    return Wanted(name or "", dict(labels) if labels else None, tuple(named), condition or "")
