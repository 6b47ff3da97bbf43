"""What the contract of all stores does not show of S3: prefixes, multipart uploads, buckets; checked with boto3."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.model_registry import FakeRegistry
from tests.keys import key_pair
from tests.trees import model, tree

from trainjob.data import copy, export, file_manifest, initialize
from trainjob.errors import (
    ChecksumMismatch,
    CorruptData,
    SourceNotFound,
)

BIG = bytes(range(256)) * 50_000  # 12.8 MB: a multipart upload


def _objects(bucket: Any, prefix: str) -> dict[str, bytes]:
    found = bucket.objects.filter(Prefix=prefix)
    return {each.key.removeprefix(prefix): each.get()["Body"].read() for each in found}


def test_from_s3_to_s3(bucket: Any, tmp_path: Path) -> None:
    source = tree(tmp_path / "source", {f"{number}": BIG[number:] for number in range(8)})
    there = copy(str(source), "s3://s3-bucket/x")
    assert copy("s3://s3-bucket/x", "s3://s3-bucket/z").digest == there.digest


def test_a_prefix_ends_at_a_slash(bucket: Any, tmp_path: Path) -> None:
    for key in ("models/a/1", "models/abc/2", "models/a/", "models/a/sub/", "models/a/sub/3"):
        bucket.put_object(Key=key, Body=b"" if key.endswith("/") else b"x")
    manifest = copy("s3://s3-bucket/models/a", str(tmp_path / "t"))
    assert [file.path for file in manifest.files] == ["1", "sub/3"]


def test_a_single_object_to_another_prefix(bucket: Any) -> None:
    bucket.put_object(Key="d/x.csv", Body=b"1,2")
    with pytest.raises(ChecksumMismatch):
        copy("s3://s3-bucket/d/x.csv", "s3://s3-bucket/e", digest="0" * 64)
    assert _objects(bucket, "e/").keys() == {file_manifest.MARK}


def test_a_failed_upload_leaves_only_its_mark(bucket: Any, tmp_path: Path) -> None:
    data = gzip.compress(BIG, compresslevel=0)[:-5]
    source = tree(tmp_path / "source", {"x.gz": data})
    with pytest.raises(CorruptData, match="truncated"):
        copy(str(source), "s3://s3-bucket/cut")
    assert _objects(bucket, "cut/").keys() == {file_manifest.MARK}
    uploads = bucket.meta.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads", [])
    assert not uploads


def test_a_missing_source(bucket: Any, tmp_path: Path) -> None:
    for uri, message in (
        ("s3-bucket/none", "none does not exist or is empty"),
        ("no/x/", "bucket 'no' does not exist"),
    ):
        with pytest.raises(SourceNotFound, match=message):
            copy(f"s3://{uri}", str(tmp_path / "t"))


def test_a_signed_model(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, (private, public) = model(tmp_path / "source"), key_pair(tmp_path)
    with FakeRegistry() as fake:
        monkeypatch.setenv("TRAINJOB_REGISTRY", f"kubeflow+{fake.url}")
        done = export(source, "s3://s3-bucket/all", name="m", export_id="a", sign=private)
        for _ in range(2):
            assert initialize("models:/m/1", str(tmp_path / "in"), verify_key=public).digest == done.digest
        export(source, "s3://s3-bucket/all", name="m", export_id="b")
        with pytest.raises(ChecksumMismatch, match="not signed"):
            initialize("models:/m/2", str(tmp_path / "in2"), verify_key=public)
