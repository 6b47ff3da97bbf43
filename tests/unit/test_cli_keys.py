"""A key stands for the job that counts, in each command that takes the name of a job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.unit.program import Program

from trainjob import (
    BackendUnavailable,
    InvalidSpec,
    JobRef,
    Phase,
    Rejected,
    TrainJobClient,
    TrainJobSpec,
    launch,
    observe,
)
from trainjob._jobs.named import find_job, find_written

SPEC = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"]})


def launched(backend: DirectBackend, key: str, namespace: str = "default") -> JobRef:
    with TrainJobClient(backend, namespace) as client:
        return client.launch(SPEC, key)


@pytest.mark.parametrize("key", ["c1", "nightly/train", "a/b/c", "Not A Name"])
@pytest.mark.parametrize("command", ["status", "diagnose", "wait", "logs", "goodput"])
def test_a_job_is_found_by_its_key(backend: DirectBackend, program: Program, command: str, key: str) -> None:
    ref = launched(backend, key)
    backend.end(ref)
    code, out, err = program(command, key)
    assert code == 0, err
    if command not in ("logs", "wait"):
        assert ref.name in out


def test_a_job_is_stopped_resumed_and_deleted_by_its_key(backend: DirectBackend, program: Program) -> None:
    ref = launched(backend, "nightly/train")
    assert program("cancel", "--suspend", "nightly/train")[0] == 0
    assert observe(backend.job(ref)).phase is Phase.SUSPENDED
    assert program("resume", "nightly/train")[0] == 0
    assert observe(backend.job(ref)).phase is not Phase.SUSPENDED
    backend.end(ref)
    assert program("delete", "nightly/train")[0] == 0
    assert backend.jobs == {}


def test_a_name_in_another_namespace_is_found_before_a_key(backend: DirectBackend, program: Program) -> None:
    ref = launched(backend, "work", "ml")
    assert json.loads(program("status", "--json", f"ml/{ref.name}")[1])["name"] == ref.name
    assert json.loads(program("status", "--json", "ml/work")[1])["name"] == ref.name


def test_a_text_that_means_two_jobs_is_refused(backend: DirectBackend, program: Program) -> None:
    one, other = launched(backend, "train", "nightly"), launched(backend, "nightly/train")
    code, _, err = program("status", "nightly/train")
    assert code == 2
    assert f"'nightly/train' is the name of TrainJob {one} and the key of TrainJob {other}" in err
    assert "name the one that you mean as NAMESPACE/NAME" in err


def test_a_report_as_json_on_stdout_is_json_only(backend: DirectBackend, program: Program) -> None:
    ref = launched(backend, "c1")
    code, out, _ = program("report", "c1", "--json", "-o", "-")
    assert code == 0
    assert json.loads(out)["name"] == ref.name


# --- what an account may not read


class Guarded(DirectBackend):
    """Refuses lists in these namespaces, and reads of single jobs in those."""

    lists: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    down = False

    async def find(self, namespace: str, labels: Mapping[str, str]) -> list[Any]:
        if self.down:
            raise BackendUnavailable("the API server is unavailable")
        if namespace in self.lists:
            raise Rejected(f"TrainJobs in namespace {namespace} cannot be listed")
        return await super().find(namespace, labels)

    async def get(self, namespace: str, name: str) -> Any:
        if namespace in self.reads:
            raise Rejected(f"TrainJobs in namespace {namespace} cannot be read")
        return await super().get(namespace, name)


@pytest.mark.anyio
async def test_who_may_read_single_jobs_only_names_them() -> None:
    backend = Guarded()
    ref = await launch(backend, SPEC, "key", namespace="ml")
    backend.lists = ("ml", "default")
    assert JobRef.of(await find_job(backend, "ml", ref.name)) == ref
    assert JobRef.of(await find_written(backend, "default", "ml", ref.name)) == ref
    with pytest.raises(Rejected, match="cannot be listed"):
        await find_job(backend, "ml", "key")


@pytest.mark.anyio
async def test_the_first_part_of_a_key_need_not_be_a_namespace_that_may_be_read() -> None:
    backend = Guarded()
    ref = await launch(backend, SPEC, "nightly/train", namespace="default")
    backend.lists = backend.reads = ("nightly",)
    assert JobRef.of(await find_written(backend, "default", "nightly", "train")) == ref
    with pytest.raises(Rejected, match="cannot be read"):
        await find_written(backend, "default", "nightly", "other")


@pytest.mark.anyio
async def test_an_outage_is_not_taken_for_a_missing_job() -> None:
    backend = Guarded()
    ref = await launch(backend, SPEC, "key", namespace="default")
    backend.down = True
    with pytest.raises(BackendUnavailable):
        await find_job(backend, "default", ref.name)


@pytest.mark.anyio
async def test_a_name_with_its_namespace_means_one_job_although_it_is_a_key_there() -> None:
    backend = DirectBackend()
    one = await launch(backend, SPEC, "first", namespace="ml")
    await launch(backend, SPEC, one.name, namespace="ml")
    with pytest.raises(InvalidSpec, match="name the one that you mean as NAMESPACE/NAME"):
        await find_job(backend, "ml", one.name)
    assert JobRef.of(await find_written(backend, "default", "ml", one.name)) == one
