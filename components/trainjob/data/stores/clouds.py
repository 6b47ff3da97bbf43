"""Open and configure the object stores of the clouds, and translate their errors.

All settings come from the environment, as obstore reads it (`obstore.store.S3Config`, ``GCSConfig``,
``AzureConfig``): static keys, web identity, roles of instances, pods and containers, custom endpoints. Certificates
are those of the system, or of ``SSL_CERT_FILE``.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from trainjob.data.locations import Location
from trainjob.data.stores.translated import Translated
from trainjob.errors import (
    ConfigurationError,
    CorruptData,
    OutOfSpace,
    SourceNotFound,
    StoreUnavailable,
    TrainJobError,
    UnsafePath,
    missing,
)

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

# Outages of up to a minute are retried here; the orchestrator retries after longer ones.
RETRY: RetryConfig = {"max_retries": 6, "retry_timeout": timedelta(seconds=60)}
STALL = "60s"
"""A connection without a byte for so long is dropped."""


@dataclass(frozen=True)
class Cloud:
    """What differs between the object stores.

    Attributes:
        name: For messages.
        plain: Environment variable that allows endpoints without TLS.
        keys: What to set where credentials are missing or wrong.
        role: Settings of the role for which temporary keys are requested, and of the proof of identity.
        bucket: The store's word for a bucket.
    """

    name: str
    plain: str
    keys: str
    role: str
    bucket: str = "bucket"


_S3 = Cloud(
    "S3",
    "AWS_ALLOW_HTTP",
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role for the pod",
    "AWS_ROLE_ARN, the token of AWS_WEB_IDENTITY_TOKEN_FILE, and the trust policy of the role",
)
_GOOGLE = Cloud(
    "Google",
    "GOOGLE_ALLOW_HTTP",
    "GOOGLE_APPLICATION_CREDENTIALS, or a service account for the pod",
    "GOOGLE_APPLICATION_CREDENTIALS, and the service account of the pod",
)
_AZURE = Cloud(
    "Azure",
    "AZURE_ALLOW_HTTP",
    "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or a workload identity",
    "AZURE_CLIENT_ID, AZURE_TENANT_ID, and AZURE_CLIENT_SECRET or the token of AZURE_FEDERATED_TOKEN_FILE",
    "container",
)
CLOUDS = {"s3": _S3, "gs": _GOOGLE, "az": _AZURE, "abfs": _AZURE, "abfss": _AZURE}
"""By scheme."""

_SECRETS = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AZURE_CLIENT_SECRET",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_STORAGE_MASTER_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_TOKEN",
    "GOOGLE_BEARER_TOKEN",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
)
# Metadata servers, which are asked for credentials if the environment has none (AWS and Azure, ECS, EKS, Google).
_INSTANCE = re.compile(r"169\.254\.(?:169\.254|170\.2|170\.23)|metadata\.google\.internal|http://metadata/")

# Replies of a full server (MinIO 507, Ceph 403), and for expired credentials (AWS 400, the others 403).
_FULL = re.compile(r"\b507 Insufficient Storage\b|<Code>(?:XMinio\w*)?(?:StorageFull|QuotaExceeded)</Code>")
_EXPIRED = re.compile(r"<Code>(?:ExpiredToken|ExpiredTokenException|TokenRefreshRequired)</Code>")

# Rust errors for settings that are missing or invalid.
_SETTINGS = re.compile(
    r"\b(?:Missing(?:Account|Bucket|BucketName|ContainerName|Key|Region|Credentials)|InvalidAccessKey|OpenCredentials"
    r"|DecodeCredentials|InvalidKey|UnknownConfigurationKey|UnableToParseUrl)\b"
)
_ANSWERED = re.compile(r"Server returned non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_CERTIFICATE = re.compile(
    r"InvalidCertificate\(\s*(\w+)|UnknownIssuer|invalid peer certificate|certificate verify failed"
)


def open_bucket(location: Location) -> Any:
    """Open the bucket or container of a location.

    Raises:
        ConfigurationError: obstore is not installed, or a setting is wrong.
    """
    try:
        from obstore.store import AzureStore, GCSStore, S3Store
    except ImportError:
        raise missing(f"{location.scheme}://", "obstore", "storage") from None
    cloud = CLOUDS[location.scheme]
    # obstore's default timeout ends every request, including its body, after 30 s. Options given here replace those
    # of the environment, so `allow_http` is read here.
    client: ClientConfig = {
        "connect_timeout": "10s",
        "read_timeout": STALL,
        "timeout": "7days",
        "allow_http": _allows_http(cloud),
    }
    with errors(location, ""):
        if cloud is _S3:
            return S3Store(location.authority, client_options=client, retry_config=RETRY)
        if cloud is _GOOGLE:
            return GCSStore(location.authority, client_options=client, retry_config=RETRY)
        container, _, host = location.authority.partition("@")
        if host:
            account = host.partition(".")[0]
            return AzureStore(container, account_name=account, client_options=client, retry_config=RETRY)
        return AzureStore(container, client_options=client, retry_config=RETRY)


def errors(location: Location, path: str) -> Translated:
    """Translate errors of obstore into those of `trainjob.errors`."""
    return Translated(partial(_translate, location, path))


def _translate(location: Location, path: str, error: BaseException) -> None:
    from obstore import exceptions

    cloud, where = CLOUDS[location.scheme], location.child(path).uri if path else location.uri
    match error:
        case TrainJobError():
            pass
        case FileNotFoundError():
            raise _not_found(location, where, str(error)) from None
        case exceptions.PermissionDeniedError() | exceptions.UnauthenticatedError():
            raise (_full(where) if _FULL.search(str(error)) else _denied(cloud, where)) from None
        case exceptions.PreconditionError():
            raise CorruptData(f"{where} changed while it was read; run the step again") from None
        case exceptions.InvalidPathError():
            raise UnsafePath(f"{where} contains a file with an unsafe name: {_brief(error)}") from None
        case exceptions.BaseError() | OSError() | ValueError():
            raise _other(location, where, error) from None


def _full(where: str) -> OutOfSpace:
    return OutOfSpace(f"no space left for {where}: the server or a quota is full; delete data or raise the quota")


def _not_found(location: Location, where: str, message: str) -> SourceNotFound:
    if any(word in message for word in ("NoSuchBucket", "ContainerNotFound")):
        return SourceNotFound(f"{CLOUDS[location.scheme].bucket} {location.authority!r} does not exist ({where})")
    return SourceNotFound(f"{where} does not exist")


def _allows_http(cloud: Cloud) -> bool:
    return os.environ.get(cloud.plain, "").lower() in ("1", "true", "yes")


def _denied(cloud: Cloud, where: str) -> ConfigurationError:
    return ConfigurationError(
        f"access to {where} was denied; check {cloud.keys}, and their permissions for the {cloud.bucket}"
    )


def _other(location: Location, where: str, error: Exception) -> TrainJobError:
    cloud, message, text = CLOUDS[location.scheme], str(error), _brief(error)
    if "NoSuchBucket" in message or "ContainerNotFound" in message:
        return _not_found(location, where, message)
    if _FULL.search(message):
        return _full(where)
    if "KeyTooLongError" in message:
        return UnsafePath(f"the name of {where} is too long for the store; rename or exclude the file")
    if (configuration := _configuration_error(cloud, where, message, text)) is not None:
        return configuration
    if "Range request not supported" in text:
        # object_store could not resume after a cut.
        text = "the connection was cut, and the server cannot resume"
    return StoreUnavailable(f"{where}: {text}")


def _configuration_error(  # noqa: PLR0911 - a list of cases
    cloud: Cloud, where: str, message: str, text: str
) -> ConfigurationError | None:
    """The error for wrong settings, credentials or certificates; None for any other error."""
    if "No CA certificates" in message:  # also for plain http: the client is built for both
        return ConfigurationError(
            f"{where} cannot be opened: no CA certificates are installed; install ca-certificates in the image, "
            "or set SSL_CERT_FILE"
        )
    if _INSTANCE.search(message):
        return ConfigurationError(f"no credentials found for {where}: set {cloud.keys}")
    if "builder error" in text and cloud is _S3 and _allows_http(cloud):
        return ConfigurationError(
            f"{where}: AWS_ENDPOINT_URL_STS is plain http, and keys are requested over https only; use an https URL"
        )
    if "builder error" in text:
        return ConfigurationError(
            f"the {cloud.name} endpoint is plain http: use https, or set {cloud.plain}=true if plain http is intended"
        )
    if _SETTINGS.search(message):
        return ConfigurationError(f"{where} cannot be opened: {text}; set {cloud.keys}")
    if (certificate := _CERTIFICATE.search(message)) is not None:
        why = f" ({certificate[1]})" if certificate[1] else ""
        return ConfigurationError(
            f"{where}: the certificate of the endpoint is not trusted{why};"
            " set SSL_CERT_FILE to a file with the certificate of its CA"
        )
    status = answered[1] if (answered := _ANSWERED.search(message)) else ""
    # object_store redacts the URL at which it requests keys, since that contains a token.
    if "Failed to read token file" in message:
        return ConfigurationError(f"requesting keys for {where} failed: check {cloud.role} ({text})")
    if "REDACTED" in text and status in ("400", "401", "403"):
        why = f"HTTP {status} {code[1]}" if (code := _CODE.search(message)) else f"HTTP {status}"
        return ConfigurationError(f"requesting keys for {where} failed ({why}): check {cloud.role}")
    if _EXPIRED.search(message):
        return ConfigurationError(f"access to {where} was denied: the credentials have expired; set {cloud.keys}")
    if status in ("401", "403"):
        return _denied(cloud, where)
    return None


def _brief(error: Exception) -> str:
    """The first line, without secrets and without the query of URLs."""
    text = str(error).partition("\n")[0]
    for name in _SECRETS:
        if len(secret := os.environ.get(name, "")) > 3:  # shorter values occur in any text
            text = text.replace(secret, "***")
    return re.sub(r"\?[^\s]*", "?...", text)[:300]
