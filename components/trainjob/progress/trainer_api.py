"""Posts the latest state to Trainer's status API, from a background thread.

At most once per second while the training runs, and the last state at interpreter exit, within at most 5 s. A failed
post is retried, with the state that is the latest then.
"""

from __future__ import annotations

import os
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLES = ("KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_CA_CERT", "KUBEFLOW_TRAINER_SERVER_TOKEN")
"""Environment variables of the API: it exists if all are set."""

_POST_INTERVAL = 1.0
_POST_SHARE = 20  # pauses per post: Trainer's server handles 5 posts a second for all jobs, other posts wait
_POST_TIMEOUT = 5.0
_MAX_BACKOFF = 30.0
_FLUSH_TRIES = 2
_FLUSH_TIMEOUT = 5.0


class _RejectedError(Exception):
    """The server rejected the request permanently; a retry would not help."""


class Poster:
    """Posts the latest status from a thread, without blocking the training."""

    def __init__(self, warn: Callable[[str, object], None]) -> None:
        self._warn = warn
        self._changed = threading.Condition()
        self._pending: bytes | None = None
        self._posting = False
        self._urgent = 0  # number of tries without a long pause
        self._thread: threading.Thread | None = None

    def post(self, status: bytes) -> None:
        """Post a status instead of the pending one, as soon as the pause since the latest post is over."""
        with self._changed:
            self._pending = status
            self._changed.notify_all()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="trainjob-progress", daemon=True)
                # At interpreter shutdown no thread can be started anymore; then `flush` posts.
                try:
                    thread.start()
                except RuntimeError:
                    return
                self._thread = thread

    def _run(self) -> None:
        pause = _POST_INTERVAL
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending is not None)
            began = time.monotonic()
            if self._send():
                pause = max(_POST_INTERVAL, _POST_SHARE * (time.monotonic() - began))
            else:
                pause = min(pause * 2, _MAX_BACKOFF)
            with self._changed:
                if self._urgent:
                    self._changed.wait(0.2)
                else:
                    self._changed.wait_for(lambda: self._urgent, pause)

    def _send(self) -> bool:
        """Post the pending status; False to retry."""
        with self._changed:
            status, self._pending = self._pending, None
            self._posting = True
        again = False
        try:
            if status is not None:
                _post(status)
        except Exception as error:  # noqa: BLE001 - no error of the status API may fail the training
            self._warn("status API", error)
            again = not isinstance(error, _RejectedError)
        with self._changed:
            if again:
                self._pending = self._pending or status
            self._posting = False
            self._urgent = max(0, self._urgent - 1)
            self._changed.notify_all()
        return not again

    def flush(self) -> None:
        """Post the pending status now."""
        if self._thread is None:
            if not self._send():
                self._send()
            return
        # By the thread, so that nothing, e.g. a name server that does not respond, delays the exit for longer.
        with self._changed:
            self._urgent = _FLUSH_TRIES + self._posting
            self._changed.notify_all()
            if not self._changed.wait_for(
                lambda: not self._posting and (self._pending is None or not self._urgent), _FLUSH_TIMEOUT
            ):
                self._warn("status API", f"no response within {_FLUSH_TIMEOUT:g} s")
            self._urgent = 0


def _post(status: bytes) -> None:
    # 40 ms of imports, for a channel that few runs use.
    from http.client import HTTPSConnection
    from ssl import VERIFY_X509_STRICT, create_default_context
    from urllib.parse import urlsplit

    url, ca_file, token_file = (os.environ[name] for name in VARIABLES)
    address = urlsplit(url)
    if address.scheme != "https" or not address.hostname:
        raise _RejectedError(f"{VARIABLES[0]} is not an https URL: {url}")
    # Both files are read each time: kubelet renews the token, and the controller the certificate.
    with open(token_file, encoding="utf-8") as file:
        token = file.read().strip()
    if not (token.isascii() and token.isprintable()):  # http.client would quote it in its error
        raise _RejectedError(f"the token in {token_file} contains characters that no token can have")
    context = create_default_context(cafile=ca_file)
    context.verify_flags &= ~VERIFY_X509_STRICT  # cluster CAs often lack the key usage that Python 3.13 requires
    # http.client, not urllib.request: the token must not reach a proxy or a redirect.
    connection = HTTPSConnection(address.hostname, address.port, timeout=_POST_TIMEOUT, context=context)
    try:
        connection.request(
            "POST",
            address.path or "/",
            body=status,
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        body = answer.read(500).decode(errors="replace").strip()
    finally:
        connection.close()
    if answer.status >= 300:
        # 401 and 403 are retried, since the token may just have been renewed; 429 and 5xx are temporary.
        error = _RejectedError if answer.status in {400, 404, 405, 413, 422} else ConnectionError
        raise error(f"HTTP {answer.status} from {url}: {body}")
