"""Pods that cannot exist are refused with the spec, long before a controller would try to make them."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes.client import models as k8s
from tests.impossible_pods import IMPOSSIBLE, OF_THE_RUNTIME, USELESS

from trainjob import InvalidSpec, TrainJobSpec
from trainjob._manifest.render import render

SPEC: dict[str, Any] = {"runtime": "torch-distributed", "command": ["x"]}


def problems(**fields: Any) -> dict[str, str]:
    """Path -> message and hint."""
    with pytest.raises(InvalidSpec) as caught:
        TrainJobSpec.parse({**SPEC, **fields})
    return {problem.path: f"{problem.message} ({problem.instead})" for problem in caught.value.problems}


def sent(**fields: Any) -> dict[str, Any]:
    """The pod template of the last patch of a job."""
    patch = render(TrainJobSpec.parse({**SPEC, **fields}), "key", 1, "ns")["spec"]["runtimePatches"][-1]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    template: dict[str, Any] = job["template"]["spec"]["template"]
    return template


REFUSED = [*IMPOSSIBLE, *USELESS, *OF_THE_RUNTIME]


@pytest.mark.parametrize(("pod", "path", "text"), REFUSED, ids=[each[1] for each in REFUSED])
def test_a_pod_that_cannot_exist_is_refused(pod: dict[str, Any], path: str, text: str) -> None:
    found = problems(pod=pod)
    path = path if path.startswith("pod.") else f"pod.{path}"
    assert [*found] == [path]
    assert text in found[path]


def test_a_pod_is_given_as_a_spec_a_template_or_a_model() -> None:
    mapping = {"node_selector": {"pool": "gpu"}, "volumes": [{"name": "d", "empty_dir": {"size_limit": "1Gi"}}]}
    volume = k8s.V1Volume(name="d", empty_dir=k8s.V1EmptyDirVolumeSource(size_limit="1Gi"))
    container = k8s.V1Container(name="node", volume_mounts=[k8s.V1VolumeMount(name="d", mount_path="/d")])
    model = k8s.V1PodSpec(node_selector={"pool": "gpu"}, volumes=[volume], containers=[container])
    metadata = k8s.V1ObjectMeta(labels={"team": "vision"})
    expected: dict[str, Any] = {
        "nodeSelector": {"pool": "gpu"},
        "volumes": [{"name": "d", "emptyDir": {"sizeLimit": "1Gi"}}],
    }
    mounted = {"containers": [{"name": "node", "volumeMounts": [{"name": "d", "mountPath": "/d"}]}]}
    assert sent(pod=mapping) == sent(pod={"spec": mapping}) == {"spec": expected}
    assert sent(pod=model) == {"spec": {**expected, **mounted}}
    template = k8s.V1PodTemplateSpec(metadata=metadata, spec=model)
    assert sent(pod=template) == {"metadata": {"labels": {"team": "vision"}}, "spec": {**expected, **mounted}}


def test_models_of_the_kubernetes_package_are_fields_of_a_spec() -> None:
    source = k8s.V1EnvVarSource(secret_key_ref=k8s.V1SecretKeySelector(name="s", key="k"))
    env = [k8s.V1EnvVar(name="A", value="1"), k8s.V1EnvVar(name="B", value_from=source)]
    resources = k8s.V1ResourceRequirements(limits={"nvidia.com/gpu": "1"}, requests={"nvidia.com/gpu": "1"})
    spec = TrainJobSpec.parse({**SPEC, "env": env, "resources_per_node": resources})
    assert spec == TrainJobSpec.parse(
        {**SPEC, "env": {"A": "1", "B": {"secretKeyRef": {"name": "s", "key": "k"}}}, "resources_per_node": {"gpu": 1}}
    )
    assert TrainJobSpec.parse({**SPEC, "env": {"B": source}}).env["B"] == {"secretKeyRef": {"name": "s", "key": "k"}}


def test_equal_pods_are_the_same_spec() -> None:
    """Models have empty lists where a mapping has nothing."""
    model = k8s.V1PodSpec(containers=[], node_selector={"a": "b"}, tolerations=[])
    template = k8s.V1PodTemplateSpec(metadata=k8s.V1ObjectMeta(labels={}), spec=model)
    mapping = {"nodeSelector": {"a": "b"}}
    forms = (
        mapping,
        model,
        template,
        model.to_dict(),
        {**mapping, "affinity": None},
        k8s.V1Pod(spec=model, kind="Pod"),
    )
    specs = [TrainJobSpec.parse({**SPEC, "pod": form}) for form in forms]
    assert [each == specs[0] for each in specs] == [True] * len(forms)


@pytest.mark.parametrize(
    ("env", "path", "text"),
    [
        (k8s.V1EnvVar(name="A", value="x"), "env", "write a list of variables"),
        ({"B": k8s.V1SecretKeySelector(name="s", key="k")}, "env.B", "write {secretKeyRef: {name: …, key: …}}"),
    ],
    ids=["one variable", "a key alone"],
)
def test_a_part_of_an_environment_is_named(env: Any, path: str, text: str) -> None:
    assert text in problems(env=env)[path]


RESOURCES: list[tuple[dict[str, Any], str, str]] = [
    ({"gpu": "0.5"}, "limits.nvidia.com/gpu", "cannot be divided"),
    ({"requests": {"nvidia.com/gpu": 2}}, "requests.nvidia.com/gpu", "write it into limits: 2"),
    ({"requests": {"gpu": 1}, "limits": {"gpu": 2}}, "requests.nvidia.com/gpu", "the same number in both"),
    ({"requests": {"hugepages-2Mi": "4Mi"}, "limits": {"hugepages-2Mi": "8Mi"}}, "requests.hugepages-2Mi", "in both"),
    ({"requests": {"memory": "8Gi"}, "limits": {"memory": "4Gi"}}, "requests.memory", "more than the limit, 4Gi"),
    ({"requests": {"memory": "16Gi"}, "limits": {"memory": "16G"}}, "requests.memory", "write 16Gi in both"),
    ({"limits": {"tpu": 4}}, "limits.tpu", "write its full name: google.com/tpu"),
    ({"limits": {"gpus": 4}}, "limits.gpus", "such as nvidia.com/gpu"),
    ({"limits": {"cpu": "2.5m"}}, "limits.cpu", "finer than 1m"),
    ({"limits": {"memory": 64}}, "limits.memory", "write 64Gi"),
    ({"limits": {"memory": "500m"}}, "limits.memory", "write 500Mi"),
    ({"limits": {"memory": "64GB"}}, "limits.memory", "write 64Gi"),
    ({"limits": {"memory": "-1"}}, "limits.memory", "not a Kubernetes quantity"),
    ({"limits": {"cpu": "4 cores"}}, "limits.cpu", "write 4"),
]  # fmt: skip


@pytest.mark.parametrize(("resources", "path", "text"), RESOURCES, ids=[str(each[0]) for each in RESOURCES])
def test_resources_that_no_pod_can_have_are_refused(resources: dict[str, Any], path: str, text: str) -> None:
    found = problems(resources_per_node=resources)
    assert text in found[f"resources_per_node.{path}"]
    assert all(path.rpartition(".")[2] in each for each in found)


def test_resources_that_pods_have_are_accepted() -> None:
    memory = {"requests": {"memory": "4Gi"}, "limits": {"memory": "8Gi"}}
    mixed: dict[str, Any] = {"requests": {"cpu": "500m"}, "limits": {"memory": "16G"}}
    for resources in (
        memory,
        mixed,
        {"limits": {"a.b/memory": "1Gi", "a.b/count": "1e3", "a.b/more": "2000m"}},
        {"limits": {"gpu": 1}},
        {"cpu": 0.5},
        {"MIG-1g.5gb": 2, "gpu": 0},
    ):
        assert TrainJobSpec.parse({**SPEC, "resources_per_node": resources})


@pytest.mark.parametrize(
    ("fields", "path", "text"),
    [
        ({"node_selector": {}}, "node_selector", "write pod: {nodeSelector: {…}}"),
        ({"imagePullSecrets": []}, "imagePullSecrets", "write pod: {imagePullSecrets: [{name: …}]}"),
        ({"tolerations": []}, "tolerations", "write pod: {tolerations: […]}"),
        ({"env_from": []}, "env_from", "Trainer's API has no envFrom"),
        ({"configmaps": []}, "configmaps", "write each variable"),
        ({"init_containers": []}, "init_containers", "needs a training runtime"),
        ({"priority_class_name": "x"}, "priority_class_name", "kueue.x-k8s.io/priority-class"),
        ({"image_pull_policy": "x"}, "image_pull_policy", "belongs to the container of the training runtime"),
        ({"cmds": []}, "cmds", "write command"),
        ({"arguments": []}, "arguments", "write args"),
        ({"env_vars": {}}, "env_vars", "write env"),
        ({"container_resources": {}}, "container_resources", "write resources_per_node"),
        ({"startup_timeout_seconds": 5}, "startup_timeout_seconds", "write start_timeout"),
        ({"pod_template_overrides": []}, "pod_template_overrides", "write pod"),
        ({"annotations": {"sidecar.istio.io/inject": "false"}}, "annotations.sidecar.istio.io/inject",
         "write pod: {metadata: {annotations: {sidecar.istio.io/inject: 'false'}}}"),
        ({"labels": {"kueue.x-k8s.io/queue-name": "TeamA"}}, "labels.kueue.x-k8s.io/queue-name", "LocalQueue"),
    ],
)  # fmt: skip
def test_names_that_people_try_are_answered_with_the_line_to_write(
    fields: dict[str, Any], path: str, text: str
) -> None:
    assert text in problems(**fields)[path]
