"""What the contract of all stores does not show of S3: prefixes, multipart uploads, buckets; checked with boto3."""

from __future__ import annotations

import gzip
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from tests.trees import tree

from trainjob.data import copy, file_manifest
from trainjob.data.locations import parse_target
from trainjob.data.stores.opening import opened_writable
from trainjob.errors import CorruptData
from trainjob.tuning import read_study
from trainjob.tuning.journal import open_journal

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


def test_a_failed_upload_leaves_only_its_mark(bucket: Any, tmp_path: Path) -> None:
    data = gzip.compress(BIG, compresslevel=0)[:-5]
    source = tree(tmp_path / "source", {"x.gz": data})
    with pytest.raises(CorruptData, match="truncated"):
        copy(str(source), "s3://s3-bucket/cut")
    assert _objects(bucket, "cut/").keys() == {file_manifest.MARK}
    uploads = bucket.meta.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads", [])
    assert not uploads


# ---------------------------------------------------------------- files that are created if they do not exist


@pytest.mark.full
def test_of_20_writers_one_creates_an_object(bucket: Any) -> None:
    ready = Barrier(20)

    def write(number: int) -> bool:
        with opened_writable(parse_target(f"s3://{bucket.name}/study")) as store:
            ready.wait()
            return store.create("asked/00000.json", b"%d" % number)

    with ThreadPoolExecutor(20) as threads:
        created = list(threads.map(write, range(20)))
    assert created.count(True) == 1
    (stored,) = bucket.objects.all()
    assert stored.key == "study/asked/00000.json"
    assert stored.get()["Body"].read() == b"%d" % created.index(True)


def test_a_journal_in_a_bucket(bucket: Any) -> None:
    with open_journal(f"s3://{bucket.name}/a/b") as journal:
        assert read_study(journal) is None
        header = {"format": 1, "study": {"metric": "loss"}, "key": "k", "namespace": "ns", "began": 1.0}
        assert journal.create("study", header) == header
        journal.create("asked/00000", {"parameters": {"x": 1}})
    with open_journal(f"s3://{bucket.name}/a/b") as again:
        assert again.create("asked/00000", {"parameters": {"x": 2}}) == {"parameters": {"x": 1}}
        state = read_study(again)
    assert state is not None
    assert [dict(trial.parameters) for trial in state.trials] == [{"x": 1}]
