"""A spec's fields are those of TrainJob's schema, and complete TrainJobs from files and clusters are read by it."""

from __future__ import annotations

import json
import logging
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st
from tests.testcluster.crd import DATA, merged

from trainjob import InvalidSpec, TrainJobSpec
from trainjob._manifest.render import render
from trainjob.errors import ConfigurationError
from trainjob.job import JobRef

RECORDED = Path(__file__).with_name("schemas")
SCHEMA: dict[str, Any] = json.loads(Path(DATA).read_text())
NAMED = {"trainer": {}, "runtimeRef": {"name": "torch-distributed"}}


def manifest(**spec: Any) -> dict[str, Any]:
    fields = {"runtimeRef": {"name": "torch-distributed"}, **spec}
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "spec": fields}


def problems(source: Any) -> dict[str, str]:
    with pytest.raises(InvalidSpec) as caught:
        TrainJobSpec.parse(source)
    return {problem.path: f"{problem.message} ({problem.instead})" for problem in caught.value.problems}


def paths(schema: Any, at: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    """Path of each field of a schema -> its type."""
    found = {at: str(schema.get("type", ""))} if at else {}
    for name, part in schema.get("properties", {}).items():
        found |= paths(part, (*at, name))
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            found |= paths(schema[name], (*at, "*"))
    return found


def test_a_field_passes_if_any_release_has_it() -> None:
    """tests/cluster holds these files, and the limits of the merged one, to real API servers."""
    releases = [json.loads(file.read_text()) for file in sorted(RECORDED.glob("trainjob-spec-*.json"))]
    assert paths(SCHEMA) == paths(reduce(merged, releases))


PLACES = sorted(path for path in paths(SCHEMA) if "*" not in path and path[0] != "podTemplateOverrides")
OBJECTS = {path: kind for path, kind in paths(SCHEMA).items() if kind == "object"}


def at(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A spec with a value at a path."""
    nested: Any = value
    for name in reversed(path):
        nested = {name: nested}
    return manifest(**nested)


@given(st.sampled_from(PLACES), st.data())
def test_a_misspelled_field_of_a_manifest_is_named_with_the_right_one(
    path: tuple[str, ...], data: st.DataObject
) -> None:
    name = path[-1]
    cut = data.draw(st.integers(1, len(name) - 2))
    wrong = name[:cut] + name[cut + 1 :]
    found = problems(at((*path[:-1], wrong), 0))
    place = ".".join(("manifest.spec", *path[:-1], wrong))
    assert found[place].startswith("no such field (did you mean ")


@given(st.sampled_from([path for path in PLACES if len(path) == 1]), st.sampled_from(["trainer", "runtimeRef"]))
def test_a_misplaced_field_of_a_manifest_is_named_with_its_place(path: tuple[str, ...], elsewhere: str) -> None:
    found = problems(manifest(**{elsewhere: {**NAMED[elsewhere], path[0]: 0}}))
    assert "it is a field of spec" in found[f"manifest.spec.{elsewhere}.{path[0]}"]


def test_the_manifests_of_other_people() -> None:
    trainer = {"numNode": 4, "initializer": {}, "podTemplateOverrides": []}
    assert problems(manifest(trainer=trainer)) == {
        "manifest.spec.trainer.numNode": "no such field (did you mean numNodes?)",
        "manifest.spec.trainer.initializer": "no such field (it is a field of spec)",
        "manifest.spec.trainer.podTemplateOverrides": "no such field (it is a field of spec)",
    }
    assert "TRAINJOB_CRD names the file" in problems(manifest(nothingLikeIt=1))["manifest.spec.nothingLikeIt"]
    assert "at least 1" in problems(manifest(trainer={"numNodes": -1}))["manifest.spec.trainer.numNodes"]


def test_the_schema_of_another_release_replaces_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = {"type": "object", "properties": {**SCHEMA["properties"], "elastic": {"type": "boolean"}}}
    versions = [{"name": "v1alpha1", "schema": {"openAPIV3Schema": {"properties": {"spec": newer}}}}]
    file = tmp_path / "crd.json"
    file.write_text(json.dumps({"kind": "CustomResourceDefinition", "spec": {"versions": versions}}))
    monkeypatch.setenv("TRAINJOB_CRD", str(file))
    assert TrainJobSpec.parse(manifest(elastic=True)).manifest == manifest(elastic=True)
    assert "true or false" in problems(manifest(elastic=3))["manifest.spec.elastic"]
    file = tmp_path / "other.json"
    file.write_text('{"kind": "Pod"}')
    monkeypatch.setenv("TRAINJOB_CRD", str(file))
    with pytest.raises(ConfigurationError, match=r"other.json has no schema .*kubectl get crd"):
        TrainJobSpec.parse(manifest())


@pytest.mark.parametrize("amount", ["64GB", "1ki", "1.2.3", ".", "1e", "-1", True, {}, [1], "\u0663", "1\n", "1e1.5"])
def test_what_is_not_a_quantity_is_named(amount: Any) -> None:
    limits = problems(manifest(trainer={"resourcesPerNode": {"limits": {"memory": amount}}}))
    assert "Kubernetes quantity" in limits["manifest.spec.trainer.resourcesPerNode.limits.memory"]


def test_a_required_value_is_not_null() -> None:
    volume: dict[str, Any] = {"volumes": [{"name": None, "emptyDir": {}}]}
    assert problems({"runtime": "torch-distributed", "pod": volume}) == {"pod.volumes[0].name": "is missing ()"}
    assert "is missing" in problems(manifest(runtimeRef=None))["manifest.spec.runtimeRef"]
    assert "is missing" in problems({**manifest(), "spec": None})["manifest.spec"]


def test_a_release_without_patches_has_no_changes_of_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {name: part for name, part in SCHEMA["properties"].items() if name != "runtimePatches"}
    versions = [{"name": "v1alpha1", "schema": {"openAPIV3Schema": {"properties": {"spec": {"properties": fields}}}}}]
    (tmp_path / "crd.json").write_text(json.dumps({"spec": {"versions": versions}}))
    monkeypatch.setenv("TRAINJOB_CRD", str(tmp_path / "crd.json"))
    found = problems({"runtime": "x", "pod": {"nodeSelector": {"a": "b"}}, "runtime_patches": [{}]})
    assert {path: "has no runtimePatches" in text for path, text in found.items()} == {
        "pod": True,
        "runtime_patches": True,
    }


def test_a_manifest_has_what_older_releases_and_programs_in_go_write() -> None:
    volumes = [{"name": "v"}, {"name": "shm", "emptyDir": None}]
    mount = {"containers": [{"name": "node", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]}
    jobs = [{"name": "node"}]
    overrides = [{"targetJobs": jobs, "spec": {"volumes": volumes}}, {"targetJobs": jobs, "spec": mount}]
    trainer = {"numProcPerNode": "auto", "resourcesPerNode": {"limits": {"nvidia.com/gpumem": "3k"}}}
    written = {**manifest(trainer=trainer, podTemplateOverrides=overrides), "status": {}}
    written["metadata"] = {"name": "x", "creationTimestamp": None}
    assert TrainJobSpec.parse(written).manifest == written


def test_a_namespaced_runtime_may_have_a_name_that_trainer_ships() -> None:
    mount = {"containers": [{"name": "trainer", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}]}
    own = {"runtime": {"name": "torch-distributed", "kind": "TrainingRuntime"}, "pod": mount}
    assert TrainJobSpec.parse(own).pod == {"spec": mount}
    assert problems({**own, "runtime": "torch-distributed"}).keys() == {
        "pod.containers[0].name",
        "pod.containers[0].volumeMounts[0].name",
    }


def test_a_complete_manifest_is_sent_unchanged() -> None:
    complete = {
        **manifest(),
        "metadata": {"name": "mine", "labels": {"team": "a"}, "annotations": {"note": "b"}},
        "spec": {**manifest()["spec"], "podTemplateOverrides": [{"targetJobs": [{"name": "node"}]}]},
    }
    rendered = render(TrainJobSpec.parse(complete), "key", 1, "ns")
    assert rendered["spec"] == complete["spec"]
    assert rendered["metadata"]["name"] != "mine"
    assert rendered["metadata"]["labels"]["team"] == "a"
    assert rendered["metadata"]["annotations"]["note"] == "b"
    assert TrainJobSpec.parse(yaml.safe_dump(complete)) == TrainJobSpec.parse({"manifest": complete})


# ---------------------------------------------------------------- from a cluster

LEFT_OUT = ("status", "metadata.uid", "spec.suspend", "spec.runtimePatches of kueue.x-k8s.io/manager")


def test_an_object_of_a_cluster_is_launched_as_its_author_wrote_it(caplog: pytest.LogCaptureFixture) -> None:
    """`kubectl get trainjob … -o yaml` of a job that trainjob launched in a Kueue queue."""
    caplog.set_level(logging.INFO)
    labels = {"kueue.x-k8s.io/queue-name": "team", "team": "vision"}
    env = {"A": "1"}
    spec = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["x"], "labels": labels, "env": env})
    first = render(spec, "key", 1, "ns")
    seen = json.loads(json.dumps(first))
    seen["metadata"] |= {
        "uid": "u",
        "resourceVersion": "7",
        "generation": 2,
        "managedFields": [],
        "creationTimestamp": "t",
    }
    seen["spec"] |= {"suspend": True, "runtimePatches": [{"manager": "kueue.x-k8s.io/manager", "time": "t"}]}
    seen["status"] = {"conditions": []}
    again = render(TrainJobSpec.parse(yaml.safe_dump(seen)), "key", 1, "ns")
    assert again["spec"] == {**first["spec"], "runtimePatches": []}
    assert again["metadata"]["labels"] == first["metadata"]["labels"]
    assert JobRef.of({**again, "metadata": {**again["metadata"], "uid": "u"}}).name == first["metadata"]["name"]
    (line,) = (record.getMessage() for record in caplog.records if "comes from a cluster" in record.getMessage())
    assert all(name in line for name in LEFT_OUT)


def test_each_job_of_ours_comes_back_from_a_cluster() -> None:
    """Also one with variables that a spec sets from its fields, without those of that job alone."""
    places = {"inputs": {"data": "s3://b/d"}, "outputs": {"model": "s3://b/m"}, "checkpoints": "s3://b/c"}
    spec = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["x"], "stall_timeout": 60, **places})
    seen = render(spec, "key", 1, "ns")
    seen["metadata"]["uid"] = "u"
    env = render(TrainJobSpec.parse(seen), "key", 2, "ns")["spec"]["trainer"]["env"]
    assert [each["name"] for each in env] == ["TRAINJOB_INPUT_DATA", "TRAINJOB_OUTPUT_MODEL"]


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"runtimePatches": {"a": 1}}, "runtimePatches"),
        ({"runtimePatches": "x"}, "runtimePatches"),
        ({"runtimePatches": [None, 3]}, "runtimePatches[0]"),
        ({"trainer": {"env": [3]}}, "trainer.env[0]"),
    ],
)
def test_parts_of_another_type_are_named_also_of_an_object_of_a_cluster(spec: dict[str, Any], path: str) -> None:
    found = problems({**manifest(**spec), "metadata": {"uid": "u"}})
    assert "must be a" in found[f"manifest.spec.{path}"]


@pytest.mark.parametrize(
    ("kind", "write"),
    [
        ("PyTorchJob", "runtime: torch-distributed"),
        ("MPIJob", "runtime: deepspeed-distributed"),
        ("TFJob", "a training runtime of yours"),
        ("Experiment", "trainjob tune"),
        ("ClusterTrainingRuntime", "kubectl apply"),
        ("List", "one of its items"),
        ("Job", "kind: TrainJob are needed"),
    ],
)
def test_other_kinds_are_answered_with_what_to_write(kind: str, write: str) -> None:
    assert write in problems({"apiVersion": "kubeflow.org/v1", "kind": kind, "spec": {}})["manifest"]
