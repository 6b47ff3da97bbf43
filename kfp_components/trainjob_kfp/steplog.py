"""The step's log, and its termination message: what a person sees of a step."""

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
from trainjob.sanitizing import plain

_MAX_MESSAGE = 4096  # kubelet: MaxContainerTerminationMessageLength; it cuts off the rest


def say(what: object) -> None:
    """A line for the step's log, at once, without control sequences: a rank may have written it."""
    # In one write, also where stdout is not buffered: a signal's handler may write in between.
    sys.stdout.write(f"{plain(str(what))}\n")
    sys.stdout.flush()


@contextmanager
def failures_explained() -> Iterator[None]:
    """Turn an error into the last lines of the log, the termination message, and exit code 1."""
    logging.getLogger("httpx").setLevel(logging.WARNING)  # KFP's executor logs at INFO: a line for each request
    try:
        yield
    except TrainJobError as error:
        text = str(error) if isinstance(error, TrainJobFailed) else f"error: {error}"
        if missing := _missing_right(text):
            text += f"\nwhat to do: {_GRANT.format(*missing)}"
        try:
            leave_message(text)
        except OSError as refused:
            say(f"cannot write the termination message: {refused}")
        say(text)
        sys.exit(1)  # a traceback would show our frames, which are not to blame, below the reason


def end_process(line: str, code: int) -> NoReturn:
    """End this process from a signal's handler, with `line` as the termination message and as the log's last line.

    On a KFP backend only the message arrives after Terminate: KFP's launcher, which reads stdout, is dead by then.
    """
    try:
        leave_message(line)
    finally:
        try:
            # Past Python's buffers: the interrupted code may hold their lock.
            os.write(1, f"{line}\n".encode())
        finally:  # also where nobody reads stdout any more (EPIPE)
            os._exit(code)


def leave_message(text: str) -> None:
    """Leave `text` as the container's termination message, the only text of a failed step that reaches the Workflow.

    Raises:
        OSError: it cannot be written.
    """
    given = os.environ.get("TRAINJOB_TERMINATION_LOG")
    path = Path(given or "/dev/termination-log")
    if given or ("KUBERNETES_SERVICE_HOST" in os.environ and path.exists()):
        path.write_text(plain(text).encode()[:_MAX_MESSAGE].decode("utf-8", "ignore"), encoding="utf-8")


_GRANT = (
    "have an administrator give {} {} the verb {!r} on {}: `trainjob install --only rbac -n {} "
    "--service-account {}` prints the Role and its binding, for `kubectl apply --server-side -f -`"
)


def _missing_right(text: str) -> tuple[str, ...] | None:
    """Of an API server's refusal: kind and name of who asked, the verb, on what, where, and the account again."""
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
