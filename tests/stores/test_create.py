"""Files that are created only if they do not exist, in the stores of the journals of studies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from trainjob.data.locations import parse_target
from trainjob.data.stores.opening import opened_writable
from trainjob.tuning import read_study
from trainjob.tuning.journal import open_journal

WRITERS = 20


@pytest.mark.full
def test_of_20_writers_one_creates_an_object(bucket: Any) -> None:
    ready = Barrier(WRITERS)

    def write(number: int) -> bool:
        with opened_writable(parse_target(f"s3://{bucket.name}/study")) as store:
            ready.wait()
            return store.create("asked/00000.json", b"%d" % number)

    with ThreadPoolExecutor(WRITERS) as threads:
        created = list(threads.map(write, range(WRITERS)))
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
