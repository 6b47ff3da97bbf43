"""The command ``trainjob`` in real processes, with and without a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from tests.warm import Warm

TRAINJOB = str(Path(sys.executable).parent / "trainjob")
STEP = ("--runtime", "trainjob-step")
JAX = ("--runtime", "jax-distributed", "--num-nodes", "2")
FOREVER = ("--", "sh", "-c", "echo begun; exec sleep 300")
STUBBORN = ("--", "sh", "-c", "trap '' TERM; echo begun; while true; do sleep 0.2; done")
INTERRUPTED = 130

TRAINING = """
import os, sys, time
from trainjob import progress

rank, epochs = os.environ["JAX_PROCESS_ID"], int(sys.argv[1])
for epoch in range(1, epochs + 1):
    print(f"epoch {epoch} of rank {rank}")
    if rank == "0":
        outputs = {"model": "file:///models/1"} if epoch == epochs else {}
        done = {"progress": 100 * epoch / epochs, "remaining_seconds": epochs - epoch}
        progress.report(**done, metrics={"loss": 1 / epoch}, outputs=outputs)
    time.sleep(0.25)
if sys.argv[2:] == [rank]:
    raise RuntimeError("the loss is not a number")
"""


class Shell:
    """Runs the command with a separate home."""

    def __init__(self, home: Path, warm: Warm) -> None:
        self.home = home
        home.mkdir(exist_ok=True)
        self._warm = str(warm.bin / "trainjob")
        unset = ("NO_COLOR", "COLUMNS")
        clean = {k: v for k, v in os.environ.items() if not k.startswith("TRAINJOB_") and k not in unset}
        self.environment = clean | {"TRAINJOB_BACKEND": "local", "TRAINJOB_HOME": str(home)}

    def start(self, *words: str, program: str = TRAINJOB) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [program, *words],
            env=self.environment,
            cwd=self.home,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def __call__(self, *words: str, code: int = 0) -> str:
        return self.both(*words, code=code)[0]

    def both(self, *words: str, code: int = 0) -> tuple[str, str]:
        """Run a command that gets no signal; return stdout and stderr."""
        process = self.start(*words, program=self._warm)
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, f"exit {process.returncode}\n{out}\n{err}"
        assert "\nTraceback" not in err  # tracebacks of trainings have a prefix
        return out, err

    def json(self, *words: str, code: int = 0) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self(*words, "--json", code=code))
        return answer

    def events(self, *words: str, code: int = 0) -> list[dict[str, Any]]:
        return events(self(*words, "--json", code=code))

    def launch(self, *words: str) -> str:
        """Launch a job; return its name."""
        return self("run", "--detach", *words).strip()

    def phase(self, name: str) -> str:
        return str(self.json("status", name)["phase"])

    def training(self, epochs: int, *fails: str) -> tuple[str, ...]:
        """Words of a training of two ranks, of which one may fail."""
        return (*JAX, "--", *self.script(TRAINING), str(epochs), *fails)

    def script(self, text: str) -> tuple[str, str]:
        """Write a Python script; return the command that runs it."""
        path = self.home / "train.py"
        path.write_text(text)
        return sys.executable, str(path)

    def is_quiet(self) -> bool:
        return not self.processes()

    def processes(self) -> list[psutil.Process]:
        """All running processes of these jobs: each has inherited the home."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                mine = process.environ().get("TRAINJOB_HOME") == str(self.home)
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def clean_up(self) -> None:
        """Cancel all jobs, and kill what commands of a failed test have left."""
        if self.processes():
            for job in self.json("list")["jobs"]:
                self("cancel", job["name"])
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()


def events(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def interrupt(process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> tuple[int, str, str]:
    """Send a signal; return the exit code, and the rest of stdout and stderr."""
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


class Terminal:
    """The command on a separate pseudo-terminal, which is its controlling terminal, so that Ctrl-C can be typed."""

    TAKE = (
        "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )

    def __init__(self, shell: Shell, *words: str, lines: int = 30, columns: int = 100, **environment: str) -> None:
        self._main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.TAKE, TRAINJOB, *words],
            env={**shell.environment, "TERM": "xterm-256color", **environment},
            cwd=shell.home,
            stdin=side,
            stdout=side,
            stderr=side,
        )
        os.close(side)
        self.raw = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # on Linux the error means that the other side is closed
            while data := os.read(self._main, 65536):
                self.raw += data.decode(errors="replace")

    @property
    def text(self) -> str:
        """What was printed; a line that was redrawn is there several times."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw).replace("\r\n", "\n").replace("\r", "\n")

    def press(self, key: bytes) -> None:
        os.write(self._main, key)

    def wait(self) -> int:
        code = self._process.wait(60)
        self._reader.join(10)
        os.close(self._main)
        return code
