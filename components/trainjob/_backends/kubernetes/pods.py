"""The pods of a TrainJob: their list, their logs, and the evidence of a failure."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

import anyio

from trainjob import names
from trainjob._backends.base import TrainJob
from trainjob._backends.kubernetes.client import TAILS, ApiClient, Request
from trainjob._backends.kubernetes.errors import (
    ApiError,
    BadRequest,
    Forbidden,
    ObjectNotFound,
    Transient,
    Unreachable,
)
from trainjob._diagnosis import READ_LINES, blockers, output, ranks
from trainjob._diagnosis.cluster import Termination, containers_of, terminations_in, terminations_of
from trainjob._diagnosis.evidence import Evidence
from trainjob._diagnosis.output import UNREAD, Output
from trainjob._support import retrying
from trainjob._support.foreign import LARGE, Unreadable, json_of
from trainjob._support.kube_objects import MAX_LINE, mappings, name_of, rank_of, training_container
from trainjob._support.log_lines import LogLine, Splitter, latest
from trainjob.job import JobRef

JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
MAX_TAILS = 64
"""Largest number of log tails read for one diagnosis: thousands more would add nothing."""

_TAIL_SECONDS = 5.0  # for retries of a log that a busy node does not return: the log is half of the explanation
_EMPTY_SECONDS, _EMPTY_AGAIN = 1.0, 2  # until an empty log of a run is read again, and how often
_REMOVED_SECONDS = 30.0  # the same if a busy kubelet has removed a run and has not noticed the next one's end yet
_REMOVED = b"unable to retrieve container logs for"  # the kubelet's reply, with status 200, about a removed run


class RunRemoved(Transient):
    """The log of a container's run was removed, which the pod's status may not show yet."""


def collection(namespace: str, kind: str) -> str:
    """The path of a core/v1 collection."""
    return f"/api/v1/namespaces/{names.namespace(namespace)}/{kind}"


async def list_pods(client: ApiClient, ref: JobRef) -> list[dict[str, Any]]:
    """The job's pods, by the JobSet's label: the labels of the TrainJob are not copied to pods."""
    selector = {"labelSelector": f"{JOBSET_NAME}={ref.name}"}
    return await client.items(collection(ref.namespace, "pods"), selector)


async def list_all(client: ApiClient, namespace: str, job: str = "") -> dict[str, list[dict[str, Any]]]:
    """The pods of the JobSets of a namespace, or of one, by the name of the JobSet."""
    selector = {"labelSelector": f"{JOBSET_NAME}={job}" if job else JOBSET_NAME}
    found: dict[str, list[dict[str, Any]]] = {}
    for pod in await client.items(collection(namespace, "pods"), selector):
        found.setdefault(pod["metadata"]["labels"][JOBSET_NAME], []).append(pod)
    return found


async def list_named(client: ApiClient, namespace: str, jobs: Sequence[str]) -> list[dict[str, Any]]:
    """The pods of the JobSets of those names."""
    selector = {"labelSelector": f"{JOBSET_NAME} in ({','.join(jobs)})"}
    return await client.items(collection(namespace, "pods"), selector)


_NAMES = ("name", "namespace", "uid", "deletionTimestamp")
_LABELS = (
    "jobset.sigs.k8s.io/replicatedjob-name",
    "jobset.sigs.k8s.io/job-index",
    "batch.kubernetes.io/job-completion-index",
)


def log_fields(pod: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a pod that reading its log needs; a complete pod has 10 KB."""
    metadata = {name: value for name, value in pod["metadata"].items() if name in _NAMES}
    labels = {name: sys.intern(value) for name, value in pod["metadata"]["labels"].items() if name in _LABELS}
    return {
        "metadata": {**metadata, "labels": labels},
        "spec": {"containers": [{"name": training_container(pod)}]},
        "status": {"phase": (pod.get("status") or {}).get("phase")},
    }


async def tail_of(
    client: ApiClient, pod: Mapping[str, Any], container: str, lines: int, *, previous: bool = False
) -> list[LogLine]:
    """The last lines of a pod's container; with `previous`, of its run before the latest restart.

    Raises:
        RunRemoved: The node has removed the log of that run.
    """
    metadata = pod["metadata"]
    params = {
        "container": container,
        "tailLines": str(lines),
        # A line of the kubelet is a line of the container runtime, which is never longer than MAX_LINE. The limit must
        # not be reached: the kubelet cuts at the end, which matters most.
        "limitBytes": str(lines * (MAX_LINE + 64)),
        "timestamps": "true",
        **({"previous": "true"} if previous else {}),
    }
    path = f"{collection(metadata['namespace'], 'pods')}/{metadata['name']}/log"
    found: list[LogLine] = []
    kubelet = KubeletLines(Splitter(rank_of(pod), raw=True))
    async with aclosing(client.lines(Request("GET", path, params), unended=True)) as raw:
        async for line in raw:
            if line.startswith(_REMOVED):
                raise RunRemoved(404, "", f"{metadata['name']}: {line.decode('utf-8', 'replace')}")
            found += latest(kubelet.take(line, ended=True))
    return found


async def tails_of(
    client: ApiClient, found: Sequence[Mapping[str, Any]], lines: int
) -> AsyncGenerator[tuple[Mapping[str, Any], list[LogLine]]]:
    """Each pod, the oldest first, with the last lines of its training container, or none if they cannot be read."""

    async def tail_or_nothing(pod: Mapping[str, Any]) -> list[LogLine]:
        async with client.tails:
            with anyio.move_on_after(_TAIL_SECONDS), suppress(ApiError):
                return await tail_of(client, pod, training_container(pod), lines)
        return []

    ordered = sorted(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))
    for start in range(0, len(ordered), TAILS):
        some = ordered[start : start + TAILS]
        for pod, tail in zip(some, await asyncio.gather(*map(tail_or_nothing, some)), strict=True):
            yield pod, tail


class KubeletLines:
    """Assembles log lines from a kubelet's reply: the parts of a long line are joined, with the time of the first.

    Args:
        splitter: Creates the lines.
    """

    def __init__(self, splitter: Splitter) -> None:
        self._splitter = splitter
        self._time: str | None = None  # of an incomplete line; empty for a line that is not of the log

    def take(self, piece: bytes, *, ended: bool) -> Iterator[LogLine]:
        """The lines completed by the next piece. A line without a leading time is a message of the kubelet."""
        if self._time is None:
            time, _, piece = piece.partition(b" ") if piece[:1].isdigit() else (b"", b"", piece)
            self._time = time.decode("ascii", "replace")
        time_of_line = self._time
        if ended:
            self._time = None
        if not time_of_line:
            return
        text = piece.rstrip(b"\r") if ended else piece
        for start in range(0, max(1, len(text)), MAX_LINE):
            part = text[start : start + MAX_LINE].decode("utf-8", "replace")
            last = start + MAX_LINE >= len(text)
            yield from self._splitter.take(time_of_line, part, ended=ended and last)


async def gather(client: ApiClient, found: Sequence[Mapping[str, Any]], trainjob: TrainJob | None) -> Evidence:
    """Evidence of the pods `found`, with the log tails of those that failed.

    Tails are read first of the pods that seem to have failed first, and of more pods until a tail shows a failure other
    than a lost peer: ranks that lose their peer end in the same second, and log the loss. A rank that ended with code 0
    before may be that peer.

    Pods that wrote their last line first come first. The times in their statuses are whole seconds, and ranks that lose
    their peer end in the same second (Gloo: 0.1 s later), after they have logged the loss.
    """
    reader = _Tails(client, {name_of(pod): pod for pod in found})
    ends = terminations_in(found)
    codes = Counter(ended.exit_code for ended in ends)
    ends.sort(key=lambda ended: codes[ended.exit_code])  # in the same second, rare exit codes first
    while len(reader.requested) < MAX_TAILS and not reader.hopeless:
        ordered = ranks.first(ranks.of_terminations(ends, reader.outputs))
        known = [rank for rank in ordered if rank.output is not UNREAD]
        if known and not (ranks.lost_another(known[0]) or known[0].output.terminated):
            break
        lost = {address for read in reader.outputs.values() for address in read.peers}
        suspects: dict[str, Termination] = {}
        failed = [rank.termination for rank in ordered]
        for ended in sorted(failed, key=lambda ended: ended.address not in lost):
            if ended.pod not in reader.requested:
                suspects.setdefault(ended.pod, ended)
        if not suspects:
            break
        await reader.read(list(suspects.values())[:TAILS])
    ordered_pods = sorted(found, key=lambda pod: reader.last_written.get(name_of(pod), "~"))
    return Evidence(trainjob, ordered_pods, reader.logs, unseen=reader.unseen)


class _Tails:
    """Reads the ends of logs.

    Attributes:
        requested: Names of the pods whose log was requested.
        logs: Pod -> last lines.
        outputs: Pod -> what its last lines show.
        last_written: Pod -> time of its last line.
        unseen: Logs that could not be read, with the reason.
        hopeless: Further requests would fail as well.
    """

    def __init__(self, client: ApiClient, pods: Mapping[str, Mapping[str, Any]]) -> None:
        self._client = client
        self._pods = pods
        self.requested: set[str] = set()
        self.logs: dict[str, list[str]] = {}
        self.outputs: dict[str, Output] = {}
        self.last_written: dict[str, str] = {}
        self.unseen: list[str] = []
        self.hopeless = False

    async def read(self, crashes: Sequence[Termination]) -> None:
        """Read the logs of the crashed containers, at the same time."""
        self.requested |= {crash.pod for crash in crashes}
        failures = [failure for failure in await asyncio.gather(*map(self._read, crashes)) if failure is not None]
        self.hopeless = len(failures) == len(crashes) or any(isinstance(failure, Forbidden) for failure in failures)
        messages = [f"logs: {failure.message}" for failure in failures]
        self.unseen = list(dict.fromkeys([*self.unseen, *messages]))

    async def _read(self, crash: Termination) -> ApiError | None:
        async with self._client.tails:
            return await self._read_now(crash)

    async def _read_now(self, crash: Termination) -> ApiError | None:
        pod = self._pods[crash.pod]
        backoff = retrying.REQUEST(longest_pause=2.0, longest_retry_after=1.0)  # `_TAIL_SECONDS` ends the retries
        failure: ApiError = Unreachable(0, "", f"{crash.pod}: no answer within {_TAIL_SECONDS:.0f} s")
        lines, read, empty = None, False, 0
        # The kubelet of a lost node does not answer at all.
        began = anyio.current_time()
        with anyio.move_on_after(_TAIL_SECONDS) as scope:
            while not read:
                try:
                    lines = await self._lines(pod, crash)
                    # A log without a line may be that of the next run, or not be written yet on a busy node.
                    empty += lines == []
                    read = lines != [] or empty > _EMPTY_AGAIN
                    if not read:
                        await anyio.sleep(_EMPTY_SECONDS)
                except Forbidden as error:
                    return error
                except RunRemoved as error:
                    failure, scope.deadline = error, began + _REMOVED_SECONDS
                    await anyio.sleep(1.0)
                except Transient as error:
                    failure = error
                    backoff.failure()
                    await anyio.sleep(backoff.pause(error.retry_after))
        if not read:
            return failure
        if lines is None:
            return None
        self.logs[crash.pod] = [*output.without_stacks([line.text for line in lines])]
        self.outputs[crash.pod] = output.read(output.of_training(self.logs[crash.pod]))
        self.last_written[crash.pod] = lines[-1].time if lines else ""
        return None

    async def _lines(self, pod: Mapping[str, Any], crash: Termination) -> list[LogLine] | None:
        """The last lines of the run that crashed; None if no run of the container has a log."""
        container = crash.container or training_container(pod)
        latest, first = _run(pod, container)
        lines: list[LogLine] | None = None
        later: list[LogLine] = []
        removed: Transient | None = None
        again = False
        # The run's log was the latest one when the pod was read, and may be the previous one by now.
        turns = [not latest, latest]
        while turns:
            previous = turns.pop(0)
            try:
                found = await tail_of(self._client, pod, container, READ_LINES, previous=previous)
            except (BadRequest, ObjectNotFound):  # no such run, or the pod is gone
                continue
            except RunRemoved as error:
                if previous != latest or first:  # it was the first run, and is the previous one by now
                    removed = error
                if previous == latest and lines is not None and not again:
                    # The empty log was that of the next run, which has ended since; so this run was removed.
                    turns, again = [not latest], True
                continue
            # Whole seconds of the same clock: lines with a later time belong to a later run.
            lines = [line for line in found if line.time[:19] <= (crash.finished[:19] or line.time[:19])]
            if lines:
                return lines
            later = found if previous or latest else later
        # The run's own log is gone: a kubelet keeps only the log of the last run that ended, and shows the end of the
        # run before for 10 s or more. The best replacement is the log of a later run that has ended. A run that was
        # active when the pod was read has ended as well if that log is gone; the kubelet is about to report it.
        if removed is not None and not later:
            raise removed
        return later or lines


def crashes_of(pod: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Failures of a pod and its containers: the container, and what distinguishes its runs.

    Containers terminated because the pod was deleted, as when its job is suspended, have not failed. A training
    container that has ended while a sidecar keeps its pod running counts: its job never ends.
    """
    if blockers.kept_by(pod) is not None:
        return {(f"{name_of(pod)}/kept", "")} | _failures_of(pod)
    return _failures_of(pod)


def _failures_of(pod: Mapping[str, Any]) -> set[tuple[str, str]]:
    found = [crash for crash in terminations_of(pod) if crash.failed and not crash.stopped]
    return {(f"{crash.pod}/{crash.container}", crash.finished or crash.reason) for crash in found}


def disruption_of(reply: bytes) -> str:
    """Why the cluster terminates the only pod of a list, e.g. ``EvictionByEvictionAPI``; empty if it does not.

    Reasons are those of the condition ``DisruptionTarget`` (Kubernetes 1.26): eviction, as by a drain, a taint,
    preemption, and termination by the kubelet. The condition is set before the pod is deleted. A pod that a person
    deletes, or that is deleted with its owner, has none.
    """
    try:
        listed = json_of(reply, "the list of pods", LARGE)
    except Unreadable:
        return ""
    for pod in mappings(listed, "items"):
        for condition in mappings(pod, "status", "conditions"):
            if (condition.get("type"), condition.get("status")) == ("DisruptionTarget", "True"):
                return str(condition.get("reason") or "DisruptionTarget")
    return ""


def _run(pod: Mapping[str, Any], container: str) -> tuple[bool, bool]:
    """Whether the run of a container that failed or was stopped is its latest one, and whether its first."""
    found = next((each for each in containers_of(pod) if each.name == container), None)
    if found is None:
        return True, True
    first = not found.last.get("terminated")
    return bool((found.state.get("terminated") or {}).get("exitCode")) or first, first
