"""The readers of what somebody else wrote: a new one is a line of `READERS`."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import httpx
from tests.unit.one_file import OneFile

from trainjob import checkpoints
from trainjob._backends.kubernetes import client, leases, pods
from trainjob._backends.kubernetes.errors import ApiError
from trainjob._backends.kubernetes.reflector import Reflector
from trainjob._backends.local import cancels, gpus
from trainjob._backends.local.store import JobFiles, write_json
from trainjob._diagnosis import markers, output, stragglers, termination_messages, verdict
from trainjob._diagnosis.evidence import Evidence
from trainjob._diagnosis.serialization import pack_diagnosis
from trainjob._goodput import attempts as goodput
from trainjob._manifest import attempts, checkpoint_directories, retry_changes, retry_notice
from trainjob._spec import TrainJobSpec
from trainjob._support import foreign, foreign_yaml
from trainjob.data import evaluate, file_manifest, models, signing, transfer
from trainjob.data.export_evaluation import Evaluation
from trainjob.data.formats import texts
from trainjob.data.formats.candidates import Candidate, Refused
from trainjob.data.locations import parse_store
from trainjob.data.options import json_object
from trainjob.data.selection import Selection
from trainjob.data.stores.files import FileStore
from trainjob.data.stores.oci import credentials, images, manifests, referrers
from trainjob.data.stores.oci.client import Client
from trainjob.data.stores.oci.repository import INDEX, Repository
from trainjob.errors import Category, ConfigurationError, CorruptData, Diagnosis, InvalidSpec, RetryVerdict, UnsafePath
from trainjob.job import FAILURE
from trainjob.progress.watchdog import RANK_MARKER
from trainjob.registry import provenance, rest, runs
from trainjob.settings import Settings
from trainjob.status import GIVEN_UP
from trainjob.tuning import open_journal, trials

Read = Callable[[bytes, Path], object]

DIAGNOSIS = Diagnosis(Category.OUT_OF_MEMORY, RetryVerdict.CONFIGURATION, "full", "node-1", 137, ("a", "b"), node="n")


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reader, what it reads, and the errors that it documents.

    Attributes:
        read: Called with the document and a new directory.
        example: A document, as JSON.
        raises: The documented errors.
    """

    read: Read
    example: Any = dataclasses.field(default_factory=dict)
    raises: tuple[type[Exception], ...] = ()


def annotation(name: str, read: Callable[[dict[str, Any]], object]) -> Read:
    """A reader of the annotation of a job."""

    def read_job(data: bytes, _: Path) -> object:
        metadata = {"namespace": "ns", "name": "a", "uid": "u", "annotations": {name: text(data)}}
        return read({"metadata": metadata, "spec": {}, "status": {}})

    return read_job


def text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def at(name: str, read: Callable[[Path], object]) -> Read:
    """A reader of a file with this name."""

    def read_file(data: bytes, folder: Path) -> object:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.write_bytes(data)
        file.chmod(0o600)
        return read(file)

    return read_file


def lease(data: bytes, _: Path) -> object:
    metadata = {"name": "x", "namespace": "ns", "annotations": {leases.JOBS: text(data)}}
    now = datetime.now(UTC)
    return leases.waiter({"metadata": metadata, "spec": {"renewTime": now.isoformat()}}, now)


def diagnosed(job: dict[str, Any]) -> object:
    found = attempts.recorded_failure(job), attempts.is_replaced(job)
    return found[0] and (found[0].text(), pack_diagnosis(found[0]), found[0].as_dict())


def on_disk(file: Path) -> object:
    files = JobFiles(file.parent)
    return files.read(), files.pods(), files.finished(), files.begun()


def status_on_disk(file: Path) -> object:
    write_json(file.parent / "object.json", {"metadata": {"namespace": "ns", "name": "a", "uid": "u"}, "spec": {}})
    return on_disk(file)


def checkpoint(marker: Path) -> object:
    return checkpoints._is_complete(marker.parent)


def manifest(data: bytes, _: Path) -> object:
    repository = Repository(cast(Any, SimpleNamespace(host="registry")), "a")
    with mock.patch.object(repository, "_manifest", return_value=data):
        return repository.manifest("latest")


def refused(data: bytes, _: Path) -> object:
    client = SimpleNamespace(read=lambda *_: data, _access=SimpleNamespace(scrub=str))
    return Client.reason(cast(Any, client), httpx.Response(400))


def referring(data: bytes, _: Path) -> object:
    client = mock.MagicMock()
    client.read.return_value = data
    client.open.return_value.__enter__.return_value = httpx.Response(200, headers={"content-type": INDEX})
    repository = SimpleNamespace(client=client, url=str, pull=(), where=str)
    return referrers._request(cast(Any, repository), "sha256:x")


def journal(file: Path) -> object:
    with open_journal(str(file.parent)) as opened:
        return opened.read("study"), opened.all("")


def mark(file: Path) -> object:
    store = FileStore(parse_store(file.parents[1]))
    return transfer._announce(store, Selection((), None, ""), None)


def header(data: bytes, _: Path) -> object:
    store = OneFile(len(data).to_bytes(8, "little") + data, "a.safetensors")
    return models._safetensors(cast(Any, store), "a", store.entries[0])


def index(data: bytes, _: Path) -> object:
    store = OneFile(data, "a.safetensors.index.json")
    models._index(cast(Any, store), "a", store.entries[0], {})
    return None


def zarr(data: bytes, _: Path) -> object:
    store = OneFile(data, ".zarray")
    texts.zarray(Candidate(cast(Any, store), "a", store.entries[0]))
    return None


def settings(data: bytes, _: Path) -> object:
    with mock.patch.dict(os.environ, {"TRAINJOB_LOCAL_ENVIRONMENTS": text(data).replace("\0", "")}):
        return Settings()


def docker_config(file: Path) -> object:
    with mock.patch.dict(os.environ, {"DOCKER_CONFIG": str(file.parent)}):
        return credentials.find("h", "r")


def hung(job: dict[str, Any]) -> object:
    return goodput.hung_seconds(goodput.Attempt(Evidence(job)))


def function(data: bytes, _: Path) -> object:
    return checkpoint_directories.digest({"trainer": {"command": ["python", "-c"], "args": ["code", text(data)]}})


def verdict_of(data: bytes, _: Path) -> object:
    found = termination_messages.verdict_of(text(data))
    return found and found.message


def api_error(data: bytes, _: Path) -> object:
    return str(asyncio.run(client._error(httpx.Response(500, content=data))))


def watched(data: bytes, _: Path) -> object:
    return Reflector(cast(Any, SimpleNamespace(timings=client.Timings())), "/x", {})._parse(data)


def page(data: bytes, _: Path) -> object:
    """As `send` and `items` read it."""
    request = client.Request("GET", "/x")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return client.parts_of(request, found) if isinstance(found, dict) else None


def ended(data: bytes, _: Path) -> object:
    try:
        found = foreign.mapping_of(data, "it")
    except foreign.Unreadable:  # as `StoreJournal.read`
        return None
    return trials.trial_of(0, {}, found)


def signed(data: bytes, _: Path) -> object:
    return signing._signed(data)


SHAPE = (ValueError, LookupError, TypeError, AttributeError)
MESSAGE = {"trainjob": 1, "error": {"type": "X", "retry": "infrastructure", "message": "m"}}
MARKER = {"rank": 0, "world": 2, "count": 5, "step": 7, "stalled_seconds": 3, "spent": {"all": 1.5, "waiting": 1}}
STRAGGLER = {"rank": "node-1", "number": 1, "name": "a", "node": "b"}
STRAGGLERS = [STRAGGLER | {"seconds": 2.0, "median": 1.0, "step_seconds": 2.0, "loading": 0.1}]
CHANGE = {"reason": "full", "diff": {"memory": ["1Gi", "2Gi"]}, "changes": {"memory": "2Gi", "num_nodes": 1}}
OBJECT = {
    "format": 1,
    "metadata": {"namespace": "ns", "name": "a", "uid": "u", "finalizers": ["x"], "labels": {}},
    "spec": {"suspend": True},
}
STATUS = {"format": 1, "status": {"conditions": [{"type": "Failed", "status": "True"}]}, "pods": [{"metadata": {}}]}
TENSORS = {"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}
CONTENT = {
    "format": "trainjob.content/v1",
    "files": [{"path": "a", "sha256": "a" * 64, "size": 1}],
    "digest": "sha256:x",
    "size": 1,
}
POD = {"items": [{"status": {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "x"}]}}]}
LOGGED = {"exception": [{"exc_type": "E", "frames": [{"filename": "f"}]}]}

READERS: dict[str, Reader] = {
    "JSON": Reader(lambda data, _: foreign.json_of(data, "it"), [1], (foreign.Unreadable,)),
    "a JSON object": Reader(lambda data, _: foreign.mapping_of(data, "it"), {"a": 1}, (foreign.Unreadable,)),
    "YAML": Reader(lambda data, _: foreign_yaml.yaml_of(data, "it"), [1], (foreign.Unreadable,)),
    "YAML documents": Reader(lambda data, _: foreign_yaml.documents_of(data, "it"), [1], (foreign.Unreadable,)),
    "spec": Reader(at("spec.yaml", TrainJobSpec.parse), {"runtime": "a", "num_nodes": 1}, (InvalidSpec,)),
    "failure": Reader(annotation(FAILURE, diagnosed), pack_diagnosis(DIAGNOSIS)),
    "given up": Reader(annotation(GIVEN_UP, diagnosed), pack_diagnosis(DIAGNOSIS)),
    "given up, time": Reader(annotation(GIVEN_UP, hung), pack_diagnosis(DIAGNOSIS)),
    "retry, outlook": Reader(
        annotation(verdict.ON_RETRY, lambda job: verdict.with_change(DIAGNOSIS, job)), {"oom": "more"}
    ),
    "retry, notice": Reader(annotation(retry_notice.RETRY_CHANGE, retry_notice.notice), CHANGE),
    "retry, changes": Reader(annotation(retry_notice.RETRY_CHANGE, retry_changes.recorded), CHANGE),
    "stragglers": Reader(annotation(stragglers.STRAGGLERS, stragglers.stragglers_of), STRAGGLERS),
    "Lease": Reader(lease, {"uid": None, "other": "2026-11-28T11:00:00Z"}),
    "function of a job": Reader(function, {"name": "f", "args": {}, "packages": []}),
    "termination message": Reader(verdict_of, MESSAGE),
    "line of a watchdog": Reader(lambda data, _: markers.markers_in([RANK_MARKER + text(data)]), MARKER),
    "line of a log": Reader(lambda data, _: output.read([text(data)]), LOGGED),
    "error of the API server": Reader(api_error, {"message": "m", "reason": "r", "details": {"causes": []}}),
    "line of a watch": Reader(
        watched, {"type": "ADDED", "object": {"metadata": {"resourceVersion": "1"}}}, (ApiError,)
    ),
    "list": Reader(page, {"metadata": {"continue": ""}, "items": [POD]}, (ApiError,)),
    "pod of a step": Reader(lambda data, _: pods.disruption_of(data), POD),
    "object.json": Reader(at("object.json", on_disk), OBJECT, (ConfigurationError,)),
    "status.json": Reader(at("status.json", status_on_disk), STATUS, (ConfigurationError,)),
    "record of a cancel": Reader(
        at("x/.cancelled/k-1.json", lambda file: cancels.read(file.parents[1], "k")),
        {"format": 1, "version": 1, "tried": 1, "uid": "", "action": "cancel", "at": "2026-11-28T11:00:00Z"},
        (ConfigurationError,),
    ),
    "place in the queue for GPUs": Reader(
        at("00000001-u.json", lambda file: gpus.places(file.parent)),
        {"format": 1, "job": "ns/x-1", "gpus": ["0"]},
        (ConfigurationError,),
    ),
    "checkpoint": Reader(at(".trainjob.json", checkpoint), {"format": 1, "files": {"a": 1}}, (ValueError,)),
    "settings": Reader(settings, {"torch-distributed": "/venv"}, (ConfigurationError,)),
    "option": Reader(lambda data, _: json_object("--x", text(data)), {"a": 1}, (ConfigurationError,)),
    "option, file": Reader(at("a", lambda file: json_object("--x", f"@{file}")), {"a": 1}, (ConfigurationError,)),
    "list of files": Reader(lambda data, _: file_manifest.parse(data, "it"), CONTENT, (CorruptData, UnsafePath)),
    "evaluation": Reader(
        at("evaluation.json", lambda file: Evaluation.read(str(file.parent))),
        {"report": {"version": 1}, "decision": None},
        (CorruptData,),
    ),
    "scores": Reader(at("a", lambda file: evaluate._read(file, "model")), {"a": 1}, (ConfigurationError,)),
    "safetensors": Reader(header, TENSORS, (CorruptData,)),
    "shard index": Reader(index, {"metadata": {"total_size": 0}, "weight_map": {"a": "b"}}, (CorruptData,)),
    "zarr": Reader(zarr, {"compressor": {"id": "zlib"}, "filters": [], "dtype": "<f4"}, (Refused,)),
    "signature": Reader(signed, {"dsseEnvelope": {"payload": "e30="}}, SHAPE),  # `verifier` expects any error
    "trial of a study": Reader(ended, {"state": "complete", "value": 1.0, "values": [[1, 0.5]]}, (CorruptData,)),
    "journal of a study": Reader(at("study.json", journal), {"a": 1}, (CorruptData,)),
    "mark of a copy": Reader(at("x/.trainjob/writing.json", mark), {"format": 1, "files": ["a"]}, (CorruptData,)),
    "reason of a registry": Reader(refused, {"errors": [{"code": "A", "message": "b"}]}),
    "list of referrers": Reader(referring, {"manifests": [{}]}, (CorruptData,)),
    "manifest of an image": Reader(manifest, {"layers": []}, (CorruptData,)),
    "annotation of a layer": Reader(lambda data, _: images._size({manifests.METADATA: text(data)}), {"size": 1}),
    "Docker's config": Reader(
        at("config.json", docker_config),
        {"auths": {"h": {"auth": "YTpi"}}, "credHelpers": {}},
        (ConfigurationError,),
    ),
    "value in a registry": Reader(lambda data, _: provenance._read(text(data)), {"a": 1}),
    "tag of a run": Reader(lambda data, _: runs._mapping(text(data)), {"a": 1}),
    "error of a registry": Reader(
        lambda data, _: rest._message(httpx.Response(500, content=data), ""), {"message": "m"}
    ),
}
"""Name -> reader."""
