"""A stored format of a newer trainjob is refused by the name of the file, with both numbers, and never misread."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.trees import tree
from tests.unit.simulated_trials import study

from trainjob import checkpoints
from trainjob._backends.base import Waiter
from trainjob._backends.kubernetes import leases
from trainjob._backends.local.store import JobFiles
from trainjob._diagnosis.evidence import Evidence
from trainjob._jobs.results import check_report
from trainjob._spec import TrainJobSpec
from trainjob._support.durations import parse_duration
from trainjob._support.formats import wrong_format
from trainjob._support.volumes import CHECKPOINT_VARIABLE
from trainjob.data import file_manifest, transfer
from trainjob.data.export_evaluation import Evaluation
from trainjob.errors import ConfigurationError, CorruptData
from trainjob.evaluation import Scores, compare
from trainjob.job import MANAGED_BY, JobRef
from trainjob.progress.message import header
from trainjob.tuning.journal import open_journal
from trainjob.tuning.search_state import SearchState
from trainjob.tuning.trials import read_study

REF = JobRef("ns", "job", "uid")


def raised(path: Path, *fields: str) -> None:
    """Raise the number of the format in a JSON file."""
    value = part = json.loads(path.read_text())
    for field in fields[:-1]:
        part = part[field]
    assert part[fields[-1]] == 1
    part[fields[-1]] = 2
    path.write_text(json.dumps(value))


def job_on_disk(home: Path, file: str) -> Callable[[], object]:
    made = JobFiles.create(home / "jobs" / "ns" / "job", {"metadata": {}, "spec": {}}, {"path": "/bin"})
    made.write_status({"conditions": []}, [])
    raised(made.directory / file, "format")
    return made.read


def study_on_disk(folder: Path) -> tuple[str, SearchState]:
    with open_journal(str(folder)) as journal:
        state = SearchState(study(), TrainJobSpec.parse({"runtime": "a"}), "k", journal, "ns")
        anyio.run(state.load, datetime.now(UTC))
        return str(folder), state


def journal_read(folder: Path) -> Callable[[], object]:
    uri, _ = study_on_disk(folder)
    raised(folder / "study.json", "format")

    def read() -> object:
        with open_journal(uri) as journal:
            return read_study(journal)

    return read


def journal_continued(folder: Path) -> Callable[[], object]:
    study_on_disk(folder)
    raised(folder / "study.json", "format")
    return lambda: study_on_disk(folder)


def dataset(folder: Path) -> Callable[[], object]:
    tree(folder / "source", {"a.txt": b"a"})
    transfer.copy(str(folder / "source"), str(folder / "made"))
    path = folder / "made" / file_manifest.NAME
    path.write_text(path.read_text().replace("trainjob.content/v1", "trainjob.content/v2"))
    return lambda: transfer.copy(str(folder / "made"), str(folder / "copy"))


def interrupted_copy(folder: Path) -> Callable[[], object]:
    tree(folder / "source", {"a.gz": b"is no gzip, so that the copy fails after its mark"})
    with pytest.raises(CorruptData):
        transfer.copy(str(folder / "source"), str(folder / "made"))
    raised(folder / "made" / file_manifest.MARK, "format")
    return lambda: transfer.copy(str(folder / "source"), str(folder / "made"))


def evaluation(folder: Path) -> Callable[[], object]:
    scores = Scores({"loss": 0.5}, 3)
    report = compare(scores, None, models=({"uri": "a"}, None), dataset={"uri": "b"})
    folder.mkdir()
    (folder / file_manifest.EVALUATION).write_bytes(Evaluation(str(folder), report, None).as_json())
    raised(folder / file_manifest.EVALUATION, "report", "version")
    return lambda: Evaluation.read(str(folder))


def with_checkpoints(folder: Path, call: Callable[[], object]) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CHECKPOINT_VARIABLE, str(folder))
        return call()


def saved(step: int) -> None:
    checkpoints.save(step, lambda directory: (directory / "model.pt").write_text("m"), keep=1)


def checkpoint(folder: Path) -> Callable[[], object]:
    with_checkpoints(folder, lambda: saved(3))
    raised(folder / "000001-step-3" / ".trainjob.json", "format")
    return lambda: with_checkpoints(folder, checkpoints.latest)


def saved_over_a_newer_one(folder: Path) -> Callable[[], object]:
    read = checkpoint(folder)

    def save() -> object:
        try:
            with_checkpoints(folder, lambda: saved(4))
        finally:
            assert (folder / "000001-step-3" / "model.pt").exists()
        return read()

    return save


def lease(_: Path) -> Callable[[], object]:
    async def read() -> object:
        backend = DirectBackend()
        backend.attend(REF)
        while not (written := backend.store.items("leases")):
            await anyio.sleep(0.01)
        annotations = written[0]["metadata"]["annotations"]
        assert annotations[leases.FORMAT] == "1"
        newer = {"name": "waiter", "annotations": {**annotations, leases.FORMAT: "2"}}
        backend.store.put("leases", {**written[0], "metadata": {**written[0]["metadata"], **newer}}, "ADDED")
        try:
            return await backend.waiters("ns")
        finally:
            await backend.aclose()

    return lambda: anyio.run(read)


def waiters(annotations: dict[str, str], age: str) -> list[Waiter]:
    """The waiters that a Lease names, which was renewed so long ago."""
    backend = DirectBackend()
    own = {"name": "waiter", "namespace": "ns", "labels": {MANAGED_BY: "trainjob"}}
    renewed = age and f"{datetime.now(UTC) - parse_duration(age):%Y-%m-%dT%H:%M:%SZ}"
    metadata = {**own, "annotations": {leases.JOBS: "{}", **annotations}}
    backend.store.put("leases", {"metadata": metadata, "spec": {"renewTime": renewed or "tomorrow"}})
    return anyio.run(backend.waiters, "ns")


@pytest.mark.parametrize("text", ["2", "v2", "2.0", " 2", "9" * 5000])
@pytest.mark.parametrize("age", ["1m", ""])
def test_a_lease_of_another_format_is_refused_while_its_process_may_live(text: str, age: str) -> None:
    with pytest.raises(ConfigurationError, match=r"Lease ns/waiter .*; or delete the Lease, if its process has ended"):
        waiters({leases.FORMAT: text}, age)


@pytest.mark.parametrize("annotations", [{}, {leases.FORMAT: "1"}, {leases.FORMAT: "2"}])
def test_a_lease_that_nobody_renews_is_read(annotations: dict[str, str]) -> None:
    """It attends no job, and the reaper removes it."""
    (waiter,) = waiters(annotations, "30d")
    assert waiter.lease == "waiter"


@pytest.mark.parametrize("renewed", ["tomorrow", None, "9999-12-31T23:59:59Z"])
def test_a_lease_of_another_format_stops_the_reaper_for_a_week_at_most(renewed: str | None) -> None:
    backend, old = DirectBackend(), f"{datetime.now(UTC) - timedelta(days=8):%Y-%m-%dT%H:%M:%SZ}"
    about: dict[str, object] = {"annotations": {leases.FORMAT: "2"}, "managedFields": [{"time": old}]}
    own = {"name": "waiter", "namespace": "ns", "labels": {MANAGED_BY: "trainjob"}, "creationTimestamp": old}
    backend.store.put("leases", {"metadata": {**own, **about}, "spec": {"renewTime": renewed}})
    assert all(not waiter.jobs for waiter in anyio.run(backend.waiters, "ns"))


def termination_message(_: Path) -> Callable[[], object]:
    text = json.dumps(header() | {"outputs": {"model": "s3://b/m"}, "trainjob": 2})
    return lambda: check_report(REF, Evidence(None, [], reported=text))


FORMATS: dict[str, tuple[Callable[[Path], Callable[[], object]], type[Exception], str]] = {
    "object": (lambda path: job_on_disk(path, "object.json"), ConfigurationError, "jobs/ns/job/object.json"),
    "status": (lambda path: job_on_disk(path, "status.json"), ConfigurationError, "jobs/ns/job/status.json"),
    "journal, read": (journal_read, CorruptData, "study.json"),
    "journal, continued": (journal_continued, CorruptData, "study.json"),
    "manifest": (dataset, CorruptData, "made/MANIFEST.json"),
    "mark of a copy": (interrupted_copy, CorruptData, ".trainjob/writing.json"),
    "evaluation": (evaluation, CorruptData, "/evaluation.json"),
    "checkpoint": (checkpoint, ValueError, "000001-step-3/.trainjob.json"),
    "checkpoint, saved": (saved_over_a_newer_one, ValueError, "000001-step-3/.trainjob.json"),
    "lease": (lease, ConfigurationError, "Lease ns/waiter"),
    "termination message": (termination_message, ConfigurationError, "the termination message of TrainJob ns/job"),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_newer_format_is_refused(tmp_path: Path, kind: str) -> None:
    write, error, where = FORMATS[kind]
    read = write(tmp_path / "x")
    message = re.escape(f"{where} was written by a newer trainjob (format 2; this one reads 1): upgrade trainjob")
    with pytest.raises(error, match=message):
        read()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (1, ""),
        (2, "f was written by a newer trainjob (format 2; this one reads 1): upgrade trainjob"),
        (0, "f has the unknown format 0 (this trainjob reads 1)"),
        (None, "f has no number of its format (this trainjob reads 1)"),
        (True, "f has no number of its format (this trainjob reads 1)"),
        ("1", "f has no number of its format (this trainjob reads 1)"),
    ],
)
def test_each_number_but_the_known_one_is_refused(found: object, message: str) -> None:
    assert wrong_format("f", found, 1) == message
