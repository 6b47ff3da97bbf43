"""Object stores of the clouds: how each is opened and configured, and what its errors mean.

All settings are those of the environment, as obstore reads it (`obstore.store.S3Config`, ``GCSConfig``,
``AzureConfig``): static keys, web identity, the roles of instances, pods and containers, other endpoints. Certificates
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

# An outage of up to a minute is bridged here; longer ones are for the orchestrator's retry.
RETRY: RetryConfig = {"max_retries": 6, "retry_timeout": timedelta(seconds=60)}
STALL = "60s"
"""Without a byte; then the connection is given up."""


@dataclass(frozen=True)
class Cloud:
    """What differs between the object stores.

    Attributes:
        name: For messages.
        plain: Environment variable that allows endpoints without TLS.
        keys: What to set where there are no credentials, or not the right ones.
        role: What says for which role keys are asked for, and proves who asks.
        bucket: What the store calls it.
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
    "AWS_ROLE_ARN, the token of AWS_WEB_IDENTITY_TOKEN_FILE, and what the role lets in",
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
# Where instances are asked for credentials when the environment has none (AWS and Azure, ECS, EKS, Google).
_INSTANCE = re.compile(r"169\.254\.(?:169\.254|170\.2|170\.23)|metadata\.google\.internal|http://metadata/")

# What servers answer when there is no room (MinIO 507, Ceph 403), and when a key has expired (AWS 400, the others 403).
_FULL = re.compile(r"\b507 Insufficient Storage\b|<Code>(?:XMinio\w*)?(?:StorageFull|QuotaExceeded)</Code>")
_EXPIRED = re.compile(r"<Code>(?:ExpiredToken|ExpiredTokenException|TokenRefreshRequired)</Code>")

# Of the Rust errors: settings that are missing, or cannot be read.
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
        from obstore.store import AzureStore, GCSStore, S3Store  # noqa: PLC0415 - an extra, for those who need it
    except ImportError:
        raise missing(f"{location.scheme}://", "obstore", "storage") from None
    cloud = CLOUDS[location.scheme]
    # obstore's own default ends every request, with its whole body, after 30 s. Options given here replace those of
    # the environment, so that one is read here.
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
    """Turn what obstore raises into our errors."""
    return Translated(partial(_translate, location, path))


def _translate(location: Location, path: str, error: BaseException) -> None:
    from obstore import exceptions  # noqa: PLC0415 - an extra

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
            raise UnsafePath(f"{where} holds a file with an unsafe name: {_brief(error)}") from None
        case exceptions.BaseError() | OSError() | ValueError():
            raise _other(location, where, error) from None


def _full(where: str) -> OutOfSpace:
    return OutOfSpace(f"no space left for {where}: the server or a quota is full; free some")


def _not_found(location: Location, where: str, said: str) -> SourceNotFound:
    if any(word in said for word in ("NoSuchBucket", "ContainerNotFound")):
        return SourceNotFound(f"there is no {CLOUDS[location.scheme].bucket} {location.authority!r} ({where})")
    return SourceNotFound(f"{where} does not exist")


def _allows_http(cloud: Cloud) -> bool:
    return os.environ.get(cloud.plain, "").lower() in ("1", "true", "yes")


def _denied(cloud: Cloud, where: str) -> ConfigurationError:
    return ConfigurationError(
        f"access to {where} was denied; check {cloud.keys}, and what they may do with the {cloud.bucket}"
    )


def _other(location: Location, where: str, error: Exception) -> TrainJobError:
    cloud, said, text = CLOUDS[location.scheme], str(error), _brief(error)
    if "NoSuchBucket" in said or "ContainerNotFound" in said:
        return _not_found(location, where, said)
    if _FULL.search(said):
        return _full(where)
    if "KeyTooLongError" in said:
        return UnsafePath(f"{where} has a name that is too long for the store; rename or exclude it")
    if (unfit := _unfit(cloud, where, said, text)) is not None:
        return unfit
    if "Range request not supported" in text:
        # object_store had to resume after a cut, and could not.
        text = "the connection was cut, and the server cannot resume"
    return StoreUnavailable(f"{where}: {text}")


def _unfit(cloud: Cloud, where: str, said: str, text: str) -> ConfigurationError | None:  # noqa: PLR0911 - a list of cases
    """What is wrong with settings, credentials or certificates; None if it is something else."""
    if "No CA certificates" in said:  # also for plain http: the client is made for both
        return ConfigurationError(
            f"{where} cannot be opened: there are no CA certificates here; install ca-certificates in the image, "
            "or set SSL_CERT_FILE"
        )
    if _INSTANCE.search(said):
        return ConfigurationError(f"there are no credentials for {where}: set {cloud.keys}")
    if "builder error" in text and cloud is _S3 and _allows_http(cloud):
        return ConfigurationError(
            f"{where}: keys are asked for over https only, and AWS_ENDPOINT_URL_STS is plain http"
        )
    if "builder error" in text:
        return ConfigurationError(
            f"the {cloud.name} endpoint is plain http: set {cloud.plain}=true if that is meant, or use https"
        )
    if _SETTINGS.search(said):
        return ConfigurationError(f"{where} cannot be opened: {text}; set {cloud.keys}")
    if (certificate := _CERTIFICATE.search(said)) is not None:
        why = f" ({certificate[1]})" if certificate[1] else ""
        return ConfigurationError(
            f"{where}: the certificate of the endpoint is not trusted here{why};"
            " set SSL_CERT_FILE to a file with its CA"
        )
    status = answered[1] if (answered := _ANSWERED.search(said)) else ""
    # object_store does not say where it asks for keys, since that has a token in it.
    if "Failed to read token file" in said:
        return ConfigurationError(f"no keys were given for {where}: check {cloud.role} ({text})")
    if "REDACTED" in text and status in ("400", "401", "403"):
        why = f"HTTP {status} {code[1]}" if (code := _CODE.search(said)) else f"HTTP {status}"
        return ConfigurationError(f"no keys were given for {where} ({why}): check {cloud.role}")
    if _EXPIRED.search(said):
        return ConfigurationError(f"access to {where} was denied: the credentials have expired; set {cloud.keys}")
    if status in ("401", "403"):
        return _denied(cloud, where)
    return None


def _brief(error: Exception) -> str:
    """The first line, without secrets and without the query of URLs."""
    text = str(error).partition("\n")[0]
    for name in _SECRETS:
        if len(secret := os.environ.get(name, "")) > 3:  # shorter ones are parts of every text
            text = text.replace(secret, "***")
    return re.sub(r"\?[^\s]*", "?...", text)[:300]
