"""One object that cannot be read stops nothing else: the reaper, lists and waits continue with the others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.hostile_documents import DOCUMENTS
from tests.unit.launches import annotations_of, attempt

from trainjob import JobRef
from trainjob._backends.kubernetes import cancels, leases
from trainjob._backends.local.backend import LocalBackend
from trainjob._backends.local.store import JobFiles
from trainjob._diagnosis.stragglers import STRAGGLERS
from trainjob._diagnosis.verdict import ON_RETRY
from trainjob._jobs.reaper import reap
from trainjob._manifest.attempts import LAUNCHED
from trainjob._manifest.retry_notice import RETRY_CHANGE
from trainjob.job import ATTEMPT, FAILURE, MANAGED_BY, TRY
from trainjob.status import CANCELLED, GIVEN_UP

pytestmark = pytest.mark.anyio

TEXTS = {name: data.decode("utf-8", "replace") for name, data in DOCUMENTS.items() if len(data) < 200_000}
TEXTS |= {
    "5,000 digits": "9" * 5000,
    "digits that are none": "²",
    "a time before all times": "0001-01-01T00:00:00+14:00",
}
ANNOTATIONS = (FAILURE, GIVEN_UP, ON_RETRY, RETRY_CHANGE, STRAGGLERS, LAUNCHED, TRY, CANCELLED)
UNATTENDED: dict[str, Any] = {"unattended": "suspend", "unattended_after": 60}


def planted(name: str, labels: dict[str, str], annotations: dict[str, str], spec: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ns", "labels": labels, "annotations": annotations}, "spec": spec}


@pytest.mark.parametrize("name", TEXTS)
async def test_the_reaper_ends_a_job_beside_planted_objects(backend: DirectBackend, name: str) -> None:
    text, now = TEXTS[name], "2026-11-21T10:00:00Z"
    attempt(backend, 1, "odd", annotations=dict.fromkeys(ANNOTATIONS, text))
    for seconds in (10**20, -(10**20)):
        spec = {"leaseDurationSeconds": seconds, "renewTime": now, "holderIdentity": text}
        backend.store.put("leases", planted(f"lease{seconds}", {MANAGED_BY: "trainjob"}, {leases.JOBS: text}, spec))
    about = dict.fromkeys((cancels._TRY, cancels._ACTION, cancels._UID), text)
    backend.store.put("leases", planted("cancel", {cancels.KEY_LABEL: "abc"}, about, {"renewTime": now}))
    job = attempt(backend, created="2026-11-20T10:00:00Z", **UNATTENDED)
    (done,) = await reap(backend, "ns", grace=0, interval=0)
    assert (done.job, done.done) == (str(job), "suspended")
    assert CANCELLED in annotations_of(backend, job)


async def test_a_lease_that_names_no_job_is_logged_once(
    backend: DirectBackend, caplog: pytest.LogCaptureFixture
) -> None:
    about = {leases.JOBS: "[" * 4000}
    spec = {"renewTime": "2026-11-21T10:00:00Z"}
    backend.store.put("leases", planted("planted", {MANAGED_BY: "trainjob"}, about, spec))
    for _ in range(3):
        assert [each.jobs for each in await backend.waiters("ns")] == [{}]
    (line,) = [each for each in caplog.messages if "planted" in each]
    assert line.startswith("Lease ns/planted: trainjob.dev/jobs is not readable: it is nested 65 lists")


@pytest.mark.parametrize("label", ["x", "-1", "²", "", "9" * 63])
def test_an_edited_label_of_an_attempt_is_no_number(label: str) -> None:
    job = {"metadata": {"namespace": "ns", "name": "a", "uid": "u", "labels": {ATTEMPT: label}}}
    assert JobRef.of(job).attempt == 1


@pytest.mark.parametrize("file", ["object.json", "status.json"])
@pytest.mark.parametrize("document", DOCUMENTS)
async def test_a_damaged_job_on_disk_is_left_out(
    tmp_path: Path, file: str, document: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("bad-1234567890-1", "good-1234567890-1"):
        metadata: dict[str, Any] = {"namespace": "ns", "name": name, "uid": name, "labels": {}}
        JobFiles.create(tmp_path / "jobs/ns" / name, {"metadata": metadata, "spec": {"suspend": True}}, {})
    damaged = tmp_path / "jobs/ns/bad-1234567890-1" / file
    damaged.write_bytes(DOCUMENTS[document])
    damaged.chmod(0o600)
    found = await LocalBackend(tmp_path).find("ns", {})
    assert [job["metadata"]["name"] for job in found] == ["good-1234567890-1"]
    assert str(damaged.parent) in caplog.text


async def test_a_job_on_disk_that_is_no_file_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metadata = {"namespace": "ns", "name": "good-1234567890-1", "uid": "u", "labels": {}}
    JobFiles.create(tmp_path / "jobs/ns/good-1234567890-1", {"metadata": metadata, "spec": {"suspend": True}}, {})
    bad = tmp_path / "jobs/ns/bad-1234567890-1"
    bad.mkdir(mode=0o700)
    os.mkfifo(bad / "object.json", 0o600)
    assert len(await LocalBackend(tmp_path).find("ns", {})) == 1
    assert "object.json is not readable: it is not a regular file; remove " in caplog.text
