"""The step image instead of Trainer's initializers, in real pods that download from SeaweedFS."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.backends import backend_of
from tests.seaweedfs import SeaweedFS
from tests.testcluster.access import TRAINER
from tests.testcluster.control_plane import Cluster

from trainjob import JobRef, TrainJobClient, TrainJobFailed
from trainjob.data import file_manifest
from trainjob.job import job_name

pytestmark = pytest.mark.timeout(400)

DIGITS = Path(__file__).parents[2] / "dags_examples" / "data" / "digits.csv.gz"
DATASET = {"storage_uri": "s3://training/data/digits.csv.gz", "secret_ref": "bucket-keys"}
MODEL = {"config.json": b"{}", "model.safetensors": b"weights", "pytorch_model.bin": b"pickle"}
ASKED: dict[str, Any] = {
    "both": {"dataset": DATASET, "model": {"storage_uri": "s3://training/base", "secret_ref": "bucket-keys"}},
    "one": {"dataset": DATASET},
    "missing": {"model": {"storage_uri": "s3://training/nosuch", "secret_ref": "bucket-keys"}},
}
READ = """
import hashlib, pathlib
from trainjob import progress
found = {str(path): path for path in pathlib.Path("/workspace").glob("*/*") if path.is_file()}
progress.report(outputs={name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()})
"""


@pytest.fixture
def bucket(own_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """A store that pods reach, with the dataset and two models."""
    here = own_cluster.layout.gateway
    with SeaweedFS(tmp_path_factory.mktemp("seaweedfs"), bind=here, bucket="training") as s3:
        objects = {f"base/{name}": data for name, data in MODEL.items()} | {"base-2/other.json": b"{}"}
        for key, data in {**objects, "data/digits.csv.gz": DIGITS.read_bytes()}.items():
            s3.client.put_object(Bucket=s3.bucket, Key=key, Body=data)
        yield s3


@pytest.fixture
def namespace(own_cluster: Cluster, bucket: SeaweedFS, tmp_path: Path) -> Iterator[str]:
    """A namespace with the keys of the store, and a volume for the PVC of each job."""
    api = own_cluster.api
    keys = {"ENDPOINT": bucket.endpoint, "ACCESS_KEY_ID": bucket.access_key, "REGION": "auto"}
    keys["SECRET_ACCESS_KEY"] = bucket.secret_key
    with own_cluster.namespace("initialized", real=True) as name:
        own_cluster.restrict(name)
        metadata = {"name": "bucket-keys", "namespace": name}
        api.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": keys})
        for key in ASKED:
            (tmp_path / key).mkdir()
            (tmp_path / key).chmod(0o775)  # a volume of type hostPath does not get the pods' `fsGroup`
            claim = {"namespace": name, "name": f"initializer-{job_name(key, 1)}"}
            volume = {"accessModes": ["ReadWriteOnce"], "storageClassName": "", "capacity": {"storage": "20Gi"}}
            volume |= {"claimRef": claim, "hostPath": {"path": str(tmp_path / key)}}
            metadata = {"name": f"{name}-{key}"}
            api.create({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata, "spec": volume})
        yield name
    for key in ASKED:
        api.delete("v1", "PersistentVolume", "", f"{name}-{key}")


@pytest.fixture
def client(own_cluster: Cluster, namespace: str) -> Iterator[TrainJobClient]:
    """A client with the permissions of Trainer's role for users."""
    backend = backend_of(own_cluster.kubeconfig_for(namespace=namespace))
    with TrainJobClient(backend, namespace) as opened:
        yield opened


def test_the_step_image_replaces_trainers_initializers(
    own_cluster: Cluster, bucket: SeaweedFS, namespace: str, client: TrainJobClient, step_image: str, tmp_path: Path
) -> None:
    read = {"runtime": "torch-initialized", "image": step_image, "command": ["python", "-c", READ]}
    jobs = {key: client.launch({**read, "initializer": asked}, key) for key, asked in ASKED.items()}

    result = client.wait(jobs["both"])
    manifest = file_manifest.parse((tmp_path / "both" / "model" / "MANIFEST.json").read_bytes(), "model")
    expected = {**MODEL, "digits.csv.gz": DIGITS.read_bytes()}
    del expected["pytorch_model.bin"]  # excluded by default, as by Trainer's initializer
    found = {Path(name).name: digest for name, digest in result.outputs.items() if "MANIFEST" not in name}
    assert found == {name: hashlib.sha256(data).hexdigest() for name, data in expected.items()}
    assert {file.path for file in manifest.files} == expected.keys() - {"digits.csv.gz"}
    assert {Path(name).parent.name for name in result.outputs} == {"dataset", "model"}

    with pytest.raises(TrainJobFailed) as caught:
        client.wait(jobs["missing"])
    diagnosis = caught.value.diagnosis
    assert diagnosis.rank == "model-initializer-0"
    assert diagnosis.summary.startswith("model-initializer-0 exited with code 2: s3://training/nosuch")
    assert "does not exist or is empty" in diagnosis.summary
    assert "not retried: the configuration must be changed first" in str(caught.value)
    assert not any(line.startswith("[node") for line in log(client, jobs["missing"]))

    assert {Path(name).parent.name for name in client.wait(jobs["one"]).outputs} == {"dataset"}
    lines = log(client, jobs["one"])
    assert "[model-initializer-0] STORAGE_URI is empty: nothing to download" in lines
    shown = json.dumps(own_cluster.api.find(TRAINER, "TrainJob", namespace)) + str(lines)
    assert not [secret for secret in (bucket.secret_key, bucket.access_key) if secret in shown]


def log(client: TrainJobClient, ref: JobRef) -> list[str]:
    return [str(line) for line in client.logs(ref)]
