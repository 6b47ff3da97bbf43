"""Models trained by jobs on a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.fakes.kube.objects import JOBSET
from tests.fakes.model_registry import FakeRegistry

from trainjob import JobRef, TrainJobClient
from trainjob._jobs import models
from trainjob._jobs.models import TrainedModel
from trainjob.errors import ConfigurationError
from trainjob.registry import connect

SHA = "ab" * 32


@pytest.fixture
def backend() -> DirectBackend:
    return DirectBackend()


@pytest.fixture
def client(backend: DirectBackend) -> Iterator[TrainJobClient]:
    with TrainJobClient(backend, "ns") as client:
        yield client


def _trained(client: TrainJobClient, backend: DirectBackend, reported: Any, key: str = "key", **fields: Any) -> JobRef:
    """A successful job with one pod and a known image."""
    ref = client.launch({"runtime": "torch-distributed", "command": ["train"], **fields}, key)
    message = {"trainjob": 1, "metrics": [{"name": "accuracy", "value": "0.97"}], "outputs": reported}
    backend.end(ref, message=json.dumps(message))
    (pod,) = pods(backend, ref)
    pod["spec"]["containers"][0]["image"] = "registry.example/train:v1"
    pod["status"]["containerStatuses"][0]["imageID"] = f"registry.example/train@sha256:{SHA}"
    backend.store.put("pods", pod)
    return ref


def pods(backend: DirectBackend, ref: JobRef) -> list[dict[str, Any]]:
    return [pod for pod in backend.store.items("pods") if pod["metadata"]["labels"][JOBSET] == ref.name]


def delete_pods(backend: DirectBackend, ref: JobRef) -> None:
    for pod in pods(backend, ref):
        backend.store.put("pods", pod, "DELETED")


def _find(client: TrainJobClient, ref: JobRef, output: str = "model", source: str | None = None) -> TrainedModel:
    return client.call(lambda: models.find(client.backend, ref, output, source=source))


def test_provenance_of_a_cluster_job_is_collected(client: TrainJobClient, backend: DirectBackend) -> None:
    initializer = {"dataset": {"storage_uri": "hf://org/digits"}, "model": {"storage_uri": "hf://org/base"}}
    inputs = {"more": "pvc://claim/more", "model": f"oci://registry.example/m@sha256:{SHA}", "none": ""}
    ref = _trained(
        *(client, backend, {"model": "s3://models/7"}), "kfp/run-7/task/train", inputs=inputs, initializer=initializer
    )
    found = _find(client, ref)
    assert (found.source, dict(found.metrics), found.target) == ("s3://models/7", {"accuracy": 0.97}, "")
    provenance = found.provenance
    assert provenance["run"] == {"kfp": "run-7"}
    assert provenance["images"] == [{"uri": "registry.example/train:v1", "digest": f"sha256:{SHA}"}]
    assert [each["uri"] for each in provenance["datasets"]] == ["hf://org/digits", "pvc://claim/more"]
    assert [each["uri"] for each in provenance["base_model"]] == ["hf://org/base", inputs["model"]]
    assert provenance["trainjob"]["runtime"] == "torch-distributed"
    assert provenance["trainjob"]["finished"].endswith("Z")
    # Its pods are deleted: only the spec is left.
    delete_pods(backend, ref)
    with pytest.raises(ConfigurationError, match=r"its text outputs: none.*progress\.report"):
        _find(client, ref)
    plain = _trained(client, backend, {}, "plain", image="registry.example/x", outputs={"model": "s3://models/8"})
    delete_pods(backend, plain)
    found = _find(client, plain)
    assert (found.source, found.provenance["images"]) == ("s3://models/8", [{"uri": "registry.example/x"}])
    assert "run" not in found.provenance


def test_paths_in_pods_require_a_source(
    client: TrainJobClient, backend: DirectBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    for uri in (f"file://{tmp_path}", "pvc://claim/model"):
        ref = _trained(client, backend, {"model": uri}, uri)
        with pytest.raises(ConfigurationError, match=r"only pods of its cluster can read.*--source"):
            _find(client, ref)
        assert _find(client, ref, source=str(tmp_path)).source == f"file://{tmp_path}"
        assert _find(client, ref, source=str(tmp_path)).provenance["trainjob"]["outputs"]["model"] == uri
    with pytest.raises(ConfigurationError, match="--target"):
        client.export(ref, name="m", source=str(tmp_path))
    with FakeRegistry() as fake:
        monkeypatch.setenv("TRAINJOB_REGISTRY", f"kubeflow+{fake.url}")
        done = client.export(ref, f"{tmp_path}-models", name="m", source=str(tmp_path))
        assert connect().resolve("m", "1").metrics == {"accuracy": 0.97}
    assert done.version == "1"
