"""One detached process per job: starts its ranks, writes its status, and outlives whoever launched it.

``python -m trainjob.backends.local.supervisor <job directory>`` returns as soon as a supervisor is in charge, this one
or another. What may die:

* the launcher: the supervisor is in a session of its own and does not notice;
* the supervisor: its guard, a fork that waits for nothing else, kills the ranks and fails the job, or ends it as it was
  asked to end;
* both at once: the next process that looks at the job does the same (`record_loss`);
* the launcher before the job has begun: the next launch of the same key starts the supervisor. A look never does, since
  it would run a program.
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

from trainjob import progress, unattended
from trainjob.backends.local import runtimes
from trainjob.backends.local.ranks import MARKER, NOT_INHERITED, Rank, author_environment, expand, sweep
from trainjob.backends.local.store import FINAL, JobFiles, Stamp, ending, kept, now, read_json
from trainjob.status import CANCELLED

GRACE_SECONDS = 5.0
"""From SIGTERM to SIGKILL when a job is suspended, deleted or out of time. (A pod has 30 s by default; on one machine
the next job waits for the same processors.)"""

_TICK = 0.05  # how soon a change of the object or of a termination message is seen
_PATIENCE = 1.0  # seconds between two tries to write a status
_LOOK = 1.0  # seconds between two looks whether somebody waits for the job

SUSPENDED = ("Suspended", "True", "Suspended", "TrainJob is suspended")
RESUMED = ("Suspended", "False", "Resumed", "TrainJob is resumed")
COMPLETE = ("Complete", "True", "AllJobsCompleted", "jobset completed successfully")
DEADLINE = ("Failed", "True", "DeadlineExceeded", "TrainJob exceeded its active deadline")
CANCEL = ("Cancelled", "True", "Cancelled", "the job was cancelled with trainjob")
UNATTENDED = ("Cancelled", "True", "Unattended", "the job was cancelled because nobody waited for it")
LOST = ("Failed", "True", "SupervisorLost", "the local supervisor of this job was killed; its ranks were stopped")


class Supervisor:
    """The life of one job."""

    def __init__(self, files: JobFiles, trainjob: dict[str, Any], start: Mapping[str, Any]) -> None:
        self.files = files
        self.trainjob = trainjob
        self.start = start
        self.home = Path(start["home"])
        self.status: dict[str, Any] = trainjob["status"]
        self.ranks: list[Rank] = []
        self.active_since = time.time()
        self._stamp: Stamp | None = None  # `trainjob` was read a while ago: it is read again at once
        self._reported = ""
        self._suspended = False  # now, or before it was resumed
        self._over = False  # the verdict stands, though it may not be written yet
        self._unwritten = False
        self._next_try = 0.0
        self._next_report = 0.0
        self._attended = time.monotonic()  # when somebody was last seen to wait for it
        self._launched = self._attended
        self._looked = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(_child_exits(), selectors.EVENT_READ)

    def run(self) -> None:
        """Until the job has ended or was deleted."""
        # In this order: whoever deletes a job that has ended waits for this process to go (`LocalBackend.delete`).
        while not (deleted := self._deleted()) and not self.files.finished():
            if self._unwritten and time.monotonic() >= self._next_try:
                self._save()
            if not self._over and kept(self.trainjob):
                self._stop()
                self._write(_cancelled(self.trainjob))
            elif not self._over:
                self._follow()
            self._wait(_TICK)
            if self.ranks and not self._over:
                self._judge()
                self._reap()
        if deleted:
            self._stop()
            self.files.remove()

    def _deleted(self) -> bool:
        """Read the object again if it changed; True once the job is to be removed."""
        stamp = self.files.stamp()[0]
        if stamp != self._stamp:
            self._stamp = stamp
            latest = self.files.read()
            if latest is None:
                return True
            self.trainjob = {**latest, "status": self.status}
        return _removed(self.trainjob)

    def _follow(self) -> None:
        """Start the ranks or suspend the job, as the object says."""
        suspend = bool(self.trainjob["spec"].get("suspend"))
        if suspend and (self.ranks or not self._suspended):
            self._stop()
            self.ranks = []
            self._write(SUSPENDED)
            self._suspended = True
        elif not suspend and not self.ranks:
            self.active_since = time.time()
            if self._suspended:
                self._write(RESUMED)
            self._launch()

    def _launch(self) -> None:
        self._launched = time.monotonic()
        directory = self.files.directory
        if runtimes.framework_of(self.trainjob) == "mpi":
            runtimes.write_hostfile(self.trainjob, directory)
        (directory / "tmp").mkdir(mode=0o700, exist_ok=True)
        port = _free_port()
        gpus = runtimes.gpus_present() if runtimes.gpus_per_node(self.trainjob) else []
        for replicated_job, count in runtimes.replicated_jobs(self.trainjob).items():
            for index in range(count):
                rank = Rank(self.trainjob, replicated_job, index, directory)
                self.ranks.append(rank)
                self._launch_rank(rank, port, gpus)
        self._write()

    def _launch_rank(self, rank: Rank, port: int, gpus: list[str]) -> None:
        trainer = self.trainjob["spec"]["trainer"]
        per_node = runtimes.gpus_per_node(self.trainjob)
        injected = runtimes.environment(self.trainjob, rank.index, port, self.files.directory)
        injected |= {
            "TRAINJOB_TERMINATION_LOG": str(rank.termination_log),
            "TMPDIR": str(self.files.directory / "tmp"),
            MARKER: self.trainjob["metadata"]["uid"],
        }
        if per_node:
            injected["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[rank.index * per_node : (rank.index + 1) * per_node])
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
        """Move output into the logs for `seconds` at most, or until there is something to judge."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:  # a child ended; `_judge` looks which one
                os.read(key.fd, 4096)
                continue
            rank: Rank = key.data
            rank.pump()
            if rank.output is None:
                self._selector.unregister(key.fd)

    def _judge(self) -> None:
        """Look at the ranks, the clock and what the script reported, and write down what changed."""
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
        elif ended != before or self._has_news():
            self._write()

    def _reap(self) -> None:
        """Ask for the end of a job that nobody has waited for longer than its author said."""
        policy, present = unattended.policy_of(self.trainjob), time.monotonic()
        if policy is None or present < self._looked + _LOOK:
            return
        self._looked = present
        if self.files.waited_for():
            self._attended = present
        if present - max(self._attended, self._launched) <= policy.after.total_seconds():
            return
        with suppress(OSError), self.files.editing():  # the disk may be full: the next look tries again
            latest = self.files.read()
            if latest is None or latest["spec"].get("suspend") or self.files.waited_for():
                return
            del latest["status"]
            metadata = latest["metadata"]
            annotations = {**(metadata.get("annotations") or {}), CANCELLED: unattended.MARK}
            ended = ending() if policy.action == "delete" else {}
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

    def _has_news(self) -> bool:
        """Look for a report of the script, not more often than once in a tick: the status is written to the disk."""
        present = time.monotonic()
        if present < self._next_report:
            return False
        self._next_report = present + _TICK
        return self._trainer_status()

    def _trainer_status(self) -> bool:
        """Take over what rank 0 reported; True if that is news."""
        message = self.ranks[0].termination_message()
        report = progress.read(message) if message != self._reported else None
        if report is None:  # nothing new, or a message caught half written: the next look sees all of it
            return False
        self._reported = message
        reported = {
            "progressPercentage": report.progress,
            "estimatedRemainingSeconds": report.remaining_seconds,
            "metrics": [{"name": name, "value": progress.text_of(value)} for name, value in report.metrics.items()],
            "lastUpdatedTime": report.updated,
        }
        self.status["trainerStatus"] = {name: value for name, value in reported.items() if value is not None}
        return True

    def _stop(self) -> None:
        """SIGTERM to all ranks, SIGKILL to those that are left after the grace period, and to all they ever started."""
        for rank in self.ranks:
            if not rank.terminated:
                rank.signal(signal.SIGTERM)
        patience = time.monotonic() + GRACE_SECONDS
        while [rank for rank in self.ranks if not self._poll(rank)]:
            if time.monotonic() >= patience:
                for rank in self.ranks:
                    if not rank.terminated:
                        rank.signal(signal.SIGKILL)
            self._wait(0.02)
        self._clean_up()

    def _clean_up(self) -> None:
        """No process and no temporary file stays behind; the disk may be full of them, and the status has to fit."""
        sweep(self.trainjob["metadata"]["uid"])
        shutil.rmtree(self.files.directory / "tmp", ignore_errors=True)

    def _write(self, condition: tuple[str, str, str, str] | None = None) -> None:
        """Write the status, with `condition` (type, status, reason, message) set."""
        if self.ranks:
            self._trainer_status()
        self.status["jobsStatus"] = self._jobs_status()
        if condition is not None:
            self.status["conditions"] = _conditions(self.status, condition)
            self._over = condition[0] in FINAL
        self._save()

    def _save(self) -> None:
        """Write the status as it is now. Where a full disk forbids it, the job goes on: its end may make room."""
        error = write_status(self.files, self.status, [rank.pod(self.trainjob) for rank in self.ranks])
        self._unwritten = error is not None
        self._next_try = time.monotonic() + _PATIENCE
        if error is not None:
            _complain(error)

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


def _removed(trainjob: Mapping[str, Any]) -> bool:
    return "deletionTimestamp" in trainjob["metadata"] and not kept(trainjob)


def _cancelled(trainjob: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return UNATTENDED if unattended.marked(trainjob) else CANCEL


def _conditions(status: Mapping[str, Any], condition: tuple[str, str, str, str]) -> list[dict[str, Any]]:
    """The conditions of `status` with `condition` (type, status, reason, message) set now."""
    others = [c for c in status.get("conditions") or [] if c["type"] != condition[0]]
    fields = dict(zip(("type", "status", "reason", "message"), condition, strict=True))
    return [*others, {**fields, "lastTransitionTime": now()}]


def write_status(files: JobFiles, status: Mapping[str, Any], pods: list[dict[str, Any]]) -> OSError | None:
    """Write the status; what forbids it, as a full disk does. Of a job that was deleted there is none to write."""
    try:
        files.write_status(status, pods)
    except FileNotFoundError:  # deleted under our hands
        return None
    except OSError as error:
        return error
    return None


def _insist(files: JobFiles, status: Mapping[str, Any], pods: list[dict[str, Any]]) -> None:
    """The same; a full disk is waited out, since a job whose end nobody can see would be stuck."""
    while error := write_status(files, status, pods):
        _complain(error)
        time.sleep(_PATIENCE)


def _complain(error: OSError) -> None:
    with suppress(OSError):  # the log is on the same disk
        print(f"no status yet, trying again: {error}", file=sys.stderr, flush=True)  # noqa: T201 - this is the log


def _child_exits() -> int:
    """A file descriptor that becomes readable when a child ends, so that the first rank to fail is seen first."""
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


def record_loss(files: JobFiles, *, patient: bool = True) -> None:
    """End a job that has no supervisor: no rank is left, and a condition says why. The caller holds the lock.

    A client is not `patient` with a disk that is full: it has others to answer, and the next look tries again.
    """
    trainjob = files.read()
    if trainjob is None or files.finished():
        return
    sweep(trainjob["metadata"]["uid"])
    if _removed(trainjob):
        files.remove()
        return
    jobs = [{**job, "active": 0, "ready": 0, "failed": 1} for job in trainjob["status"].get("jobsStatus") or []]
    ended = _conditions(trainjob["status"], _cancelled(trainjob) if kept(trainjob) else LOST)
    status = {**trainjob["status"], "jobsStatus": jobs, "conditions": ended}
    (_insist if patient else write_status)(files, status, files.pods())


def _guard(files: JobFiles, lifeline: int) -> None:
    """Wait until the supervisor is gone, then make sure that nothing of its job is left."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.read(lifeline, 1)
    if files.finished():
        return
    if files.supervise(wait_seconds=5) is not None:
        record_loss(files)


def _take_charge(files: JobFiles) -> int | None:
    """The supervisor's lock; None once another supervisor has begun the job, or the job is gone."""
    while files.object.exists() and not files.begun():
        if (lock := files.supervise(wait_seconds=_TICK)) is not None:
            return lock
    return None


def main(directory: str) -> None:
    """Detach, take charge of the job in `directory` and stay with it to its end."""
    files = JobFiles.opened(Path(directory))
    announce, announced = os.pipe()
    if os.fork():  # the launcher's child: returns once it is certain that somebody is in charge
        os.close(announced)
        os.read(announce, 1)
        os._exit(0)
    os.setsid()
    lock = _take_charge(files)
    trainjob = files.read()
    if lock is None or trainjob is None or files.finished():
        os._exit(0)
    if trainjob["status"]:  # another supervisor began and died
        record_loss(files)
        os._exit(0)
    _insist(files, {"jobsStatus": []}, [])
    guarded, lifeline = os.pipe()
    if os.fork() == 0:
        os.close(lock)
        os.close(lifeline)
        os.close(announced)
        _guard(files, guarded)
        os._exit(0)
    os.close(guarded)
    os.close(announced)
    os.chdir("/")
    Supervisor(files, trainjob, read_json(files.start) or {}).run()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
