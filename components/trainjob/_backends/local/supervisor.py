"""One detached process per job: starts its ranks, writes its status, and outlives the process that launched the job.

``python -m trainjob._backends.local.supervisor <job directory>`` returns as soon as a supervisor has the lock, this one
or another. Processes that may be killed:

* the launcher: the supervisor has a separate session and is not affected;
* the supervisor: its guard, a fork that waits for the supervisor's end, kills the ranks and fails the job, or completes
  a requested cancellation or deletion;
* both at once: the next process that reads the job does the same (`record_loss`);
* the launcher before the job has begun: the next launch of the same key starts the supervisor. Reading the job does
  not, because it would run a program.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainjob import progress
from trainjob._backends.local import permissions, runtimes
from trainjob._backends.local.conditions import (
    BOOKED,
    COMPLETE,
    DEADLINE,
    RESUMED,
    SUSPENDED,
    cancelled,
    end_lost,
    is_removed,
    record_loss,
    with_condition,
    write_status,
)
from trainjob._backends.local.gpus import GpuQueue
from trainjob._backends.local.ranks import MARKER, NOT_INHERITED, Rank, author_environment, expand, sweep
from trainjob._backends.local.store import (
    FINAL,
    JobFiles,
    OtherFormat,
    Stamp,
    cancel_metadata,
    cancel_requested,
    read_json,
)
from trainjob._manifest import unattended
from trainjob.progress.message import RESERVED, text_of
from trainjob.status import CANCELLED, WAITING

GRACE_SECONDS = 5.0
"""Seconds from SIGTERM to SIGKILL when a job is suspended, deleted or exceeds its deadline. (A pod has 30 s by default;
on one machine the next job waits for the same processors.)"""

_TICK = 0.05  # seconds between two checks of the object and of the termination message
_RETRY_SECONDS = 1.0  # between two attempts to write a status
_WAITER_CHECK_SECONDS = 1.0  # between two checks whether a process waits for the job


class Supervisor:
    """Runs one job."""

    def __init__(self, files: JobFiles, trainjob: dict[str, Any], start: Mapping[str, Any], queue: GpuQueue) -> None:
        self.files = files
        self.queue = queue
        self.trainjob = trainjob
        self.start = start
        self.home = Path(start["home"])
        self.status: dict[str, Any] = trainjob["status"]
        self.ranks: list[Rank] = []
        self.active_since = time.time()
        self._stamp: Stamp | None = None  # `trainjob` may be outdated: it is read again at once
        self._reported = ""
        self._over = False  # the job has finished; the final status may not be written yet
        self._unwritten = False
        self._next_try = 0.0
        self._next_report = 0.0
        self._attended = time.monotonic()  # when a process was last seen to wait for the job
        self._launched = self._attended
        self._waiters_checked = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(_child_exits(), selectors.EVENT_READ)

    def run(self) -> None:
        """Run until the job has finished or was deleted."""
        # In this order: the deletion of a finished job waits for the end of this process (`LocalBackend.delete`).
        while not (deleted := self._deleted()) and not self.files.finished():
            if self._unwritten and time.monotonic() >= self._next_try:
                self._save()
            if not self._over and cancel_requested(self.trainjob):
                self._stop()
                self._write(cancelled(self.trainjob))
            elif not self._over:
                self._apply_suspend()
            self._wait(_TICK)
            if self.ranks and not self._over:
                self._check_ranks()
                self._end_unattended()
        if deleted:
            self._stop()
            self.files.remove()

    def _deleted(self) -> bool:
        """Read the object again if it changed; True if the job is to be removed."""
        stamp = self.files.stamp()[0]
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                latest = self.files.read()
            except OtherFormat as error:  # what a newer trainjob asks for is unknown: the job runs on
                sys.stderr.write(f"{error}\n")
                latest = self.trainjob
            if latest is None:
                return True
            self.trainjob = {**latest, "status": self.status}
        return is_removed(self.trainjob)

    def _apply_suspend(self) -> None:
        """Start the ranks or suspend the job, according to the object."""
        suspend, waits = bool(self.trainjob["spec"].get("suspend")), self._waits()
        if suspend and (self.ranks or waits != SUSPENDED[2]):
            self._stop()
            self.ranks = []
            self._write(SUSPENDED)
        elif not suspend and not self.ranks:
            if why := self.queue.book():
                if why != self._waits("message"):
                    self._write(("Suspended", "True", WAITING, why))
                return
            self.active_since = time.time()
            if waits:
                self._write(BOOKED if waits == WAITING else RESUMED)
            self._launch()

    def _waits(self, field: str = "reason") -> str:
        """Why the job is suspended or in the queue, from its status; empty if it is neither."""
        conditions = self.status.get("conditions") or []
        return next((c[field] for c in conditions if c["type"] == "Suspended" and c["status"] == "True"), "")

    def _launch(self) -> None:
        self._launched = time.monotonic()
        directory = self.files.directory
        if runtimes.framework_of(self.trainjob) == "mpi":
            runtimes.write_hostfile(self.trainjob, directory)
        (directory / "tmp").mkdir(mode=0o700, exist_ok=True)
        port = _free_port()
        for replicated_job, count in runtimes.replicated_jobs(self.trainjob).items():
            for index in range(count):
                rank = Rank(self.trainjob, replicated_job, index, directory)
                self.ranks.append(rank)
                self._launch_rank(rank, port)
        self._write()

    def _launch_rank(self, rank: Rank, port: int) -> None:
        trainer = self.trainjob["spec"]["trainer"]
        injected = runtimes.environment(self.trainjob, rank.index, port, self.files.directory)
        injected |= {
            "TRAINJOB_TERMINATION_LOG": str(rank.termination_log),
            "TMPDIR": str(self.files.directory / "tmp"),
            MARKER: self.trainjob["metadata"]["uid"],
        }
        if self.queue.gpus:  # by default CUDA counts the fastest GPU first, and nvidia-smi by the PCI bus
            visible = ",".join(self.queue.gpus[rank.index])
            injected |= {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        try:
            own = author_environment(trainer.get("env") or [], self.trainjob, rank.name, self.home, injected)
        except LookupError as error:
            rank.refuse(str(error).strip("'\""))
            return
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
        environment = {**inherited, "PYTHONUNBUFFERED": "1", "PATH": self.start["path"], **own, **injected}
        command = [expand(word, {**own, **injected}) for word in (*trainer["command"], *(trainer.get("args") or ()))]
        rank.launch(command, environment, self.start["cwd"])
        if rank.output is not None:
            self._selector.register(rank.output, selectors.EVENT_READ, rank)

    def _wait(self, seconds: float) -> None:
        """Copy output to the logs for `seconds` at most, or until a rank ends."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:  # a child ended; `_check_ranks` finds which one
                os.read(key.fd, 4096)
                continue
            rank: Rank = key.data
            rank.pump()
            if rank.output is None:
                self._selector.unregister(key.fd)

    def _check_ranks(self) -> None:
        """Check the ranks, the deadline and the reports of the script; write the status if something changed."""
        before = [rank.terminated is not None for rank in self.ranks]
        ended = [self._poll(rank) for rank in self.ranks]
        failed = [rank for rank in self.ranks if rank.terminated and rank.terminated["exitCode"] != 0]
        deadline = self.trainjob["spec"].get("activeDeadlineSeconds")
        if failed:
            self._stop()
            first = f"{self.trainjob['metadata']['name']}-{failed[0].replicated_job}-0"
            reason = f"jobset failed due to one or more job failures (first failed job: {first})"
            self._write(("Failed", "True", "FailedJobs", reason))
        elif all(ended):
            self._clean_up()
            self._write(COMPLETE)
        elif deadline and time.time() >= self.active_since + deadline:
            self._stop()
            self._write(DEADLINE)
        elif ended != before or self._has_new_report():
            self._write()

    def _end_unattended(self) -> None:
        """Cancel or suspend a job without a waiting process for longer than its author allows."""
        policy, present = unattended.policy_of(self.trainjob), time.monotonic()
        if policy is None or present < self._waiters_checked + _WAITER_CHECK_SECONDS:
            return
        self._waiters_checked = present
        if self.files.waited_for():
            self._attended = present
        if present - max(self._attended, self._launched) <= policy.after.total_seconds():
            return
        # The disk may be full, or a newer trainjob has changed the job: the next check tries again.
        with suppress(OSError, OtherFormat), self.files.editing():
            latest = self.files.read()
            if latest is None or latest["spec"].get("suspend") or self.files.waited_for():
                return
            del latest["status"]
            metadata = latest["metadata"]
            annotations = {**(metadata.get("annotations") or {}), CANCELLED: unattended.MARK}
            ended = cancel_metadata() if policy.action == "cancel" else {}
            suspended = {"suspend": True} if policy.action == "suspend" else {}
            self.files.write_object(
                {
                    **latest,
                    "metadata": {**metadata, "annotations": annotations, **ended},
                    "spec": {**latest["spec"], **suspended},
                }
            )

    def _poll(self, rank: Rank) -> bool:
        descriptor = rank.output
        ended = rank.poll()
        if ended and descriptor is not None and descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)
        return ended

    def _has_new_report(self) -> bool:
        """Check for a report of the script, once in a tick at most: each one causes a write to the disk."""
        present = time.monotonic()
        if present < self._next_report:
            return False
        self._next_report = present + _TICK
        return self._trainer_status()

    def _trainer_status(self) -> bool:
        """Copy the report of rank 0 into the status; True if it is new."""
        message = self.ranks[0].termination_message()
        report = progress.read(message) if message != self._reported else None
        if report is None:  # nothing new, or a half-written message: the next check reads all of it
            return False
        self._reported = message
        named = {RESERVED + name: value for name, value in report.details.items()} | report.metrics
        reported = {
            "progressPercentage": report.progress,
            "estimatedRemainingSeconds": report.remaining_seconds,
            "metrics": [{"name": name, "value": text_of(value)} for name, value in named.items()],
            "lastUpdatedTime": report.updated,
        }
        self.status["trainerStatus"] = {name: value for name, value in reported.items() if value is not None}
        return True

    def _stop(self) -> None:
        """Send SIGTERM to all ranks; after the grace period SIGKILL to the rest and to all processes of the job."""
        for rank in self.ranks:
            if not rank.terminated:
                rank.signal(signal.SIGTERM)
        kill_at = time.monotonic() + GRACE_SECONDS
        while [rank for rank in self.ranks if not self._poll(rank)]:
            if time.monotonic() >= kill_at:
                for rank in self.ranks:
                    if not rank.terminated:
                        rank.signal(signal.SIGKILL)
            self._wait(0.02)
        self._clean_up()

    def _clean_up(self) -> None:
        """Kill remaining processes and remove temporary files, which may fill the disk that the status needs."""
        sweep(self.trainjob["metadata"]["uid"], [rank.pid for rank in self.ranks if rank.pid])
        self.queue.leave()
        shutil.rmtree(self.files.directory / "tmp", ignore_errors=True)

    def _write(self, condition: tuple[str, str, str, str] | None = None) -> None:
        """Write the status, with `condition` (type, status, reason, message) set."""
        if self.ranks:
            self._trainer_status()
        self.status["jobsStatus"] = self._jobs_status()
        if condition is not None:
            self.status["conditions"] = with_condition(self.status, condition)
            self._over = condition[0] in FINAL
        self._save()

    def _save(self) -> None:
        """Write the current status. On a full disk the job keeps running: its end may free space."""
        error = write_status(self.files, self.status, [rank.pod(self.trainjob) for rank in self.ranks])
        self._unwritten = error is not None
        self._next_try = time.monotonic() + _RETRY_SECONDS
        if error is not None:
            _log_failed_write(error)

    def _jobs_status(self) -> list[dict[str, Any]]:
        names = ("node", "launcher") if runtimes.framework_of(self.trainjob) == "mpi" else ("node",)
        codes = [rank.terminated["exitCode"] if rank.terminated else None for rank in self.ranks]
        counts = {
            "active": int(None in codes and not any(codes)),
            "ready": int(bool(codes) and None in codes and not any(codes)),
            "succeeded": int(bool(codes) and all(code == 0 for code in codes)),
            "failed": int(any(codes)),
            "suspended": int(not codes),
        }
        return [{"name": name, **counts} for name in names]


def _log_failed_write(error: OSError) -> None:
    with suppress(OSError):  # the log is on the same disk
        sys.stderr.write(f"the status cannot be written and is retried: {error}\n")


def _child_exits() -> int:
    """A file descriptor that becomes readable when a child ends, so that the first failed rank is found first."""
    reader, writer = os.pipe()
    for descriptor in (reader, writer):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _guard(files: JobFiles, uid: str, lifeline: int) -> None:
    """Wait for the end of the supervisor, then kill what is left of its job, also if its files cannot be read."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.read(lifeline, 1)
    with suppress(OtherFormat):
        if files.finished():
            return
    end_lost(files, uid, wait_seconds=5)


def _locked(files: JobFiles) -> int | None:
    """The lock of the supervisor; None if another supervisor has begun the job, or the job does not exist."""
    while files.object.exists() and not files.begun():
        if (lock := files.supervise(wait_seconds=_TICK)) is not None:
            return lock
    return None


def main(directory: str) -> None:
    """Detach, take the lock of the job in `directory` and run it to its end."""
    files = JobFiles(Path(directory))
    permissions.check(files.home)
    announce, announced = os.pipe()
    if os.fork():  # the child of the launcher: returns once a supervisor has the lock
        os.close(announced)
        os.read(announce, 1)
        os._exit(0)
    os.setsid()
    lock = _locked(files)
    trainjob = files.read()
    if lock is None or trainjob is None or files.finished():
        os._exit(0)
    if trainjob["status"]:  # another supervisor began and died
        record_loss(files)
        os._exit(0)
    if (error := write_status(files, {"jobsStatus": []}, [])) is not None:
        sys.exit(f"the job was not started: its status cannot be written: {error}")
    queue = GpuQueue(files, trainjob)
    with suppress(OSError, OtherFormat):  # the supervisor retries
        queue.enter()  # before the launch ends, so that the jobs of one launcher start in its order
    guarded, lifeline = os.pipe()
    if os.fork() == 0:
        os.close(lock)
        os.close(lifeline)
        os.close(announced)
        _guard(files, trainjob["metadata"]["uid"], guarded)
        os._exit(0)
    os.close(guarded)
    os.close(announced)
    os.chdir("/")
    Supervisor(files, trainjob, read_json(files.start) or {}, queue).run()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
