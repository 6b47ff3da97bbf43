"""Schedules of exports at once, see `tests.simulation.export_world`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests import campaigns
from tests.simulation.export_inputs import Inputs, Settings
from tests.simulation.export_world import Exports, world
from tests.simulation.local_processes import explore, run

from trainjob.registry import moves
from trainjob.registry.kubeflow import KubeflowRegistry
from trainjob.registry.mlflow_promotions import MlflowPromotions

SCHEDULES = int(os.environ.get("TRAINJOB_SIMULATION") or 100)

pytestmark = pytest.mark.timeout(120 + SCHEDULES)


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    (tmp_path / "inputs").mkdir()
    return Inputs(tmp_path / "inputs")


def test_random_schedules(tmp_path: Path, inputs: Inputs, record_property: campaigns.Record) -> None:
    """Set ``TRAINJOB_SIMULATION`` for more schedules, and ``TRAINJOB_SEED`` for the same ones."""
    campaigns.begin(record_property, SCHEDULES)
    first = campaigns.SEED * 1_000_000
    done = explore(
        partial(world, directory=tmp_path, inputs=inputs),
        range(first, first + SCHEDULES),
        lambda seed: f"TRAINJOB_SEED={campaigns.SEED}, world {seed}: {Settings.drawn(seed)}",
    )
    print(done)


# ------------------------------------------------------------ what each part of a promotion is for


class Part(NamedTuple):
    """A part of a promotion, and a schedule that breaks a property without it.

    Attributes:
        off: Switches the part off.
        kind: The broken property.
        settings: Of the world.
        script: The schedule.
    """

    off: Callable[[pytest.MonkeyPatch], None]
    kind: str
    settings: Settings
    script: Sequence[str]


def settings(registry: str, rule: str = "always", *, tuesday: bool = True) -> Settings:
    accuracy = {"monday": 0.9, **({"tuesday": 0.7} if tuesday else {})}
    return Settings(registry, rule, accuracy, champion=True, person=True)


def without_once(patch: pytest.MonkeyPatch) -> None:
    for registry in (MlflowPromotions, KubeflowRegistry):
        patch.setattr(registry, "promote", _forgetful(registry.promote))


def _forgetful(promote: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, once: bool = False, **options: Any) -> Any:
        del once
        return promote(*arguments, **options)

    return call


def without_mark_of_the_former_holder(patch: pytest.MonkeyPatch) -> None:
    announce = MlflowPromotions._announce

    def unmarked(self: MlflowPromotions, candidate: Any, now: Any, alias: str, claim: Any) -> None:
        tag = self._tag
        with pytest.MonkeyPatch.context() as inner:
            others = lambda version, *words: tag(version, *words) if version is candidate else None  # noqa: E731
            inner.setattr(self, "_tag", others)
            announce(self, candidate, now, alias, claim)

    patch.setattr(MlflowPromotions, "_announce", unmarked)


def moved_then_killed(process: str) -> list[str]:
    """Kill a process of an MLflow registry right after it has moved the alias."""
    return [f"start {process[:-1]}", f"alias {process}", f"step {process} 1", f"kill {process}"]


SEQUENCE = ["start monday", "end monday0", "start tuesday", "end tuesday0"]
FROZEN = [
    "start monday",
    "alias monday0",
    "start monday",
    "end monday1",
    "start tuesday",
    "end tuesday0",
    "end monday0",
]

PARTS = {
    "once, in a SQLite file": Part(without_once, "twice", settings("sqlite"), SEQUENCE),
    "once, on a server": Part(without_once, "back", settings("server"), SEQUENCE),
    "once, in a Kubeflow registry": Part(without_once, "twice", settings("kubeflow"), SEQUENCE),
    "the second tag": Part(
        lambda patch: patch.setattr(moves, "has_moved", lambda *_: False),
        "twice",
        settings("sqlite", tuesday=False),
        ["start monday", "end monday0", "person old"],
    ),
    "the first tag": Part(
        lambda patch: patch.setattr(moves, "_before", lambda *_: None),
        "twice",
        settings("sqlite"),
        ["start tuesday", "end tuesday0", *moved_then_killed("monday0"), "person old"],
    ),
    "the mark of the former holder": Part(
        without_mark_of_the_former_holder,
        "twice",
        settings("sqlite", tuesday=False),
        [*moved_then_killed("monday0"), "command old"],
    ),
    "the chain: the rule decides if others moved it": Part(
        lambda patch: patch.setattr(moves, "passed", lambda *_: []),
        "incomplete",
        settings("sqlite", "metric"),
        ["start monday", "alias monday0", "kill monday0", "start tuesday", "end tuesday0"],
    ),
    "the chain: it stays if a person moved it": Part(
        lambda patch: patch.setattr(moves, "passed", lambda *_: ["1", "2", "3"]),
        "twice",
        settings("sqlite", "metric"),
        ["start tuesday", "end tuesday0", *moved_then_killed("monday0"), "person old"],
    ),
    "giving the alias back": Part(
        lambda patch: patch.setattr(moves, "followers", lambda *_: []), "back", settings("server"), FROZEN
    ),
    "the lock of a SQLite file": Part(
        lambda patch: patch.setattr("trainjob.registry.sqlite.locked", lambda *_: nullcontext()),
        "twice",
        settings("sqlite"),
        FROZEN,
    ),
    "promotions that are over do not compete": Part(
        lambda patch: patch.setattr(MlflowPromotions, "_look", _nothing_is_over(MlflowPromotions._look)),
        "back",
        settings("server", "metric"),
        ["start monday", "end monday0", "person old", "start tuesday", "end tuesday0"],
    ),
}


def _nothing_is_over(look: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: (*look(*arguments)[:2], ())


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_each_part_of_a_promotion_is_needed(part: Part, tmp_path: Path, inputs: Inputs) -> None:
    worlds = partial(world, directory=tmp_path, inputs=inputs, settings=part.settings)
    assert run(worlds, 0, part.script).violations == {}
    with pytest.MonkeyPatch.context() as patch:
        part.off(patch)
        assert part.kind in run(worlds, 0, part.script).violations


def test_a_try_that_looks_again_does_not_move_the_alias_back(tmp_path: Path, inputs: Inputs) -> None:
    """On a server, a try that is frozen before its last look sees that another try has moved the alias."""
    script = ["start monday", "promote monday0", *FROZEN[2:]]
    done: Exports = run(partial(world, directory=tmp_path, inputs=inputs, settings=settings("server")), 0, script)
    assert [holder for _, holder in done.moves] == ["1", "2", "3"]
    assert done.violations == {}


def test_a_frozen_try_gives_the_alias_back(tmp_path: Path, inputs: Inputs) -> None:
    done: Exports = run(partial(world, directory=tmp_path, inputs=inputs, settings=settings("server")), 0, FROZEN)
    assert [holder for _, holder in done.moves] == ["1", "2", "3", "2", "3"]
    late = next(each for each in done.machine.processes if each.name == "monday0").result
    assert (late.promoted, late.version) == (False, "2")
    assert late.reason == "'champion' moved to version 3 at the same time, and stays there"


_WITHOUT_METRIC = Settings("server", "gate", {"monday": 0.7, "tuesday": 0.9}, champion=False, person=True)

FOUND = {
    "a person moves it back to a version whose promotion was killed": (
        Settings("server", "always", {"monday": 0.8, "wednesday": 0.7}, champion=True, person=True),
        "start wednesday; alias wednesday0; step wednesday0 1; reach wednesday0; kill wednesday0; "
        "start monday; alias monday0; step monday0 2; kill monday0; person wednesday",
    ),
    "a person moves it away from a version that another promotion gave it to": (
        Settings("server", "metric", {"monday": 0.8, "tuesday": 0.6}, champion=False, person=True),
        "start monday; start tuesday; promote monday0; step monday0 2; end tuesday0; refuse monday0; person tuesday",
    ),
    "a retry completes a promotion that began after a better version had lost the alias": (
        Settings("server", "metric", {"monday": 0.8, "tuesday": 0.6}, champion=True, person=True),
        "start monday; end monday0; start tuesday; command old; start tuesday; promote tuesday1; step tuesday1 1; "
        "step tuesday1 3; kill tuesday1",
    ),
    "it is moved on and back by hand while a try completes its promotion": (
        _WITHOUT_METRIC,
        "start tuesday; promote tuesday0; start monday; step tuesday0 1; end monday0; alias tuesday0; "
        "step tuesday0 1; command monday; command tuesday",
    ),
    "a hand moves it to a version that nothing has promoted, and a promotion overwrites that": (
        Settings("server", "always", {"monday": 0.8, "tuesday": 0.6}, champion=True, person=True),
        "start tuesday; promote tuesday0; kill tuesday0; start monday; alias monday0; person tuesday",
    ),
    "a hand moves it in a SQLite file while a promotion holds the lock": (
        Settings("sqlite", "always", {"monday": 0.9, "tuesday": 0.6, "wednesday": 0.8}, champion=True, person=True),
        "start wednesday; promote wednesday0; kill wednesday0; start tuesday; alias tuesday0; person wednesday",
    ),
    "a hand moves it to a version that nothing has promoted, and away": (
        settings("sqlite"),
        "start tuesday; promote tuesday0; refuse tuesday0; start monday; end monday0; person tuesday; person monday",
    ),
    "a hand moves it away from a killed promotion, and to the version that held it before": (
        Settings("sqlite", "always", {"monday": 0.9, "tuesday": 0.8}, champion=True, person=True),
        "start monday; end monday0; start tuesday; alias tuesday0; step tuesday0 1; kill tuesday0; person old; "
        "person monday",
    ),
    "a hand moves it away from a killed promotion, and a command to the version that held it before": (
        Settings("server", "always", {"monday": 0.9, "tuesday": 0.8}, champion=True, person=True),
        "start monday; end monday0; start tuesday; alias tuesday0; step tuesday0 1; kill tuesday0; person old; "
        "command monday",
    ),
    "a promotion on its way elects the best of those before a command": (
        Settings("server", "metric", {"monday": 0.8, "tuesday": 0.6}, champion=True, person=True),
        "start tuesday; promote tuesday0; start monday; end monday0; command old",
    ),
    "a try gives it to a version whose promotion has begun, and another one takes it": (
        Settings("server", "always", {"monday": 0.6, "tuesday": 0.7, "wednesday": 0.8}, champion=True, person=False),
        "start monday; start monday; start tuesday; promote tuesday0; start wednesday; promote monday1; "
        "step monday1 2; start wednesday; step monday1 2; step monday0 40; promote wednesday1; promote wednesday1",
    ),
    **{
        f"a promotion elects the best of those that claim the alias, {registry}, {who}": (
            Settings(
                registry, "metric", {"tuesday": 0.6, "wednesday": 0.9}, champion=registry == "kubeflow", person=True
            ),
            f"start tuesday; start wednesday; promote tuesday0; end wednesday0; {who} tuesday",
        )
        for registry in ("server", "kubeflow")
        for who in ("person", "command")
    },
    "three simultaneous promotions of two versions": (
        Settings("server", "always", {"monday": 0.9, "tuesday": 0.6}, champion=False, person=False),
        "start tuesday; promote tuesday0; step tuesday0 1; start monday; promote monday0; start tuesday; "
        "reach tuesday0; end tuesday1; step monday0 3; reach monday0",
    ),
}
"""Schedules that once broke a property, or that the properties permit for a stated reason."""


@pytest.mark.parametrize(("settings", "script"), FOUND.values(), ids=FOUND)
def test_an_alias_does_not_move_back(settings: Settings, script: str, tmp_path: Path, inputs: Inputs) -> None:
    worlds = partial(world, directory=tmp_path, inputs=inputs, settings=settings)
    assert run(worlds, 0, script.split("; ")).violations == {}
