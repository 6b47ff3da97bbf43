from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, strategies as st

from trainjob import InvalidSpec, JobRef, TrainJobSpec
from trainjob._manifest.checkpoint_directories import digest
from trainjob._manifest.render import differences, render
from trainjob._spec import Resources
from trainjob.job import ATTEMPT, KEY, MANAGED_BY, SPEC_HASH, job_name, key_hash, labels_of, spec_hash

RFC_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
TRAIN: dict[str, Any] = {"runtime": "torch-distributed", "command": ["train"], "num_nodes": 2}
KEYS = st.text(alphabet=st.characters(exclude_categories=["Cs"])).filter(str.strip)


def rendered(key: str = "key", attempt: int = 1, **fields: Any) -> dict[str, Any]:
    return render(TrainJobSpec.parse({**TRAIN, **fields}), key, attempt, "ns")


ATTEMPTS = st.one_of(st.integers(1, 999), st.integers(1000, 10**20 - 1))


@given(st.lists(st.tuples(KEYS, ATTEMPTS), unique=True, min_size=1))
def test_names_and_labels_are_distinct_and_valid_in_kubernetes(work: list[tuple[str, int]]) -> None:
    names = [job_name(key, attempt) for key, attempt in work]
    assert len(set(names)) == len(work)
    assert len({key_hash(key) for key, _ in work}) == len({key for key, _ in work})
    for name, (key, attempt) in zip(names, work, strict=True):
        assert RFC_1035.fullmatch(name)
        assert len(name) <= 33
        assert len(f"{name}-dataset-initializer-0-0-abcde") <= 63  # JobSet's webhook
        assert re.fullmatch(rf"[a-z].*-[a-z0-9]{{10}}-{attempt}", name)
        assert f"-{key_hash(key)}-" in name
        assert name == job_name(key, attempt)
        for value in labels_of(key).values():
            assert LABEL.fullmatch(value)


@pytest.mark.parametrize(
    ("key", "attempt", "begins"),
    [
        ("airflow/dag/run/train_model", 1, "train-model-"),
        ("runs/Train Model!/", 1, "train-model-"),
        ("a/2026-11-21", 1, "job-"),
        ("a/7b-llama", 1, "b-llama-"),
        ("日本", 1, "job-"),
        ("x/a-very-long-name-of-a-task", 1, "a-very-long-name-o-"),
        # Names of later attempts have a shorter slug.
        ("x/seventeen-letters-and", 1000, "seventeen-letters-"),
        ("x/seventeen-letters-and", 99_999, "seventeen-letter-"),
        ("x/seventeen-letters-and", 10**10, "seventeen-"),  # not `seventeen--`
        ("x/seventeen-letters-and", 10**19, "s-"),
    ],
)
def test_names_contain_the_last_part_of_the_key(key: str, attempt: int, begins: str) -> None:
    assert job_name(key, attempt) == f"{begins}{key_hash(key)}-{attempt}"


def test_names_and_hashes_do_not_change_between_versions() -> None:
    """After an upgrade, running jobs must still be found, and belong to their keys."""
    assert job_name("airflow/prod/retrain/scheduled__2026-01-31/train", 2) == "train-kusxgt73oi-2"
    assert spec_hash(rendered()) == "31ab4e7f71ed3a05e1a26d73f5f2caebe36a988b20809f8196d5046f4b0b2571"
    beyond_ascii = rendered(env={"CITY": "Zürich"}, args=["日本"])
    assert spec_hash(beyond_ascii) == "946dade30dc7d2e81a9695cd39c9dd5963f849a54d287b7d422e00a6823782a2"


def test_an_attempt_below_1_and_a_spec_without_a_runtime_are_rejected() -> None:
    for attempt in (0, -1):
        with pytest.raises(ValueError, match="is less than 1"):
            job_name("k", attempt)
    with pytest.raises(InvalidSpec, match="runtime: is missing"):
        render(TrainJobSpec(), "k", 1, "ns")


def test_all_fields_are_rendered() -> None:
    owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "run-x", "uid": "u"}
    spec = TrainJobSpec.parse(
        {
            **TRAIN,
            "image": "i:1",
            "args": ["--lr", "0.1"],
            "env": {"A": "1"},
            "num_proc_per_node": 4,
            "resources_per_node": {"cpu": 1},
            "labels": {"team": "x", "dag_id": "theirs"},
            "annotations": {"note": "y"},
            "owner_reference": owner,
            "suspend": True,
            "active_deadline_seconds": 60,
            "managed_by": "kueue.x-k8s.io/multikueue",
        }
    )
    sent = render(spec, "a/b", 3, "ns", origin={"dag_id": "digits"})
    assert sent == {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {
            "name": job_name("a/b", 3),
            "namespace": "ns",
            "labels": {"team": "x", "dag_id": "digits", MANAGED_BY: "trainjob", KEY: key_hash("a/b"), ATTEMPT: "3"},
            "annotations": {"note": "y", KEY: "a/b", SPEC_HASH: spec_hash(sent)},
            "ownerReferences": [owner],
        },
        "spec": {
            "runtimeRef": spec.runtime.api() if spec.runtime else {},
            "trainer": {
                "numNodes": 2,
                "image": "i:1",
                "command": ["train"],
                "args": ["--lr", "0.1"],
                "env": [{"name": "A", "value": "1"}],
                "resourcesPerNode": {"limits": {"cpu": "1"}, "requests": {"cpu": "1"}},
                "numProcPerNode": 4,
            },
            "suspend": True,
            "activeDeadlineSeconds": 60,
            "managedBy": "kueue.x-k8s.io/multikueue",
        },
    }


QUANTITIES = (
    "0.5=500m .25=250m 1000m=1 1500m=1500m 4=4 2000=2k 0=0 0m=0 16Gi=16Gi 1024Mi=1Gi 1000Ki=1000Ki 1.5Gi=1536Mi"
    " 0.5Ki=512 1000M=1G 1e3=1e3"
)


@pytest.mark.parametrize(("amount", "canonical"), [each.split("=") for each in QUANTITIES.split()])
def test_quantities_are_sent_in_canonical_form(amount: str, canonical: str) -> None:
    """Responses of Kubernetes 1.36. With any other spelling, Kueue could not start the job (`env_api`)."""
    sent = Resources(requests={"memory": amount}).api()
    assert sent == {"requests": {"memory": canonical}}, "without empty limits"


def test_identity_and_hash_are_read_from_an_object() -> None:
    job = rendered("k", 7)
    job["metadata"]["uid"] = "u"
    assert JobRef.of(job) == JobRef("ns", job_name("k", 7), "u", 7)
    assert str(JobRef.of(job)) == f"ns/{job_name('k', 7)}"
    foreign = {"metadata": {"namespace": "ns", "name": "by-hand", "uid": "u"}}
    assert JobRef.of(foreign) == JobRef("ns", "by-hand", "u", 1)
    assert spec_hash(foreign) == spec_hash({"metadata": {"annotations": None}}) == ""


# ---------------------------------------------------------------- spec hash and differences

SPECS = st.fixed_dictionaries(
    {"runtime": st.sampled_from(["torch-distributed", "jax-distributed"]), "command": st.lists(st.text(max_size=9))},
    optional={
        "num_nodes": st.integers(1, 9),
        "env": st.dictionaries(st.from_regex(r"[A-Z]{1,5}", fullmatch=True), st.text("abc")),
        "suspend": st.booleans(),
        "labels": st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), st.text("abc", min_size=1)),
        "resources_per_node": st.sampled_from([{"cpu": 1}, {"gpu": 2}, {"limits": {"memory": "1Gi"}}]),
    },
)


def parsed(fields: dict[str, Any]) -> TrainJobSpec:
    return TrainJobSpec.model_validate(fields)


@given(SPECS)
def test_hash_does_not_depend_on_serialization(fields: dict[str, Any]) -> None:
    spec = parsed(fields)
    first = spec_hash(render(spec, "k", 1, "ns"))
    assert re.fullmatch(r"[0-9a-f]{64}", first)
    for again in (
        parsed(json.loads(spec.model_dump_json(exclude_defaults=True))),
        parsed(spec.model_dump(by_alias=True)),  # with each default
        parsed(dict(reversed(fields.items()))),
    ):
        assert spec_hash(render(again, "another key", 2, "elsewhere")) == first


@given(SPECS, SPECS)
def test_hash_differs_between_specs(one: dict[str, Any], other: dict[str, Any]) -> None:
    hashes = [spec_hash(render(parsed(fields), "k", 1, "ns")) for fields in (one, other)]
    assert (hashes[0] == hashes[1]) == (parsed(one) == parsed(other))


RESOURCES = '{"requests": {"cpu": "1"}, "limits": {"cpu": "1"}}'


@pytest.mark.parametrize(
    ("wanted", "present", "lines"),
    [
        ({"num_nodes": 3}, {}, ["spec.trainer.numNodes: 2 -> 3"]),
        ({"args": ["--lr", "0.2"]}, {"args": ["--lr", "0.1"]}, ['spec.trainer.args[1]: "0.1" -> "0.2"']),
        ({"env": {"A": "1", "B": "2"}, "num_nodes": 1}, {"env": {"A": "1"}, "image": "i:1"}, [
            "spec.trainer.numNodes: 2 -> 1",
            'spec.trainer.env: [{"name": "A", "value": "1"}] -> '
            '[{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]',
            'spec.trainer.image: "i:1" -> (nothing)',
        ]),
        ({"resources_per_node": {"cpu": 1}}, {}, [f"spec.trainer.resourcesPerNode: (nothing) -> {RESOURCES}"]),
        ({}, {"resources_per_node": {"cpu": 1}}, [f"spec.trainer.resourcesPerNode: {RESOURCES} -> (nothing)"]),
        ({"args": ["日本"]}, {}, ['spec.trainer.args: (nothing) -> ["日本"]']),
        # At most 80 characters of a value are shown, quotes included.
        ({"image": "i" * 78}, {}, [f'spec.trainer.image: (nothing) -> "{"i" * 78}"']),
        ({"image": "i" * 79}, {}, [f'spec.trainer.image: (nothing) -> "{"i" * 76}…']),
    ],
)  # fmt: skip
def test_differences_are_listed_by_path(wanted: dict[str, Any], present: dict[str, Any], lines: list[str]) -> None:
    assert differences(rendered(**wanted), rendered(**present)) == lines


def test_additions_of_the_cluster_are_ignored() -> None:
    spec = TrainJobSpec.parse(TRAIN)
    wanted, present = (render(spec, "k", 1, "ns") for _ in range(2))
    present["spec"] |= {"suspend": True, "managedBy": "x", "runtimePatches": [{"manager": "kueue.x-k8s.io/manager"}]}
    present["spec"]["runtimeRef"]["more"] = 1
    assert differences(wanted, present) == []
    present["metadata"]["labels"]["x"] = "y"
    assert render(spec, "k", 1, "ns") == wanted, "a caller may change the returned object"


# ---------------------------------------------------------------- checkpoints


def checkpoint(at: str) -> str:
    (variable,) = rendered("a/work", checkpoints=at)["spec"]["trainer"]["env"]
    assert variable["name"] == "TRAINJOB_CHECKPOINT"
    return str(variable["value"])


@pytest.mark.parametrize(
    ("at", "handed"),
    [
        ("file:///mnt/disk", "/mnt/disk/ns/work-{hash}-{asked}"),
        ("file:///mnt/my%20disk/", "/mnt/my disk/ns/work-{hash}-{asked}"),
        ("s3://bucket/some/where/", "s3://bucket/some/where/ns/work-{hash}-{asked}"),
        ("pvc://claim", "/mnt/trainjob-checkpoints/ns/work-{hash}-{asked}"),
        ("pvc://claim/some/where", "/mnt/trainjob-checkpoints/some/where/ns/work-{hash}-{asked}"),
    ],
)
def test_checkpoint_directories_are_below_the_given_location(at: str, handed: str) -> None:
    assert checkpoint(at=at) == handed.format(hash=key_hash("a/work"), asked=digest(rendered()["spec"]))


def test_checkpoint_volume_is_added_to_the_patches_of_a_spec() -> None:
    """On each step that trains: Trainer's MPI runtimes also train in the launcher's pod."""
    own = {"manager": "example.com/team", "trainingRuntimeSpec": {"template": {"metadata": {"labels": {"a": "b"}}}}}
    spec: dict[str, Any] = {
        "runtime": "deepspeed-distributed",
        "checkpoints": "pvc://claim/x",
        "runtime_patches": [own],
    }
    first, second = rendered(**spec)["spec"]["runtimePatches"]
    assert first == own
    node, launcher = second["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert (node["name"], launcher["name"]) == ("node", "launcher")
    assert node["template"] == launcher["template"]
    pod = node["template"]["spec"]["template"]["spec"]
    (volume,), (container,) = pod["volumes"], pod["containers"]
    assert volume["persistentVolumeClaim"] == {"claimName": "claim"}
    (mount,) = container["volumeMounts"]
    assert mount["name"] == volume["name"]
    assert checkpoint(at="pvc://claim/x").startswith(f"{mount['mountPath']}/x/")
    assert "runtimePatches" not in rendered(checkpoints="s3://b")["spec"]


def test_the_owner_reference_is_optional_and_complete() -> None:
    assert "ownerReferences" not in rendered()["metadata"]
    with pytest.raises(InvalidSpec, match=r"owner_reference\.uid"):
        rendered(owner_reference={"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "run-x", "uid": ""})


@pytest.mark.parametrize(
    "at", ["", "/some/where", "file:some/where", "file://host/x", "pvc:///x", "pvc://Claim/x", "s3://", "s3://a b"]
)
def test_invalid_checkpoint_locations_are_rejected(at: str) -> None:
    with pytest.raises(InvalidSpec, match=r"checkpoints: .* is not a checkpoint location"):
        rendered(checkpoints=at)
