"""Starts the watchdog of `trainjob.progress` in the program that `trainjob exec` runs.

Python imports this module at its start, since `trainjob exec` puts its folder first into PYTHONPATH for a job with a
``stall_timeout``. Only the process of a rank is watched: no launcher of ranks, and no process that a rank starts.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import PurePath

_LAUNCHERS = {"torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed", "ray"}
_WATCHED = "TRAINJOB_WATCHED"  # inherited by the processes that a rank starts


def _watch() -> None:
    launches = "RANK" not in os.environ and any(PurePath(word).name in _LAUNCHERS for word in sys.orig_argv)
    if launches or _WATCHED in os.environ:
        return
    try:
        from trainjob import progress  # noqa: PLC0415 - may be missing
    except ImportError:  # another environment than that of `trainjob exec`
        return
    os.environ[_WATCHED] = "1"
    progress.watch()


def _run_next() -> None:
    """Run the sitecustomize that this one hides."""
    here = str(PurePath(__file__).parent)
    sys.path[:] = [path for path in sys.path if path != here]
    found = PathFinder.find_spec("sitecustomize", sys.path)
    if found is not None and found.loader is not None:
        found.loader.exec_module(module_from_spec(found))


_watch()
_run_next()
