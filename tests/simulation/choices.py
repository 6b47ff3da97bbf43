"""Draws the next action of a random schedule, by weights: mostly progress, sometimes a fault or a person."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.fakes.kube.objects import has_condition, in_queue, is_active, is_deleting, is_ended, is_suspended
from tests.simulation.processes import LAUNCHERS
from tests.simulation.settings import LAUNCHERS as LAUNCHERS_OF, short_name
from tests.simulation.transport import Sent
from tests.simulation.world import World

Weighted = tuple[float, str]

_MOST_PROCESSES = 10
_MOST_LIVING = 4

# Mode -> weight for a request that reads, and for one that changes something.
_FAULTS = {
    "killbefore": (0.3, 0.5),
    "killafter": (0.2, 1.0),
    "killlate": (0.0, 0.4),
    "lost": (0.3, 0.3),
    "noreply": (0.0, 0.8),
    "late": (0.0, 0.8),
    "slow": (0.0, 0.3),
    "repeat": (0.0, 0.3),
    "503": (0.2, 0.2),
}


@dataclass
class Budget:
    """How much may still happen in a schedule.

    Attributes:
        faults: Kills, lost, late and repeated requests, broken watches, compactions, quotas.
        people: Changes by people with kubectl.
        outages: Times at which webhooks fail or the runtime is gone.
    """

    faults: int = 3
    people: int = 2
    outages: int = 2


class Chooser:
    """Draws the actions of one schedule.

    Args:
        world: The world.
        numbers: The random numbers of the schedule.
    """

    def __init__(self, world: World, numbers: random.Random) -> None:
        self._world = world
        self._numbers = numbers
        self._budget = Budget()

    def draw(self) -> str:
        """The next action."""
        options = [*self._progress(), *self._starts(), *self._jobs(), *self._people()]
        if self._budget.faults > 0:
            options += [*self._faults()]
        if self._world.mix == "outages":
            options += [*self._outages()]
        (text,) = self._numbers.choices([text for _, text in options], [weight for weight, _ in options])
        self._spend(text.split())
        return text

    def _spend(self, words: list[str]) -> None:
        word = words[0]
        if word in ("kill", "cut", "compact", "quota") or (word == "do" and words[2] != "ok"):
            self._budget.faults -= 1
        elif word in ("delete", "suspend", "resume"):
            self._budget.people -= 1
        elif (word == "webhooks" and words[1] != "answer") or words == ["runtime", "off"]:
            self._budget.outages -= 1

    def _requests(self) -> Iterator[Sent]:
        """The first request of each kind of each process."""
        seen: set[tuple[str, str]] = set()
        for sent in self._world.pending:
            if (known := (sent.process.name, sent.kind)) not in seen:
                seen.add(known)
                yield sent

    def _progress(self) -> Iterator[Weighted]:
        world = self._world
        for sent in self._requests():
            yield 30, f"do {sent.process.name} ok {sent.kind}"
        for name in dict.fromkeys(sent.process.name for sent in world.pending):
            yield 8, f"run {name}"
        for watch in {(each.process.name, each.plural): each for each in world.watches if each.is_behind}.values():
            yield 12, f"watch {watch.process.name} {watch.plural}"
        if world.late:
            yield 2, "late"
        if world.due() is not None:
            yield 6, "tick"
        yield 1, "tick 31"
        yield 0.4, "tick 3700"

    def _starts(self) -> Iterator[Weighted]:
        world = self._world
        living = [each for each in world.processes if each.is_living]
        if len(living) >= _MOST_LIVING or len(world.processes) >= _MOST_PROCESSES:
            return
        for key in world.settings.keys:
            launchers = [each for each in world.processes if each.key == key and each.kind in LAUNCHERS]
            # One integration launches a key.
            kinds = (launchers[0].kind,) if launchers else LAUNCHERS_OF[world.mix]
            options = ("", " start", " timeout" if world.settings.queue else "")
            (option,) = self._numbers.choices(options, (60, 25, 15))
            for kind in kinds:
                yield 0.7 if any(each.is_living for each in launchers) else 3, f"spawn {kind} {key}{option}"
            if launchers:
                yield from self._stops(key, launchers[0].kind, len(launchers))
        if world.processes:
            yield 0.4, f"spawn reap {world.settings.keys[0]}"

    def _stops(self, key: str, kind: str, tries: int) -> Iterator[Weighted]:
        yield 0.5, f"spawn wait {key}"
        for action in ("delete", "suspend"):
            yield 0.4, f"spawn cancel {key} {action}"
            yield 0.15, f"spawn cancelref {key} {action}"
        if kind == "airflow":
            tried = self._numbers.randint(1, tries)
            yield 0.4, f"spawn airflowstop {key} delete:{tried}"
            yield 0.3, f"spawn onkill {key} suspend:{tried}"
        if kind == "kfp":
            yield 0.5, f"spawn kfpstop {key} {self._numbers.choice(('suspend', 'cancel'))}"

    def _jobs(self) -> Iterator[Weighted]:
        world = self._world
        for job in world.server.jobs():
            name = short_name(job["metadata"]["name"], world.settings.keys)
            if is_deleting(job) or "#" not in name:
                continue
            if is_active(job) and world.server.running_pods(job["metadata"]["uid"]):
                yield from ((2, f"crash {name}"), (1, f"crash {name} oom"))
                yield 2, f"report {name}"
                yield from ((2, f"end {name} 0"), (1.5, f"end {name} 3"))
                if world.mix == "outages":
                    yield 0.2, f"lose {name}"
            if in_queue(job) and not is_ended(job):
                yield (3, f"admit {name}") if is_suspended(job) else (0.5, f"preempt {name}")
            if is_ended(job):
                yield 0.4, f"ttl {name}"
            if world.mix in ("all", "outages", "edits", "variations") and has_condition(job, "Failed"):
                yield 0.1, f"takeback {name}"

    def _people(self) -> Iterator[Weighted]:
        world = self._world
        if self._budget.people <= 0:
            return
        for job in world.server.jobs():
            name = short_name(job["metadata"]["name"], world.settings.keys)
            if "#" in name and not is_deleting(job):
                yield from ((0.25, f"delete {name}"), (0.1, f"delete {name} Foreground"))
                yield from ((0.15, f"suspend {name}"), (0.15, f"resume {name}"))

    def _faults(self) -> Iterator[Weighted]:
        world = self._world
        for sent in self._requests():
            if not sent.watches:
                for mode, weights in _FAULTS.items():
                    if weight := weights[sent.changes]:
                        yield weight, f"do {sent.process.name} {mode} {sent.kind}"
                if sent.kind == "POST trainjobs" and sent.process.option == "start":
                    yield from ((15, f"do {sent.process.name} {mode} {sent.kind}") for mode in ("slow", "hang"))
        for process in world.processes:
            if process.is_living:
                yield 0.5, f"kill {process.name}"
        for name in dict.fromkeys(watch.process.name for watch in world.watches):
            yield 0.2, f"cut {name}"
        yield 0.1, "compact"
        if world.mix == "outages":
            yield 0.3, f"quota {self._numbers.randint(1, 3)}"

    def _outages(self) -> Iterator[Weighted]:
        world = self._world
        if world.server.webhooks != "answer":
            yield 2, "webhooks answer"
        elif self._budget.outages > 0:
            yield 0.3, f"webhooks {self._numbers.choice(('refuse', 'hang'))}"
        if world.server.get("clustertrainingruntimes", "trainjob-step") is None:
            yield 1, "runtime on"
        elif self._budget.outages > 0:
            yield 0.1, "runtime off"
