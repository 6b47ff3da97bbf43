"""What Trainer's images read: arguments of ``tune run``, rejections by its webhook, variables of its initializers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from hypothesis import example, given, strategies as st

from trainjob import InvalidSpec, TrainJobSpec
from trainjob._backends.local.ranks import expand
from trainjob._manifest.render import render
from trainjob._spec import LoraConfig, TorchTuneConfig

RUNTIME = "torchtune-llama3.2-1b"
TUNE: dict[str, Any] = {"runtime": RUNTIME, "torchtune": {}}
LORA = ["model.lora_attn_modules=[q_proj,v_proj,output_proj]"]


def trainer(**fields: Any) -> dict[str, Any]:
    rendered: dict[str, Any] = render(TrainJobSpec.parse({**TUNE, **fields}), "key", 1, "ns")["spec"]["trainer"]
    return rendered


def problems(source: Any = TUNE, **fields: Any) -> dict[str, str]:
    with pytest.raises(InvalidSpec) as caught:
        TrainJobSpec.parse({**source, **fields})
    return {problem.path: f"{problem.message} ({problem.instead})" for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("config", "args"),
    [
        ({}, []),
        ({"dtype": "bf16", "batch_size": 4, "epochs": 2, "loss": "torchtune.modules.loss.Loss"},
         ["dtype=bf16", "batch_size=4", "epochs=2", "loss=torchtune.modules.loss.Loss"]),
        ({"peft_config": {}}, LORA),
        ({"peftConfig": {"loraAttnModules": ["k_proj"]}}, ["model.lora_attn_modules=[k_proj]"]),
        ({"peft_config": {"apply_lora_to_mlp": True, "apply_lora_to_output": False, "lora_rank": 8, "lora_alpha": 16,
                          "lora_dropout": 0.1, "use_dora": True}},
         ["model.apply_lora_to_mlp=True", "model.apply_lora_to_output=False", "model.lora_rank=8",
          "model.lora_alpha=16", "model.lora_dropout=0.1", "model.use_dora=True", *LORA]),
        ({"dataset_preprocess_config": {}}, ["dataset=torchtune.datasets.instruct_dataset"]),
        ({"dataset_preprocess_config": {"source": "parquet", "split": "train[:10%]", "train_on_input": False,
                                        "new_system_prompt": "Answer briefly.",
                                        "column_map": {"input": "question", "output": "answer"}}},
         ["dataset=torchtune.datasets.instruct_dataset", "dataset.source=parquet", "dataset.split=train[:10%]",
          "dataset.train_on_input=False", "dataset.new_system_prompt=Answer briefly.",
          "dataset.column_map={'input': 'question', 'output': 'answer'}"]),
    ],
)  # fmt: skip
def test_configuration_becomes_arguments(config: dict[str, Any], args: list[str]) -> None:
    rendered = trainer(torchtune=config)
    assert rendered["command"] == ["tune", "run"]
    assert rendered.get("args", []) == args


@pytest.mark.parametrize(
    ("dataset", "arg"),
    [
        ("hf://tatsu-lab/alpaca", "dataset.data_dir=/workspace/dataset/."),
        ("hf://tatsu-lab/alpaca/data", "dataset.data_dir=/workspace/dataset/data"),
        ("hf://tatsu-lab/alpaca/data/train.parquet", "dataset.data_files=/workspace/dataset/data/train.parquet"),
        ("s3://bucket/alpaca/data", "dataset.data_dir=/workspace/dataset"),
    ],
)
def test_dataset_argument_depends_on_its_location(dataset: str, arg: str) -> None:
    assert trainer(initializer={"dataset": dataset})["args"] == [arg]


def test_the_authors_args_come_last() -> None:
    assert trainer(torchtune={"epochs": 2}, args=["optimizer.lr=2e-5"])["args"] == ["epochs=2", "optimizer.lr=2e-5"]


@given(st.text(alphabet=st.one_of(st.sampled_from("${}()':#\\\"%! \n"), st.characters(exclude_categories=["Cs"]))))
@example("$$")
@example("$(A)")
def test_a_prompt_arrives_unchanged(prompt: str) -> None:
    preprocess = {"new_system_prompt": prompt, "column_map": {"input": prompt}}
    args = [
        expand(arg, {"": "x", "A": "x"}) for arg in trainer(torchtune={"dataset_preprocess_config": preprocess})["args"]
    ]
    read = {name: yaml.safe_load(value) for name, _, value in (arg.partition("=") for arg in args)}

    def by_omegaconf(text: str) -> str:
        return re.sub(r"(\\+)\$\{", lambda found: "\\" * (len(found[1]) // 2) + "${", text)

    assert by_omegaconf(read.get("dataset.new_system_prompt", "")) == prompt
    assert by_omegaconf(read["dataset.column_map"]["input"]) == prompt


def test_serialized_spec_parses_to_the_same_spec() -> None:
    spec = TrainJobSpec.parse({**TUNE, "torchtune": {"epochs": 1, "peft_config": {"lora_rank": 8}}})
    assert spec.torchtune == TorchTuneConfig(epochs=1, peft_config=LoraConfig(lora_rank=8))
    assert TrainJobSpec.parse(yaml.safe_dump(spec.model_dump(mode="json", exclude_defaults=True))) == spec
    assert TrainJobSpec.parse(spec.model_dump(by_alias=True, exclude_none=True, exclude_defaults=True)) == spec


QLORA = {"peft_config": {"quantize_base": True}}


@pytest.mark.parametrize(
    ("fields", "path", "text"),
    [
        ({"runtime": "torch-distributed"}, "runtime", "torchtune-llama3.2-1b"),
        ({"runtime": "my-own-llama3.2-1b"}, "runtime", "does not name a model"),
        ({"num_nodes": 2}, "num_nodes", "torchtune trains llama3.2-1b on one node only"),
        ({"runtime": "torchtune-llama3.3-70b", "num_nodes": 2, "torchtune": {"peft_config": {}}},
         "torchtune.peft_config", "LoRA on 2 nodes"),
        ({"runtime": "torchtune-qwen2.5-1.5b", "torchtune": QLORA}, "torchtune.peft_config", "quantize_base"),
        ({"torchtune": QLORA, "resources_per_node": {"gpu": 2}}, "torchtune.peft_config", "on a single GPU only"),
        ({"torchtune": QLORA, "resources_per_node": {"cpu": 2}}, "torchtune.peft_config", "resources_per_node"),
        ({"args": ["epochs=1", "output_dir=/x"]}, "args[1]", "output_dir, which the runtime sets"),
        ({"command": ["tune", "run"]}, "torchtune", "cannot be combined with command"),
        ({"func": {"name": "f", "source": "def f(): pass"}}, "torchtune", "or func"),
        ({"torchtune": {"dtype": "fp16"}}, "torchtune.dtype", "'bf16' or 'fp32'"),
        ({"torchtune": {"epochs": 0}}, "torchtune.epochs", "greater than or equal to 1"),
        ({"torchtune": {"loss": "my loss"}}, "torchtune.loss", "match"),
        ({"torchtune": {"numNodes": 2}}, "torchtune.numNodes", "num_nodes is a field of the spec itself"),
        ({"torchtune": {"peft_config": {"loraRanc": 3}}}, "torchtune.peft_config.loraRanc", "mean lora_rank?"),
        ({"torchtune": {"peft_config": {"lora_attn_modules": []}}}, "torchtune.peft_config.lora_attn_modules",
         "1 item"),
        ({"torchtune": {"peft_config": {"lora_attn_modules": ["x"]}}}, "torchtune.peft_config.lora_attn_modules[0]",
         "q_proj"),
        ({"torchtune": {"dataset_preprocess_config": {"source": "avro"}}},
         "torchtune.dataset_preprocess_config.source", "parquet"),
    ],
)  # fmt: skip
def test_invalid_configurations_are_rejected(fields: dict[str, Any], path: str, text: str) -> None:
    found = problems(**fields)
    assert text in found[path], found


@pytest.mark.parametrize(
    "fields",
    [
        {"runtime": "torchtune-llama3.3-70b", "num_nodes": 2},
        {"runtime": "mine-llama3.2-3b"},
        {"torchtune": QLORA},  # the runtime may have one GPU
        {"torchtune": QLORA, "num_proc_per_node": 1},
        {"torchtune": QLORA, "resources_per_node": {"gpu": 1}},
        {"torchtune": {"peft_config": {"quantize_base": True, "use_dora": True}}, "resources_per_node": {"gpu": 2}},
        {"torchtune": {"peft_config": {"quantize_base": False}}, "resources_per_node": {"gpu": 2}},
    ],
)
def test_valid_configurations_are_accepted(fields: dict[str, Any]) -> None:
    TrainJobSpec.parse({**TUNE, **fields})


BY_HAND = {"runtime": "torchtune-llama3.2-1b", "command": ["tune", "run"], "args": ["tokenizer.path=/x", *LORA]}


def test_the_same_rules_hold_for_a_command_and_a_manifest() -> None:
    assert set(problems(BY_HAND, num_nodes=2)) == {"num_nodes", "args", "args[0]"}
    manifest = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "spec": {
            "runtimeRef": {"name": "torchtune-x"},
            "trainer": {"numNodes": 2, "command": ["tune", "run"], "args": BY_HAND["args"]},
        },
    }
    trainer = "manifest.spec.trainer"
    expected = {"manifest.spec.runtimeRef.name", f"{trainer}.numNodes", f"{trainer}.args", f"{trainer}.args[0]"}
    assert set(problems(manifest)) == expected


# ---------------------------------------------------------------- initializers

NO_WEIGHTS = {"IGNORE_PATTERNS": "*.msgpack,*.h5,*.bin,*.pt,*.pth"}
CACHE = {"storage_uri": "cache://schema/table", "metadata_loc": "s3://b/metadata.json", "num_data_nodes": 3}
BY_KEY = {"secretKeyRef": {"name": "s", "key": "k"}}


def initializer(kind: str, source: Any) -> dict[str, Any]:
    spec = TrainJobSpec.parse({"runtime": RUNTIME, "initializer": {kind: source}})
    assert TrainJobSpec.parse(yaml.safe_dump(spec.model_dump(mode="json", exclude_defaults=True))) == spec
    ((name, settings),) = render(spec, "key", 1, "ns")["spec"]["initializer"].items()
    assert name == kind
    return dict(settings)


@pytest.mark.parametrize(
    ("kind", "source", "env"),
    [
        ("dataset", "hf://org/set", {}),
        ("dataset", {"storage_uri": "hf://org/set", "ignore_patterns": ["*.md", "*.txt"]},
         {"IGNORE_PATTERNS": "*.md,*.txt"}),
        ("dataset", {"storage_uri": "hf://org/set", "ignore_patterns": []}, {}),
        ("dataset", {"storage_uri": "hf://org/set", "access_token": BY_KEY}, {"ACCESS_TOKEN": BY_KEY}),
        ("dataset", {"storageUri": "hf://org/set", "accessToken": {"valueFrom": BY_KEY}}, {"ACCESS_TOKEN": BY_KEY}),
        ("dataset",
         {"storage_uri": "s3://bucket/set", "endpoint": "https://s3.example", "access_key_id": "AKIAEXAMPLE",
          "secret_access_key": BY_KEY, "region": "eu-west-1", "role_arn": "arn:aws:iam::1:role/x"},
         {"ENDPOINT": "https://s3.example", "ACCESS_KEY_ID": "AKIAEXAMPLE", "SECRET_ACCESS_KEY": BY_KEY,
          "REGION": "eu-west-1", "ROLE_ARN": "arn:aws:iam::1:role/x"}),
        ("dataset",
         {**CACHE, "head_cpu": "1", "head_mem": "2Gi", "worker_cpu": "3", "worker_mem": "4Gi", "iam_role": "arn:x",
          "env": {"READINESS_PERIOD_SECONDS": "5"}},
         {"CLUSTER_SIZE": "4", "METADATA_LOC": "s3://b/metadata.json", "HEAD_CPU": "1", "HEAD_MEM": "2Gi",
          "WORKER_CPU": "3", "WORKER_MEM": "4Gi", "IAM_ROLE": "arn:x", "READINESS_PERIOD_SECONDS": "5"}),
        ("model", "hf://org/model", NO_WEIGHTS),
        ("model", {"storage_uri": "s3://bucket/model", "ignore_patterns": []}, {}),
        ("model", {"storage_uri": "s3://bucket/model", "env": {"IGNORE_PATTERNS": "*.md"}},
         {"IGNORE_PATTERNS": "*.md"}),
        ("model", "model-registry://llama/1", {}),
    ],
)  # fmt: skip
def test_settings_become_environment_variables(kind: str, source: Any, env: dict[str, Any]) -> None:
    expected = [{"name": n, "value": v} if isinstance(v, str) else {"name": n, "valueFrom": v} for n, v in env.items()]
    assert initializer(kind, source).get("env", []) == expected


def test_the_secret_reference_is_rendered() -> None:
    source = {"storage_uri": "s3://b/set", "secret_ref": "s3-keys"}
    assert initializer("dataset", source) == {"storageUri": "s3://b/set", "secretRef": {"name": "s3-keys"}}


@pytest.mark.parametrize(
    ("kind", "source", "path", "text"),
    [
        ("dataset", "hf://squad", "storage_uri", "hf://org/name"),
        ("dataset", {"storage_uri": "hf://o/s", "region": "eu"}, "region", "settings: ignore_patterns, access_token"),
        ("dataset", {"storage_uri": "gs://b/s", "region": "eu"}, "region", "set it in env"),
        ("dataset", {"storage_uri": "hf://o/s", "access_token": "abc"}, "access_token", "a Secret with ACCESS_TOKEN"),
        ("model", {"storage_uri": "s3://b/m", "secret_access_key": "abc"}, "secret_access_key", "'secretKeyRef'"),
        ("model", {"storage_uri": "s3://b/m", "endpoint": "https://me:pw@host"}, "endpoint", "secret"),
        ("dataset", {"storage_uri": "s3://b/s", "region": "a", "env": {"REGION": "b"}}, "env.REGION", "by region, too"),
        ("dataset", {**CACHE, "storage_uri": "cache://schema"}, "storage_uri", "cache://schema/table"),
        ("dataset", {**CACHE, "num_data_nodes": None}, "num_data_nodes", "is missing"),
        ("model", {**CACHE}, "storage_uri", "does not support models"),
    ],
)
def test_invalid_settings_of_initializers_are_rejected(kind: str, source: Any, path: str, text: str) -> None:
    ((found, message),) = problems({"runtime": RUNTIME}, initializer={kind: source}).items()
    assert found == f"initializer.{kind}.{path}"
    assert text in message


def test_the_cache_can_be_configured_by_variables() -> None:
    env = {"CLUSTER_SIZE": "4", "METADATA_LOC": "s3://b/m.json"}
    assert len(initializer("dataset", {"storage_uri": "cache://schema/table", "env": env})["env"]) == 2
