"""Pods that cannot exist, as specs have them: unit tests refuse them, and a real API server does."""

from __future__ import annotations

from typing import Any

CLAIM = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
EMPTY = {"name": "data", "emptyDir": {}}


def mounts(*given: dict[str, Any], volumes: Any = (EMPTY,)) -> dict[str, Any]:
    return {"volumes": [*volumes], "containers": [{"volumeMounts": [*given]}]}


def node_affinity(**expression: Any) -> dict[str, Any]:
    terms = [{"matchExpressions": [{"key": "zone", **expression}]}]
    return {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    }


EXPRESSION = "pod.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0]"
EXPRESSION += ".matchExpressions[0]"
Row = tuple[dict[str, Any], str, str]
"""PodSpec or pod template, path of the problem (below ``pod``), and a part of the message."""

# What an API server refuses as a pod.
IMPOSSIBLE: list[Row] = [
    ({"metadata": {"labels": {"ts": "2026-01-01T00:00:00+00:00"}}}, "pod.metadata.labels.ts", "not a label value"),
    ({"metadata": {"labels": {"a": "b" * 64}}}, "pod.metadata.labels.a", "not a label value"),
    ({"metadata": {"labels": {"a b": "c"}}}, "pod.metadata.labels.a b", "not a Kubernetes key"),
    ({"metadata": {"labels": {"a": 1}}}, "pod.metadata.labels.a", "write '1'"),
    ({"metadata": {"annotations": {"sidecar.istio.io/inject": False}}},
     "pod.metadata.annotations.sidecar.istio.io/inject", "write 'false'"),
    ({"nodeSelector": {"a": "b c"}}, "pod.nodeSelector.a", "not a label value"),
    ({"nodeSelector": {"a": True}}, "pod.nodeSelector.a", "write 'true'"),
    ({"serviceAccountName": "Trainer_SA"}, "pod.serviceAccountName", "not a name of a Kubernetes object"),
    ({"volumes": [{**EMPTY, "name": "my_vol"}]}, "pod.volumes[0].name", "not a name of a volume"),
    ({"volumes": [EMPTY, EMPTY]}, "volumes[1]", "given twice"),
    ({"volumes": [{**EMPTY, "secret": {"secretName": "s"}}]}, "pod.volumes[0]", "remove all but one"),
    ({"volumes": [{"name": "v", "emptyDir": {"sizeLimit": "64GB"}}]}, "volumes[0].emptyDir.sizeLimit", "64Gi"),
    ({"volumes": CLAIM}, "volumes", "must be a list, not a mapping"),
    (mounts({"name": "nope", "mountPath": "/x"}), "pod.containers[0].volumeMounts[0].name", "no volume nope"),
    (mounts({"name": "data", "mountPath": "/x"}, {"name": "data", "mountPath": "/x"}),
     "containers[0].volumeMounts[1]", "given twice"),
    (mounts({"name": "data", "mountPath": "/x", "subPath": "../y"}), "pod.containers[0].volumeMounts[0].subPath",
     "relative"),
    ({"securityContext": {"supplementalGroups": [-1]}}, "pod.securityContext.supplementalGroups[0]", "0 to"),
    ({"tolerations": [{"key": "a b", "operator": "Exists"}]}, "pod.tolerations[0].a b", "not a Kubernetes key"),
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
    (node_affinity(operator="In", values=["a b"]), f"{EXPRESSION}.values[0]", "not a label value"),
    ({"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": ""}]}}},
     "pod.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey", "is empty"),
    ({"securityContext": {"privileged": True}}, "securityContext.privileged", "containers.securityContext"),
    ({"securityContext": {"runAsUser": "1000"}}, "securityContext.runAsUser", "write 1000"),
    ({"securityContext": {"runAsUser": -1}}, "pod.securityContext.runAsUser", "0 to"),
    ({"securityContext": {"seccompProfile": {"type": "runtimeDefault"}}}, "pod.securityContext.seccompProfile.type",
     "RuntimeDefault"),
    ({"nodeSelectr": {}}, "nodeSelectr", "did you mean nodeSelector?"),
]  # fmt: skip

# What an API server accepts, and no node runs as it is meant; the last is refused by TrainJob's own schema.
USELESS: list[Row] = [
    ({"imagePullSecrets": [{"name": "reg_cred"}]}, "pod.imagePullSecrets[0].name", "not a name"),
    ({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "My_Claim"}}]},
     "pod.volumes[0].persistentVolumeClaim.claimName", "not a name"),
    ({"volumes": [{"name": "v", "emptyDir": {"medium": "memory"}}]}, "pod.volumes[0].emptyDir.medium", "Memory"),
    (mounts({"name": "data", "mountPath": "x"}), "pod.containers[0].volumeMounts[0].mountPath", "absolute path"),
    (node_affinity(operator="Gt", values=["a"]), f"{EXPRESSION}.values", "one whole number"),
    ({"terminationGracePeriodSeconds": -1}, "terminationGracePeriodSeconds", "at least 0"),
]  # fmt: skip

# What pods may have, and Trainer cannot change for one job.
OF_THE_RUNTIME: list[Row] = [
    ({"containers": [{"name": "base"}]}, "pod.containers[0].name", "the training container is node"),
    ({"containers": [{"image": "i"}]}, "containers[0].image", "write image in the spec"),
    ({"containers": [{"resources": {}}]}, "containers[0].resources", "write resources_per_node"),
    ({"containers": [{"env": [{"name": "A", "value": "b"}]}]}, "pod.containers[0].env", "use env"),
    ({"priorityClassName": "high"}, "priorityClassName", "set it in a training runtime"),
]  # fmt: skip
