"""Settings of Trainer's initializers become environment variables of their images."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from trainjob import InvalidSpec, TrainJobSpec
from trainjob._manifest.render import render

RUNTIME = "torchtune-llama3.2-1b"
NO_WEIGHTS = {"IGNORE_PATTERNS": "*.msgpack,*.h5,*.bin,*.pt,*.pth"}
CACHE = {"storage_uri": "cache://schema/table", "metadata_loc": "s3://b/metadata.json", "num_data_nodes": 3}
BY_KEY = {"secretKeyRef": {"name": "s", "key": "k"}}


def rendered(kind: str, source: Any) -> dict[str, Any]:
    spec = TrainJobSpec.parse({"runtime": RUNTIME, "initializer": {kind: source}})
    assert TrainJobSpec.parse(yaml.safe_dump(spec.model_dump(mode="json", exclude_defaults=True))) == spec
    initializer: dict[str, Any] = render(spec, "key", 1, "ns")["spec"]["initializer"]
    assert set(initializer) == {kind}
    return dict(initializer[kind])


def problems(kind: str, source: Any) -> dict[str, str]:
    with pytest.raises(InvalidSpec) as caught:
        TrainJobSpec.parse({"runtime": RUNTIME, "initializer": {kind: source}})
    prefix = f"initializer.{kind}."
    return {each.path.removeprefix(prefix): f"{each.message} ({each.instead})" for each in caught.value.problems}


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
        ("model", "HF://org/model", NO_WEIGHTS),
        ("model", "s3://bucket/model", NO_WEIGHTS),
        ("model", {"storage_uri": "s3://bucket/model", "ignore_patterns": []}, {}),
        ("model", {"storage_uri": "s3://bucket/model", "env": {"IGNORE_PATTERNS": "*.md"}},
         {"IGNORE_PATTERNS": "*.md"}),
        ("model", "model-registry://llama/1", {}),
    ],
)  # fmt: skip
def test_settings_become_environment_variables(kind: str, source: Any, env: dict[str, Any]) -> None:
    expected = [{"name": n, "value": v} if isinstance(v, str) else {"name": n, "valueFrom": v} for n, v in env.items()]
    assert rendered(kind, source).get("env", []) == expected


def test_the_secret_reference_is_rendered() -> None:
    source = {"storage_uri": "s3://b/set", "secret_ref": "s3-keys"}
    assert rendered("dataset", source) == {"storageUri": "s3://b/set", "secretRef": {"name": "s3-keys"}}


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
        ("dataset", {**CACHE, "num_data_nodes": 1}, "num_data_nodes", "greater than or equal to 2"),
        ("dataset", {**CACHE, "num_data_nodes": None}, "num_data_nodes", "is missing"),
        ("dataset", {**CACHE, "metadata_loc": None}, "metadata_loc", "is missing"),
        ("model", {**CACHE}, "storage_uri", "does not support models"),
        ("dataset", {"storage_uri": "hf://o/s", "acess_token": BY_KEY}, "acess_token", "no such field"),
    ],
)
def test_invalid_settings_are_rejected(kind: str, source: Any, path: str, text: str) -> None:
    found = problems(kind, source)
    assert text in found[path], found
    assert set(found) == {path}


def test_the_cache_can_be_configured_by_variables() -> None:
    env = {"CLUSTER_SIZE": "4", "METADATA_LOC": "s3://b/m.json"}
    assert len(rendered("dataset", {"storage_uri": "cache://schema/table", "env": env})["env"]) == 2
