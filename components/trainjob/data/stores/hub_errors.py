"""What the errors of huggingface-hub mean."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from trainjob import retry_after
from trainjob.errors import (
    ConfigurationError,
    OutOfSpace,
    SourceNotFound,
    StoreUnavailable,
    TrainJobError,
    UnsafePath,
)


@contextmanager
def errors(where: str) -> Iterator[None]:
    """Turn what huggingface-hub raises into our errors."""
    from huggingface_hub import errors as theirs  # noqa: PLC0415 - an extra

    # Errors of its HTTP client, which is httpx in some versions and a fork of it in others.
    transport: type[Exception] = theirs.HfHubHTTPError.__bases__[0]
    try:
        yield
    except TrainJobError:
        raise
    except theirs.GatedRepoError:
        raise ConfigurationError(
            f"{where} is gated: accept its conditions on the Hub, and set HF_TOKEN to a token of that account"
        ) from None
    except theirs.RepositoryNotFoundError:
        hint = "HF_TOKEN may not see it" if os.environ.get("HF_TOKEN") else "if it is private, set HF_TOKEN"
        raise SourceNotFound(f"there is no repository {where}; {hint}") from None
    except (theirs.RevisionNotFoundError, theirs.EntryNotFoundError):
        raise SourceNotFound(f"{where} does not exist") from None
    except theirs.HfHubHTTPError as error:
        raise _answered(where, error) from None
    except theirs.HFValidationError as error:
        raise ConfigurationError(f"{where}: {_brief(error)}") from None
    except ValueError as error:
        if "path_in_repo" in str(error):
            raise UnsafePath(f"{where}: {_brief(error)}") from None
        raise StoreUnavailable(f"{where}: {_brief(error)}") from None
    except RuntimeError as error:
        # Of an upload; what it was is behind it.
        if isinstance(error.__cause__, theirs.HfHubHTTPError):
            raise _answered(where, error.__cause__) from None
        raise StoreUnavailable(f"{where}: {_brief(error.__cause__ or error)}") from None
    except (transport, OSError) as error:
        raise StoreUnavailable(f"{where}: {_brief(error)}") from None


def _answered(where: str, error: Exception) -> TrainJobError:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", 0)
    if status in (401, 403):
        return ConfigurationError(
            f"access to {where} was denied; set HF_TOKEN to a token that may read it, or write to it ({_brief(error)})"
        )
    if status == 507:
        return OutOfSpace(f"no space left for {where}: {_brief(error)}")
    if status in (408, 409, 412, 425, 429) or status >= 500 or not status:
        unavailable = StoreUnavailable(f"{where}: the hub answered HTTP {status}")
        if response is not None:
            unavailable.retry_after = retry_after.seconds(response.headers.get("Retry-After"))
        return unavailable
    return ConfigurationError(f"{where}: the hub answered HTTP {status}: {_brief(error)}")


def _brief(error: BaseException) -> str:
    """In one line, without the token."""
    text = " ".join(str(error).split()) or type(error).__name__
    if token := os.environ.get("HF_TOKEN"):
        text = text.replace(token, "***")
    return text[:300]
