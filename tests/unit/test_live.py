"""Reading running jobs for any number of viewers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import anyio
import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.unit.counting import CountingBackend

from trainjob._jobs.launching import launch
from trainjob._pages import live
from trainjob._pages.documents.training import training_document
from trainjob._pages.live import LiveReader, take_document
from trainjob._spec import TrainJobSpec
from trainjob.errors import BackendUnavailable, NotFound
from trainjob.job import JobRef
from trainjob.status import QUEUE_LABEL

pytestmark = pytest.mark.anyio
SPEC = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["python", "train.py"]})


@pytest.fixture
async def backend(prompt: None) -> AsyncIterator[CountingBackend]:
    made = CountingBackend()
    yield made
    await made.aclose()


@pytest.fixture
async def ref(backend: CountingBackend) -> JobRef:
    """A running job."""
    ref = await launch(backend, SPEC, "study/train", namespace="ns")
    backend.running(ref)
    backend.reads.clear()
    return ref


@pytest.fixture
def reader(backend: CountingBackend) -> LiveReader:
    """One that reads again for each viewer."""
    return LiveReader(backend, seconds=0)


async def test_viewers_share_a_read_and_a_document(backend: CountingBackend, ref: JobRef) -> None:
    reader = LiveReader(backend, seconds=60)
    with mock.patch.object(live, "training_document", wraps=training_document) as made:
        documents = await asyncio.gather(*(reader.document(ref.namespace, ref.name, tail=0) for _ in range(20)))
        assert {document["phase"] for document in documents} == {"Running"}
        assert backend.reads == ["get", "evidence", "find"]
        documents[0]["href"] = "changed"
        assert documents[1]["href"] == ""
        await reader.document(ref.namespace, ref.name, tail=0)
        assert (len(backend.reads), made.call_count) == (3, 1), "the document is not 60 s old yet"
        await asyncio.gather(*(reader.document(ref.namespace, ref.name, tail=10) for _ in range(20)))
        assert made.call_count == 2, "with the last lines of the log"
    backend.reads.clear()
    lists = await asyncio.gather(*(reader.listed("ns") for _ in range(10)))
    assert backend.reads == ["find"]
    assert [job["name"] for job in lists[0]["jobs"]] == [ref.name]


async def test_a_running_job_is_read_with_few_requests(
    backend: CountingBackend, reader: LiveReader, ref: JobRef
) -> None:
    await reader.document(ref.namespace, ref.name, tail=0)
    for value in ("0.5", "0.4", "0.3"):
        backend.reads.clear()
        backend.status(ref, trainerStatus={"metrics": [{"name": "loss", "value": value}]})
        document = await reader.document(ref.namespace, ref.name, tail=0)
        assert (backend.reads, document["metrics"]) == (["state"], {"loss": float(value)})
    assert [value for _, _, value in document["history"]["loss"]] == [0.5, 0.4, 0.3]
    backend.end(ref, 3)
    document = await reader.document(ref.namespace, ref.name, tail=0)
    assert "evidence" in backend.reads
    assert (document["phase"], document["diagnosis"]["exit_code"]) == ("Failed", 3)


async def test_the_age_of_a_document_counts_from_the_beginning_of_its_read(
    backend: CountingBackend, ref: JobRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = LiveReader(backend, seconds=0.1)
    await reader.document(ref.namespace, ref.name, tail=0)

    async def slow(ref: JobRef) -> Any:
        found = await CountingBackend.state(backend, ref)
        await anyio.sleep(0.15)
        return found

    monkeypatch.setattr(backend, "state", slow)
    for _ in range(2):
        await anyio.sleep(0.1)
        await reader.document(ref.namespace, ref.name, tail=0)
    backend.reads.clear()
    await reader.document(ref.namespace, ref.name, tail=0)
    assert backend.reads == ["state"]


async def test_a_waiting_job_keeps_its_blocker_between_two_full_reads(
    backend: CountingBackend, reader: LiveReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = await launch(backend, SPEC, "study/train", namespace="ns")
    event = {"type": "Warning", "reason": "Odd", "message": "an event"}
    condition = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": "no quota"}
    extra: dict[str, Any] = {
        "events": [event],
        "workload": {"status": {"conditions": [condition]}},
        "unseen": ["secrets: forbidden"],
        "missing": [],
    }

    async def evidence(ref: JobRef) -> Any:
        backend.reads.append("evidence")
        return replace(await DirectBackend.evidence(backend, ref), **extra)

    monkeypatch.setattr(backend, "evidence", evidence)
    backend.condition(ref, "Suspended", "Suspended")
    backend.change(ref, {"spec": {"suspend": True}, "metadata": {"labels": {QUEUE_LABEL: "gpus"}}})
    first = await reader.document(ref.namespace, ref.name, tail=0)
    assert first["blocker"]["reason"] == "Pending"
    backend.reads.clear()
    second = await reader.document(ref.namespace, ref.name, tail=0)
    assert backend.reads == ["state"]
    same = ("phase", "blocker", "events", "unseen", "diagnosis")
    assert {name: second[name] for name in same} == {name: first[name] for name in same}
    monkeypatch.setattr(live, "_WAITING_SECONDS", 0)
    backend.reads.clear()
    await reader.document(ref.namespace, ref.name, tail=0)
    assert "evidence" in backend.reads


async def test_an_error_reaches_each_viewer_and_is_not_kept(backend: CountingBackend, ref: JobRef) -> None:
    reader = LiveReader(backend)
    backend.broken = BackendUnavailable("the cluster is away")
    results = await asyncio.gather(
        *(reader.document(ref.namespace, ref.name, tail=0) for _ in range(3)), return_exceptions=True
    )
    assert [str(each) for each in results] == ["the cluster is away"] * 3
    assert backend.reads == ["get"]
    backend.broken = None
    assert (await reader.document(ref.namespace, ref.name, tail=0))["phase"] == "Running"


async def test_a_viewer_that_leaves_does_not_end_the_read(backend: CountingBackend, ref: JobRef) -> None:
    reader = LiveReader(backend)
    leaving = asyncio.create_task(reader.document(ref.namespace, ref.name, tail=0))
    staying = asyncio.create_task(reader.document(ref.namespace, ref.name, tail=0))
    await anyio.sleep(0.005)
    leaving.cancel()
    assert (await staying)["phase"] == "Running"
    assert backend.reads.count("get") == 1


async def test_no_such_job(backend: CountingBackend) -> None:
    reader = LiveReader(backend)
    for read in (reader.document("ns", "nothing"), take_document(backend, "ns", "nothing")):
        with pytest.raises(NotFound, match="there is no TrainJob ns/nothing"):
            await read
    assert not reader._jobs, "it is not kept"


async def test_the_reader_keeps_a_bounded_number_of_jobs(
    backend: CountingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_JOBS", 3)
    reader = LiveReader(backend)
    for number in range(5):
        ref = await launch(backend, SPEC, f"study/{number}", namespace="ns")
        await reader.document(ref.namespace, ref.name)
    assert len(reader._jobs) == 3
    assert len(reader._logs) <= 3


async def test_pods_of_other_attempts_are_read_once_after_their_end(
    backend: CountingBackend, reader: LiveReader, ref: JobRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "FULL_SECONDS", 0.0)
    monkeypatch.setattr(live, "_WAITING_SECONDS", 0.0)
    backend.end(ref, 3)
    second = await launch(backend, SPEC, "study/train", namespace="ns")
    backend.running(second)
    backend.reads.clear()
    for _ in range(3):
        document = await reader.document("ns", second.name, tail=0)
    assert document["attempts"][0]["summary"]
    assert backend.reads.count("state") == 1
    backend.end(second)
    assert (await reader.document("ns", ref.name, tail=0))["attempts"][1]["phase"] == "Complete"
    assert backend.reads.count("state") == 2, "the page of the earlier attempt shows the later one, too"


def origin(run: str, task: str) -> dict[str, str]:
    return {"dag_id": "retrain", "run_id": run, "task_id": task}


async def test_the_previous_run_of_the_task_is_compared(backend: CountingBackend) -> None:
    for run, loss in (("r1", 0.9), ("r2", 0.5)):
        done = await launch(backend, SPEC, f"airflow/{run}/train", namespace="ns", origin=origin(run, "train"))
        points = f'{{"loss": [[1, 1.0, {loss}], [2, 2.0, {loss / 2}]]}}'
        backend.end(done, message=f'{{"trainjob": 1, "metrics": [], "history": {points}}}')
        other = await launch(backend, SPEC, f"airflow/{run}/other", namespace="ns", origin=origin(run, "other"))
        backend.end(other)
        backend.store.ahead += timedelta(seconds=2)  # times of objects are whole seconds
    ref = await launch(backend, SPEC, "airflow/r3/train", namespace="ns", origin=origin("r3", "train"))
    backend.running(ref)
    document = await take_document(backend, "ns", ref.name)
    assert document["task"] == "train"
    (previous,) = document["compare"]
    assert previous["label"] == "previous run"
    assert [value for _, _, value in previous["history"]["loss"]] == [0.5, 0.25]


async def test_other_jobs_of_the_run_complete_the_lineage(backend: CountingBackend, reader: LiveReader) -> None:
    spec = SPEC.model_copy(update={"inputs": {"dataset": "s3://b/digits"}})
    data = await launch(backend, SPEC, "airflow/r1/data", namespace="ns", origin=origin("r1", "data"))
    backend.end(data, message='{"trainjob": 1, "outputs": {"uri": "s3://b/digits", "digest": "sha256:d"}}')
    export = await launch(backend, SPEC, "airflow/r1/export", namespace="ns", origin=origin("r1", "export"))
    backend.running(export)
    ref = await launch(backend, spec, "airflow/r1/train", namespace="ns", origin=origin("r1", "train"))
    backend.running(ref)
    lineage = (await reader.document("ns", ref.name))["lineage"]
    assert lineage["datasets"] == [{"name": "dataset", "uri": "s3://b/digits", "digest": "sha256:d"}]
    assert lineage["registered"] is None
    outputs = '{"uri": "s3://m/7", "digest": "sha256:m", "name": "digits", "version": "7"}'
    backend.end(export, message=f'{{"trainjob": 1, "outputs": {outputs}}}')
    backend.end(ref)
    lineage = (await reader.document("ns", ref.name))["lineage"]
    assert (lineage["registered"]["model"], lineage["registered"]["version"]) == ("digits", "7")
