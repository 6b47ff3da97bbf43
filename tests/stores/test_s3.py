"""Copies to and from S3, checked with boto3."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.model_registry import FakeRegistry
from tests.keys import key_pair
from tests.seaweedfs import SeaweedFS

from trainjob.data import copy, export, file_manifest, initialize, read_manifest
from trainjob.errors import (
    ChecksumMismatch,
    CorruptData,
    SourceNotFound,
)

BUCKET = "own-bucket"
BIG = bytes(range(256)) * 50_000  # 12.8 MB: a multipart upload
FILES = {"a.txt": b"one", "sub/b.bin": BIG, "sub/empty": b"", "sp ace/%20?#é+": b"x"}


@pytest.fixture(scope="module")
def own_bucket(seaweedfs: SeaweedFS) -> Any:
    """A bucket of this module, which is empty at the beginning of each test."""
    made = seaweedfs.resource.Bucket(BUCKET)
    made.create()
    return made


@pytest.fixture
def bucket(own_bucket: Any, seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in seaweedfs.environment().items():
        monkeypatch.setenv(name, value)
    yield own_bucket
    own_bucket.objects.all().delete()


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
    there = copy(str(source), "s3://own-bucket/x/y")
    objects = _objects(bucket, "x/y/")
    assert objects.pop(file_manifest.NAME) == there.to_json()
    assert objects == FILES
    lines: list[str] = []
    assert copy(str(source), "s3://own-bucket/x/y/", progress=lines.append) == there
    back = copy("s3://own-bucket/x/y", str(tmp_path / "back"), digest=there.digest)
    assert back.digest == there.digest
    assert {file.path: (tmp_path / "back" / file.path).read_bytes() for file in back.files} == FILES
    assert len(lines) == 1, lines


def test_from_s3_to_s3(bucket: Any, tmp_path: Path) -> None:
    source = _tree(tmp_path / "source", {f"{number}": BIG[number:] for number in range(8)})
    there = copy(str(source), "s3://own-bucket/x")
    assert copy("s3://own-bucket/x", "s3://own-bucket/z").digest == there.digest


def test_a_prefix_ends_at_a_slash(bucket: Any, tmp_path: Path) -> None:
    for key in ("models/a/1", "models/abc/2", "models/a/", "models/a/sub/", "models/a/sub/3"):
        bucket.put_object(Key=key, Body=b"" if key.endswith("/") else b"x")
    manifest = copy("s3://own-bucket/models/a", str(tmp_path / "t"))
    assert [file.path for file in manifest.files] == ["1", "sub/3"]


def test_a_single_object(bucket: Any, tmp_path: Path) -> None:
    bucket.put_object(Key="d/x.csv", Body=b"1,2")
    digest = hashlib.sha256(b"1,2").hexdigest()
    manifest = copy("s3://own-bucket/d/x.csv", str(tmp_path / "t"), digest=digest)
    assert [(file.path, file.sha256) for file in manifest.files] == [("x.csv", digest)]
    with pytest.raises(ChecksumMismatch):
        copy("s3://own-bucket/d/x.csv", "s3://own-bucket/e", digest="0" * 64)
    assert _objects(bucket, "e/").keys() == {file_manifest.MARK}


def test_a_failed_upload_leaves_only_its_mark(bucket: Any, tmp_path: Path) -> None:
    data = gzip.compress(BIG, compresslevel=0)[:-5]
    source = _tree(tmp_path / "source", {"x.gz": data})
    with pytest.raises(CorruptData, match="truncated"):
        copy(str(source), "s3://own-bucket/cut")
    assert _objects(bucket, "cut/").keys() == {file_manifest.MARK}
    uploads = bucket.meta.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    assert not uploads
    with pytest.raises(CorruptData, match="is incomplete"):
        copy("s3://own-bucket/cut", str(tmp_path / "t"))
    (source / "x.gz").write_bytes(gzip.compress(BIG, compresslevel=0))
    copy(str(source), "s3://own-bucket/cut")
    assert _objects(bucket, "cut/").keys() == {"x.gz", file_manifest.NAME}


def test_tampering_is_detected(bucket: Any, tmp_path: Path) -> None:
    copy(str(_tree(tmp_path / "source", FILES)), "s3://own-bucket/m")
    bucket.put_object(Key="m/a.txt", Body=b"eno")
    with pytest.raises(ChecksumMismatch, match=r"a\.txt"):
        copy("s3://own-bucket/m", str(tmp_path / "t"))
    assert read_manifest(str(tmp_path / "t")) is None


def test_a_missing_source(bucket: Any, tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="s3://own-bucket/none does not exist or is empty"):
        copy("s3://own-bucket/none", str(tmp_path / "t"))
    with pytest.raises(SourceNotFound, match="bucket 'nobucket' does not exist"):
        copy("s3://nobucket/none/", str(tmp_path / "t"))


def test_a_signed_model(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, (private, public) = (
        str(_tree(tmp_path / "source", {"config.json": b"{}", "a/w.txt": b"1"})),
        key_pair(tmp_path),
    )
    with FakeRegistry() as fake:
        monkeypatch.setenv("TRAINJOB_REGISTRY", f"kubeflow+{fake.url}")
        done = export(source, f"s3://{BUCKET}/all", name="m", export_id="a", sign=private)
        for _ in range(2):
            assert initialize("models:/m/1", str(tmp_path / "in"), verify_key=public).digest == done.digest
        export(source, f"s3://{BUCKET}/all", name="m", export_id="b")
        with pytest.raises(ChecksumMismatch, match="not signed"):
            initialize("models:/m/2", str(tmp_path / "in2"), verify_key=public)
