"""An attempt that is asked to do something else than an earlier one of its key does not use its checkpoints."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tests.objects import condition

from trainjob import InvalidSpec, TrainJobSpec
from trainjob._manifest.checkpoint_directories import NOT_ASKED, asked, digest, directory, location, notice
from trainjob._manifest.render import differences, render
from trainjob._manifest.retry_changes import Changes
from trainjob.job import ATTEMPT, key_hash

KEY = "airflow/airflow/d/r/0/train"
COMMAND: dict[str, Any] = {
    "runtime": "torch-distributed",
    "image": "registry.example/train:1",
    "command": ["python", "train.py"],
    "args": ["--epochs", "10"],
    "env": {"ITEM": "north"},
    "inputs": {"dataset": "s3://b/north"},
    "outputs": {"model": "s3://b/model"},
    "num_nodes": 2,
    "resources_per_node": {"memory": "16Gi"},
    "checkpoints": "s3://b/checkpoints",
}
FUNCTION: dict[str, Any] = {
    "runtime": "torch-distributed",
    "func": {"name": "train", "source": "def train(**item): pass"},
    "func_args": {"region": "north"},
    "packages_to_install": ["numpy"],
    "checkpoints": "s3://b/checkpoints",
}
INITIALIZER = {"dataset": "hf://team/north", "model": "hf://meta-llama/Llama-3.2-1B"}
TORCHTUNE: dict[str, Any] = {
    "runtime": "torchtune-llama3.2-1b",
    "torchtune": {"epochs": 1},
    "initializer": INITIALIZER,
    "checkpoints": "s3://b/checkpoints",
}
ARGO = {"manager": "example.com/team", "trainingRuntimeSpec": {"template": {"metadata": {"labels": {"a": "b"}}}}}

# Each field of a spec: a spec with it, and other values. A new field has to be put into one of the two tables.
ASKED: dict[str, tuple[Mapping[str, Any], list[Any]]] = {
    "command": (COMMAND, [["python", "other.py"], ["python", "train.py", "--more"]]),
    "args": (COMMAND, [["--epochs", "20"], ["--epochs"], []]),
    "func_args": (FUNCTION, [{"region": "south"}, {"region": "north", "epochs": 1}, {}]),
    "torchtune": (TORCHTUNE, [{"epochs": 2}, {"epochs": 1, "dtype": "bf16"}]),
    "env": (COMMAND, [{"ITEM": "south"}, {"ITEM": ""}, {}, {"ITEM": "north", "SEED": "1"}]),
    "inputs": (COMMAND, [{"dataset": "s3://b/south"}, {"data": "s3://b/north"}, {}, {"dataset": "pvc://b/north"}]),
    "initializer": (TORCHTUNE, [INITIALIZER | {"dataset": "hf://team/south"}, INITIALIZER | {"model": "hf://team/m"}]),
}
KEPT: dict[str, tuple[Mapping[str, Any], list[Any]]] = {
    "runtime": (COMMAND, ["torch-resilient"]),  # but see `test_the_runtime_counts_if_it_names_the_program`
    "image": (COMMAND, ["registry.example/train:2", None]),
    "func": (FUNCTION, [{"name": "train", "source": "def train(**item): print(item)"}]),
    "packages_to_install": (FUNCTION, [["numpy==2.4.0"], []]),
    "pip_index_urls": (FUNCTION, [["https://pypi.example/simple"]]),
    "outputs": (COMMAND, [{"model": "s3://b/model/try-2"}, {}]),
    "num_nodes": (COMMAND, [1]),
    "num_proc_per_node": (COMMAND, [8]),
    "resources_per_node": (COMMAND, [{"memory": "32Gi"}, None]),
    "runtime_patches": (COMMAND, [[ARGO]]),
    "pod": (COMMAND, [{"nodeSelector": {"a": "b"}}]),
    "suspend": (COMMAND, [True]),
    "active_deadline_seconds": (COMMAND, [60]),
    "stall_timeout": (COMMAND, ["15m"]),
    "managed_by": (COMMAND, ["kueue.x-k8s.io/multikueue"]),
    "unattended": (COMMAND, ["suspend"]),
    "unattended_after": (COMMAND, ["PT2H"]),
    "on_retry": (COMMAND, [{"out_of_memory": {"max_memory": "64Gi"}}]),
    "labels": (COMMAND, [{"kueue.x-k8s.io/queue-name": "backfill"}]),
    "annotations": (COMMAND, [{"note": "x"}]),
    "owner_reference": (COMMAND, [{"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "x", "uid": "u"}]),
}


def made(fields: Mapping[str, Any], attempt: int = 1, key: str = KEY, **more: Any) -> dict[str, Any]:
    return render(TrainJobSpec.parse(dict(fields)), key, attempt, "ns", **more)


def stored(fields: Mapping[str, Any], attempt: int = 1, phase: str = "", **more: Any) -> dict[str, Any]:
    """An attempt that exists, complete or failed."""
    trainjob = made(fields, attempt, **more)
    trainjob["metadata"] |= {"uid": f"u{attempt}", "creationTimestamp": f"2026-01-01T00:{attempt:02}:00Z"}
    if phase:
        trainjob["status"] = {"conditions": [condition(phase)]}
    return trainjob


def changed(fields: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {name: value for name, value in {**fields, **more}.items() if value is not None}


CASES = [
    pytest.param(field, fields, value, field in ASKED, id=f"{field}-{number}")
    for table in (ASKED, KEPT)
    for field, (fields, values) in table.items()
    for number, value in enumerate(values)
]


def test_every_field_of_a_spec_is_classified() -> None:
    assert not ASKED.keys() & KEPT.keys()
    # The location itself is neither, and a whole manifest has no checkpoints.
    assert ASKED.keys() | KEPT.keys() | {"checkpoints", "manifest"} == TrainJobSpec.model_fields.keys()


@pytest.mark.parametrize(("field", "fields", "value", "is_asked"), CASES)
def test_the_directory_follows_from_what_is_asked(
    field: str, fields: Mapping[str, Any], value: Any, is_asked: bool
) -> None:
    first, second = made(fields, 1), made(changed(fields, **{field: value}), 2)
    assert (directory(first) != directory(second)) == is_asked
    text = notice(first, second)
    assert (text != "") == is_asked
    if is_asked:
        assert f"({field}" in text or field == "torchtune"
        assert directory(first) in text
        assert directory(second) in text


def test_a_retry_of_the_same_spec_uses_the_same_directory() -> None:
    fields = {**COMMAND, "env": {"A": "1", "B": "2"}, "inputs": {"a": "s3://a", "b": "s3://b"}}
    fields |= {"on_retry": {"out_of_memory": {"max_memory": "64Gi"}}}
    other_order = {**fields, "env": {"B": "2", "A": "1"}, "inputs": {"b": "s3://b", "a": "s3://a"}}
    changes = Changes(memory="24Gi", num_nodes=1, queue="backfill", priority_class="high", excluded_nodes=("gpu-7",))
    retries = [*(made(fields, attempt) for attempt in (1, 2, 999, 1000)), made(fields, 2, changes=changes)]
    (found,) = {directory(each) for each in (*retries, made(other_order))}
    assert re.fullmatch(rf"s3://b/checkpoints/ns/train-{key_hash(KEY)}-[0-9a-z]{{8}}", found)
    assert directory(made(fields, key="airflow/airflow/d/r/1/train")) != found, "another work of the same name"


@pytest.mark.parametrize(
    ("fields", "digest_of_it"), [(COMMAND, "571854h1"), (FUNCTION, "a7z4q67m"), (TORCHTUNE, "l82dyi00")]
)
def test_directories_do_not_change_between_versions(fields: dict[str, Any], digest_of_it: str) -> None:
    """After an upgrade, the next attempt must find the checkpoints."""
    assert directory(made(fields)) == f"s3://b/checkpoints/ns/train-{key_hash(KEY)}-{digest_of_it}"


def test_the_runtime_counts_if_it_names_the_program() -> None:
    for fields in (TORCHTUNE, {"runtime": "a", "args": ["--x"], "checkpoints": "s3://b"}):
        first, second = made(fields), made({**fields, "runtime": "torchtune-qwen2.5-1.5b"})
        assert directory(first) != directory(second)
        assert f'(runtime: "{fields["runtime"]}" -> "torchtune-qwen2.5-1.5b")' in notice(first, second)
    tune = {"runtime": "torchtune-llama3.2-1b", "command": ["tune", "run"], "checkpoints": "s3://b"}
    assert directory(made(tune)) != directory(made({**tune, "runtime": "torchtune-qwen2.5-1.5b"}))


def test_arguments_of_functions_are_recognized() -> None:
    arguments = {"func_args": {"pattern": "$(HOME) $$ \\ ü"}}
    assert asked(made({**FUNCTION, **arguments})["spec"]) == arguments
    for args in (["1", "{"], ["1", "[]"], ["1", '{"name": 1}'], ["1", "1"], ["x"]):
        assert asked(made({**COMMAND, "command": ["python", "-c", "print()"], "args": args})["spec"])["args"] == args


# ---------------------------------------------------------------- environment


KNOWN = (
    "NCCL_DEBUG CUDA_VISIBLE_DEVICES PYTORCH_CUDA_ALLOC_CONF OMP_NUM_THREADS HF_HOME HTTPS_PROXY no_proxy LOG_LEVEL"
    " LOGLEVEL TF_CPP_MIN_LOG_LEVEL TORCH_DISTRIBUTED_DEBUG PYTHONUNBUFFERED MKL_NUM_THREADS TRANSFORMERS_VERBOSITY"
    " log_level"
)


@pytest.mark.parametrize(
    "name", [*KNOWN.split(), *(each.replace("*", "ABC") for each in NOT_ASKED if not each.startswith("TRAINJOB_"))]
)
def test_variables_of_libraries_keep_the_directory(name: str) -> None:
    for env in ({name: "1"}, {name: "2"}, {name: ""}, {name.lower(): "1"}):
        assert directory(made({**COMMAND, "env": {"ITEM": "north", **env}})) == directory(made(COMMAND))


@pytest.mark.parametrize("name", ["SEED", "NCCL", "MY_NCCL_DEBUGS", "LOG_LEVELS", "PROXY", "DEBUG", "XTORCH_X"])
def test_all_other_variables_change_the_directory(name: str) -> None:
    first, second = made(COMMAND), made({**COMMAND, "env": {"ITEM": "north", name: ""}})
    assert directory(first) != directory(second)
    assert f'env.{name}: (nothing) -> ""' in notice(first, second)


def test_only_values_from_secrets_are_left_out() -> None:
    def env(**source: Any) -> dict[str, Any]:
        return {**COMMAND, "env": {"ITEM": "north", "X": {"valueFrom": source}}}

    secret = [env(secretKeyRef={"name": name, "key": "k"}) for name in ("a", "b")]
    assert directory(made(secret[0])) == directory(made(secret[1])) == directory(made(COMMAND))
    texts = [env(configMapKeyRef={"name": name, "key": "k"}) for name in ("a", "b")]
    assert directory(made(texts[0])) != directory(made(texts[1]))


@pytest.mark.parametrize("fields", [COMMAND, FUNCTION, TORCHTUNE], ids=["command", "function", "torchtune"])
def test_what_a_server_adds_is_no_difference(fields: dict[str, Any]) -> None:
    """A server leaves out empty parts, and a webhook may add variables of a proxy."""
    spec = made(fields)["spec"]
    present = copy.deepcopy(spec)
    trainer = present["trainer"]
    trainer["env"] = [*trainer["env"], {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}]
    present |= {"suspend": False, "managedBy": "trainer.kubeflow.org/trainjob-controller", "runtimePatches": []}
    assert asked(present) == asked(spec)
    assert digest(present) == digest(spec)


# ---------------------------------------------------------------- after a complete attempt


def test_a_training_that_completed_trains_again_and_its_retries_continue_that() -> None:
    complete = stored(COMMAND, 1, "Complete")
    again = made(COMMAND, 2, earlier=[complete])
    assert directory(again) == f"{directory(complete)}-1"
    text = notice(complete, again)
    assert f"trains again, since {complete['metadata']['name']} is complete: it does not continue" in text
    assert f"its own are in {directory(again)}. To continue on purpose, set TRAINJOB_CHECKPOINT" in text
    assert text.endswith(f" to {directory(complete)}")
    failed = stored(COMMAND, 2, "Failed", earlier=[complete])
    for earlier in ([complete, failed], [complete], [failed], [failed, complete]):  # some were deleted
        assert directory(made(COMMAND, 3, earlier=earlier)) == directory(again)
    second = stored(COMMAND, 3, "Complete", earlier=[complete, failed])
    for earlier in ([complete, failed, second], [second]):
        assert directory(made(COMMAND, 4, earlier=earlier)) == f"{directory(complete)}-3"


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from([COMMAND, FUNCTION]), st.sampled_from(["Failed", "Complete"])), max_size=6))
def test_no_attempt_continues_from_a_complete_one(attempts: list[tuple[Mapping[str, Any], str]]) -> None:
    earlier: list[dict[str, Any]] = []
    for number, (fields, phase) in enumerate(attempts, start=1):
        trainjob = stored(fields, number, phase, earlier=earlier)
        same = [each for each in earlier if asked(each["spec"]) == asked(trainjob["spec"])]
        done = [each for each in same if each["status"]["conditions"][0]["type"] == "Complete"]
        assert directory(trainjob) not in {directory(each) for each in done}
        if same and same[-1] not in done:
            assert directory(trainjob) == directory(same[-1]), "a retry continues"
        earlier.append(trainjob)


# ---------------------------------------------------------------- a directory that the author has chosen


MOUNT = "/mnt/trainjob-checkpoints"


@pytest.mark.parametrize(
    ("checkpoints", "chosen", "handed"),
    [
        ("s3://b/checkpoints", "s3://b/checkpoints/ns/train-x-1", "s3://b/checkpoints/ns/train-x-1"),
        ("s3://b/checkpoints", "/scratch/x", "/scratch/x"),
        ("file:///data", "file:///data/my%20work", "/data/my work"),
        ("pvc://claim/a", "pvc://claim/a/ns/train-x", f"{MOUNT}/a/ns/train-x"),
        ("pvc://claim/a", "pvc://claim", f"{MOUNT}/"),
        ("pvc://claim/a", f"{MOUNT}/a/ns/train-x", f"{MOUNT}/a/ns/train-x"),
    ],
)
def test_an_author_may_choose_the_directory(checkpoints: str, chosen: str, handed: str) -> None:
    fields = {**COMMAND, "checkpoints": checkpoints, "env": {"ITEM": "north", "TRAINJOB_CHECKPOINT": chosen}}
    trainjob = made(fields)
    variables = [each for each in trainjob["spec"]["trainer"]["env"] if each["name"] == "TRAINJOB_CHECKPOINT"]
    assert variables == [{"name": "TRAINJOB_CHECKPOINT", "value": handed}]
    assert ("runtimePatches" in trainjob["spec"]) == checkpoints.startswith("pvc://"), "the volume is mounted"
    assert asked(trainjob["spec"]) == asked(made(COMMAND)["spec"]), "the choice itself is not what is asked"
    assert directory(made(fields, 2, earlier=[stored(fields, 1, "Complete")])) == handed, "it is used as it is"


CHOICE, IS_NONE = "env.TRAINJOB_CHECKPOINT: ", "is not a checkpoint directory (write "
UNMOUNTED = "which is not mounted"
SECRET = {"secretKeyRef": {"name": "a", "key": "b"}}


@pytest.mark.parametrize(
    ("checkpoints", "chosen", "problem"),
    [
        (None, "s3://b/x", f"{CHOICE}is set from checkpoints (set checkpoints to the location of the directory, too)"),
        ("s3://b", "", f"{CHOICE}'' {IS_NONE}pvc://claim/path, s3://…, file:///… or an absolute path)"),
        ("s3://b", "relative/path", f"{CHOICE}'relative/path' {IS_NONE}"),
        ("s3://b", "pvc://c/x", f"{CHOICE}is on the PVC volume c, {UNMOUNTED} (set checkpoints to pvc://c)"),
        ("pvc://a/x", "pvc://b/x", f"{CHOICE}is on the PVC volume b, {UNMOUNTED} (set checkpoints to pvc://b)"),
        ("s3://b", f"{MOUNT}/x", f"{CHOICE}is on a PVC volume, and none is mounted (set checkpoints to pvc://claim/p"),
        ("s3://b", SECRET, f"{CHOICE}is a reference (write the path or URI of the directory)"),
        ("s3://b", "s3://me:word@host/x", f"{CHOICE}contains a credential"),
        (3, "s3://b/x", "checkpoints: "),  # the choice is no second problem
        ("nowhere", "s3://b/x", "checkpoints: "),
    ],
)
def test_a_choice_that_cannot_work_is_refused(checkpoints: Any, chosen: Any, problem: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        TrainJobSpec.parse(changed(COMMAND, checkpoints=checkpoints, env={"TRAINJOB_CHECKPOINT": chosen}))
    assert f"  - {problem}" in str(caught.value)
    assert len({each.path for each in caught.value.problems}) == 1


def test_a_whole_manifest_has_no_checkpoint_directory() -> None:
    def manifest(**trainer: object) -> dict[str, Any]:
        spec = {"runtimeRef": {"name": "r"}, "trainer": trainer}
        return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "spec": spec}

    with pytest.raises(InvalidSpec, match="TRAINJOB_CHECKPOINT: is set from inputs and outputs or checkpoints"):
        TrainJobSpec.parse(manifest(env=[{"name": "TRAINJOB_CHECKPOINT", "value": "/x"}]))
    assert directory(made(manifest(command=["a"]))) == ""


# ---------------------------------------------------------------- the line


def test_the_notice_names_both_directories_and_how_to_continue() -> None:
    first = made(COMMAND, 1)
    second = made({**COMMAND, "args": ["--epochs", "20"], "env": {"ITEM": "south", "SEED": "1"}}, 2)
    old, new = directory(first), directory(second)
    one, two = (each["metadata"]["name"] for each in (first, second))
    assert notice(first, second) == (
        f'TrainJob ns/{two} is asked to do something else than {one} (args[1]: "10" -> "20", env.ITEM: "north" -> '
        f'"south", env.SEED: (nothing) -> "1"), so it does not continue from the checkpoints of {one}: its own are in '
        f"{new}. To continue on purpose, set TRAINJOB_CHECKPOINT in env of the spec to {old}"
    )
    on_purpose = {**COMMAND, "args": ["--epochs", "20"], "env": {"ITEM": "north", "TRAINJOB_CHECKPOINT": old}}
    assert notice(first, made(on_purpose, 2)) == ""


def test_directories_on_a_volume_are_named_as_their_author_writes_them() -> None:
    fields = {**COMMAND, "checkpoints": "pvc://claim/my%20work"}
    first, second = made(fields, 1), made({**fields, "args": []}, 2)
    work = directory(first).removeprefix("/mnt/trainjob-checkpoints/my work/")
    assert location(first) == f"pvc://claim/my%20work/{work}"
    assert location(first) in notice(first, second)
    assert "/mnt/" not in notice(first, second)
    on_purpose = {**fields, "args": [], "env": {"ITEM": "north", "TRAINJOB_CHECKPOINT": location(first)}}
    assert directory(made(on_purpose)) == directory(first)
    del first["spec"]["runtimePatches"]
    assert location(first) == directory(first)


def test_no_notice_without_two_directories() -> None:
    record = {"metadata": {"name": "x", "namespace": "ns", "labels": {ATTEMPT: "1"}}, "spec": {"trainer": {}}}
    for none in (made(changed(COMMAND, checkpoints=None)), record):
        assert notice(none, made(COMMAND)) == notice(made(COMMAND), none) == ""


def test_long_differences_are_cut_and_another_location_is_none() -> None:
    first, moved = made(COMMAND, 1), made({**COMMAND, "checkpoints": "s3://b/elsewhere"}, 2)
    two, one = moved["metadata"]["name"], first["metadata"]["name"]
    begin = f"TrainJob ns/{two} does not continue from the checkpoints of {one}: its own are in s3://b/elsewhere/ns/"
    assert notice(first, moved).startswith(begin)
    many = ({**COMMAND, "args": [word] * 20} for word in ("a", "x" * 300))
    text = notice(*(made(fields, attempt) for attempt, fields in enumerate(many, 1)))
    assert "args[4]: " in text
    assert "args[5]: " not in text
    assert ", 15 more)" in text
    assert len(text) < 1500


def test_secrets_are_not_shown() -> None:
    """A spec refuses them. An object of another version, or one that a person changed, may have some."""
    first, second = made(COMMAND, 1), made(COMMAND, 2)
    for trainjob, secret in ((first, "8d1c0f6a2b"), (second, "c93fd22e17")):
        trainer = trainjob["spec"]["trainer"]
        trainer["args"] = ["--token", secret, f"--password={secret}", "--lr"]
        trainer["env"] += [{"name": "DB_PASSWORD", "value": secret}, {"name": "URL", "value": f"https://me:{secret}@h"}]
        (own,) = (each for each in trainer["env"] if each["name"] == "TRAINJOB_CHECKPOINT")
        own["value"] += secret[:1]
    text = notice(first, second)
    assert "args[1]: *** -> ***" in text
    assert "env.DB_PASSWORD: *** -> ***" in text
    assert "8d1c0f6a2b" not in text
    assert "c93fd22e17" not in text


def test_another_spec_is_not_explained_by_its_directory() -> None:
    """`SpecMismatch` names what the author changed, not the directory that follows from it."""
    first = made(COMMAND)
    assert differences(made({**COMMAND, "args": ["--epochs", "20"]}), first) == ['spec.trainer.args[1]: "10" -> "20"']
    (line,) = differences(made({**COMMAND, "checkpoints": "s3://b/elsewhere"}), first)
    assert re.match(r'spec\.trainer\.env\[\d\]\.value: "s3://b/checkpoints/', line)


# ---------------------------------------------------------------- docs


def test_the_docs_list_the_variables_that_do_not_count() -> None:
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "checkpoints.md").read_text()
    patterns = [pattern for pattern in NOT_ASKED if not pattern.startswith("TRAINJOB_")]
    assert [pattern for pattern in patterns if f"`{pattern}`" not in text] == []
