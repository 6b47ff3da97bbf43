from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainjob import InvalidSpec, TrainJobSpec
from trainjob._manifest.render import render
from trainjob._spec import Resources, RuntimeRef

TRAIN = {"runtime": "torch-distributed", "command": ["torchrun", "train.py"]}
MANIFEST: dict[str, Any] = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "TrainJob",
    "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": {"numNodes": 2}},
}
TOKEN = "hf_" + "a1B2" * 6  # a valid form, but not a real token


def problems(source: Any, **fields: Any) -> dict[str, str]:
    """Path -> message and hint of all problems of `source`."""
    with pytest.raises(InvalidSpec) as caught:
        TrainJobSpec.parse({**source, **fields} if isinstance(source, Mapping) else source)
    return {problem.path: f"{problem.message} ({problem.instead})" for problem in caught.value.problems}


def body(**fields: Any) -> dict[str, Any]:
    rendered: dict[str, Any] = render(TrainJobSpec.parse({**TRAIN, **fields}), "key", 1, "ns")["spec"]
    return rendered


# ---------------------------------------------------------------- every field in the API


def patch(*containers: Any, manager: str = "example.com/team", **pod: Any) -> Any:
    """A runtime patch of the pods of the step `node`."""
    if containers:
        pod["containers"] = list(containers)
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return {"manager": manager, "training_runtime_spec": {"template": {"spec": {"replicated_jobs": [job]}}}}


PATCH = patch(
    {"name": "node", "volume_mounts": [{"name": "data", "mountPath": "/data"}]},
    service_account_name="trainer",
    node_selector={"gpu": "h100"},
    tolerations=[{"key": "gpu", "operator": "Exists"}],
    image_pull_secrets=["registry"],
    termination_grace_period_seconds=60,
    volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": "d"}}],
    init_containers=[{"name": "warm-up", "env": {"A": "1"}}],
)
TEMPLATE = PATCH["training_runtime_spec"]["template"]
TEMPLATE["metadata"] = {"labels": {"kueue.x-k8s.io/priority-class": "high"}}
TEMPLATE["spec"]["replicated_jobs"][0]["template"]["metadata"] = {"annotations": {"a": "b"}}


@pytest.mark.parametrize(
    ("fields", "path", "expected"),
    [
        ({}, "runtimeRef",
         {"name": "torch-distributed", "apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime"}),
        ({"runtime": {"name": "mine", "kind": "TrainingRuntime"}}, "runtimeRef.kind", "TrainingRuntime"),
        ({"command": []}, "trainer", {}),  # sent although empty
        ({"env": {"A": "1", "B": "$(A)", "T": {"valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}}},
         "trainer.env", [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)"},
         {"name": "T", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]),
        ({"inputs": {"data": "s3://b/d"}, "outputs": {"model": "s3://b/m"}, "env": {"A": "$(TRAINJOB_INPUT_DATA)"}},
         "trainer.env", [{"name": "TRAINJOB_INPUT_DATA", "value": "s3://b/d"},
         {"name": "TRAINJOB_OUTPUT_MODEL", "value": "s3://b/m"}, {"name": "A", "value": "$(TRAINJOB_INPUT_DATA)"}]),
        ({"inputs": {"model": ""}}, "trainer.env", [{"name": "TRAINJOB_INPUT_MODEL"}]),
        ({"resources_per_node": {"cpu": 4, "gpu": 1}}, "trainer.resourcesPerNode",
         {"requests": {"cpu": "4", "nvidia.com/gpu": "1"}, "limits": {"cpu": "4", "nvidia.com/gpu": "1"}}),
        ({"resources_per_node": {"Memory": "1Gi", "storage": "9G", "MIG-1g.5gb": 1, "example.com/Custom-NPU": 2}},
         "trainer.resourcesPerNode.limits",
         {"memory": "1Gi", "ephemeral-storage": "9G", "nvidia.com/mig-1g.5gb": "1", "example.com/Custom-NPU": "2"}),
    ],
)  # fmt: skip
def test_forms_of_fields_are_rendered(fields: dict[str, Any], path: str, expected: object) -> None:
    value: Any = body(**fields)
    for name in path.split("."):
        value = value[name]
    assert value == expected


def test_unset_fields_and_empty_values_are_not_sent() -> None:
    assert set(body()) == {"runtimeRef", "trainer"}
    assert body(env={"A": "", "B": "b"}, outputs={"c": ""})["trainer"]["env"] == [
        {"name": "TRAINJOB_OUTPUT_C"},
        {"name": "A"},
        {"name": "B", "value": "b"},
    ]


def test_runtime_patches_are_rendered() -> None:
    (patch,) = body(runtime_patches=[PATCH])["runtimePatches"]
    assert patch["manager"] == "example.com/team"
    template = patch["trainingRuntimeSpec"]["template"]
    assert template["metadata"] == {"labels": {"kueue.x-k8s.io/priority-class": "high"}}
    (job,) = template["spec"]["replicatedJobs"]
    assert job["template"]["metadata"] == {"annotations": {"a": "b"}}
    assert job["template"]["spec"]["template"]["spec"] == {
        "serviceAccountName": "trainer",
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "imagePullSecrets": [{"name": "registry"}],
        "terminationGracePeriodSeconds": 60,
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "d"}}],
        "initContainers": [{"name": "warm-up", "env": [{"name": "A", "value": "1"}]}],
        "containers": [{"name": "node", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}],
    }


def camel(value: Any) -> Any:
    if isinstance(value, list):
        return [camel(item) for item in value]
    if not isinstance(value, dict):
        return value
    words = {name: name.split("_") for name in value}
    return {w[0] + "".join(part.title() for part in w[1:]): camel(value[name]) for name, w in words.items()}


def test_camel_case_is_the_same_spec() -> None:
    fields = {
        **TRAIN,
        "num_nodes": 2,
        "num_proc_per_node": 2,
        "active_deadline_seconds": 9,
        "managed_by": "kueue.x-k8s.io/multikueue",
        "initializer": {"dataset": {"storage_uri": "hf://a/b", "secret_ref": "x"}},
        "env": {"A": {"secret_key_ref": {"name": "s", "key": "k"}}},
        "runtime_patches": [PATCH],
    }
    assert "numNodes" in camel(fields)
    assert TrainJobSpec.parse(camel(fields)) == TrainJobSpec.parse(fields)


def test_every_form_of_env_is_the_same() -> None:
    reference = {"secretKeyRef": {"name": "s", "key": "k"}}
    forms: list[Any] = [
        {"A": "1", "T": reference},
        {"A": "1", "T": {"valueFrom": reference}},
        {"A": "1", "T": {"value_from": reference}},
        {"A": "1", "T": {"secret_key_ref": {"name": "s", "key": "k"}}},
        [{"name": "A", "value": "1"}, {"name": "T", "valueFrom": reference}],
    ]
    for form in forms:
        assert TrainJobSpec.parse({**TRAIN, "env": form}).env == {"A": "1", "T": reference}


def test_yaml_text_file_and_mapping_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(TRAIN))
    specs = [TrainJobSpec.parse(s) for s in (TRAIN, yaml.safe_dump(TRAIN), json.dumps(TRAIN), tmp_path / "spec.yaml")]
    assert all(spec == specs[0] for spec in specs)
    assert TrainJobSpec.parse(specs[0]) is specs[0]


def test_a_spec_is_immutable_and_built_by_its_names() -> None:
    spec = TrainJobSpec(runtime=RuntimeRef(name="r"), command=["x"], resources_per_node=Resources(limits={"cpu": "1"}))
    with pytest.raises(ValueError, match="frozen"):
        spec.num_nodes = 2


# ---------------------------------------------------------------- rejected specs


def manifest_with(**spec: Any) -> dict[str, Any]:
    return {**MANIFEST, "spec": {**MANIFEST["spec"], **spec}}


NAMED = {"A": 1, "PET_NNODES": "1", "HF_TOKEN": "x"}
POD = "runtime_patches[0].training_runtime_spec.template.spec.replicated_jobs[0].template.spec.template.spec"
BAD_PATCH = patch(
    {"name": "side", "imagee": "i", "volumeMounts": [{}]},
    nodeSelectors={},
    volumes=[{"name": "a", "persistentVolumeClam": {}}, {"emptyDir": {}}],
    tolerations=[{"operater": "Exists"}],
    affinity={"nodeAfinity": {}},
)


def patch_sent(container: Any) -> Any:
    """A runtime patch in the API's names."""
    job = {"name": "node", "template": {"spec": {"template": {"spec": {"containers": [container]}}}}}
    return {"manager": "a/b", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}


TRAINERS = ("node", "dataset-initializer", "model-initializer")
SENT_POD = "runtime_patches[0].trainingRuntimeSpec.template.spec.replicatedJobs[0].template.spec.template.spec"
REJECTED: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "limits": (
        {"runtime": "x", "num_proc_per_node": 0, "active_deadline_seconds": 0, "managed_by": "me", "image": "i" * 501,
         "command": ["x"] * 129, "initializer": {"dataset": "hf://" + "x" * 2048, "model": "org/set"}},
        {"num_proc_per_node": "greater than or equal to 1", "active_deadline_seconds": "greater than or equal to 1",
         "managed_by": "kueue.x-k8s.io/multikueue", "image": "500", "command": "128",
         "initializer.dataset.storage_uri": "2048", "initializer.model.storage_uri": "a URI such as hf://"},
    ),
    "variables": (
        {"runtime": "x", "args": ["a\0b"], "env": {
            "1A": "1", "A": "x\0y", "A B": "1", "TRAINJOB_INPUT_DATA": "s3://x/y", "DMLC_TASK_ID": "2",
            "OMPI_MCA_plm_rsh_args": "2", "JAX_PROCESS_ID": "2", "TRAINJOB_CHECKPOINT": "/x",
        }},
        {"args[0]": "NUL", "env.1A": "not a name", "env.A": "NUL", "env.A B": "not a name",
         "env.TRAINJOB_INPUT_DATA": "inputs and outputs",
         "env.DMLC_TASK_ID": "xgboost", "env.OMPI_MCA_plm_rsh_args": "MPI", "env.JAX_PROCESS_ID": "JAX",
         "env.TRAINJOB_CHECKPOINT": "is set from"},
    ),
    "too many variables": ({"runtime": "x", "env": {f"A{i}": "" for i in range(129)}}, {"env": "128"}),
    "names and locations": (
        {"runtime": "x", "inputs": {"Data": "s3://b/d", "data": "/some/where"}, "packages_to_install": ["numpy"],
         "pip_index_urls": ["https://x"], "annotations": {"trainjob.dev/delivered": "x"},
         "labels": {"a": "x" * 64, "trainjob.dev/key": "x", "app.kubernetes.io/managed-by": "me"}},
        {"inputs.Data": "not a valid name", "inputs.data": "not a URI", "packages_to_install": "needs func",
         "pip_index_urls": "needs func", "annotations.trainjob.dev/delivered": "reserved",
         "labels.a": "not a label value", "labels.trainjob.dev/key": "reserved",
         "labels.app.kubernetes.io/managed-by": "reserved"},
    ),
    "a manager twice": ({"runtime": "x", "runtime_patches": [PATCH, PATCH]}, {"runtime_patches[1]": "is given twice"}),
    "too many patches": (
        {"runtime": "x", "runtime_patches": [{**PATCH, "manager": f"example.com/{n}"} for n in range(17)]},
        {"runtime_patches": "has 17 entries; at most 16"},
    ),
    "no runtime": ({"runtime": None}, {"runtime": "is missing"}),
    "a bad runtime": (
        {"runtime": {"name": "X_", "kin": "x", "kind": "Runtime"}, "func": 3, "func_args": {"a": 1}},
        {"runtime.name": "", "runtime.kin": "did you mean kind?", "runtime.kind": "TrainingRuntime", "func": ""},
    ),
    "unknown fields, a bad value, a reserved name and a secret": (
        {"runtime": "x", "numNode": 2, "trainer_image": 3, "args": ["--token=abc"], "command": [0.1],
         "func_args": {"a": 1}, "env": {"A": {"bad": 1}, "B": 2}, "annotations": {"note": "password=hunter2"}},
        {"numNode": "did you mean num_nodes?", "trainer_image": "did you mean image?", "env.A.bad": "no such field",
         "env.B": "write '2'", "args[0]": "secret", "command[0]": "must be text, not float",
         "func_args": "needs func", "annotations.note": "secret"},
    ),
    "resources": (
        {"runtime": "x", "resources_per_node": {"cpu": "4x", "GPU": "many", "memory": "1Gi"}, "labels": {"a b": ""}},
        {"resources_per_node.cpu": "'4x'", "resources_per_node.GPU": "'many'", "labels.a b": "not a Kubernetes key"},
    ),
    "misspelled parts of resources": (
        {"runtime": "x", "resources_per_node": {"request": {"cpu": 1}, "limits": {"cpu": "a", "memory": "b"}}},
        {"resources_per_node.request": "did you mean requests?", "resources_per_node.limits.cpu": "'a'",
         "resources_per_node.limits.memory": "'b'"},
    ),
    "initializers": (
        {"runtime": "x", "initializer": {
            "datset": "hf://a/b", "dataset": {"storage": "x", "accessTokn": "y"},
            "model": {"storageUri": "hf://a/b", "numDataNodes": 1},
        }},
        {"initializer.datset": "did you mean dataset?",
         "initializer.dataset.storage": "did you mean storage_uri?",
         "initializer.dataset.accessTokn": "did you mean access_token?",
         "initializer.model.numDataNodes": "greater than or equal to 2"},
    ),
    "settings of initializers": (
        {"runtime": "x", "initializer": {
            "model": {"storageUri": "hf://a/b", "region": "eu", "env": {"ACCESS_TOKEN": "x"}},
        }},
        {"initializer.model.region": "hf://", "initializer.model.env.ACCESS_TOKEN": "secret"},
    ),
    "fields of patches": (
        {"runtime": "x", "runtime_patches": [BAD_PATCH]},
        {f"{POD}.nodeSelectors": "did you mean nodeSelector?",
         f"{POD}.volumes[0].persistentVolumeClam": "did you mean persistentVolumeClaim?",
         f"{POD}.volumes[1].name": "is missing",
         f"{POD}.tolerations[0].operater": "did you mean operator?",
         f"{POD}.affinity.nodeAfinity": "did you mean nodeAffinity?",
         f"{POD}.containers[0].imagee": "no such field",
         f"{POD}.containers[0].volumeMounts[0].name": "is missing",
         f"{POD}.containers[0].volumeMounts[0].mountPath": "is missing"},
    ),
    "values of patches": (
        {"runtime": "x", "runtime_patches": [
            patch({"name": "side", "env": {"HF_TOKEN": "x"}}, manager="me", tolerations=[{"value": "x"}]),
        ]},
        {"runtime_patches[0].manager": "domain-prefixed", f"{SENT_POD}.tolerations[0]": "without a key",
         f"{SENT_POD}.containers[0].env.HF_TOKEN": "secret"},
    ),
    "variables of Trainer's containers": (
        {"runtime": "x", "runtime_patches": [patch(*({"name": name, "env": {"A": "1"}} for name in TRAINERS))]},
        {f"{SENT_POD}.containers[{n}].env": "use env" for n in range(len(TRAINERS))},
    ),
    "a secret in a patch": (
        {"runtime": "x", "runtime_patches": [
            patch(volumes=[{"name": "v", "csi": {"driver": "d", "volumeAttributes": {"options": "password=hunter2"}}}]),
        ]},
        {f"{SENT_POD}.volumes[0].csi.volumeAttributes.options": "secret"},
    ),
    "env as a list": (
        {"runtime": "x", "env": [
            {"name": "A", "value": 1}, {"value": "x"}, "B=1",
            {"name": ["A"], "value": "1"}, {"name": "C", "value": "1", "valueFrom": {}}, {"name": "A", "valeu": "1"},
        ]},
        {"env.A": "write '1'", "env[1]": "needs a name", "env[2]": "needs a name",
         "env[3]": "needs a name", "env[4]": "valueFrom and value", "env[5].valeu": "no such field",
         "env[5]": "A is given twice"},
    ),
    "sources of env": (
        {"runtime": "x", "env": {"A": {"valueFrom": {"secretKeyRef": {"name": "S_", "keyy": "k"}}},
                                 "B": {"secretKeyReff": {"name": "s", "key": "k"}}, "E": None, "F": {},
                                 "G": {"secretKeyRef": {"name": "s", "key": "k"}, "fieldRef": {"fieldPath": "x"}},
                                 "C": {"secretKeyRef": {"name": "S_", "key": "k"}},
                                 "D": {"secretKeyRef": {"key": "k"}}}},
        {"env.A.secretKeyRef.keyy": "did you mean key?", "env.B.secretKeyReff": "did you mean secretKeyRef?",
         "env.C.secretKeyRef.name": "is not a valid name", "env.D.secretKeyRef.name": "is missing",
         "env.E": "must be text, not null", "env.F": "exactly one", "env.G": "exactly one"},
    ),
    "a name in both spellings": (
        {"runtime": "x", "numNodes": 0, "num_nodes": 2},
        {"numNodes": "greater than or equal to 1", "num_nodes": "remove num_nodes or numNodes"},
    ),
    "a misspelled runtime": (
        {"runtim": "x", "labels": {"a": 1, "b": True}, "ttlSecondsAfterFinished": 5},
        {"runtim": "did you mean runtime?", "labels.a": "'1'", "labels.b": "write 'true'",
         "ttlSecondsAfterFinished": "belongs to the training runtime"},
    ),
    "a manifest": (
        {**MANIFEST, "specs": {}, "statu": {}, "status": {},
         "metadata": {"labels": {1: "x", "a": 1, "trainjob.dev/attempt": "1"}},
         "spec": {"runtimeRef": "x", "trainer": {
             "command": "x", "args": ["--lr", 0.1, TOKEN],
             "env": [3, *({"name": name, "value": value} for name, value in NAMED.items())],
         }}},
        {"manifest.specs": "did you mean spec?", "manifest.statu": "no such field",
         "manifest.metadata.labels.a": "must be text", "manifest.metadata.labels.trainjob.dev/attempt": "reserved",
         "manifest.spec.runtimeRef": "must be a mapping", "manifest.spec.trainer.command": "must be a list",
         "manifest.spec.trainer.args[1]": "must be text, not float", "manifest.spec.trainer.args[2]": "secret",
         "manifest.spec.trainer.env[0]": "must be a mapping", "manifest.spec.trainer.env.HF_TOKEN": "secret",
         "manifest.spec.trainer.env.A.value": "must be text, not int", "manifest.spec.trainer.env.PET_NNODES": "torch"},
    ),
    "a manifest beside fields": (
        {"manifest": {**MANIFEST, "spec": {"initializer": {"x": 3}, "trainer": {"command": ["tune", "run"]}}},
         "args": [], "command": ["x"]},
        {"args": "cannot be combined", "command": "cannot be combined with a whole manifest",
         "manifest.spec.initializer.x": "no such field", "manifest.spec.runtimeRef": "is missing"},
    ),
    "secrets in a manifest": (
        manifest_with(
            initializer={"dataset": {"storageUri": "https://a:b@c/d"},
                         "model": {"env": [{"name": "ACCESS_TOKEN", "value": "x"}]}},
            runtimePatches=[patch_sent({"name": "launcher", "env": [{"name": "A", "value": TOKEN},
                                                                {"name": "HF_TOKEN", "value": "x"}]})],
            podTemplateOverrides=[{"targetJobs": [{"name": "node"}], "spec": {"volumes": [
                {"name": "v", "flexVolume": {"driver": "d", "options": {"password": "hunter2"}}}]}}],
        ),
        {"manifest.spec.initializer.dataset.storageUri": "credential",
         "manifest.spec.initializer.model.env.ACCESS_TOKEN": "secret",
         **{f"manifest.{SENT_POD.replace('runtime_patches', 'spec.runtimePatches')}.containers[0].env.{name}": "secret"
            for name in ("A", "HF_TOKEN")},
         "manifest.spec.podTemplateOverrides[0].spec.volumes[0].flexVolume.options.password": "secret"},
    ),
    "parts of a manifest that are no mappings": (
        {**MANIFEST, "spec": "x", "metadata": []},
        {"manifest.spec": "must be a mapping, not text", "manifest.metadata": "must be a mapping, not a list"},
    ),
    "variables of a manifest as a mapping": (
        manifest_with(trainer={"env": {"A": "1"}}), {"manifest.spec.trainer.env": "must be a list, not a mapping"},
    ),
    "another kind": ({**MANIFEST, "kind": "Job"}, {"manifest": "is a trainer.kubeflow.org/v1alpha1 Job"}),
    "another group": (
        {**MANIFEST, "apiVersion": "v1"}, {"manifest": "apiVersion: trainer.kubeflow.org/v1alpha1"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REJECTED)
def test_all_problems_are_reported_together(case: str) -> None:
    fields, expected = REJECTED[case]
    found = problems(fields)
    assert set(found) == set(expected)
    assert {path: text for path, text in found.items() if expected[path] not in text} == {}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("just text", "the spec is a single value; write a mapping of fields"),
        ("runtime: x\n---\nruntime: y", "has more than one YAML document, line 2, column 1 (write one job in a file)"),
        ("- a", "the spec is a list; write a mapping of fields"),
        ("", "the spec is empty; write a mapping of fields"),
        (Path("/nonexistent/spec.yaml"), "cannot be read"),
        ({1: 2}, "'1': 'no such field"),
    ],
)
def test_invalid_sources_are_rejected(source: Any, text: str) -> None:
    assert text in str(problems(source))


# ---------------------------------------------------------------- secrets


def test_literal_secrets_are_rejected_in_each_field() -> None:
    """`test_masking` has the forms of secrets."""
    env = {"AWS_SECRET_ACCESS_KEY": "x", "HARMLESS": TOKEN, "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE"}
    found = problems(
        {"runtime": "x"},
        env=env,
        command=["curl", "-u", "me:hunter2", "https://host"],
        args=["train", "--api-key", "abc", "mysql --password hunter2", "python3", "-c", "login(token='hunter2')"],
        initializer={"dataset": "https://me:pw@host/x"},
        inputs={"data": "https://a.blob.core.windows.net/c?sig=a1B2a1B2a1B2a1B2%3D"},
        outputs={"model": f"https://host/x?t={TOKEN}"},
        checkpoints="https://host/x?X-Goog-Signature=a1B2a1B2a1B2a1B2a1B2",
        annotations={"example.com/note": "password=hunter2", "example.com/db-password": "hunter2"},
        labels={"token": "hunter2"},
    )
    assert {path for path, text in found.items() if "secret" in text.lower() or "credential" in text} == {
        *(f"env.{name}" for name in env), "command[2]", "args[2]", "args[3]", "args[6]",
        "initializer.dataset.storage_uri", "inputs.data", "outputs.model", "checkpoints", "labels.token",
        "annotations.example.com/note", "annotations.example.com/db-password",
    }  # fmt: skip


def test_text_that_resembles_a_secret_is_accepted() -> None:
    env = {"TOKENIZERS_PARALLELISM": "false", "MAX_TOKENS": "4096", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
    env |= {"HF_TOKEN_PATH": "/secrets/token", "KEYTAB_FILE": "/x", "TOKEN_URL": "https://x", "API_TOKEN": ""}
    env |= {"HF_TOKEN": "$(FROM_ELSEWHERE)", "AWS_ACCESS_KEY_ID": "$(AWS_ACCESS_KEY_ID)"}
    agent = {"vault.hashicorp.com/agent-inject-secret-db-password": "database/creds/x"}
    words = ["--token=$(HF_TOKEN)", "--token", "$(HF_TOKEN)", "--pad-token=<pad>", "--mask_token", "[MASK]"]
    read = "import os; login(token=os.environ['HF_TOKEN'], user='me')"
    TrainJobSpec.parse(
        {
            "runtime": "x",
            "env": env,
            "command": ["python3", "-c", read, "docker", "run", "-u", "1000:1000"],
            "args": [*words, "--use-token=true", "--token", "--verbose"],
            "inputs": {"data": "s3://bucket/token/password", "other": "https://host:8443/a@b:c"},
            "pod": {"metadata": {"annotations": agent}},
            "annotations": {
                "note": "password: see the vault",
                "commit": "3f786850e387550fdab836ed7e6dc881de23001b",
            },
        }
    )
    TrainJobSpec.parse({"runtime": "x", "env": {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE"}})


def test_the_error_suggests_a_secret_key_ref() -> None:
    hint = problems(TRAIN, env={"HF_TOKEN": "x"})["env.HF_TOKEN"]
    assert "HF_TOKEN: {'valueFrom': {'secretKeyRef'" in hint
    assert TOKEN not in str(problems(TRAIN, env={"A": TOKEN}))
    assert "hunter2" not in str(problems(TRAIN, inputs={"data": "no uri password=hunter2"}))
    assert "hunter2" not in str(problems(TRAIN, outputs={"data": "https://a?sig=hunter2"}))
    found = problems(TRAIN, command=["sh", "-c", "PASSWORD=hunter2 run"], annotations={"password": "hunter2"})
    assert "secretKeyRef and write $(NAME)" in found["command[2]"]
    assert "hunter2" not in str(found)
