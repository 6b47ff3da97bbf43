"""The admission policy of `trainjob install --only policy`, on a real API server: what it refuses, and its messages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import yaml
from tests.cluster.commands import applied, printed
from tests.cluster.policies import asked, key, patch, protected
from tests.processes import wait_until
from tests.testcluster.access import TRAINER, Access, refused, trainjob

from trainjob import TrainJobSpec
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.launching import dry_run

Object = dict[str, Any]

DIGEST = f"sha256:{'0123456789abcdef' * 4}"


@pytest.fixture(scope="module")
def namespace(cluster: Access) -> Iterator[str]:
    """A namespace with the policy, whose ConfigMap an administrator has edited."""
    with cluster.namespace("policy") as name, protected(cluster, name):
        yield name


def node(**fields: Any) -> Object:
    return patch(containers=[{"name": "node", **fields}])


USUAL = {
    "serviceAccountName": "trainer",
    "imagePullSecrets": [{"name": "pull"}],
    "securityContext": {"fsGroup": 1000, "runAsUser": 1000},
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "volumes": [
        {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
        {"name": "scratch", "emptyDir": {}},
        {"name": "keys", "secret": {"secretName": "trainjob-storage"}},
    ],
    "containers": [
        {
            "name": "node",
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            "securityContext": {"readOnlyRootFilesystem": True},
        }
    ],
}


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"runtimeRef": {"name": "trainjob-step"}, "suspend": True, "activeDeadlineSeconds": 60},
        {"trainer": {"image": f"registry.example/train:1@{DIGEST}", "env": [key("trainjob-storage")]}},
        {"trainer": {"image": f"hub.example:5000/team/digits:1@{DIGEST}", "command": ["python"], "args": ["-c", ""]}},
        {"trainer": {"image": f"hub.example:5000/team/digits@{DIGEST}", "env": [{"name": "A", "value": "b"}]}},
        {"trainer": {"resourcesPerNode": {"limits": {"nvidia.com/gpu": "1"}}, "numNodes": 2}},
        patch(**USUAL),
    ],
    ids=["plain", "step", "registry", "repository with tag", "repository", "resources", "usual patches"],
)
def test_specs_that_the_policy_allows(cluster: Access, namespace: str, spec: Object) -> None:
    assert asked(cluster, namespace, **spec) == ""


def image(reference: str) -> Object:
    return {"trainer": {"image": reference}}


def volume(**source: Any) -> Object:
    return patch(volumes=[{"name": "v", **source}])


ALLOWED_RUNTIMES = "allowed: ClusterTrainingRuntime/torch-resilient, ClusterTrainingRuntime/trainjob-step"
SECRET = "Secret other is not allowed; allowed: trainjob-storage, pull"
REFUSED: list[tuple[Object, str]] = [
    (
        {"runtimeRef": {"name": "torch-distributed"}},
        f"spec.runtimeRef: ClusterTrainingRuntime/torch-distributed is not allowed; {ALLOWED_RUNTIMES}",
    ),
    (image("registry.example/train:1"), "registry.example/train:1 has no digest; write <name>@sha256"),
    (image("registry.example/train@sha256:0123"), "train@sha256:0123 has no digest"),
    (
        image(f"registry.example.evil/train@{DIGEST}"),
        f"registry.example.evil/train@{DIGEST} is from a registry that is not allowed; allowed: registry.example, "
        "hub.example:5000/team/digits",
    ),
    (image(f"registry.example:5000/train@{DIGEST}"), "from a registry that is not allowed"),
    (image(f"hub.example:5000/team/digits2@{DIGEST}"), "from a registry that is not allowed"),
    (image(f"python@{DIGEST}"), "from a registry that is not allowed"),
    ({"trainer": {"env": [key("other")]}}, SECRET),
    ({"initializer": {"dataset": {"storageUri": "s3://a/b", "secretRef": {"name": "other"}}}}, SECRET),
    ({"initializer": {"model": {"storageUri": "hf://a/b", "env": [key("other")]}}}, SECRET),
    (volume(secret={"secretName": "other"}), SECRET),
    (patch(imagePullSecrets=[{"name": "pull"}, {"name": "other"}]), SECRET),
    (node(env=[key("other"), key("another")]), "Secret other, another is not allowed"),
    (patch(initContainers=[{"name": "node", "env": [key("other")]}]), SECRET),
    (patch(serviceAccountName="admin"), "ServiceAccount admin is not allowed; allowed: trainer"),
    (volume(hostPath={"path": "/"}), "not allowed: pod.volumes.hostPath"),
    (volume(projected={"sources": [{"secret": {"name": "other"}}]}), "not allowed: pod.volumes.projected"),
    (volume(csi={"driver": "d"}), "not allowed: pod.volumes.csi"),
    (node(securityContext={"privileged": True}), "not allowed: pod.containers.securityContext.privileged"),
    (
        node(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
        "not allowed: pod.containers.securityContext.capabilities",
    ),
    (node(securityContext={"runAsUser": 0}), "runAsUser: 0 (root) is not allowed"),
    (patch(securityContext={"runAsUser": 0}), "runAsUser: 0 (root) is not allowed"),
    (patch(securityContext={"runAsNonRoot": False}), "not allowed: pod.securityContext.runAsNonRoot"),
    (
        patch(securityContext={"seccompProfile": {"type": "Unconfined"}}),
        "not allowed: pod.securityContext.seccompProfile",
    ),
]


@pytest.mark.parametrize(("spec", "message"), REFUSED)
def test_specs_that_the_policy_refuses(cluster: Access, namespace: str, spec: Object, message: str) -> None:
    why = asked(cluster, namespace, **spec)
    assert message in why
    assert "ValidatingAdmissionPolicy 'trainjob'" in why


def test_a_runtime_of_the_namespace_is_not_allowed_by_a_cluster_runtimes_name(cluster: Access, namespace: str) -> None:
    """Authors of a runtime in the namespace could give it any pod."""
    shipped = cluster.api.get(TRAINER, "ClusterTrainingRuntime", "", "torch-distributed")
    assert shipped
    metadata = {"name": "torch-resilient", "namespace": namespace, "labels": shipped["metadata"]["labels"]}
    cluster.add_runtime({**shipped, "kind": "TrainingRuntime", "metadata": metadata})
    own = {"kind": "TrainingRuntime", "name": "torch-resilient"}
    assert "TrainingRuntime/torch-resilient is not allowed" in asked(cluster, namespace, runtimeRef=own)


def test_patches_are_checked_when_they_change(cluster: Access, namespace: str) -> None:
    """Any other change is not checked: a job from before the policy can be suspended and removed."""
    with cluster.namespace("before") as before:
        job = trainjob("early", before, runtime="torch-distributed", suspend=True)
        cluster.api.create(job)
        with protected(cluster, before):
            change = {"metadata": {"labels": {"seen": "yes"}}, "spec": {"activeDeadlineSeconds": 600}}
            cluster.api.patch(TRAINER, "TrainJob", before, "early", change)
            for late in (patch(serviceAccountName="admin"), image("other:1")):
                changed = partial(cluster.api.patch, TRAINER, "TrainJob", before, "early", {"spec": late})
                assert "torch-distributed is not allowed" in refused(changed)
            cluster.api.delete(TRAINER, "TrainJob", before, "early")


def test_without_its_allow_lists_the_policy_refuses_all_jobs(cluster: Access) -> None:
    with cluster.namespace("unlisted") as name:
        lists, *others = printed("--only", "policy", "-n", name)
        metadata = yaml.safe_load(lists)["metadata"]
        applied(cluster, [lists, *others])
        wait_until(
            "the policy is enforced", lambda: "digits is not" in asked(cluster, name, runtimeRef={"name": "digits"})
        )
        assert asked(cluster, name) == "", "torch-resilient is among those that are listed by default"
        cluster.api.delete("v1", "ConfigMap", metadata["namespace"], metadata["name"])
        wait_until("its lists are gone", lambda: "no params found" in asked(cluster, name))
        cluster.api.delete("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding", "", metadata["name"])


@pytest.mark.anyio
async def test_what_a_launcher_adds_to_a_spec_is_allowed(backend: KubernetesBackend, namespace: str) -> None:
    spec = {
        "runtime": "torch-resilient",
        "image": f"registry.example/train@{DIGEST}",
        "checkpoints": "pvc://checkpoints/digits",
        "inputs": {"model": "pvc://models/base"},
        "env": {"KEY": {"secretKeyRef": {"name": "trainjob-storage", "key": "key"}}},
        "resources_per_node": {"limits": {"nvidia.com/gpu": "1"}},
    }
    await dry_run(backend, TrainJobSpec.parse(spec), "allowed", namespace=namespace)
