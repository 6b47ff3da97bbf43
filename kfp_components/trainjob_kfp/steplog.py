"""The log and the termination message of a step, which show its outcome to users."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from trainjob import TrainJobError, TrainJobFailed
from trainjob._support.control_characters import plain

_MAX_MESSAGE = 4096  # bytes: kubelet, MaxContainerTerminationMessageLength; the kubelet truncates longer messages


def write_line(what: object) -> None:
    """Write a line to the step's log and flush it. Control sequences are removed, since a rank can have written it."""
    # In a single write, even if stdout is not buffered: a signal handler could write in between.
    sys.stdout.write(f"{plain(str(what))}\n")
    sys.stdout.flush()


@contextmanager
def report_failures() -> Iterator[None]:
    """Report an error as the last lines of the log and as the termination message; exit with code 1."""
    logging.getLogger("httpx").setLevel(logging.WARNING)  # KFP's executor sets INFO, which logs each request
    try:
        yield
    except TrainJobError as error:
        text = str(error) if isinstance(error, TrainJobFailed) else f"error: {error}"
        if missing := _missing_permission(text):
            text += f"\nwhat to do: {_GRANT.format(*missing)}"
        text = "\n".join([text, *getattr(error, "__notes__", ())])
        try:
            leave_message(text)
        except OSError as refused:
            write_line(f"cannot write the termination message: {refused}")
        write_line(text)
        sys.exit(1)  # no traceback: it would show frames of this package, which are not the cause, below the reason


def end_process(line: str, code: int) -> NoReturn:
    """End this process from a signal handler; `line` becomes the termination message and the last line of the log.

    On a KFP backend only the message arrives after Terminate: KFP's launcher, which reads stdout, has already ended.
    """
    try:
        leave_message(line)
    finally:
        try:
            # Bypass Python's buffers: the interrupted code may hold their lock.
            os.write(1, f"{line}\n".encode())
        finally:  # also if stdout is closed (EPIPE)
            os._exit(code)


def leave_message(text: str) -> None:
    """Write `text` as the container's termination message, the only text of a failed step that the Workflow contains.

    Raises:
        OSError: the message cannot be written.
    """
    given = os.environ.get("TRAINJOB_TERMINATION_LOG")
    path = Path(given or "/dev/termination-log")
    if given or ("KUBERNETES_SERVICE_HOST" in os.environ and path.exists()):
        path.write_text(plain(text).encode()[:_MAX_MESSAGE].decode("utf-8", "ignore"), encoding="utf-8")


_GRANT = (
    "ask an administrator to allow {} {} the verb {!r} on {}: `trainjob install --only rbac -n {} "
    "--service-account {} | kubectl apply --server-side -f -`"
)


def _missing_permission(text: str) -> tuple[str, ...] | None:
    """Parse an API server's refusal: kind and name of the user, verb, resource, namespace, and the account again."""
    found = _FORBIDDEN.search(text)
    if found is None:
        return None
    user, verb, resource, group, namespace = found.groups()
    account = user.removeprefix("system:serviceaccount:")
    kind = "service account" if account != user else "user"
    what = f"{resource}.{group}" if group else resource
    return kind, account, verb, what, namespace, account


_FORBIDDEN = re.compile(
    r'User "([^"]+)" cannot (\w+) resource "([^"]+)" in API group "([^"]*)" in the namespace "([^"]+)"'
)
