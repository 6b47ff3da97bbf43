"""One record for each process of a job: how it ended, what its output shows, its steps and its stack. Pure.

The steps are from the lines that the watchdogs of `trainjob.progress` write to the logs. Compares counters, stacks and
ends, never clocks of different nodes by less than their skew.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from trainjob._diagnosis.cluster import CLOCK_SKEW, SIGKILL, SIGTERM, Termination, containers_of, terminations_of
from trainjob._diagnosis.markers import Frame, Marker, markers_in
from trainjob._diagnosis.output import UNREAD, Output
from trainjob._support.kube_objects import mapping, mappings, parse_time
from trainjob.progress.watchdog import BACKWARD_FILES, COLLECTIVE_FILES, COMPILER_FILES, DEVICE_FILES, NEUTRAL_FILES

Process = tuple[str, int]
"""A process: the rank of its pod, as ``node-1``, and the number that the process reports, which other pods may, too."""

SAME_ON_ALL = re.compile(
    r"(?i)^(all_?reduce|all_?gather|reduce_?scatter|broadcast|all_?to_?all|barrier|monitored_?barrier|reduce$|gather"
    r"|scatter|sync_global_devices|process_allgather)"
)
"""Collectives of which every rank of a group calls the same one. Others, as send, differ between healthy ranks."""

_NEUTRAL, _COLLECTIVE = re.compile(NEUTRAL_FILES), re.compile(COLLECTIVE_FILES)
_BACKWARD, _DEVICE, _COMPILER = re.compile(BACKWARD_FILES), re.compile(DEVICE_FILES), re.compile(COMPILER_FILES)


@dataclass(frozen=True)
class Rank:
    """What is known of one process.

    Attributes:
        process: The process.
        marker: Its steps and its stack, as its watchdog has written them last.
        termination: How its container ended; empty if it has not, or that is unknown.
        output: The end of its log; `UNREAD` if it was not read.
        shared: Other processes of its pod write markers, too.
        lost: Why its pod cannot respond, such as a node that is not ready; empty if it can.
    """

    process: Process
    marker: Marker = field(default_factory=Marker)
    termination: Termination = field(default_factory=Termination)
    output: Output = UNREAD
    shared: bool = False
    lost: str = ""

    @property
    def name(self) -> str:
        """The process for people: its pod, and its number if that differs from the pod's."""
        pod, number = self.process
        return pod if pod == f"node-{number}" and not self.shared else f"rank {number} ({pod})"

    @property
    def exit_code(self) -> int | None:
        """Exit code of its container; None if it has not ended."""
        return self.termination.exit_code

    @property
    def ended(self) -> bool:
        """Whether its interpreter has exited, or its container has."""
        return self.marker.ended or self.exit_code is not None

    @property
    def stalled(self) -> bool:
        """Whether it has reported that it makes no step."""
        return self.marker.stalled

    @property
    def finished(self) -> datetime | None:
        """When its container ended, by its node's clock."""
        return parse_time(self.termination.finished)

    @property
    def waits_in(self) -> str | None:
        """The collective in which it waits for others, "" if it is elsewhere; None if that is unknown."""
        device, inside = False, []
        for frame in self.marker.stack:
            if _BACKWARD.search(frame.file):
                return "backward"
            if _COLLECTIVE.search(frame.file) and not _NEUTRAL.search(frame.file):
                inside.append(frame.function)
                continue
            device = device or bool(_DEVICE.search(frame.file))
            if not _NEUTRAL.search(frame.file) and not _DEVICE.search(frame.file):
                break
        else:
            if not inside:
                return None
        # The outermost one that a script calls; it may call others of its library.
        known = [function for function in inside if SAME_ON_ALL.match(function)]
        return next(iter([*reversed(known), *inside]), None if device else "")

    @property
    def compiles(self) -> bool:
        """Whether it is inside a compiler, as that of ``torch.compile``, whose first call takes minutes."""
        return any(_COMPILER.search(frame.file) for frame in self.marker.stack)

    @property
    def place(self) -> Frame | None:
        """The innermost frame that is no wait of a library; None if the stack is unknown."""
        return next((frame for frame in self.marker.stack if not _NEUTRAL.search(frame.file)), None)

    @property
    def at_step(self) -> str:
        """Where it is, for a summary; empty if unknown."""
        return f" at step {self.marker.step[1]}" if self.marker.step else ""


def ranks_in(pod: str, lines: Iterable[str]) -> dict[Process, Rank]:
    """The processes that have written markers to the log of one pod.

    Args:
        pod: Rank of the pod, as ``node-1``.
        lines: Lines of its log, oldest first; may begin anywhere, and lines may be cut.
    """
    found = markers_in(lines)
    return {(pod, number): Rank((pod, number), marker, shared=len(found) > 1) for number, marker in found.items()}


def with_pod(rank: Rank, pod: Mapping[str, Any]) -> Rank:
    """Add what the pod of a process shows: its end, a node that does not respond."""
    status = mapping(pod, "status")
    state = next((each.state for each in containers_of(pod) if each.kind == "main"), {})
    ends = [each for each in terminations_of(pod) if not each.container and each.exit_code is not None]
    ready = next((each for each in mappings(status, "conditions") if each.get("type") == "Ready"), {})
    node = mapping(pod, "spec").get("nodeName") or "its node"
    lost = ""
    if status.get("reason") == "NodeLost" or ("running" in state and ready.get("status") == "Unknown"):
        lost = f"{node} does not respond"
    elif "running" in state and ready.get("status") == "False":
        lost = f"its pod on {node} is not ready"
    return replace(rank, termination=ends[-1] if ends and "terminated" in state else Termination(), lost=lost)


# ---------------------------------------------------------------- the root cause of a failure


def of_terminations(
    terminations: Iterable[Termination], outputs: Mapping[str, Output], logs: Mapping[str, Sequence[str]] | None = None
) -> list[Rank]:
    """One rank for each end, with the output of its pod and the steps of the process that has made most.

    Args:
        terminations: Ends that `cluster.terminations_in` found.
        outputs: Pod -> end of its log, as far as it was read.
        logs: Pod -> lines of its log, with markers.
    """
    found = []
    for each in terminations:
        markers = ranks_in(each.rank, (logs or {}).get(each.pod, ())).values()
        furthest = max(markers, key=lambda rank: rank.marker.count, default=Rank((each.rank, 0)))
        out = outputs.get(each.pod, UNREAD)
        if out.continued and out.worker is None and not each.signal:  # the program has chosen its exit code
            out = replace(out, error="", aborted=False, lost_peer=False)
        found.append(replace(furthest, termination=each, output=out))
    return found


def first(ranks: Sequence[Rank]) -> list[Rank]:
    """The ranks that failed, the root cause first; before them one that ended early, and that the others lost.

    Peers come before the network: ranks that were terminated from outside (SIGTERM, SIGKILL), or that report a lost
    peer, come after those that failed by themselves, whatever the clocks of their nodes show. Kubernetes counts whole
    seconds. Of two ranks killed in the same second, the one with SIGTERM comes second: SIGKILL follows only after a
    grace period of seconds, so that rank was terminating already. Equal ones keep their order.
    """
    lost = [rank.finished for rank in ranks if rank.finished and _blames_another(rank)]
    read = [rank for rank in ranks if rank.output is not UNREAD and not rank.output.terminated]
    explained = [
        each.finished for each in read if each.finished and each.termination.failed and not _blames_another(each)
    ]
    lost_since = min(lost) + CLOCK_SKEW if lost else None
    explained_since = min(explained) - CLOCK_SKEW if explained else None

    def level(rank: Rank) -> int:
        ended, output = rank.termination, rank.output
        # Killed before other ranks lost it: by the kernel, because memory ran out. Killed later: because the job ends.
        early = lost_since is not None and (rank.finished is None or rank.finished <= lost_since)
        # Of thousands of ranks not every log is read. At the same time, a rank whose log was read, and which reports no
        # other rank as the reason, comes first.
        late = explained_since is not None and (rank.finished is None or rank.finished >= explained_since)
        unread = output is UNREAD and ended.meaning is None
        connection = output.raised is not None and output.raised.connection
        levels = (
            (ended.stopped, 8),
            (ended.sidecar, 7),
            (ended.disruption, 0),
            (ended.killed and early and ended.exit_code == SIGKILL, 2),
            ((ended.killed and output.worker is None) or output.terminated, 6),
            (output.joined[1] > 0 and output.consequence, 4),  # it names how many processes are missing
            (lost_another(rank), 5),
            (connection, 3),
            (unread and late, 1),
        )
        return next((number for applies, number in levels if applies), 0)

    failed = [rank for rank in ranks if rank.termination.failed]
    ordered = sorted(failed, key=lambda rank: (level(rank), rank.termination.finished, rank.exit_code == SIGTERM))
    if ordered and level(ordered[0]) in (3, 4, 5) and (gone := _ended_early(ranks, ordered[0])) is not None:
        return [gone, *ordered]
    return ordered


def lost_another(rank: Rank) -> bool:
    """Whether its log reports that another rank failed, or was lost."""
    out = rank.output
    named = out.blamed is not None and rank.process[0] != f"node-{out.blamed}"
    return out.consequence or out.after_lost_peer or named


def _blames_another(rank: Rank) -> bool:
    """Whether its log reports that it lost another rank, or a connection."""
    connection = rank.output.raised is not None and rank.output.raised.connection
    return not rank.output.terminated and (lost_another(rank) or connection)


def _ended_early(ranks: Sequence[Rank], victim: Rank) -> Rank | None:
    """A rank that ended with code 0 before another one lost it, with fewer steps if both count them."""
    group, _, _ = victim.process[0].rpartition("-")
    for rank in ranks:
        if rank.exit_code != 0 or rank.process[0].rpartition("-")[0] != group or rank.process == victim.process:
            continue
        before = rank.finished is None or victim.finished is None or rank.finished <= victim.finished + CLOCK_SKEW
        counted = rank.marker.count and victim.marker.count
        if before and (not counted or rank.marker.count < victim.marker.count):
            return rank
    return None
