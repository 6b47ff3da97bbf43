"""Each mechanism of the launch protocol, how to switch it off, and a schedule that then violates a property.

A mechanism is switched off by replacing functions of the product. `seed` searches random schedules for a violation;
`script` is a directed schedule, since some states are too rare for random ones.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tests.fakes.kube.objects import NAMESPACE
from tests.simulation.schedules import Outcome, replay, run
from tests.simulation.scripts import script
from tests.simulation.settings import DEFAULT_KEY, MIXES

from trainjob._backends.kubernetes import leases
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs import cancellation, fencing, following, launching, looks, reaper, successors
from trainjob._manifest import attempts
from trainjob.job import JobRef, job_name
from trainjob.status import CANCELLED

Replacement = tuple[Any, str, Any]
"""An object, the name of its attribute, and the value that replaces it."""


@dataclass(frozen=True)
class Mechanism:
    """One mechanism.

    Attributes:
        name: What it is called.
        does: What it does, in a clause.
        violates: The property that fails without it.
        script: A schedule in which it does.
        off: What is replaced to switch it off.
    """

    name: str
    does: str
    violates: str
    script: str
    off: tuple[Replacement, ...]

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """The product without this mechanism."""
        with ExitStack() as stack:
            for target, name, value in self.off:
                stack.enter_context(mock.patch.object(target, name, value))
            yield

    def by_script(self) -> Outcome:
        """The outcome of the script without this mechanism."""
        with self.switched_off():
            return replay(self.script)

    def seed(self, mix: str, seeds: range) -> tuple[int, str] | None:
        """The first seed that violates a property only without this mechanism, and that property; None without one."""
        for seed in seeds:
            with self.switched_off():
                found = run(seed, mix).found
            if found and (new := found.keys() - run(seed, mix).found.keys()):
                return seed, min(new)
        return None


# --- replacements


def _returns(value: Any) -> Callable[..., Awaitable[Any]]:
    async def replaced(*_: Any, **__: Any) -> Any:
        return value

    return replaced


_begin, _look, _end, _create, _adopt = (
    looks.Looks.begin,
    looks.Looks.look,
    launching._Launch._end,
    launching._Launch._create,
    launching._Launch._adopt,
)
_stop, _run_cancel_key, _patch = cancellation._Stop._stop, cancellation.cancel_key, KubernetesBackend.patch
_decide, _request_cancel, _ranks_ended = attempts.decide, cancellation.request_cancel, fencing.EarlierRanks.ended


async def _begin_without_jobs(seen: Any, *beside: Any) -> Any:
    others = await _begin(seen, *beside)
    seen.attempts, seen.delivered = [], frozenset()
    return others


async def _look_at_deliveries(seen: Any) -> None:
    await _look(seen)
    seen.delivered = frozenset(_uid(job) for job in seen.attempts if attempts.is_delivered(job))


async def _create_without_look(launch: Any, latest: Any, changes: Any) -> None:
    await _create(launch, latest, changes)
    seen = launch.seen
    seen.attempts = [job for job in await launch.backend.find(launch.namespace, {}) if seen.is_own(job)]


async def _look_unless_created(seen: Any) -> None:
    if not any(map(seen.is_own, seen.attempts)):
        await _look(seen)


async def _end_own_only(launch: Any, losers: list[Any]) -> None:
    own = [job for job in losers if launch.seen.is_own(job)]
    launch.seen.attempts = [job for job in launch.seen.attempts if job in own or job not in losers]
    await _end(launch, own)
    if not own:
        raise _Decided


class _Decided(Exception):
    """The other attempts are left alone."""


async def _run_without_ending_others(launch: Any) -> JobRef:
    """`_Launch.run`, which returns the attempt that counts and leaves those of others."""
    try:
        return await _launch_run(launch)
    except _Decided:
        counts, _ = _decide(launch.seen.attempts)
        assert counts is not None
        return JobRef.of(counts)


_launch_run = launching._Launch.run


def _recorded(trainjob: Mapping[str, Any], _: Any) -> list[str]:
    return str(trainjob["metadata"]["annotations"].get(attempts.REPLACES) or "").split(",")


async def _adopt_without_a_change(launch: Any, latest: Any) -> bool:
    without = mock.patch.object(KubernetesBackend, "patch", functools.partialmethod(_patch_unless_adoption))
    with without:
        return await _adopt(launch, latest)


async def _patch_unless_adoption(backend: Any, ref: JobRef, patch: Mapping[str, Any]) -> None:
    if "spec" in patch or attempts.ADOPTED not in patch.get("metadata", {}).get("annotations", {}):
        await _patch(backend, ref, patch)


async def _stop_with_mark_first(stop: Any, job: Any) -> None:
    await stop._backend.patch(JobRef.of(job), {"metadata": {"annotations": {CANCELLED: "true"}}})
    await _stop(stop, job)


async def _delete_instead_of_suspend(backend: Any, trainjob: Any, action: str = "cancel", mark: str = "true") -> None:
    await _request_cancel(backend, trainjob, "cancel", mark)


async def _patch_once(backend: Any, ref: JobRef, patch: Mapping[str, Any]) -> None:
    """`patch` to which each Conflict means that the job is gone."""
    body = {**patch, "metadata": {"resourceVersion": None, **patch.get("metadata", {})}}
    await _patch(backend, ref, body)


async def _ended_at_once(ranks: Any, numbers: Any) -> bool:
    pods = await ranks._backend.remaining_pods(ranks._namespace, ranks._names(numbers))
    ranks.highest = max([ranks.highest, *map(fencing._attempt_of, pods)])
    return True


def _decide_by_delivered_results(jobs: Any) -> Any:
    with mock.patch.object(attempts, "is_delivered", return_value=False):
        return _decide(jobs)


def _no_version(trainjob: Any) -> dict[str, str]:
    return {}


def _uid(job: Mapping[str, Any]) -> str:
    return str(job["metadata"]["uid"])


def _modules_with(name: str) -> list[Any]:
    """The modules that have imported a function of `trainjob._manifest.attempts`, and that one."""
    modules = (attempts, cancellation, fencing, following, launching, looks, reaper, successors)
    return [module for module in modules if hasattr(module, name)]


_WITHOUT_VERSIONS = tuple((module, "version_of", _no_version) for module in _modules_with("version_of"))

_WITHOUT_TIMES = tuple((module, "has_foreign_end", lambda job: False) for module in _modules_with("has_foreign_end"))

MECHANISMS = (
    Mechanism(
        "look before the create",
        "a launch lists the attempts of its key before it creates one",
        "overlap",
        script("launch_after_a_deletion"),
        (
            (looks.Looks, "begin", _begin_without_jobs),
            (launching._Launch, "_is_fenced", _returns(True)),
        ),
    ),
    Mechanism(
        "look after the create",
        "a launch lists them again after it has created one",
        "twice",
        script("frozen_create"),
        (
            (launching._Launch, "_create", _create_without_look),
            (looks.Looks, "look", _look_unless_created),
        ),
    ),
    Mechanism(
        "a launch ends the attempts that do not count",
        "also those that another launch has created",
        "twice",
        script("launch_after_a_killed_create"),
        (
            (launching._Launch, "_end", _end_own_only),
            (launching._Launch, "run", _run_without_ending_others),
        ),
    ),
    Mechanism(
        "the reaper ends the attempts that do not count",
        "for launches that were killed after their create",
        "twice",
        script("killed_after_a_frozen_create"),
        ((reaper, "decide", lambda jobs: (None, [])),),
    ),
    Mechanism(
        "a delivered result does not count",
        "for the reaper: what follows is new work",
        "reaped",
        script("delivered_before_the_next"),
        ((reaper, "decide", _decide_by_delivered_results),),
    ),
    Mechanism(
        "waiters follow",
        "a waiter whose job is gone waits for the attempt that counts",
        "deserted",
        script("loser_has_a_waiter"),
        ((successors, "_successor", _returns(None)),),
    ),
    Mechanism(
        "a replaced attempt never counts",
        "the next attempt records the UIDs of those before",
        "reaped",
        script("resumed_by_a_person"),
        ((attempts, "_replaced_by", lambda *_: ()),),
    ),
    Mechanism(
        "a later adoption counts",
        "an attempt that a later launch has adopted is not replaced by an earlier launch",
        "reaped",
        script("adopted_beside_a_killed_launch"),
        ((attempts, "_replaced_by", _recorded),),
    ),
    Mechanism(
        "delivered since",
        "a launch adopts a result that was delivered since it began",
        "lost",
        script("delivered_while_frozen"),
        ((looks.Looks, "look", _look_at_deliveries),),
    ),
    Mechanism(
        "a name is never used again",
        "a launch looks for a JobSet of the name before the create",
        "reused",
        script("name_of_a_deleted_job"),
        ((KubernetesBackend, "is_free", _returns(True)), (KubernetesBackend, "remaining_pods", _returns([]))),
    ),
    Mechanism(
        "the verdict of an older JobSet does not count",
        "a waiter checks whose JobSet has ended, and when",
        "stale",
        script("jobset_of_a_deleted_job"),
        ((following, "check_verdict", _returns(None)), *_WITHOUT_TIMES),
    ),
    Mechanism(
        "wait for ranks",
        "the next attempt starts after the last rank of the earlier ones",
        "overlap",
        script("ranks_of_a_failed_attempt"),
        ((fencing.EarlierRanks, "ended", _ended_at_once),),
    ),
    Mechanism(
        "failed attempts are suspended",
        "before the next attempt is created",
        "revived",
        script("taken_back"),
        ((launching, "suspend_failed", _returns(True)),),
    ),
    Mechanism(
        "requests that nobody asked for carry the version",
        "those of the reaper, and of the rule of two",
        "reaped",
        script("adopted_before_the_reaper"),
        _WITHOUT_VERSIONS,
    ),
    Mechanism(
        "an adoption changes the job",
        "so that a request with the version before loses",
        "reaped",
        script("adopted_before_the_reaper"),
        ((launching._Launch, "_adopt", _adopt_without_a_change),),
    ),
    Mechanism(
        "marks name the cancel",
        "a waiter resumes what an older cancel or kill has suspended",
        "waits",
        script("late_sigterm"),
        ((successors, "is_stale", lambda job: False),),
    ),
    Mechanism(
        "cancels leave a record",
        "a launch that began before stops what it creates",
        "running",
        script("stop_after_give_up"),
        ((KubernetesBackend, "announce_cancel", _returns(None)),),
    ),
    Mechanism(
        "the reaper obeys records",
        "for launches that were killed after their create",
        "running",
        script("stop_of_a_killed_launch"),
        ((KubernetesBackend, "all_cancels", _returns({})),),
    ),
    Mechanism(
        "a cancelled launch suspends its job",
        "so that its name stays taken, and a late create is refused",
        "running",
        script("create_without_reply"),
        ((launching, "request_cancel", _delete_instead_of_suspend),),
    ),
    Mechanism(
        "a cancel suspends failed attempts",
        "Trainer does not run them again",
        "running",
        script("failed_before_the_cancel"),
        ((cancellation._Stop, "suspend_failed", _returns(None)),),
    ),
    Mechanism(
        "a cancelled launch suspends a failed job, too",
        "Trainer does not run it again",
        "running",
        script("failed_before_its_launch_obeys", "False", "suspend"),
        ((launching, "may_come_back", lambda job: False),),
    ),
    Mechanism(
        "a stop sends the DELETE first",
        "no webhook can delay it",
        "unstopped",
        script("cancel_without_webhooks", "cancel", "refuse"),
        ((cancellation._Stop, "_stop", _stop_with_mark_first),),
    ),
    Mechanism(
        "a Conflict of a quota is repeated",
        "a Conflict without a version is not about the job",
        "running",
        script("suspend_with_a_quota"),
        ((KubernetesBackend, "patch", _patch_once),),
    ),
    Mechanism(
        "given-up jobs end their waits",
        "with the recorded diagnosis",
        "waits",
        script("wait_for_given_up"),
        ((following, "check_given_up", _returns(None)),),
    ),
    Mechanism(
        "a deletion that does not end is not waited for",
        "longer than its grace period and 60 s",
        "waits",
        script("foreground_on_a_lost_node"),
        ((following, "_DELETION_SECONDS", 10 * 365 * 86400.0),),
    ),
    Mechanism(
        "waiters renew a Lease",
        "the reaper leaves what they wait for",
        "reaped",
        script("attended_for_hours"),
        ((leases.Attendance, "attend", lambda attendance, ref: None),),
    ),
)


def table(schedules: int = 0, seed: int = 1) -> str:
    """A table of the mechanisms in Markdown, with the property that fails without each.

    Args:
        schedules: How many random schedules of each mix are tried until one violates a property.
        seed: Their first seed.
    """
    lines = ["| mechanism | what it does | its script without it |", "|---|---|---|"]
    if schedules:
        lines = [f"{lines[0]} random schedules without it |", f"{lines[1]}---|"]
    for each in MECHANISMS:
        text = each.by_script().found.get(each.violates)
        cells = [each.name, each.does, "nothing fails" if text is None else f"`{each.violates}`: {_plain(text)}"]
        if schedules:
            found = ((mix, each.seed(mix, range(seed, seed + schedules))) for mix in MIXES)
            mix, first = next(((mix, first) for mix, first in found if first is not None), ("", None))
            cells.append(f"`{first[1]}`: {mix}, seed {first[0]}" if first is not None else "nothing fails")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """The text of a violation, without its step, with jobs as scripts name them."""
    stem = re.escape(job_name(DEFAULT_KEY, 1).rpartition("-")[0])
    named = re.sub(rf"(?:{NAMESPACE}/)?{stem}-(\d+)", rf"{DEFAULT_KEY}#\1", text.partition(": ")[2])
    return named.partition(": BackendUnavailable")[0].replace("'", "").replace("|", "\\|")
