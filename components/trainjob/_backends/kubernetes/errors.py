"""Replies of an API server as exceptions.

::

    ApiError                 status, reason and message of the server
      x BadRequest           400
      x Unauthorized         401: the credentials were reloaded and are still refused
      x Forbidden            403
      x ObjectNotFound       404
      x Conflict             409
      x Expired              410: the server no longer holds the resource version
      x TooLarge             413
      x Invalid              422
      x Transient            may succeed when retried
        + TooManyRequests    429
        + ServerError        5xx
        + Unreachable        no reply
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainjob._support import retrying
from trainjob.errors import RetryVerdict, TrainJobError

_SHOWN = 1000  # characters of a server's message; that of a rejected patch can quote a complete pod


class ApiError(TrainJobError):
    """A reply that is not a success.

    Attributes:
        status: HTTP status; 0 where there was no reply.
        reason: The server's CamelCase reason.
        message: The server's message.
        retry_after: Seconds that the server asked to wait; None if it did not.
    """

    def __init__(self, status: int, reason: str, message: str, retry_after: float | None = None) -> None:
        self.status = status
        self.reason = reason
        self.message = message[:_SHOWN]
        self.retry_after = retry_after
        super().__init__(f"{status} {reason}: {self.message}" if status else self.message)


class BadRequest(ApiError):
    """400."""


class Unauthorized(ApiError):
    """401."""


class Forbidden(ApiError):
    """403."""


class ObjectNotFound(ApiError):
    """404."""


class Conflict(ApiError):
    """409."""


class Expired(ApiError):
    """410."""


class TooLarge(ApiError):
    """413."""


class Invalid(ApiError):
    """422."""


class Transient(ApiError):
    """May succeed when retried."""

    retry = RetryVerdict.INFRASTRUCTURE


class TooManyRequests(Transient):
    """429."""


class ServerError(Transient):
    """5xx."""


class Unreachable(Transient):
    """No reply: the connection was refused, broke, or was silent for too long."""


class NoConnection(Unreachable):
    """No connection can be opened, or the other end of one is gone; a watch does not normally end so."""


_BY_STATUS: Mapping[int, type[ApiError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: ObjectNotFound,
    409: Conflict,
    410: Expired,
    413: TooLarge,
    422: Invalid,
    429: TooManyRequests,
}


def error_of(status: int, body: object, header: str | None = None) -> ApiError:
    """The exception for a reply.

    Args:
        status: HTTP status, or the ``code`` of a Status object inside a watch.
        body: JSON or text of the reply. Text is quoted only in part, since a proxy may have written it.
        header: Value of ``Retry-After``.
    """
    fields: Mapping[str, Any] = body if isinstance(body, Mapping) and body.get("kind") == "Status" else {}
    message = str(fields.get("message") or (body if isinstance(body, str) else "") or "no message")
    asked = retrying.seconds(header)
    if asked is None:
        asked = (fields.get("details") or {}).get("retryAfterSeconds")
    if "etcdserver: request is too large" in message:  # the API server forwards it as 500
        status = 413
    kind = _BY_STATUS.get(status, ServerError if status >= 500 else ApiError)
    return kind(status, str(fields.get("reason") or ""), message.strip()[:_SHOWN], asked)
