"""Google Cloud Storage and Azure, as far as tests can cover them: requests and error messages.

Reads and writes go to a fake server (`tests.fakes.clouds`), not to the real services.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
from obstore.exceptions import GenericError
from tests.fakes.clouds import Clouds
from tests.fakes.scripted import Answer, Asked, ScriptedServer, as_json
from tests.serving import serving
from tests.trees import files, tree

from trainjob._support import retrying
from trainjob.data import copy, file_manifest, transfer
from trainjob.data.locations import parse_store
from trainjob.data.stores import clouds
from trainjob.data.stores.opening import open_store, open_writable
from trainjob.errors import ConfigurationError, OutOfSpace, SourceNotFound, StoreUnavailable, UnsafePath

BIG = bytes(range(256)) * 50_000  # 12.8 MB: larger than one part


@pytest.fixture(autouse=True)
def unset_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr("trainjob.data.stores.clouds.RETRY", {"max_retries": 0})
    monkeypatch.setattr(retrying, "TRANSFER", partial(retrying.TRANSFER, failures=1))


S3 = {"AWS_ENDPOINT_URL": "{}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "eu-1"}
GOOGLE = {"GOOGLE_BASE_URL": "{}", "GOOGLE_ALLOW_HTTP": "1"}
AZURE = {"AZURE_STORAGE_ACCOUNT_NAME": "acc", "AZURE_STORAGE_ENDPOINT": "{}", "AZURE_ALLOW_HTTP": "true"}
S3_KEY = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "aHVudGVyMmh1bnRlcjI="}
AZURE_KEY = {"AZURE_STORAGE_ACCOUNT_KEY": "aHVudGVyMmh1bnRlcjI="}


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets variables, whose values may contain the address of a server."""

    def set_(values: Mapping[str, str], url: str = "http://127.0.0.1:1") -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value.replace("{}", url))

    return set_


@pytest.mark.parametrize(
    ("uri", "settings", "missing"),
    [
        ("gs://models/x", GOOGLE | {"GOOGLE_SKIP_SIGNATURE": "true"}, "GOOGLE_ALLOW_HTTP"),
        ("s3://models/x", S3 | S3_KEY, "AWS_ALLOW_HTTP"),
        ("az://c/x", {}, "AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_a_missing_setting_is_named(
    setting: Callable[..., None], tmp_path: Path, uri: str, settings: dict[str, str], missing: str
) -> None:
    setting({name: value for name, value in settings.items() if name != missing})
    with pytest.raises(ConfigurationError, match=missing):
        copy(uri, str(tmp_path / "t"))


def test_missing_certificates_are_distinguished_from_plain_http(setting: Callable[..., None]) -> None:
    setting(S3 | S3_KEY | dict.fromkeys(("SSL_CERT_FILE", "SSL_CERT_DIR"), "/nonexistent"))
    with pytest.raises(ConfigurationError, match="ca-certificates"):
        transfer.scan("s3://models/x")


@pytest.fixture
def clouds_server(setting: Callable[..., None]) -> Iterator[Clouds]:
    with serving(Clouds()) as server:
        setting(AZURE | AZURE_KEY | GOOGLE | {"GOOGLE_BEARER_TOKEN": "t"}, server.url)
        yield server


def test_a_container_of_another_account_is_written_and_read(clouds_server: Clouds, tmp_path: Path) -> None:
    """`tests/stores` has the same for the other schemes."""
    given = {"a.txt": b"one", "sub/big": BIG, "sub/empty": b"", "sp ace/%20?#é+": b"x"}
    container = "abfss://models@acc.dfs.core.windows.net"
    there = copy(str(tree(tmp_path / "source", given)), f"{container}/x/y")
    held = dict(clouds_server.buckets["models"])
    assert held == {f"x/y/{name}": data for name, data in given.items()} | {
        f"x/y/{file_manifest.NAME}": there.to_json()
    }
    assert any("blockid" in each for each in clouds_server.requests), "large files are uploaded in parts"
    clouds_server.buckets["models"]["x/yz/other"] = b"of another prefix"
    copy(f"{container}/x/y", str(tmp_path / "back"), digest=there.digest)
    assert files(tmp_path / "back") == given
    open_writable(parse_store(f"{container}/x/y")).delete("never there")


@pytest.mark.parametrize(("scheme", "what"), [("gs", "bucket"), ("az", "container")])
def test_a_missing_bucket_is_reported(scheme: str, what: str, clouds_server: Clouds, tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match=f"{what} 'nobucket' does not exist"):
        copy(f"{scheme}://nobucket/x/", str(tmp_path / "t"))


def _cloud(asked: Asked) -> Answer:
    """An empty file for every path, and tokens."""
    headers = {"ETag": '"1"', "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
    if asked.path.endswith("/token"):
        return as_json({"access_token": "federated", "expires_in": 3600})
    return Answer(headers=headers)


FEDERATED = {"AZURE_CLIENT_ID": "client", "AZURE_TENANT_ID": "tenant", "AZURE_AUTHORITY_HOST": "{}"}
FEDERATED |= {"AZURE_FEDERATED_TOKEN_FILE": "token"}


# `tests/stores/test_credentials.py` has keys and roles of S3.
@pytest.mark.parametrize(
    ("uri", "settings", "asked"),
    [
        ("az://c/x", AZURE | AZURE_KEY, "/c/x SharedKey acc:"),
        ("abfs://c/x", AZURE | AZURE_KEY, "/c/x SharedKey acc:"),
        ("abfss://c@lake.dfs.core.windows.net/x", AZURE | AZURE_KEY, "/c/x SharedKey lake:"),
        ("az://c/x", AZURE | {"AZURE_STORAGE_SAS_TOKEN": "sv=1&sig=abc"}, "/c/x sv=1&sig=abc"),
        ("az://c/x", AZURE | FEDERATED, "/c/x Bearer federated"),
        ("gs://b/x", GOOGLE | {"GOOGLE_BEARER_TOKEN": "given"}, "/b/x Bearer given"),
        ("gs://b/x", GOOGLE | {"GOOGLE_SKIP_SIGNATURE": "true"}, "/b/x "),
        ("s3://b/x", S3 | {"AWS_SKIP_SIGNATURE": "true"}, "/b/x "),
    ],
    ids=lambda value: "-".join(sorted(value)) if isinstance(value, dict) else None,
)
def test_credentials_and_endpoints_come_from_the_environment(
    uri: str, settings: dict[str, str], asked: str, *, setting: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("projected")
    with serving(ScriptedServer(_cloud)) as server:
        files = {name: str(tmp_path / "token") for name, value in settings.items() if value == "token"}
        setting(settings | files, server.url)
        assert open_store(parse_store(uri)).stat("").etag == '"1"'
    path, _, query = server.asked[-1].path.partition("?")
    assert f"{path} {server.asked[-1].headers.get('Authorization') or query}".startswith(asked)


@pytest.mark.parametrize(
    ("uri", "settings", "error", "words"),
    [
        ("az://c/x", AZURE | {"AZURE_STORAGE_ACCOUNT_KEY": "hunter2 is not base64"}, ConfigurationError, "be opened"),
        ("gs://b/x", {"GOOGLE_SERVICE_ACCOUNT": "/nonexistent"}, ConfigurationError, "cannot be opened"),
        ("az://c/x", AZURE | AZURE_KEY, StoreUnavailable, "az://c/x"),
        ("s3://models/x", S3 | S3_KEY, StoreUnavailable, "s3://models/x"),
    ],
)
def test_errors_contain_no_secret(
    setting: Callable[..., None], tmp_path: Path, uri: str, settings: dict[str, str], error: type[Exception], words: str
) -> None:
    setting(settings, "http://127.0.0.1:1/aHVudGVyMmh1bnRlcjI=")
    with pytest.raises(error, match=words) as caught:
        copy(uri, str(tmp_path))
    for hidden in ("hunter2", "aHVudGVy", "\n"):
        assert hidden not in str(caught.value)


NO_KEYS = "no credentials found for"
CODE = "… 400 Bad Request: <Error><Code>{}</Code></Error>".format


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize(
    ("message", "error", "words"),
    [
        ("Error performing token request: http://169.254.169.254/latest/api/token", ConfigurationError, NO_KEYS),
        (
            "Error performing GET http://metadata.google.internal/computeMetadata/v1/instance after 0 retries",
            ConfigurationError,
            NO_KEYS,
        ),
        ("error: invalid peer certificate: UnknownIssuer", ConfigurationError, "SSL_CERT_FILE"),
        ("Custom { error: InvalidCertificate(\n  BadSignature,\n)", ConfigurationError, "SSL_CERT_FILE"),
        ("Error performing list request: … 403 Forbidden", ConfigurationError, "was denied; check"),
        ("Error performing list request: … 401 Unauthorized", ConfigurationError, "was denied; check"),
        (CODE("ExpiredToken"), ConfigurationError, "have expired; set"),
        (CODE("KeyTooLongError"), UnsafePath, "too long for the store"),
        (CODE("RequestTimeout"), StoreUnavailable, "400"),
        ("… 507 Insufficient Storage: <Error><Code>XMinioStorageFull</Code></Error>", OutOfSpace, "no space left"),
        ("Error performing POST REDACTED … 403 Forbidden", ConfigurationError, "requesting keys for .* failed .*403"),
        ("Error performing POST REDACTED … 503 Service Unavailable", StoreUnavailable, "503"),
    ],
)
def test_errors_of_obstore_are_mapped(scheme: str, message: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words), clouds.errors(parse_store(f"{scheme}://b/x"), ""):
        raise GenericError(message.replace("…", "Server returned non-2xx status code:"))
