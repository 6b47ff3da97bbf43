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


def test_file_matches_its_checksum_and_is_reproducible(packed: bytes) -> None:
    digest, name = (DATA / "SHA256SUMS").read_text().split()
    assert name == "digits.csv.gz"
    assert hashlib.sha256(packed).hexdigest() == digest
    assert len(packed) < 100_000
    assert packed[:2] == b"\x1f\x8b"
    assert packed[3:8] == bytes(5), "no file name and no time in the gzip header"


def test_rows_are_images_with_labels(packed: bytes) -> None:
    text = io.StringIO(gzip.decompress(packed).decode("ascii"))
    rows = [[int(cell) for cell in row] for row in csv.reader(text)]
    assert len(rows) == 1797
    assert {len(row) for row in rows} == {65}
    pixels = {value for row in rows for value in row[:64]}
    assert (min(pixels), max(pixels)) == (0, 16)
    counts = Counter(row[64] for row in rows)
    assert sorted(counts) == list(range(10)), "balanced classes"
    assert (min(counts.values()), max(counts.values())) == (174, 183)


def test_readme_names_origin_and_license() -> None:
    readme = (DATA / "README.md").read_text(encoding="utf-8")
    for fact in ("Alpaydin", "Kaynak", "UCI Machine Learning", "10.24432/C50P49", "CC BY 4.0"):
        assert fact in readme
