"""Google Cloud Storage and Azure, as far as tests can cover them: requests and error messages.

Reads and writes go to a fake server (`tests.unit.fake_clouds`), not to the real services.
"""

from __future__ import annotations

import http.server
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.serving import serving
from tests.unit.fake_clouds import Clouds

from trainjob._support import retrying
from trainjob.data import copy, file_manifest
from trainjob.data.locations import parse_store
from trainjob.data.stores import clouds
from trainjob.data.stores.opening import open_store, open_writable
from trainjob.errors import ConfigurationError, OutOfSpace, SourceNotFound, StoreUnavailable, UnsafePath

BIG = bytes(range(256)) * 50_000  # 12.8 MB: larger than one part
AZURE = {"AZURE_STORAGE_ACCOUNT_NAME": "acc", "AZURE_STORAGE_ENDPOINT": "{}", "AZURE_ALLOW_HTTP": "true"}


@pytest.fixture(autouse=True)
def unset_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr("trainjob.data.stores.clouds.RETRY", {"max_retries": 0})
    monkeypatch.setattr(retrying, "TRANSFER", partial(retrying.TRANSFER, failures=1))


def test_plain_http_of_google_requires_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    with pytest.raises(ConfigurationError, match="GOOGLE_ALLOW_HTTP"):
        list(open_store(parse_store("gs://models/x")).list())


@pytest.fixture
def clouds_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Clouds]:
    with serving(Clouds()) as server:
        account = {"gcs_base_url": server.url, "disable_oauth": True, "client_email": "", "private_key": ""}
        (tmp_path / "account.json").write_text(json.dumps(account | {"private_key_id": ""}))
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
        monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")
        for name, value in (AZURE | {"AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0"}).items():
            monkeypatch.setenv(name, value.replace("{}", server.url))
        yield server


@pytest.mark.parametrize("scheme", ["gs", "az", "abfss"])
def test_upload_and_download_preserve_content(scheme: str, clouds_server: Clouds, tmp_path: Path) -> None:
    files = {"a.txt": b"one", "sub/big": BIG, "sub/empty": b"", "sp ace/%20?#é+": b"x"}
    for name, data in files.items():
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_bytes(data)
    bucket = f"{scheme}://models" + "@acc.dfs.core.windows.net" * (scheme == "abfss")
    there = copy(str(tmp_path / "source"), f"{bucket}/x/y")
    held = dict(clouds_server.buckets["models"])
    assert held.pop(f"x/y/{file_manifest.NAME}") == there.to_json()
    assert held == {f"x/y/{name}": data for name, data in files.items()}
    assert any("partNumber" in each or "blockid" in each for each in clouds_server.requests), (
        "large files are uploaded in parts"
    )
    assert copy(str(tmp_path / "source"), f"{bucket}/x/y/") == there
    clouds_server.buckets["models"]["x/yz/other"] = b"of another prefix"
    back = copy(f"{bucket}/x/y", str(tmp_path / "back"), digest=there.digest)
    assert {file.path: (tmp_path / "back" / file.path).read_bytes() for file in back.files} == files
    open_writable(parse_store(f"{bucket}/x/y")).delete("never there")
    assert [file.path for file in copy(f"{bucket}/x/y/a.txt", str(tmp_path / "one")).files] == ["a.txt"]
    with pytest.raises(SourceNotFound, match="does not exist or is empty"):
        copy(f"{bucket}/none", str(tmp_path / "t"))


@pytest.mark.parametrize(("scheme", "what"), [("gs", "bucket"), ("az", "container")])
def test_a_missing_bucket_is_reported(scheme: str, what: str, clouds_server: Clouds, tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match=f"{what} 'nobucket' does not exist"):
        copy(f"{scheme}://nobucket/x/", str(tmp_path / "t"))


class _Cloud(http.server.BaseHTTPRequestHandler):
    """Serves an empty file for every path, and issues tokens."""

    protocol_version = "HTTP/1.1"
    timeout = 5  # of an idle connection, so that no test hangs
    asked: list[str]

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, _, query = self.path.partition("?")
        type(self).asked.append(f"{path} {self.headers.get('Authorization') or query}")
        answer: dict[str, object] = {}
        if path.endswith("/token"):
            answer = {"access_token": "federated", "expires_in": 3600}
        elif path == "/role":
            answer = {"AccessKeyId": "role", "SecretAccessKey": "x", "Token": "x", "Expiration": "2099-01-01T00:00:00Z"}
        body = json.dumps(answer).encode() if answer else b""
        self.send_response(200)
        for name, value in {"ETag": '"1"', "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_HEAD = do_GET  # noqa: N815 - names of http.server


@pytest.fixture
def cloud() -> Iterator[str]:
    _Cloud.asked = []
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Cloud)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


S3 = {"AWS_ENDPOINT_URL": "{}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "eu-1"}
GOOGLE = {"GOOGLE_BASE_URL": "{}", "GOOGLE_ALLOW_HTTP": "1"}


@pytest.mark.parametrize(
    ("uri", "settings", "asked"),
    [
        ("az://c/x", AZURE | {"AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0"}, "/c/x SharedKey acc:"),
        ("abfs://c/x", AZURE | {"AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0"}, "/c/x SharedKey acc:"),
        (
            "abfss://c@lake.dfs.core.windows.net/x",
            AZURE | {"AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0"},
            "/c/x SharedKey lake:",
        ),
        ("az://c/x", AZURE | {"AZURE_STORAGE_SAS_TOKEN": "sv=1&sig=abc"}, "/c/x sv=1&sig=abc"),
        (
            "az://c/x",
            AZURE
            | {
                "AZURE_CLIENT_ID": "client",
                "AZURE_TENANT_ID": "tenant",
                "AZURE_FEDERATED_TOKEN_FILE": "{token}",
                "AZURE_AUTHORITY_HOST": "{}",
            },
            "/c/x Bearer federated",
        ),
        ("gs://b/x", GOOGLE | {"GOOGLE_BEARER_TOKEN": "given"}, "/b/x Bearer given"),
        ("gs://b/x", GOOGLE | {"GOOGLE_SKIP_SIGNATURE": "true"}, "/b/x "),
        (
            "s3://b/x",
            S3 | {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "x"},
            "/b/x AWS4-HMAC-SHA256 Credential=key/",
        ),
        (
            "s3://b/x",
            S3 | {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "{}/role", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "{token}"},
            "/b/x AWS4-HMAC-SHA256 Credential=role/",
        ),
        ("s3://b/x", S3 | {"AWS_SKIP_SIGNATURE": "true"}, "/b/x "),
    ],
    ids=lambda value: "-".join(sorted(value)) if isinstance(value, dict) else None,
)
def test_credentials_and_endpoints_come_from_the_environment(
    uri: str, settings: dict[str, str], asked: str, *, cloud: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("projected")
    for name, value in settings.items():
        monkeypatch.setenv(name, value.replace("{}", cloud).replace("{token}", str(tmp_path / "token")))
    assert open_store(parse_store(uri)).stat("").etag == '"1"'
    assert _Cloud.asked[-1].startswith(asked)


@pytest.mark.parametrize(
    ("uri", "name", "value"),
    [
        ("az://c/x", "AZURE_STORAGE_ACCOUNT_KEY", "hunter2 is not base64"),
        ("gs://b/x", "GOOGLE_SERVICE_ACCOUNT", "/nonexistent"),
    ],
)
def test_invalid_credentials_are_reported_without_secrets(
    uri: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "acc")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="cannot be opened") as caught:
        open_store(parse_store(uri))
    assert "hunter2" not in str(caught.value)


def test_azure_requires_an_account_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        copy("az://c/x", str(tmp_path))


def test_errors_do_not_contain_the_account_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "acc")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "aHVudGVyMmh1bnRlcjI=")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:1/aHVudGVyMmh1bnRlcjI=")
    monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
    with pytest.raises(StoreUnavailable) as caught:
        copy("az://c/x", str(tmp_path))
    assert "aHVudGVy" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize(
    "message",
    [
        "Error performing token request: http://169.254.169.254/latest/api/token",
        "Error performing GET http://metadata.google.internal/computeMetadata/v1/instance after 0 retries",
    ],
)
def test_missing_credentials_are_reported(scheme: str, message: str) -> None:
    from obstore.exceptions import GenericError

    with (
        pytest.raises(ConfigurationError, match="no credentials found for"),
        clouds.errors(parse_store(f"{scheme}://b/x"), ""),
    ):
        raise GenericError(message)


@pytest.mark.parametrize(
    "message",
    ["error: invalid peer certificate: UnknownIssuer", "Custom { error: InvalidCertificate(\n  BadSignature,\n)"],
)
def test_an_untrusted_certificate_is_reported(message: str) -> None:
    from obstore.exceptions import GenericError

    with pytest.raises(ConfigurationError, match="SSL_CERT_FILE"), clouds.errors(parse_store("s3://b/x"), ""):
        raise GenericError(message)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize(
    ("message", "error", "words"),
    [
        ("Error performing list request: … 403 Forbidden", ConfigurationError, "was denied; check"),
        ("Error performing list request: … 401 Unauthorized", ConfigurationError, "was denied; check"),
        ("… 400 Bad Request: <Error><Code>ExpiredToken</Code></Error>", ConfigurationError, "have expired; set"),
        ("… 400 Bad Request: <Error><Code>KeyTooLongError</Code></Error>", UnsafePath, "too long for the store"),
        ("… 507 Insufficient Storage: <Error><Code>XMinioStorageFull</Code></Error>", OutOfSpace, "no space left"),
        ("… 400 Bad Request: <Error><Code>RequestTimeout</Code></Error>", StoreUnavailable, "400"),
        (
            "Error performing POST REDACTED … 403 Forbidden",
            ConfigurationError,
            "requesting keys for .* failed .*HTTP 403",
        ),
        ("Error performing POST REDACTED … 503 Service Unavailable", StoreUnavailable, "503"),
    ],
)
def test_unclassified_obstore_errors_are_mapped(scheme: str, message: str, error: type[Exception], words: str) -> None:
    from obstore.exceptions import GenericError

    with pytest.raises(error, match=words), clouds.errors(parse_store(f"{scheme}://b/x"), ""):
        raise GenericError(message.replace("…", "Server returned non-2xx status code:"))


def test_credentials_in_azure_uris_are_rejected() -> None:
    with pytest.raises(ConfigurationError, match="credentials"):
        parse_store("az://user:key@container/x")
