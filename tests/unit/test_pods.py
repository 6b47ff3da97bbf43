"""Pods that cannot exist are refused with the spec, long before a controller would try to make them."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes.client import models as k8s

from trainjob import InvalidSpec, TrainJobSpec
from trainjob._manifest.render import render

SPEC: dict[str, Any] = {"runtime": "torch-distributed", "command": ["x"]}
CLAIM = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
EMPTY = {"name": "data", "emptyDir": {}}


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


def mounts(*given: dict[str, Any], volumes: Any = (EMPTY,)) -> dict[str, Any]:
    return {"volumes": [*volumes], "containers": [{"volumeMounts": [*given]}]}


def node_affinity(**expression: Any) -> dict[str, Any]:
    terms = [{"matchExpressions": [{"key": "zone", **expression}]}]
    return {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    }


EXPRESSION = "pod.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0]"
EXPRESSION += ".matchExpressions[0]"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"metadata": {"labels": {"ts": "2026-01-01T00:00:00+00:00"}}}, "pod.metadata.labels.ts", "not a label value"),
    ({"metadata": {"labels": {"a": "b" * 64}}}, "pod.metadata.labels.a", "not a label value"),
    ({"metadata": {"labels": {"a b": "c"}}}, "pod.metadata.labels.a b", "not a Kubernetes key"),
    ({"metadata": {"labels": {"a": 1}}}, "pod.metadata.labels.a", "write '1'"),
    ({"metadata": {"annotations": {"sidecar.istio.io/inject": False}}},
     "pod.metadata.annotations.sidecar.istio.io/inject", "write 'false'"),
    ({"nodeSelector": {"a": "b c"}}, "pod.nodeSelector.a", "not a label value"),
    ({"nodeSelector": {"a": True}}, "pod.nodeSelector.a", "write 'true'"),
    ({"serviceAccountName": "Trainer_SA"}, "pod.serviceAccountName", "not a name of a Kubernetes object"),
    ({"imagePullSecrets": [{"name": "reg_cred"}]}, "pod.imagePullSecrets[0].name", "not a name"),
    ({"volumes": [{**EMPTY, "name": "my_vol"}]}, "pod.volumes[0].name", "not a name of a volume"),
    ({"volumes": [EMPTY, EMPTY]}, "pod.volumes[1].name", "given twice"),
    ({"volumes": [{"name": "v"}]}, "pod.volumes[0]", "one source"),
    ({"volumes": [{**EMPTY, "secret": {"secretName": "s"}}]}, "pod.volumes[0]", "one source"),
    ({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "My_Claim"}}]},
     "pod.volumes[0].persistentVolumeClaim.claimName", "not a name"),
    ({"volumes": [{"name": "v", "emptyDir": {"sizeLimit": "64GB"}}]}, "volumes[0].emptyDir.sizeLimit", "64Gi"),
    ({"volumes": [{"name": "v", "emptyDir": {"medium": "memory"}}]}, "pod.volumes[0].emptyDir.medium", "Memory"),
    ({"volumes": CLAIM}, "volumes", "must be a list, not a mapping"),
    (mounts({"name": "nope", "mountPath": "/x"}), "pod.containers[0].volumeMounts[0].name", "no volume nope"),
    (mounts({"name": "data", "mountPath": "x"}), "pod.containers[0].volumeMounts[0].mountPath", "absolute path"),
    (mounts({"name": "data", "mountPath": "/x"}, {"name": "data", "mountPath": "/x"}),
     "pod.containers[0].volumeMounts[1].mountPath", "given twice"),
    ({"tolerations": [{"key": "a", "operator": "Exists", "effect": "Noschedule"}]}, "pod.tolerations[0].effect",
     "NoSchedule"),
    ({"tolerations": [{"key": "a", "operator": "Equals"}]}, "pod.tolerations[0].operator", "Exists, Equal"),
    ({"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}, "pod.tolerations[0]", "not allow a value"),
    ({"tolerations": [{"key": "a", "effect": "NoSchedule", "tolerationSeconds": 5}]},
     "pod.tolerations[0].tolerationSeconds", "NoExecute"),
    ({"tolerations": [{"key": "a", "tolerationSecond": 5}]}, "tolerations[0].tolerationSecond", "tolerationSeconds"),
    (node_affinity(operator="in", values=["a"]), f"{EXPRESSION}.operator", "In, NotIn"),
    (node_affinity(operator="In"), f"{EXPRESSION}.values", "at least one value"),
    (node_affinity(operator="Exists", values=["a"]), f"{EXPRESSION}.values", "does not allow values"),
    (node_affinity(operator="Gt", values=["a"]), f"{EXPRESSION}.values", "one whole number"),
    (node_affinity(operator="In", values=["a b"]), f"{EXPRESSION}.values[0]", "not a label value"),
    ({"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": ""}]}}},
     "pod.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey", "is empty"),
    ({"securityContext": {"privileged": True}}, "securityContext.privileged", "containers.securityContext"),
    ({"securityContext": {"runAsUser": "1000"}}, "securityContext.runAsUser", "write 1000"),
    ({"securityContext": {"runAsUser": -1}}, "pod.securityContext.runAsUser", "0 to"),
    ({"securityContext": {"seccompProfile": {"type": "runtimeDefault"}}}, "pod.securityContext.seccompProfile.type",
     "RuntimeDefault"),
    ({"terminationGracePeriodSeconds": -1}, "terminationGracePeriodSeconds", "at least 0"),
    ({"containers": [{"name": "base"}]}, "pod.containers[0].name", "the training container is node"),
    ({"containers": [{"image": "i"}]}, "containers[0].image", "write image in the spec"),
    ({"containers": [{"resources": {}}]}, "containers[0].resources", "write resources_per_node"),
    ({"containers": [{"env": [{"name": "A", "value": "b"}]}]}, "pod.containers[0].env", "use env"),
    ({"priorityClassName": "high"}, "priorityClassName", "set it in a training runtime"),
    ({"nodeSelectr": {}}, "nodeSelectr", "did you mean nodeSelector?"),
]  # fmt: skip


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


RESOURCES: list[tuple[dict[str, Any], str, str]] = [
    ({"gpu": "0.5"}, "limits.nvidia.com/gpu", "cannot be divided"),
    ({"gpu": "1Gi"}, "limits.nvidia.com/gpu", "not a whole number"),
    ({"requests": {"nvidia.com/gpu": 2}}, "requests.nvidia.com/gpu", "write it into limits: 2"),
    ({"requests": {"gpu": 1}, "limits": {"gpu": 2}}, "requests.nvidia.com/gpu", "the same number in both"),
    ({"requests": {"hugepages-2Mi": "4Mi"}, "limits": {"hugepages-2Mi": "8Mi"}}, "requests.hugepages-2Mi", "in both"),
    ({"requests": {"memory": "8Gi"}, "limits": {"memory": "4Gi"}}, "requests.memory", "more than the limit, 4Gi"),
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
    mixed = {"requests": {"cpu": "500m"}, "limits": {"memory": "16G"}}
    for resources in (memory, mixed, {"limits": {"gpu": 1}}, {"cpu": 0.5}, {"MIG-1g.5gb": 2, "gpu": 0}):
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
