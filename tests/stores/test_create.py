"""Files that are created only if they do not exist, in the stores of the journals of studies."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
from tests.seaweedfs import SeaweedFS

from trainjob.data.locations import parse_target
from trainjob.data.stores.opening import opened_writable
from trainjob.tuning import read_study
from trainjob.tuning.journal import open_journal

BUCKET = "create-bucket"
WRITERS = 20


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


@pytest.mark.full
def test_of_20_writers_one_creates_an_object(bucket: Any) -> None:
    ready = Barrier(WRITERS)

    def write(number: int) -> bool:
        with opened_writable(parse_target(f"s3://{BUCKET}/study")) as store:
            ready.wait()
            return store.create("asked/00000.json", b"%d" % number)

    with ThreadPoolExecutor(WRITERS) as threads:
        created = list(threads.map(write, range(WRITERS)))
    assert created.count(True) == 1
    (stored,) = bucket.objects.all()
    assert stored.key == "study/asked/00000.json"
    assert stored.get()["Body"].read() == b"%d" % created.index(True)


def test_a_journal_in_a_bucket(bucket: Any) -> None:
    with open_journal(f"s3://{BUCKET}/a/b") as journal:
        assert read_study(journal) is None
        header = {"format": 1, "study": {"metric": "loss"}, "key": "k", "namespace": "ns", "began": 1.0}
        assert journal.create("study", header) == header
        journal.create("asked/00000", {"parameters": {"x": 1}})
    with open_journal(f"s3://{BUCKET}/a/b") as again:
        assert again.create("asked/00000", {"parameters": {"x": 2}}) == {"parameters": {"x": 1}}
        state = read_study(again)
    assert state is not None
    assert [dict(trial.parameters) for trial in state.trials] == [{"x": 1}]
