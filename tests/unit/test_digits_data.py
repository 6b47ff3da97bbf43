"""The dataset of the examples matches its README."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
from collections import Counter
from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "dags_examples" / "data"


@pytest.fixture(scope="module")
def packed() -> bytes:
    return (DATA / "digits.csv.gz").read_bytes()


@pytest.fixture(scope="module")
def rows(packed: bytes) -> list[list[int]]:
    return [[int(cell) for cell in row] for row in csv.reader(io.StringIO(gzip.decompress(packed).decode("ascii")))]


def test_file_matches_its_checksum(packed: bytes) -> None:
    digest, name = (DATA / "SHA256SUMS").read_text().split()
    assert name == "digits.csv.gz"
    assert hashlib.sha256(packed).hexdigest() == digest


def test_file_is_small_and_reproducible(packed: bytes) -> None:
    assert len(packed) < 100_000
    assert packed[:2] == b"\x1f\x8b"
    assert packed[3] == 0, "no file name in the gzip header"
    assert packed[4:8] == bytes(4), "no time in the gzip header"


def test_rows_are_images_with_labels(rows: list[list[int]]) -> None:
    assert len(rows) == 1797
    assert {len(row) for row in rows} == {65}
    pixels = [value for row in rows for value in row[:64]]
    assert min(pixels) == 0
    assert max(pixels) == 16


def test_classes_are_balanced(rows: list[list[int]]) -> None:
    counts = Counter(row[64] for row in rows)
    assert sorted(counts) == list(range(10))
    assert min(counts.values()) == 174
    assert max(counts.values()) == 183


def test_readme_names_origin_and_license() -> None:
    readme = (DATA / "README.md").read_text(encoding="utf-8")
    for fact in ("Alpaydin", "Kaynak", "UCI Machine Learning", "10.24432/C50P49", "CC BY 4.0"):
        assert fact in readme
