from __future__ import annotations

import gzip
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest
from moto.server import ThreadedMotoServer

from trainjob.data import content, copy, read_manifest, transfer
from trainjob.errors import (
    ChecksumMismatch,
    ConfigurationError,
    CorruptData,
    SourceNotFound,
    StoreUnavailable,
    UnsafePath,
)

BIG = bytes(range(256)) * 50_000  # 12.8 MB: a multipart upload
FILES = {"a.txt": b"one", "sub/b.bin": BIG, "sub/empty": b"", "sp ace/%20?#é+": b"x"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "hunter2hunter2",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    bucket = boto3.resource("s3", endpoint_url=endpoint, region_name="us-east-1").Bucket("models")
    bucket.create()
    yield bucket
    bucket.objects.all().delete()


def _tree(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def _objects(bucket: Any, prefix: str) -> dict[str, bytes]:
    found = bucket.objects.filter(Prefix=prefix)
    return {each.key.removeprefix(prefix): each.get()["Body"].read() for each in found}


def test_to_s3_and_back(bucket: Any, tmp_path: Path) -> None:
    source = _tree(tmp_path / "source", FILES)
    there = copy(str(source), "s3://models/x/y")
    objects = _objects(bucket, "x/y/")
    assert objects.pop(content.NAME) == there.to_json()
    assert objects == FILES
    lines: list[str] = []
    assert copy(str(source), "s3://models/x/y/", progress=lines.append) == there
    back = copy("s3://models/x/y", str(tmp_path / "back"), digest=there.digest)
    assert back.digest == there.digest
    assert {file.path: (tmp_path / "back" / file.path).read_bytes() for file in back.files} == FILES
    assert len(lines) == 1, lines


def test_from_s3_to_s3(bucket: Any, tmp_path: Path) -> None:
    source = _tree(tmp_path / "source", {f"{number}": BIG[number:] for number in range(8)})
    there = copy(str(source), "s3://models/x")
    assert copy("s3://models/x", "s3://models/z").digest == there.digest


def test_a_prefix_ends_at_a_slash(bucket: Any, tmp_path: Path) -> None:
    for key in ("models/a/1", "models/abc/2", "models/a/", "models/a/sub/", "models/a/sub/3"):
        bucket.put_object(Key=key, Body=b"" if key.endswith("/") else b"x")
    manifest = copy("s3://models/models/a", str(tmp_path / "t"))
    assert [file.path for file in manifest.files] == ["1", "sub/3"]


def test_a_single_object(bucket: Any, tmp_path: Path) -> None:
    bucket.put_object(Key="d/x.csv", Body=b"1,2")
    digest = hashlib.sha256(b"1,2").hexdigest()
    manifest = copy("s3://models/d/x.csv", str(tmp_path / "t"), digest=digest)
    assert [(file.path, file.sha256) for file in manifest.files] == [("x.csv", digest)]
    with pytest.raises(ChecksumMismatch):
        copy("s3://models/d/x.csv", "s3://models/e", digest="0" * 64)
    assert _objects(bucket, "e/").keys() == {content.MARK}


def test_an_upload_that_fails_leaves_nothing(bucket: Any, tmp_path: Path) -> None:
    data = gzip.compress(BIG, compresslevel=0)[:-5]
    source = _tree(tmp_path / "source", {"x.gz": data})
    with pytest.raises(CorruptData, match="truncated"):
        copy(str(source), "s3://models/cut")
    assert _objects(bucket, "cut/").keys() == {content.MARK}
    uploads = bucket.meta.client.list_multipart_uploads(Bucket="models").get("Uploads", [])
    assert not uploads
    with pytest.raises(CorruptData, match="half written"):
        copy("s3://models/cut", str(tmp_path / "t"))
    (source / "x.gz").write_bytes(gzip.compress(BIG, compresslevel=0))
    copy(str(source), "s3://models/cut")
    assert _objects(bucket, "cut/").keys() == {"x.gz", content.NAME}


def test_tampering_is_noticed(bucket: Any, tmp_path: Path) -> None:
    copy(str(_tree(tmp_path / "source", FILES)), "s3://models/m")
    bucket.put_object(Key="m/a.txt", Body=b"eno")
    with pytest.raises(ChecksumMismatch, match=r"a\.txt"):
        copy("s3://models/m", str(tmp_path / "t"))
    assert read_manifest(str(tmp_path / "t")) is None


@pytest.mark.parametrize("key", ["evil/../../etc/x", "evil//x", "evil/a\\b", "evil/./x"])
def test_hostile_keys(bucket: Any, tmp_path: Path, key: str) -> None:
    bucket.put_object(Key=key, Body=b"x")
    with pytest.raises(UnsafePath):
        copy("s3://models/evil/", str(tmp_path / "t"))
    assert not (tmp_path / "t").exists()


def test_what_is_not_there(bucket: Any, tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="nothing is at s3://models/none"):
        copy("s3://models/none", str(tmp_path / "t"))
    with pytest.raises(SourceNotFound, match="no bucket 'nobucket'"):
        copy("s3://nobucket/none/", str(tmp_path / "t"))


def test_plain_http_has_to_be_asked_for(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(ConfigurationError, match="AWS_ALLOW_HTTP"):
        copy("s3://models/x", str(tmp_path / "t"))


def test_an_image_without_certificates_is_told_from_plain_http(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.setenv(name, "/nonexistent")
    with pytest.raises(ConfigurationError, match="ca-certificates"):
        transfer.scan("s3://models/x")


def test_errors_hold_no_secret(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1/hunter2hunter2")
    monkeypatch.setattr("trainjob.data.stores.clouds.RETRY", {"max_retries": 0})
    with pytest.raises(StoreUnavailable) as caught:
        copy("s3://models/x", str(tmp_path / "t"))
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_obstore(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    with pytest.raises(ConfigurationError, match=r"trainjob\[storage\]"):
        copy("s3://models/x", str(tmp_path / "t"))
