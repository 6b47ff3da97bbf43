"""Reports the return value of a function trainer in the termination message of rank 0.

The source of this file is sent with the function into images without this package: standard library only.
The message has the format of `trainjob.progress`, whose metrics and outputs it keeps.
"""

import json
import os
import sys
import time
from contextlib import suppress
from importlib import import_module
from typing import Any

MAX_BYTES = 4096  # kubelet: MaxContainerTerminationMessageLength; it truncates longer messages
_RANKS = "RANK", "JAX_PROCESS_ID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX"


def watch() -> None:
    """Start the watchdog of this rank, if the job has a ``stall_timeout`` and the image has the package."""
    if os.environ.get("TRAINJOB_STALL_TIMEOUT"):
        with suppress(ImportError):
            import_module("trainjob.progress").watch()  # by name, since that module imports this one


def report(name: str, value: Any) -> None:
    """Report the value that function `name` returned, on global rank 0 only; None is not reported.

    A value that is not JSON, or is too large, is logged and does not fail a finished training.
    """
    rank = next((os.environ[each] for each in _RANKS if os.environ.get(each)), "0")
    if value is None or (rank.isdecimal() and int(rank) != 0):
        return
    try:
        value = json.loads(json.dumps(value, allow_nan=False, default=_scalar))
    except (TypeError, ValueError, RecursionError) as error:
        advice = "return finite numbers, text, bools, or lists and dicts of them; write other values to a file"
        _warn(f"the return value of {name}() is lost: it cannot be written as JSON: {error}; {advice}")
        return
    # If the function has imported that module, a thread of it may write the message again later.
    write = getattr(sys.modules.get("trainjob.progress"), "report_returned", lambda value: merge("returned", value))
    try:
        write(value)
    except ValueError as error:
        _warn(f"the return value of {name}() is lost: it is too large: {error}")


def _warn(message: str) -> None:
    print(f"trainjob: {message}", file=sys.stderr, flush=True)


def _scalar(value: Any) -> Any:
    """A scalar of NumPy, JAX or Torch as a number of Python."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def merge(field: str, value: Any) -> None:
    """Set one field of the existing message. If space is short, the history is dropped first, then the oldest metrics.

    Raises:
        ValueError: The value does not fit. Nothing was changed.
    """
    path = os.environ.get("TRAINJOB_TERMINATION_LOG", "")
    if not path and os.environ.get("KUBERNETES_SERVICE_HOST"):
        path = "/dev/termination-log"
    if not path or not os.path.exists(path):
        return
    with open(path, "r+b") as file:  # in place: kubelet bind-mounts the file
        try:
            found, _ = json.JSONDecoder().raw_decode(file.read().decode("utf-8", "replace").lstrip())
        except (ValueError, RecursionError):
            found = None
        known: Any = found if isinstance(found, dict) and found.get("trainjob") == 1 else {"trainjob": 1}
        updated = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        message = {**known, "lastUpdatedTime": updated, field: value}
        if len(_encode(message)) > MAX_BYTES:
            message.pop("history", None)
        while len(_encode(message)) > MAX_BYTES and isinstance(message.get("metrics"), list) and message["metrics"]:
            del message["metrics"][0]
        if (size := len(_encode(message))) > MAX_BYTES:
            raise ValueError(too_large(len(_encode(value)), size))
        file.seek(0)
        file.write(_encode(message))
        file.truncate()


def too_large(needed: int, size: int) -> str:
    """The error for a value of `needed` bytes in a message of `size` bytes."""
    free = max(0, MAX_BYTES - size + needed)
    return (
        f"it has {needed} bytes of JSON; {free} of {MAX_BYTES} bytes are free in the termination message of rank 0; "
        "write it to a file and return the URI of that file"
    )


def _encode(message: Any) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode("ascii")
