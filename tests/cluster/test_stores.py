"""Datasets, models and a registry, with real pods: SeaweedFS, PVCs, and the API of a Kubeflow Model Registry.

The tests run the workflow initialize, train, export on ``s3://`` by the components of KFP; the step image instead of
Trainer's initializers; steps and trainings on ``pvc://``.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.backends import backend_of
from tests.cluster.kfp_steps import Execution, Steps
from tests.fakes.model_registry import FakeRegistry
from tests.seaweedfs import SeaweedFS
from tests.testcluster import step_image as steps
from tests.testcluster.access import TRAINER
from tests.testcluster.control_plane import Cluster

from trainjob import TrainJobClient, TrainJobFailed
from trainjob.data import file_manifest
from trainjob.data.options import STEPS
from trainjob.job import job_name

pytestmark = pytest.mark.timeout(400)

Object = dict[str, Any]
DIGITS = Path(__file__).parents[2] / "dags_examples" / "data" / "digits.csv.gz"
DIGITS_URI = "s3://training/data/digits.csv.gz"
TOKEN = "of-the-tests-own-registry"
TRAIN = ["python", f"{steps.EXAMPLES}/training/digits_jax.py", "--epochs=1"]
STAGED = ["trainjob", "exec", "--", *TRAIN]
TRAIN_ARGS = ["--dataset=$(TRAINJOB_INPUT_DATASET)", "--output=$(TRAINJOB_OUTPUT_MODEL)"]


@dataclass
class Platform:
    """A cluster, storage and a registry that requires a token, as pods reach them."""

    cluster: Cluster
    s3: SeaweedFS
    registry: FakeRegistry
    output: list[str] = field(default_factory=list)
    """Of launchers and logs so far; it must not contain a secret."""
    volumes: list[str] = field(default_factory=list)

    def admit(self, namespace: str) -> None:
        """Create the settings and keys with which pods reach storage and registry."""
        settings = self.s3.environment()
        keys = {name: settings.pop(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
        metadata = {"name": "trainjob-storage", "namespace": namespace}
        secret = {**keys, "KUBEFLOW_REGISTRY_TOKEN": TOKEN}
        for kind, content_ in (("ConfigMap", {"data": settings}), ("Secret", {"stringData": secret})):
            self.cluster.api.create({"apiVersion": "v1", "kind": kind, "metadata": metadata, **content_})

    def client(self, namespace: str) -> TrainJobClient:
        """A client with the permissions of Trainer's role for users."""
        return TrainJobClient(backend_of(self.cluster.kubeconfig_for(namespace=namespace)), namespace)

    def volume(self, name: str, namespace: str, directory: Path, mode: str = "ReadWriteOnce") -> Object:
        """The spec of a PVC that gets a volume on the real node, backed by `directory`."""
        directory.chmod(0o775)  # a volume of type hostPath does not get the pods' `fsGroup`
        common = {"accessModes": [mode], "storageClassName": ""}
        bound = {"claimRef": {"namespace": namespace, "name": name}, "capacity": {"storage": "20Gi"}}
        volume = {**common, **bound, "hostPath": {"path": str(directory)}}
        metadata = {"name": f"{namespace}-{name}"}
        self.volumes.append(metadata["name"])
        self.cluster.api.create({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata, "spec": volume})
        return {**common, "volumeName": metadata["name"], "resources": {"requests": {"storage": "1Gi"}}}

    def check_that_no_secret_shows(self, namespace: str) -> None:
        """Check the TrainJobs, the logs of their pods, and the output of launchers."""
        jobs = self.cluster.api.find(TRAINER, "TrainJob", namespace)
        pods = self.cluster.api.find("v1", "Pod", namespace)
        logs = [self.cluster.pod_log(namespace, pod["metadata"]["name"]) for pod in pods]
        assert jobs
        assert any(logs)
        everything = json.dumps(jobs) + "\n".join([*logs, *self.output])
        for secret in (self.s3.secret_key, self.s3.access_key, TOKEN):
            assert secret not in everything

    def version(self, name: str) -> tuple[Object, Object]:
        """The only version of a model, and its only artifact."""
        model = self.registry.call("GET", "registered_model", name=name)
        versions = self.registry.call("GET", f"registered_models/{model['id']}/versions")["items"]
        assert [each["state"] for each in versions] == ["LIVE"]
        artifacts = self.registry.call("GET", f"model_versions/{versions[0]['id']}/artifacts")["items"]
        assert [each["state"] for each in artifacts] == ["LIVE"]
        return versions[0], artifacts[0]

    def stored(self, uri: str) -> file_manifest.ContentManifest:
        """The manifest in the bucket at `uri`; all files are compared with it."""
        prefix = uri.removeprefix(self.s3.uri()).rstrip("/")
        assert prefix != uri

        def read(path: str) -> bytes:
            data: bytes = self.s3.client.get_object(Bucket=self.s3.bucket, Key=f"{prefix}/{path}")["Body"].read()
            return data

        manifest = file_manifest.parse(read("MANIFEST.json"), uri)
        assert manifest.files
        for file in manifest.files:
            assert hashlib.sha256(read(file.path)).hexdigest() == file.sha256
        return manifest


def properties(version: Mapping[str, Any]) -> dict[str, Any]:
    """Custom properties by name, JSON values decoded."""
    found: dict[str, Any] = {}
    for name, value in version["customProperties"].items():
        (text,) = [each for kind, each in value.items() if kind != "metadataType"]
        found[name] = json.loads(text) if isinstance(text, str) and text.startswith(("{", "[")) else text
    return found


@pytest.fixture(scope="module")
def platform(own_cluster: Cluster, step_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    here = own_cluster.layout.gateway  # this machine, for pods and for launchers
    with (
        SeaweedFS(tmp_path_factory.mktemp("seaweedfs"), bind=here, bucket="training") as s3,
        FakeRegistry(host=here, token=TOKEN) as registry,
    ):
        s3.client.upload_file(str(DIGITS), s3.bucket, DIGITS_URI.removeprefix(s3.uri()))
        platform = Platform(own_cluster, s3, registry)
        yield platform
    for name in platform.volumes:
        own_cluster.api.delete("v1", "PersistentVolume", "", name)


@pytest.fixture(scope="module")
def namespace(platform: Platform) -> Iterator[str]:
    """A namespace whose steps reach storage and registry."""
    with platform.cluster.namespace("stores", real=True) as name:
        platform.admit(name)
        yield name


# ---------------------------------------------------------------- KFP


def test_the_workflow_by_the_components_of_kfp(platform: Platform, kfp_steps: Steps) -> None:
    platform.admit(kfp_steps.namespace)
    run_id = str(uuid.uuid4())
    work = f"s3://training/work/{run_id}"

    def execute(execution: Execution) -> Object:
        ended = kfp_steps.run(execution)
        assert ended.code == 0, ended.log
        platform.output += [ended.log, json.dumps(ended.output)]
        values: Object = ended.output["parameterValues"]
        return values

    asked = {"source": DIGITS_URI, "target": f"{work}/dataset"}
    dataset = execute(Execution("initialize_dataset", asked, run=run_id))
    training = {
        "runtime": "trainjob-step",
        "command": STAGED,
        "args": TRAIN_ARGS,
        "inputs": {"dataset": dataset["uri"]},
        "outputs": {"model": f"{work}/model"},
    }
    trained = execute(Execution("train", training, run=run_id))
    export = Execution(
        "export_model",
        {
            "source": trained["model_uri"],
            "target": "s3://training/models",
            "name": "digits-kfp",
            "metrics": trained["result"],
            "alias": "champion",
            "metric": "accuracy",
            "datasets": [{"uri": DIGITS_URI, "digest": dataset["digest"]}],
            "registry": f"kubeflow+{platform.registry.url}",
        },
        run=run_id,
    )
    exported = execute(export)
    version, artifact = platform.version("digits-kfp")
    recorded, manifest = properties(version), platform.stored(artifact["uri"])
    names = ("version", "uri", "digest")
    assert [exported[name] for name in names] == [version["name"], artifact["uri"], manifest.digest]
    assert recorded["trainjob.digest"] == manifest.digest
    assert {file.path for file in manifest.files} == {"config.json", "model.safetensors"}
    (source,) = recorded["trainjob.provenance.datasets"]
    assert (source["uri"], source["digest"]) == (DIGITS_URI, dataset["digest"])
    assert recorded["trainjob.provenance.trainjob"]["name"] == trained["result"]["name"]
    assert 0.3 < recorded["trainjob.metric.accuracy"] <= 1
    assert recorded["trainjob.provenance.run"]
    assert (artifact["modelSourceKind"], artifact["modelSourceId"]) == ("kfp", run_id)
    assert artifact["modelSourceGroup"] == kfp_steps.namespace

    again = execute(export)
    assert (again["version"], again["uri"]) == (exported["version"], exported["uri"])
    platform.version("digits-kfp")  # still only one version
    platform.check_that_no_secret_shows(kfp_steps.namespace)


# ---------------------------------------------------------------- instead of Trainer's initializers

READ = """
import hashlib, pathlib
from trainjob import progress
found = {str(path): path for path in pathlib.Path("/workspace").glob("*/*") if path.is_file()}
progress.report(outputs={name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()})
"""


def test_the_step_image_replaces_trainers_initializers(platform: Platform, step_image: str, tmp_path: Path) -> None:
    model = {"config.json": b"{}", "model.safetensors": b"weights", "pytorch_model.bin": b"pickle"}
    for name, data in model.items():
        platform.s3.client.put_object(Bucket=platform.s3.bucket, Key=f"base/{name}", Body=data)
    platform.s3.client.put_object(Bucket=platform.s3.bucket, Key="base-2/other.json", Body=b"{}")
    read = {"runtime": "torch-initialized", "image": step_image, "command": ["python", "-c", READ]}
    keyed = {"secret_ref": "bucket-keys"}
    initializers = {
        "both": {
            "dataset": {"storage_uri": DIGITS_URI, **keyed},
            "model": {"storage_uri": "s3://training/base", **keyed},
        },
        "one": {"dataset": {"storage_uri": DIGITS_URI, **keyed}},
        "missing": {"model": {"storage_uri": "s3://training/nosuch", **keyed}},
    }
    keys = {
        "ENDPOINT": platform.s3.endpoint,
        "ACCESS_KEY_ID": platform.s3.access_key,
        "SECRET_ACCESS_KEY": platform.s3.secret_key,
        "REGION": "auto",
    }
    with platform.cluster.namespace("initialized", real=True) as namespace, platform.client(namespace) as client:
        platform.cluster.restrict(namespace)
        metadata = {"name": "bucket-keys", "namespace": namespace}
        platform.cluster.api.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": keys})
        for key in initializers:
            (tmp_path / key).mkdir()
            platform.volume(f"initializer-{job_name(key, 1)}", namespace, tmp_path / key)
        jobs = {key: client.launch({**read, "initializer": asked}, key) for key, asked in initializers.items()}

        result = client.wait(jobs["both"])
        manifest = file_manifest.parse((tmp_path / "both" / "model" / "MANIFEST.json").read_bytes(), "model")
        expected = {**model, "digits.csv.gz": DIGITS.read_bytes()}
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
        lines = [str(line) for line in client.logs(jobs["missing"])]
        assert not any(line.startswith("[node") for line in lines)
        platform.output += lines

        assert {Path(name).parent.name for name in client.wait(jobs["one"]).outputs} == {"dataset"}
        lines = [str(line) for line in client.logs(jobs["one"])]
        assert "[model-initializer-0] STORAGE_URI is empty: nothing to download" in lines
        platform.output += lines
        platform.check_that_no_secret_shows(namespace)


# ---------------------------------------------------------------- PVCs


@pytest.fixture
def claims(platform: Platform, namespace: str, tmp_path: Path) -> Path:
    """The directory of the PVCs ``scratch`` and ``models``."""
    for name in ("scratch", "models"):
        (tmp_path / name).mkdir()
        spec = platform.volume(name, namespace, tmp_path / name, "ReadWriteMany")
        metadata = {"name": name, "namespace": namespace}
        platform.cluster.api.create(
            {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}
        )
    return tmp_path


def test_pvcs_are_mounted_in_steps_and_trainings(platform: Platform, namespace: str, claims: Path) -> None:
    registry = f"kubeflow+{platform.registry.url}"
    step: Object = {"runtime": "trainjob-step"}
    with platform.client(namespace) as client:

        def wait(key: str, **spec: Any) -> Any:
            return client.wait(client.launch({**step, **spec}, f"claims/{key}"))

        options: Object = {"source": DIGITS_URI, "target": "pvc://scratch/data set"}
        downloaded = wait("initialize", command=STEPS["initialize-dataset"](**options).to_command())
        assert downloaded.outputs["uri"] == "pvc://scratch/data%20set"
        assert (claims / "scratch" / "data set" / "digits.csv.gz").read_bytes() == DIGITS.read_bytes()

        # `trainjob exec` is not needed: the mounted PVC has a local path.
        inputs, outputs = {"dataset": downloaded.outputs["uri"]}, {"model": "pvc://scratch/model"}
        trained = wait("train", command=TRAIN, args=TRAIN_ARGS, inputs=inputs, outputs=outputs)
        assert trained.outputs == outputs

        options = {"target": "pvc://models/", "name": "digits-claim", "export_id": "claims", "registry": registry}
        command = STEPS["export"](**{**options, "source": trained.outputs["model"]}).to_command()
        exported = wait("export", command=command)
        version, artifact = platform.version("digits-claim")
        assert exported.outputs["uri"] == artifact["uri"]
        path = claims / "models" / artifact["uri"].removeprefix("pvc://models/")
        manifest = file_manifest.parse((path / "MANIFEST.json").read_bytes(), str(path))
        assert manifest.digest == properties(version)["trainjob.digest"] == exported.outputs["digest"]
        for name in ("config.json", "model.safetensors"):
            assert (path / name).read_bytes() == (claims / "scratch" / "model" / name).read_bytes()

        # The PVC of a registered model is not known before its step runs.
        options = {"source": "models:/digits-claim/latest", "target": "pvc://scratch/champion", "registry": registry}
        command = STEPS["initialize-model"](**options).to_command()
        with pytest.raises(
            TrainJobFailed, match="PersistentVolumeClaim models is not mounted at /mnt/trainjob-claims/models"
        ):
            wait("unmounted", command=command)
        downloaded = wait("mounted", command=command, inputs={"models": "pvc://models"})
        assert (downloaded.outputs["uri"], downloaded.outputs["digest"]) == ("pvc://scratch/champion", manifest.digest)
        assert (claims / "scratch" / "champion" / "model.safetensors").exists()
