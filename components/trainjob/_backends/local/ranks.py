"""Ranks as processes: start, read and stop them, and describe them as pods."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from trainjob._backends.local import permissions
from trainjob._backends.local.store import now
from trainjob._support.foreign import Unreadable, read_regular
from trainjob._support.kube_objects import MAX_LINE
from trainjob._support.log_lines import cri_line

MARKER = "TRAINJOB_LOCAL_UID"
"""Environment variable of every process of a job: finds processes that are left, also after their parents ended."""

NOT_INHERITED = ("AIRFLOW", "_AIRFLOW", "KFP_", "ARGO_", "KUBERNETES_", "KUBEFLOW_TRAINER_", MARKER)
"""Prefixes of variables that ranks do not inherit from the launching process: a rank would act as a part of it."""

_REFERENCE = re.compile(r"\$\$|\$\(([^()]+)\)")
_EXIT_SECONDS = 5.0  # for killed processes to exit, which takes longest with the memory of a GPU
_LAST_MESSAGE = 4096  # kubelet: bytes of a termination message


def expand(text: str, environment: Mapping[str, str]) -> str:
    """Kubernetes' expansion of command and args: ``$(NAME)`` if NAME is set, ``$$`` for a dollar sign."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return environment.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def author_environment(
    variables: Sequence[Mapping[str, Any]],
    trainjob: Mapping[str, Any],
    pod: str,
    home: Path,
    injected: Mapping[str, str],
) -> dict[str, str]:
    """The author's variables with their values; Secrets and ConfigMaps are directories of `home`.

    Raises:
        LookupError: A Secret or ConfigMap, or a key of it, does not exist.
    """
    values: dict[str, str] = {}
    for variable in variables:
        source = variable.get("valueFrom")
        if source is None:
            values[variable["name"]] = expand(str(variable.get("value") or ""), {**injected, **values})
            continue
        found = _value_from(source, trainjob, pod, home)
        if found is not None:
            values[variable["name"]] = found
    return values


def _value_from(source: Mapping[str, Any], trainjob: Mapping[str, Any], pod: str, home: Path) -> str | None:
    for field, directory in (("secretKeyRef", "secrets"), ("configMapKeyRef", "configmaps")):
        if field in source:
            reference = source[field]
            path = Path(home, directory, reference["name"], reference["key"])
            try:
                return path.read_text(encoding="utf-8").rstrip("\n")
            except UnicodeDecodeError as error:
                raise LookupError(f"{field} {reference['name']}/{reference['key']}: {path} is not UTF-8") from error
            except OSError as error:
                if reference.get("optional"):
                    return None
                raise LookupError(
                    f"{field} {reference['name']}/{reference['key']} does not exist: write the value to the file {path}"
                ) from error
    metadata = trainjob["metadata"]
    if "fieldRef" in source:
        fields = {
            "metadata.name": pod,
            "metadata.namespace": metadata["namespace"],
            "metadata.uid": metadata["uid"],
            "spec.nodeName": os.uname().nodename,
            "status.podIP": "127.0.0.1",
            "status.hostIP": "127.0.0.1",
        }
        return str(fields.get(source["fieldRef"]["fieldPath"], ""))
    if "resourceFieldRef" not in source:
        raise LookupError(f"valueFrom {', '.join(source)} is not supported on this machine")
    kind, _, resource = source["resourceFieldRef"]["resource"].partition(".")
    resources = (trainjob["spec"].get("trainer") or {}).get("resourcesPerNode") or {}
    return str((resources.get(kind) or {}).get(resource, ""))


class Rank:
    """One started process with its log and its pod."""

    def __init__(self, job: Mapping[str, Any], replicated_job: str, index: int, directory: Path) -> None:
        self.name = f"{job['metadata']['name']}-{replicated_job}-0-{index}"
        self.replicated_job = replicated_job
        self.index = index
        self.termination_log = directory / "termination" / self.name
        self._log_path = directory / "logs" / f"{self.name}.log"
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._open = False  # the last line in the log is a progress bar without its end
        self._clock = 0  # nanoseconds; later than that of any line written
        self.started = ""
        self.terminated: dict[str, Any] | None = None

    def launch(self, command: Sequence[str], environment: Mapping[str, str], cwd: str) -> None:
        """Start the process; if that fails, the rank terminates with ``StartError``, as a container does."""
        if not self._log_path.is_file() or self._log_path.is_symlink():
            _remove(self._log_path)
        self._log = _opened(self._log_path)
        self.started = now()
        _remove(self.termination_log)  # of an earlier start
        self.termination_log.touch(0o600)
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # ValueError: a NUL character
            reason = {
                "FileNotFoundError": f'exec: "{command[0]}": executable file not found in $PATH',
                "PermissionError": f'exec: "{command[0]}": permission denied',
            }.get(type(error).__name__, str(error))
            if not Path(cwd).is_dir():
                reason = f"working directory {cwd} does not exist"
            self.refuse(reason)
            return
        if self._process.stdout is not None:
            os.set_blocking(self._process.stdout.fileno(), False)

    def refuse(self, why: str) -> None:
        """Terminate the rank before its start."""
        self.started = self.started or now()
        self.terminated = {
            "exitCode": 128,
            "reason": "StartError",
            "message": why,
            "startedAt": self.started,
            "finishedAt": now(),
        }

    @property
    def pid(self) -> int | None:
        """Process ID; None before the start."""
        return self._process.pid if self._process else None

    @property
    def output(self) -> int | None:
        """File descriptor of the output of the process; None once all of it was read."""
        stdout = self._process.stdout if self._process else None
        return stdout.fileno() if stdout and not stdout.closed else None

    def pump(self) -> None:
        """Copy the output of the process so far into its log."""
        while (descriptor := self.output) is not None and self._log is not None:
            try:
                data = os.read(descriptor, 256 * 1024)
            except BlockingIOError:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            parts = [part for line in lines for part in _parts(line.rstrip(b"\r"))]
            while len(self._rest) >= MAX_LINE:
                parts.append((self._rest[:MAX_LINE], True))
                self._rest = self._rest[MAX_LINE:]
            self._open = self._open and not lines
            if b"\r" in self._rest:  # a progress bar is readable before the end of its line
                parts.append((self._rest, True))
                self._rest, self._open = b"", True
            written = self._cri(parts)
            if not data:
                self._close_output()
            with suppress(OSError):  # a full disk must not fail the training
                self._log.write(written)
                self._log.flush()

    def _cri(self, parts: Sequence[tuple[bytes, bool]]) -> bytes:
        """Lines for the log, each with a different time, so that a reader can resume after any line."""
        self._clock = max(self._clock + 1, time.time_ns())
        written = [cri_line(_nanoseconds(self._clock + i), text, partial=more) for i, (text, more) in enumerate(parts)]
        self._clock += len(parts)
        return b"".join(written)

    def poll(self) -> bool:
        """Whether the process has ended and its complete output is in the log."""
        if self.terminated is not None:
            return True
        if self._process is None or (code := self._process.poll()) is None:
            return False
        signal_number = -code if code < 0 else 0
        self.terminated = {
            "exitCode": 128 + signal_number if signal_number else code,
            "signal": signal_number,  # 0: it exited, also with a code above 128
            "reason": "Completed" if code == 0 else "Error",
            "message": self.termination_message(),
            "startedAt": self.started,
            "finishedAt": now(),
        }
        self.signal(signal.SIGKILL)  # processes that it started
        self.pump()
        self._close()
        return True

    def signal(self, number: int) -> None:
        """Send signal `number` to the process group of the rank."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _close_output(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()

    def _close(self) -> None:
        self._close_output()
        if self._log is not None:
            with suppress(OSError):
                if self._rest or self._open:
                    self._log.write(self._cri([(self._rest, False)]))
                self._log.close()

    def termination_message(self) -> str:
        """The termination message of the process; empty if it wrote none."""
        try:
            return read_regular(self.termination_log, _LAST_MESSAGE, cut=True).decode("utf-8", "replace")
        except Unreadable:
            return ""

    def pod(self, trainjob: Mapping[str, Any]) -> dict[str, Any]:
        """The rank as the pod that it would be."""
        if self.terminated is not None:
            state: dict[str, Any] = {"terminated": self.terminated}
            phase = "Succeeded" if self.terminated["exitCode"] == 0 else "Failed"
        else:
            state, phase = {"running": {"startedAt": self.started}}, "Running"
        name = trainjob["metadata"]["name"]
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": self.name,
                "namespace": trainjob["metadata"]["namespace"],
                "labels": {
                    "jobset.sigs.k8s.io/jobset-name": name,
                    "jobset.sigs.k8s.io/replicatedjob-name": self.replicated_job,
                    "batch.kubernetes.io/job-completion-index": str(self.index),
                },
            },
            "spec": {"nodeName": os.uname().nodename, "containers": [{"name": "node"}]},
            "status": {
                "phase": phase,
                "startTime": self.started,
                "containerStatuses": [
                    {"name": "node", "ready": phase == "Running", "restartCount": 0, "state": state, "lastState": {}}
                ],
            },
        }


def _parts(line: bytes) -> list[tuple[bytes, bool]]:
    """Parts of a line, each with whether another part follows."""
    cuts = range(0, max(len(line), 1), MAX_LINE)
    return [(line[cut : cut + MAX_LINE], cut + MAX_LINE < len(line)) for cut in cuts]


def _nanoseconds(clock: int) -> str:
    seconds, rest = divmod(clock, 10**9)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest:09}Z"


def sweep(uid: str, ended: Collection[int] = ()) -> None:
    """Kill every process of job `uid`, also those that left their group, and wait until they have exited.

    Does nothing where there is no /proc: there, only the process groups of the ranks are killed, by `Rank.signal`.

    Args:
        uid: UID of the job.
        ended: Process IDs of its ranks that have ended. Each has led a session, of which other processes may be left:
            one that exits has no environment any more, and may still have the memory of a GPU.
    """
    if not Path("/proc/self/environ").exists():
        return
    deadline = time.monotonic() + _EXIT_SECONDS
    sessions = [str(pid).encode() for pid in ended if not Path(f"/proc/{pid}").exists()]  # else the number is reused
    while _kill_left(uid, sessions, deadline) and time.monotonic() < deadline:
        pass


def _kill_left(uid: str, sessions: Collection[bytes], deadline: float) -> bool:
    """Kill once, and wait; True if a process was found. Takes 30 us per process."""
    marker = f"\0{MARKER}={uid}\0".encode()
    found: list[int] = []
    with ExitStack() as stack:
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit() or int(entry.name) == os.getpid() or not _is_left(entry.path, marker, sessions):
                continue
            with suppress(OSError):
                process = os.pidfd_open(int(entry.name))
                stack.callback(os.close, process)
                # Still the same process: the descriptor refers to it.
                if _is_left(entry.path, marker, sessions) and not _exited(process, 0):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                    found.append(process)
        for process in found:
            _exited(process, max(0.0, deadline - time.monotonic()))
    return bool(found)


def _exited(process: int, seconds: float) -> bool:
    """Wait until all threads of a process have exited, which closes its files, such as those of a GPU."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _is_left(directory: str, marker: bytes, sessions: Collection[bytes]) -> bool:
    """Whether a process has the marker of a job, or belongs to one of the sessions."""
    with suppress(OSError):  # it has ended, or belongs to another user
        if marker in b"\0" + Path(directory, "environ").read_bytes() + b"\0":
            return True
    with suppress(OSError):
        return bool(sessions) and Path(directory, "stat").read_bytes().rpartition(b")")[2].split()[3] in sessions
    return False


def _remove(path: Path) -> None:
    """Remove a file, or anything by which the script has replaced it; nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _opened(log: Path) -> IO[bytes]:
    """A log file, to append to."""
    return open(log, "ab", opener=permissions.opener)
