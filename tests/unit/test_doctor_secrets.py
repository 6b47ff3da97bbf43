"""Finds the Secrets that a job refers to, in every field of a pod."""

from __future__ import annotations

from typing import Any

import pytest

from trainjob._doctor.secrets import Needed, needed


def pod(**fields: Any) -> dict[str, Any]:
    job = {"name": "node", "template": {"spec": {"template": {"spec": fields}}}}
    template = {"spec": {"replicatedJobs": [job]}}
    return {"runtimePatches": [{"manager": "x/y", "trainingRuntimeSpec": {"template": template}}]}


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ({"trainer": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}}, ["s"]),
        ({"initializer": {"dataset": {"secretRef": {"name": "s"}}, "model": {"secretRef": {"name": "t"}}}}, ["s", "t"]),
        (pod(containers=[{"name": "node", "envFrom": [{"secretRef": {"name": "s"}}]}]), ["s"]),
        (pod(initContainers=[{"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s"}}}]}]), ["s"]),
        (pod(volumes=[{"name": "v", "secret": {"secretName": "s"}}]), ["s"]),
        (pod(volumes=[{"name": "v", "projected": {"sources": [{"secret": {"name": "s"}}]}}]), ["s"]),
        (pod(volumes=[{"name": "v", "csi": {"nodePublishSecretRef": {"name": "s"}}}]), ["s"]),
        (pod(volumes=[{"name": "v", "secret": {"secretName": "s", "optional": True}}]), []),
        ({"trainer": {"env": [{"name": "secretRef", "value": "s"}], "args": ["secret"]}}, []),
        ({"trainer": None, "runtimePatches": "none", "initializer": {"dataset": {"secretRef": "s"}}}, []),
    ],
)
def test_required_secrets_are_found(spec: dict[str, Any], names: list[str]) -> None:
    assert [each.name for each in needed(spec)] == names


def test_secrets_for_images_are_distinguished() -> None:
    assert [*needed(pod(imagePullSecrets=[{"name": "s"}, {}]))] == [Needed("s", pulls=True)]
