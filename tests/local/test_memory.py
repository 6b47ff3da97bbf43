"""Memory does not grow with the data: it stays below 200 MB."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import campaigns
from tests.local.sparse_s3 import SparseS3
from tests.serving import serving
from tests.unit.measured import COPY, SCAN, peak

from trainjob.data import file_manifest

GIB = 1 << 30
LIMIT = 200_000_000
BY_RANGES = "from trainjob.data import ranges; ranges.TRIAL, ranges.FAST = 0, float('inf')\n"
"""Always read by ranges: a single connection counts as too slow."""


@pytest.fixture
def server() -> Iterator[SparseS3]:
    with serving(SparseS3()) as server:
        yield server


def used(server: SparseS3, script: str, *words: str | Path, unsigned: bool = False) -> int:
    """Peak of the memory; `unsigned`: otherwise obstore hashes every byte a second time, for the signature."""
    environment = server.environment | ({"AWS_UNSIGNED_PAYLOAD": "true"} if unsigned else {})
    found = peak(script, *words, environment=environment)
    print(f"{' -> '.join(map(str, words))}: {found / 1e6:.0f} MB")
    return found


def _sparse(folder: Path, size: int) -> Path:
    folder.mkdir()
    with (folder / "big").open("wb") as file:
        file.truncate(size)
    return folder


@pytest.mark.full
def test_a_large_sparse_file(server: SparseS3, tmp_path: Path) -> None:
    """The server keeps only the length of the file, so no disk space is needed."""
    size = (20 if campaigns.FULL else 2) * GIB
    assert used(server, COPY, _sparse(tmp_path / "source", size), "s3://zeros/there", unsigned=True) < LIMIT
    assert server.held["there/big"] == size
    manifest = server.held[f"there/{file_manifest.NAME}"]
    assert isinstance(manifest, bytes)
    assert file_manifest.parse(manifest, "").size == size


def test_large_parts(server: SparseS3, tmp_path: Path) -> None:
    """S3 allows 10 000 parts: a file of 200 GiB has parts of 23 MiB. Here a smaller file has fewer of them."""
    size, parts = (2 * GIB, 90) if campaigns.FULL else (GIB // 2, 22)
    source = _sparse(tmp_path / "source", size)
    (source / "other").hardlink_to(source / "big")
    fewer = f"from trainjob.data.stores import object_stores; object_stores._PARTS = {parts}; {COPY}"
    assert used(server, fewer, source, "s3://zeros/there", unsigned=True) < LIMIT
    assert server.held["there/other"] == size


def test_ranges_of_large_files(server: SparseS3, tmp_path: Path) -> None:
    """Four files in parallel, with as many parallel ranges as allowed."""
    each = GIB // (2 if campaigns.FULL else 8)
    server.held |= {f"in/{number}": each for number in range(4)}
    assert used(server, BY_RANGES + SCAN, "s3://zeros/in/") < LIMIT
    assert used(server, BY_RANGES + COPY, "s3://zeros/in/", "s3://zeros/out") < LIMIT
    server.held = {"one": GIB // 2}
    assert used(server, BY_RANGES + COPY, "s3://zeros/one", tmp_path / "target") < LIMIT


@pytest.mark.full
def test_ten_thousand_small_files(server: SparseS3, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for number in range(10_000):
        (source / str(number % 101)).mkdir(parents=True, exist_ok=True)
        (source / str(number % 101) / str(number)).write_bytes(b"%d" % number)
    for here, there in (
        (str(source), str(tmp_path / "copy")),
        (str(source), "s3://zeros/many"),
        ("s3://zeros/many", str(tmp_path / "back")),
    ):
        assert used(server, COPY, here, there) < LIMIT
    for name in ("copy", "back"):
        files = file_manifest.parse((tmp_path / name / file_manifest.NAME).read_bytes(), "").files
        assert len(files) == 10_000
        assert all((tmp_path / name / file.path).read_bytes() == (source / file.path).read_bytes() for file in files)
