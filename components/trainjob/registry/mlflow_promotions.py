"""Promotions in MLflow, which has no compare-and-set: the last request moves an alias.

A SQLite file has a lock, so that promotions follow each other. On a server a version first **claims** the alias by a
tag, and the claims are read again after the alias was moved: all clients elect the same winner from them. Other tags
record which versions the alias has pointed to, see `trainjob.registry.moves`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial

from trainjob.errors import ModelNotFound
from trainjob.registry import moves
from trainjob.registry.alias_claims import Claim, holder
from trainjob.registry.base import Mode, ModelVersion, Promotion, check_alias, check_rule, compare

CLAIM = "trainjob.claim."
_SIMULTANEOUS = 30  # seconds between promotions that count as simultaneous; clocks of launchers differ by less
_ROUNDS = 5


class MlflowPromotions(ABC):
    """Moves aliases in a registry, by requests that a subclass sends."""

    @property
    @abstractmethod
    def _is_server(self) -> bool:
        """Whether others may write at the same time."""

    @abstractmethod
    def list(self, name: str) -> Sequence[ModelVersion]:
        """List all versions, oldest first. Reads their tags before their aliases."""

    @abstractmethod
    def resolve(self, name: str, version: str) -> ModelVersion:
        """Find a version; raise ModelNotFound if it does not exist."""

    @abstractmethod
    def _holder(self, name: str, alias: str) -> ModelVersion | None:
        """The version that an alias points to."""

    @abstractmethod
    def _set_alias(self, version: ModelVersion, alias: str) -> None:
        """Let an alias point to a version."""

    @abstractmethod
    def _tag(self, version: ModelVersion, tag: str, value: str) -> None:
        """Set a tag of a version."""

    @abstractmethod
    def _exclusive(self) -> AbstractContextManager[None]:
        """Exclude other writers, where that is possible."""

    def promote(
        self,
        name: str,
        version: str,
        *,
        alias: str,
        metric: str | None = None,
        mode: Mode = "max",
        min_improvement: float = 0.0,
        dry_run: bool = False,
        once: bool = False,
    ) -> Promotion:
        """Move ``alias`` to ``version`` if it is better. Of simultaneous promotions the best by ``metric`` wins."""
        check_alias(alias)
        check_rule(metric, mode, min_improvement)
        decide = partial(compare, alias=alias, metric=metric, mode=mode, min_improvement=min_improvement)
        with self._exclusive():
            while True:
                candidate, now, over = self._look(name, version, alias)
                verdict = decide(candidate, now)
                has_it = verdict.previous == candidate.version
                if once and verdict.promoted and not has_it:
                    every = partial(self.list, name)
                    verdict = moves.refusal(candidate, now, alias, metric=metric, every=every) or verdict
                if not verdict.promoted or dry_run:
                    return verdict
                if has_it:
                    return self._complete(candidate, alias, verdict)
                claim = Claim(int(time.time()), metric, mode)
                self._announce(candidate, now, alias, claim)
                # Another try of this export may have moved the alias since, and a later export may have moved it on.
                if not once or not self._is_server or not moves.has_moved(self.resolve(name, candidate.version), alias):
                    break
            self._set_alias(candidate, alias)
            self._tag(candidate, f"{moves.MOVED}{alias}", moves.NOT_SETTLED if self._is_server else moves.SETTLED)
            if self._is_server:
                wrote = moves.text(now) if once else ""
                verdict = self._settled(candidate, alias, claim, verdict, wrote=wrote, over=over)
                self._tag(candidate, f"{moves.MOVED}{alias}", moves.SETTLED)
            return verdict

    def _look(self, name: str, version: str, alias: str) -> tuple[ModelVersion, ModelVersion | None, Collection[str]]:
        """The version, the holder of the alias, and on a server the versions from which it has been moved on."""
        if not self._is_server:
            return self.resolve(name, version), self._holder(name, alias), ()
        every = self.list(name)
        candidate = next((each for each in every if each.version == version), None) or self.resolve(name, version)
        now = next((each for each in every if alias in each.aliases), None)
        return candidate, now, {each.version for each in every if moves.has_moved(each, alias)} - {now and now.version}

    def _announce(self, candidate: ModelVersion, now: ModelVersion | None, alias: str, claim: Claim) -> None:
        """Write the tags that have to exist before the alias moves from one version to another."""
        if now is not None and not moves.has_moved(now, alias):
            with suppress(ModelNotFound):  # it was deleted since
                self._tag(now, f"{moves.MOVED}{alias}", moves.SETTLED)
        self._tag(candidate, f"{moves.MOVING}{alias}", moves.text(now))
        if self._is_server:
            self._tag(candidate, f"{CLAIM}{alias}", str(claim))

    def _complete(self, candidate: ModelVersion, alias: str, verdict: Promotion) -> Promotion:
        """Complete the promotion of a version that holds the alias: an earlier try may have been killed.

        If the alias was moved on from the version meanwhile, a person may have moved it back, so it stays.
        """
        if moves.is_settled(candidate, alias):
            return verdict
        if self._is_server and f"{CLAIM}{alias}" in candidate.tags:
            over = moves.passed(self.list(candidate.name), candidate, alias)
            verdict = self._settled(candidate, alias, _claim(candidate, alias), verdict, over=over)
        self._tag(candidate, f"{moves.MOVED}{alias}", moves.SETTLED)
        return verdict

    def _settled(
        self,
        candidate: ModelVersion,
        alias: str,
        mine: Claim,
        verdict: Promotion,
        *,
        wrote: str = "",
        over: Collection[str] = (),
    ) -> Promotion:
        """Settle simultaneous promotions on a server; returns the result of this one.

        Of an export, no version had taken the alias from the candidate right before this promotion moved it. One that
        has done so since took it from another try of the same export, and gets the alias back.

        Args:
            candidate: The version of this promotion.
            alias: The alias.
            mine: Its claim.
            verdict: The result without others.
            wrote: Of an export: the first tag that this promotion wrote, see `moves`.
            over: Versions from which the alias had been moved on before this promotion began: they do not compete.
        """
        now = None
        for _ in range(_ROUNDS):
            every = self.list(candidate.name)
            now = next((version for version in every if alias in version.aliases), None)
            rivals = [
                (version, claim)
                for version in every
                if abs((claim := _claim(version, alias)).order - mine.order) <= _SIMULTANEOUS
                and (claim.metric, claim.mode) == (mine.metric, mine.mode)
                and version.version not in over
            ]
            winner = holder(rivals) if mine.metric else now
            has_it = now is not None and now.version == candidate.version
            later = moves.followers(every, candidate, alias, wrote) if wrote and has_it else []
            if later:
                winner = max(later, key=lambda version: (_claim(version, alias).order, int(version.version)))
            if now is None or winner is None or now.version == winner.version:
                break
            # Otherwise a person moved it, or a claim newer than this list, which the next list will contain.
            if later or any(version.version == now.version for version, _ in rivals):
                self._set_alias(winner, alias)
                if not moves.has_moved(winner, alias):  # its own promotion may have been killed
                    self._tag(winner, f"{moves.MOVED}{alias}", moves.NOT_SETTLED)
        if now is not None and now.version == candidate.version:
            return verdict
        who = f"version {now.version}" if now else "no version"
        return Promotion(False, f"{alias!r} moved to {who} at the same time, and stays there", verdict.previous)


def _claim(version: ModelVersion, alias: str) -> Claim:
    return Claim.parse(version.tags.get(f"{CLAIM}{alias}", ""))
