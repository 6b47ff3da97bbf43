"""The parts of a report that are read from objects: the spec in short, the ranks, the Events."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainjob._backends.base import TrainJob
from trainjob._diagnosis import blockers
from trainjob._support.control_characters import one_line
from trainjob._support.display import short_text
from trainjob._support.kube_objects import mapping, mappings, parse_time, rank_of, training_container
from trainjob._support.masking import MASK, names_a_secret, public
from trainjob._support.numbers import count_of
from trainjob.status import QUEUE_LABEL

_COMMAND = 300  # characters of a command, which may embed the source of a function
_EVENTS = 100  # latest Events


@dataclass(frozen=True)
class Rank:
    """A pod of the job.

    Attributes:
        rank: As ``node-1``.
        pod: Name of the pod.
        node: Its node; empty if it is not scheduled.
        state: State of its container or the reason why it does not run: ``Running``, ``CrashLoopBackOff``,
            ``Unschedulable``.
        exit_code: Exit code of the latest finished run of the container.
        restarts: Number of restarts of the container.
        started: First start of the container, if known.
        finished: End of its latest run.
    """

    rank: str
    pod: str
    node: str = ""
    state: str = ""
    exit_code: int | None = None
    restarts: int = 0
    started: datetime | None = None
    finished: datetime | None = None

    @property
    def bad(self) -> bool:
        """Whether the rank has a problem."""
        return bool(self.exit_code) or self.state not in ("Running", "Completed", "ContainerCreating", "Pending")


@dataclass(frozen=True)
class Event:
    """An Event of the job or of a related object.

    Attributes:
        time: Latest occurrence.
        kind: ``Normal`` or ``Warning``.
        reason: In CamelCase.
        about: The object, as ``Pod x``.
        message: The reason in words.
        count: Number of occurrences.
    """

    time: datetime | None
    kind: str
    reason: str
    about: str
    message: str
    count: int = 1


def spec_in_short(trainjob: TrainJob) -> Iterator[tuple[str, str]]:
    """The job's spec in short, with names of environment variables, but without their values."""
    spec, labels = mapping(trainjob, "spec"), mapping(trainjob, "metadata", "labels")
    trainer, runtime = mapping(spec, "trainer"), mapping(spec, "runtimeRef")
    kind = short_text(runtime.get("kind") or "ClusterTrainingRuntime")
    requested = mapping(trainer, "resourcesPerNode")
    amounts = mapping(requested, "limits") or mapping(requested, "requests")
    found = {
        "runtime": short_text(runtime.get("name")) + ("" if kind == "ClusterTrainingRuntime" else f" ({kind})"),
        "nodes": short_text(trainer.get("numNodes")),
        "processes": short_text(trainer.get("numProcPerNode")),
        "image": short_text(trainer.get("image")),
        "command": one_line(_command(trainer.get("command")), _COMMAND),
        "args": one_line(_command(trainer.get("args")), _COMMAND),
        "resources": ", ".join(f"{name} {short_text(amount)}" for name, amount in amounts.items()),
        "env": ", ".join(short_text(variable.get("name")) for variable in mappings(trainer, "env")),
        "dataset": short_text(mapping(spec, "initializer", "dataset").get("storageUri")),
        "model": short_text(mapping(spec, "initializer", "model").get("storageUri")),
        "patches": ", ".join(short_text(patch.get("manager")) for patch in mappings(spec, "runtimePatches")),
        "queue": short_text(labels.get(QUEUE_LABEL)),
        "deadline": f"{short_text(limit)} s" if (limit := spec.get("activeDeadlineSeconds")) else "",
    }
    return ((name, text) for name, text in found.items() if text)


def _command(words: object) -> str:
    """A command on one line, without the values of secret options."""
    shown, option = [], ""
    for word in words if isinstance(words, list | tuple) else ():
        text = str(word)
        name, equals, value = text.partition("=") if text.startswith("--") else (option, "", text)
        if name and names_a_secret(name.lstrip("-"), value):
            text = f"{name}={MASK}" if equals else MASK
        option = text if text.startswith("--") and not equals else ""
        shown.append(text if text.endswith(MASK) else shlex.quote(text))
    return public(" ".join(shown))


def ranks_of(pods: Sequence[Mapping[str, Any]]) -> list[Rank]:
    """The ranks of the pods, ordered by role and index."""
    return sorted((rank_from(pod) for pod in pods), key=_order)


def rank_from(pod: Mapping[str, Any]) -> Rank:
    """The rank of a pod, with the state of its training container."""
    trains = training_container(pod)
    found = [each for each in mappings(pod, "status", "containerStatuses") if each.get("name") == trains]
    status = found[0] if found else {}
    now, last = mapping(status, "state"), mapping(status, "lastState")
    ended = mapping(now, "terminated") or mapping(last, "terminated")
    starts = [mapping(state, kind).get("startedAt") for state in (last, now) for kind in ("running", "terminated")]
    code, restarts = ended.get("exitCode"), status.get("restartCount")
    return Rank(
        rank_of(pod),
        short_text(mapping(pod, "metadata").get("name")),
        short_text(mapping(pod, "spec").get("nodeName")),
        _state(pod, now),
        exit_code=code if isinstance(code, int) else None,
        restarts=restarts if isinstance(restarts, int) else 0,
        started=min((time for time in map(parse_time, starts) if time is not None), default=None),
        finished=parse_time(ended.get("finishedAt")),
    )


def _state(pod: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    phase = short_text(mapping(pod, "status").get("phase"))
    unscheduled = [
        short_text(each.get("reason"))
        for each in mappings(pod, "status", "conditions")
        if each.get("type") == "PodScheduled" and each.get("status") == "False"
    ]
    terminated = mapping(now, "terminated")
    return (
        short_text(mapping(pod, "status").get("reason"))
        or short_text(mapping(now, "waiting").get("reason"))
        or (short_text(terminated.get("reason")) or ("Error" if terminated.get("exitCode") else "Completed"))
        * bool(terminated)
        or ("Running" if "running" in now else "")
        or next(iter(unscheduled), "")
        or phase
    )


def _order(rank: Rank) -> tuple[str, int, str]:
    role, _, index = rank.rank.rpartition("-")
    return (role, count_of(index) or 0, rank.pod)


def events_of(events: Sequence[Mapping[str, Any]]) -> tuple[Event, ...]:
    """The latest Events, the latest last."""
    made = []
    for event in sorted(events, key=blockers.event_time)[-_EVENTS:]:
        about = mapping(event, "involvedObject") or mapping(event, "regarding")
        count = event.get("count") or mapping(event, "series").get("count")
        made.append(
            Event(
                parse_time(blockers.event_time(event)),
                short_text(event.get("type")) or "Normal",
                short_text(event.get("reason")),
                f"{short_text(about.get('kind'))} {short_text(about.get('name'))}".strip(),
                short_text(" ".join(str(event.get("message") or event.get("note") or "").split())),
                count if isinstance(count, int) else 1,
            )
        )
    return tuple(made)
