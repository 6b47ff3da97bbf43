"""The watchdog thread: writes to stderr whether the rank makes progress, and its stacks when it does not.

The waiter of the job reads these lines. The thread runs if ``TRAINJOB_STALL_TIMEOUT`` (seconds) is set, and starts at
the first call of `report` or `step`, or by `watch`::

    trainjob.rank {"rank": 3, "world": 4, "count": 120, "step": 120, "step_seconds": 0.0121,
                   "spent": {"all": 1.45, "waiting": 0.2}, "time": 1769860800.0}

(without the line break). One when it starts, one at the first step, and at most one each quarter of the timeout while
the rank makes steps. When no step was counted for half of the timeout (before the second step: for all of it,
since a compiler runs in the first one), one with ``stalled_seconds``, and the Python stacks of all threads, each line
with a prefix: ``trainjob.stack 3| ``. At interpreter exit, one with ``ended``. ``count`` is the number of calls;
``step`` is the latest step that the script gave, or ``steps`` the number of calls of `step` without one. ``spent``
has the seconds from the first step to the latest, and how many of them the main thread spent ``waiting`` for other
ranks in a collective, waiting for a ``device``, and ``loading`` data, by looks at its stack about ten times a second:
they show a rank that is slower than the others.

If `py-spy <https://github.com/benfred/py-spy>`_ is on the ``PATH``, the stacks of a rank that stalls have the native
frames, too.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time

from .message import RANKS, encode, rank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType
    from typing import IO

    from .calls import Counter

RANK_MARKER = "trainjob.rank "
"""Start of a watchdog's line about its rank; JSON follows."""
STACK_MARKER = "trainjob.stack "
"""Start of a line of a stack; the number of the rank, ``| `` and the text follow."""
WAITING, DEVICE, LOADING = "waiting", "device", "loading"
"""What a marker's ``spent`` has, besides ``all``."""
NATIVE_HEADING = "native frames by py-spy"
"""Line of a stack after which the stacks of py-spy follow, that of the main thread first."""
_NATIVE_SECONDS = 10  # that py-spy may take
_WATCHDOG = "trainjob-watchdog"  # name of its thread
_LONGEST_TICK = 0.1  # seconds between two looks of the watchdog, on average
_GOLDEN = 0.618  # pauses that differ by this sequence do not keep step with the training

# Files of Python frames, as regular expressions.
NEUTRAL_FILES = (
    r"(^|/)(threading|queue|selectors|socket|ssl|subprocess|contextlib)\.py$|concurrent/futures/|asyncio/"
    r"|torch/distributed/(c10d_logger|utils)\.py$|torch/utils/_contextlib\.py$|torch/_ops\.py$|torch/_tensor\.py$"
    r"|torch/autograd/function\.py$|jax/_src/(?!distributed|multihost)|<frozen"
)
"""They wait for something, whatever it is: the frame that called them tells."""
COLLECTIVE_FILES = (
    r"torch/distributed/|torch/_C/_distributed|jax/experimental/multihost_utils\.py$|jax/_src/(distributed|multihost)"
    r"|mpi4py/|horovod/|deepspeed/comm/|oneccl|torch_xla/core/xla_model\.py$|xgboost/collective\.py$"
)
"""A process waits in these for other ranks."""
BACKWARD_FILES = r"torch/autograd/graph\.py$"
"""The reducers of DistributedDataParallel and FSDP wait in here for other ranks, in native code."""
DEVICE_FILES = r"torch/(cuda|xpu|hpu|npu)/(__init__|streams)\.py$|jax/_src/(array|api)\.py$|/jaxlib/"
"""These wait for a device, which may wait for another rank: nothing follows from them."""
COMPILER_FILES = (
    r"torch/_dynamo/(?!eval_frame|external_utils|decorators)|torch/_functorch/_aot_autograd/(?!runtime_wrappers)"
    r"|torch/_inductor/(?!output_code|utils\.py|cudagraph_)|triton/(compiler|backends)/|torch_xla/_dynamo/"
    r"|jax/_src/(compiler|interpreters/mlir)\.py$|jax/experimental/pallas/|tensorflow/compiler/"
)
"""Compilers, without the files through which each call of compiled code goes (PyTorch 2.11, Triton 3.6, JAX 0.11)."""
_LOADING_FILES = (
    r"(^|/)(torch/utils/data|tensorflow/python/data|datasets/formatting|grain|streaming/base|webdataset|nvidia/dali)/"
    r"|(^|/)datasets/(iterable|arrow)_dataset\.py$"
)
_STACK_LINES = 300  # of one rank: the threads of data loaders are many
_FRAMES = 60  # of one thread
_ATOMIC = 4096  # PIPE_BUF of Linux: a write of at most so many bytes is not mixed with others

_WORLDS = ("WORLD_SIZE", "JAX_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE", "DMLC_NUM_WORKER", "PET_NNODES")


class Watchdog:
    """Writes whether this rank makes progress, and its stacks when it does not."""

    def __init__(self, counter: Counter, timeout: float) -> None:
        self._counter = counter
        self._timeout = timeout
        self._rank = rank(*RANKS)
        self._world = rank(*_WORLDS)
        self._pid = os.getpid()
        self._seen = 0  # count at the latest look
        self._changed = time.monotonic()  # when it had changed
        self._written = 0  # count in the latest marker
        self._written_at = self._changed
        self._number: dict[str, int] = {}  # in the latest marker, of a step made at:
        self._number_at = self._changed
        self._stalled = False
        self._warned = False
        self._ended = False
        self._began: float | None = None  # when the first step was seen
        self._sampled = self._changed
        self._spent = {WAITING: 0.0, DEVICE: 0.0, LOADING: 0.0}
        self._phase = 0.0

    def start(self) -> None:
        """Start the thread. Without one, as at interpreter shutdown, nothing more is written."""
        self._mark()
        try:
            threading.Thread(target=self._run, name=_WATCHDOG, daemon=True).start()
        except RuntimeError:
            return
        atexit.register(self._end)

    def _run(self) -> None:
        places = Places()
        main = threading.main_thread().ident
        while True:
            self._phase = (self._phase + _GOLDEN) % 1
            time.sleep(min(self._timeout / 16, _LONGEST_TICK) * (0.5 + self._phase))
            if self._ended:
                return
            now, count = time.monotonic(), self._counter.count
            if self._began is not None:
                if (place := places.of(sys._current_frames().get(main or 0))) in self._spent:
                    # The whole time since: code that holds the interpreter's lock delays this thread.
                    self._spent[place] += now - self._sampled
            elif count:
                self._began = now
            self._sampled = now
            if count != self._seen:
                if self._stalled:
                    self._warn(now - self._changed)
                self._seen, self._changed, self._stalled = count, now, False
            if count != self._written and (not self._written or now - self._written_at >= self._timeout / 4):
                self._mark()
            elif not self._stalled and now - self._changed >= self._timeout / (2 if count > 1 else 1):
                self._stalled = True
                self._mark(stalled_seconds=round(now - self._changed, 3))
                for stacks in (_stacks, _native_stacks):
                    _write_lines(f"{STACK_MARKER}{self._rank}| {line}" for line in stacks())

    def _mark(self, **more: object) -> None:
        """Write a marker of the latest look."""
        marker: dict[str, object] = {"rank": self._rank, **({"world": self._world} if self._world else {})}
        if self._seen:
            number = self._counter.number()
            marker |= {"count": self._seen, **number}
            for name, value in number.items():
                done = value - self._number.get(name, value)
                if done > 0:
                    marker["step_seconds"] = float(f"{(self._changed - self._number_at) / done:.4g}")
            self._number, self._number_at = number, self._changed
            if self._began is not None:
                spent = {"all": self._changed - self._began} | {k: v for k, v in self._spent.items() if v}
                marker["spent"] = {name: round(seconds, 3) for name, seconds in spent.items()}
        self._written, self._written_at = self._seen, time.monotonic()
        _write_lines([f"{RANK_MARKER}{encode({**marker, **more, 'time': round(time.time(), 3)}).decode()}"])

    def _warn(self, seconds: float) -> None:
        if not self._warned:
            self._warned = True
            advice = f"raise stall_timeout ({self._timeout:g} s) to several times the longest pause of the training"
            _write_lines([f"trainjob.progress: a step came {seconds:.3g} s after the one before: {advice}"])

    def _end(self) -> None:
        if os.getpid() == self._pid:  # not in a child that inherited this handler
            self._ended = True
            if self._seen != self._counter.count:
                self._seen, self._changed = self._counter.count, time.monotonic()
            self._mark(ended=True)


class Places:
    """Classifies what a thread does by the files of its frames."""

    def __init__(self) -> None:
        import re

        self._kinds: dict[str, str] = {}  # of a file
        self._patterns = [
            (LOADING, re.compile(_LOADING_FILES)),
            (WAITING, re.compile(BACKWARD_FILES)),
            (DEVICE, re.compile(DEVICE_FILES)),
            ("neutral", re.compile(NEUTRAL_FILES)),
            (WAITING, re.compile(COLLECTIVE_FILES)),
        ]

    def of(self, frame: FrameType | None) -> str:
        """`WAITING`, `DEVICE` or `LOADING`; other text for anything else."""
        found = ""  # by the innermost frame that decides
        device = False
        while frame is not None:
            kind = self._kind(frame.f_code.co_filename)
            if kind == LOADING:  # what it calls belongs to it
                return LOADING
            device = device or (not found and kind == DEVICE)
            if not found and kind not in ("neutral", DEVICE):
                found = DEVICE if device and kind != WAITING else kind
            frame = frame.f_back
        return found

    def _kind(self, file: str) -> str:
        if (kind := self._kinds.get(file)) is None:
            kind = next((kind for kind, pattern in self._patterns if pattern.search(file)), "own")
            self._kinds[file] = kind
        return kind


def _stacks() -> list[str]:
    """The Python stacks of all threads but this one, the main thread first, innermost frames first."""
    import faulthandler

    try:
        file = _file()
    except OSError as error:
        return [f"the stacks cannot be read: {error}"]
    with file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode("utf-8", "replace")
    main = f"0x{threading.main_thread().ident or 0:016x}"
    threads = [block.splitlines() for block in text.strip().split("\n\n") if not block.startswith("Current thread")]
    threads.sort(key=lambda lines: main not in lines[0])
    found = [line for lines in threads for line in lines[: _FRAMES + 1]]
    heading = "Main thread (most recent call first):"  # Python 3.14 adds the name of the program
    return [heading if line.startswith(f"Thread {main}") else line for line in found[:_STACK_LINES]]


def _file() -> IO[bytes]:
    """A file for stacks, since a pipe holds only 64 KB, and nothing reads it before the end. In memory if possible."""
    import tempfile

    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("trainjob-stacks"), "w+b")
    return tempfile.TemporaryFile()


def _native_stacks() -> list[str]:
    """What py-spy shows of all threads, the main thread first; nothing without py-spy, or without its permission."""
    import subprocess
    from shutil import which

    program, limit = which("py-spy"), which("timeout")
    if program is None or limit is None:
        return []
    _allow_tracing(True)
    try:
        # py-spy stops this process meanwhile, so another process has to end it if it takes too long.
        command = [limit, "-s", "KILL", str(_NATIVE_SECONDS), program, "dump", "--native", "--pid", str(os.getpid())]
        text = subprocess.run(command, capture_output=True, check=False).stdout.decode("utf-8", "replace")
    except OSError:
        return []
    finally:
        _allow_tracing(False)
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("Thread "):
            blocks.append([])
        if blocks and line:  # before the first thread stands the command line, which may have secrets
            blocks[-1].append(line)
    blocks.sort(key=lambda lines: "MainThread" not in lines[0])
    found = [line for lines in blocks if _WATCHDOG not in lines[0] for line in lines[: _FRAMES + 1]]
    return [NATIVE_HEADING, *found[:_STACK_LINES]] if found else []


def _allow_tracing(allowed: bool) -> None:
    """Let a child of this process read it, which the kernel's module Yama forbids by default."""
    import ctypes

    set_ptracer, anyone = 0x59616D61, -1  # PR_SET_PTRACER, PR_SET_PTRACER_ANY of linux/prctl.h
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(set_ptracer, ctypes.c_ulong(anyone if allowed else 0), 0, 0, 0)


def _write_lines(lines: Iterable[str]) -> None:
    """Write complete lines to stderr, also if the script has replaced `sys.stderr`."""
    text = "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")
    while text:
        cut = text.rfind(b"\n", 0, _ATOMIC) + 1 or len(text)
        try:
            os.write(2, text[:cut])
        except OSError:
            return
        text = text[cut:]
