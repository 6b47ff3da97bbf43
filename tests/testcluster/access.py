"""The interface of any cluster for tests."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.processes import wait_until
from tests.testcluster import kueue, nodes
from tests.testcluster.api import Api, ApiError, write_kubeconfig
from tests.testcluster.components import read_objects

Object = dict[str, Any]

TRAINER = "trainer.kubeflow.org/v1alpha1"
JOBSET = "jobset.x-k8s.io/v1alpha2"

RULES: Sequence[Mapping[str, Sequence[str]]] = (
    {
        "apiGroups": ["trainer.kubeflow.org"],
        "resources": ["trainjobs"],
        "verbs": ["create", "patch", "get", "list", "watch", "delete"],
    },
    {"apiGroups": [""], "resources": ["pods", "events"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
)
"""The permissions of Trainer's role for users, kubeflow-trainer-edit: no `update`, no Jobs, no JobSets."""


class Access:
    """Access to a cluster with Trainer by an administrator's kubeconfig."""

    def __init__(self, kubeconfig: Path, directory: Path) -> None:
        self.kubeconfig = kubeconfig
        self.directory = directory

    @cached_property
    def api(self) -> Api:
        """The administrator's client."""
        return Api(self.kubeconfig)

    def close(self) -> None:
        """Close the connections."""
        if "api" in vars(self):
            self.api.close()

    def lacks(self, feature: str) -> str:
        """Why the cluster lacks a feature, as text; empty if it has it.

        Args:
            feature: trainer, kueue, simulated-nodes, real-node or processes (components can be killed and restarted).
        """
        kind = feature.partition("-node")[0]
        if kind in ("simulated", "real"):
            available = bool(self.api.find("v1", "Node", labels=f"{nodes.LABEL}={kind}"))
        else:
            group = {"trainer": "trainer.kubeflow.org", "kueue": "kueue.x-k8s.io"}.get(feature)
            available = group in {each["name"] for each in self.api.request("GET", "/apis")["groups"]}
        return "" if available else f"the cluster of {self.kubeconfig} has no {feature}"

    @contextmanager
    def namespace(self, prefix: str = "test", *, real: bool = False) -> Iterator[str]:
        """Create a namespace, with a LocalQueue if the cluster has Kueue, and delete it afterwards.

        Args:
            prefix: Prefix of the name.
            real: Run its pods on the real node (by annotations of the namespace, so with any runtime), otherwise on
                simulated nodes.
        """
        name = f"{prefix}-{secrets.token_hex(4)}"
        kind = "real" if real else "simulated"
        annotations = {"scheduler.alpha.kubernetes.io/node-selector": f"{nodes.LABEL}={kind}"}
        if real:
            toleration = f'[{{"key": "{nodes.LABEL}", "operator": "Exists"}}]'
            annotations["scheduler.alpha.kubernetes.io/defaultTolerations"] = toleration
        metadata = {"name": name, "annotations": {} if self.lacks(f"{kind}-node{'' if real else 's'}") else annotations}
        self.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        try:
            # Pods are refused until the controller manager has created the service account.
            wait_until("the service account exists", lambda: self.api.get("v1", "ServiceAccount", name, "default"))
            if not self.lacks("kueue"):
                self.api.create(kueue.local_queue(name))
            yield name
        finally:
            self.api.delete("v1", "Namespace", "", name)

    @contextmanager
    def volume(self, namespace: str, name: str, directory: Path) -> Iterator[None]:
        """Create the PersistentVolumeClaim `name`, whose volume is a directory of the real node."""
        values = {"namespace": namespace, "name": name, "directory": directory}
        for each in read_objects("volume.yaml", values):
            self.api.create(each)
        try:
            yield
        finally:
            self.api.delete("v1", "PersistentVolume", "", namespace)

    def restrict(self, namespace: str) -> None:
        """Enforce the Pod Security Standard "restricted" in a namespace."""
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        self.api.patch("v1", "Namespace", "", namespace, {"metadata": {"labels": labels}})

    def finish(self, namespace: str, job: str = "") -> None:
        """End all running pods of a namespace, or those of one TrainJob; see `nodes.run_until_finished`."""
        end_now = {"metadata": {"annotations": {nodes.variable("run"): "1ms"}}}
        labels = f"jobset.sigs.k8s.io/jobset-name={job}" if job else ""
        for pod in self.api.find("v1", "Pod", namespace, labels=labels, fields="status.phase=Running"):
            try:
                self.api.patch("v1", "Pod", namespace, pod["metadata"]["name"], end_now)
            except ApiError as error:
                if error.status != 404:  # a pod whose job was deleted may be gone
                    raise

    def add_runtime(self, runtime: Object) -> None:
        """Apply a runtime, and wait until jobs can be launched with it."""
        self.api.apply(runtime)
        wait_for_runtime(self.api, runtime)

    def add_priority_class(self, name: str) -> None:
        """Create a class of preempting pods; wait until the cache of the admission plugin has it."""
        kind = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass"}
        self.api.apply({**kind, "metadata": {"name": name}, "value": 1000})
        spec = {"priorityClassName": name, "containers": [{"name": "probe", "image": "none"}]}
        probe = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe", "namespace": "default"}, "spec": spec}

        def known() -> bool:
            return "no PriorityClass" not in refused(lambda: self.api.create(probe, dry_run=True))

        wait_until(f"the priority class {name} is known", known)

    def forbid_trainjobs(self, namespace: str) -> None:
        """Set a namespace's quota of TrainJobs to zero, and wait until it is enforced.

        The quota controller discovers new kinds of objects every 30 s, and TrainJobs are new in a cluster that has just
        started. After that it counts them at each full resync, which components.py sets to 5 s.
        """
        hard = {"count/trainjobs.trainer.kubeflow.org": "0"}
        metadata = {"name": "none", "namespace": namespace}
        self.api.create({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": hard}})

        def counted() -> bool:
            quota = self.api.get("v1", "ResourceQuota", namespace, "none") or {}
            return bool(quota.get("status", {}).get("used") == hard)

        wait_until("the quota controller counts TrainJobs", counted, 60)

    def token_for(self, service_account: str, namespace: str = "default", seconds: int = 3600) -> str:
        """A bearer token of a service account, which is created if it does not exist."""
        metadata = {"name": service_account, "namespace": namespace}
        self.api.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
        path = f"{self.api.path('v1', 'ServiceAccount', namespace, service_account)}/token"
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "metadata": {},
            "spec": {"expirationSeconds": seconds},
        }
        return str(self.api.request("POST", path, request)["status"]["token"])

    def kubeconfig_for(
        self, rules: Sequence[Mapping[str, Any]] = RULES, namespace: str = "default", *, cluster_wide: bool = False
    ) -> Path:
        """A kubeconfig of a service account with only the permissions `rules`, in `namespace` or in all namespaces."""
        name = f"limited-{secrets.token_hex(4)}"
        token = self.token_for(name, namespace)
        group = "rbac.authorization.k8s.io"
        kind = "ClusterRole" if cluster_wide else "Role"
        metadata = {"name": name} if cluster_wide else {"name": name, "namespace": namespace}
        common = {"apiVersion": f"{group}/v1", "metadata": metadata}
        self.api.create({**common, "kind": kind, "rules": list(rules)})
        subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
        role = {"apiGroup": group, "kind": kind, "name": name}
        self.api.create({**common, "kind": f"{kind}Binding", "roleRef": role, "subjects": [subject]})
        if rules:
            resource, _, sub = rules[0]["resources"][0].partition("/")
            asked = {
                "group": rules[0]["apiGroups"][0],
                "resource": resource,
                "subresource": sub,
                "namespace": namespace,
            }
            self.wait_for_permission(f"system:serviceaccount:{namespace}:{name}", **asked, verb=rules[0]["verbs"][0])
        target = self.directory / f"{name}.kubeconfig"
        return write_kubeconfig(target, self.api.server, self.api.authority, {"token": token}, namespace)

    def wait_for_permission(self, user: str, **attributes: str) -> None:
        """Wait until a user has a permission: the API server reads new roles by a watch.

        Args:
            user: Such as ``system:serviceaccount:<namespace>:<name>``.
            attributes: The permission, as ``resourceAttributes`` of a SubjectAccessReview.
        """
        spec = {"user": user, "resourceAttributes": attributes}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        wait_until("the permission is in effect", lambda: self.api.request("POST", path, review)["status"]["allowed"])

    def watch(self, api_version: str, kind: str, namespace: str) -> str:
        """The events of a watch within a second, one a line; it begins with all existing objects."""
        params = {"watch": "true", "timeoutSeconds": "1"}
        return str(self.api.request("GET", self.api.path(api_version, kind, namespace), params=params))

    def pod_log(self, namespace: str, pod: str, **params: str) -> str:
        """The log of a pod's only container."""
        return str(self.api.request("GET", f"{self.api.path('v1', 'Pod', namespace, pod)}/log", params=params))


def trainjob(name: str, namespace: str, *, runtime: str = "torch-distributed", **spec: Any) -> Object:
    """A TrainJob object; `spec` has its fields with their API names, e.g. ``trainer={"numNodes": 2}``."""
    return {
        "apiVersion": TRAINER,
        "kind": "TrainJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"runtimeRef": {"name": runtime}, **spec},
    }


def condition(each: Mapping[str, Any] | None, kind: str) -> Object | None:
    """A condition of an object if its status is True; otherwise None."""
    found = ((each or {}).get("status") or {}).get("conditions") or []
    return next((dict(one) for one in found if one["type"] == kind and one["status"] == "True"), None)


def wait_for_runtime(api: Api, runtime: Object) -> None:
    """Wait until the caches of the webhooks have a runtime."""
    metadata = runtime["metadata"]
    probe = trainjob("probe", metadata.get("namespace", "default"), runtime=metadata["name"])
    probe["spec"]["runtimeRef"]["kind"] = runtime["kind"]
    unknown = ("must be created before", "not found")

    def known() -> bool:
        why = refused(lambda: api.create(probe, dry_run=True))
        return not any(each in why for each in unknown)

    wait_until(f"the runtime {metadata['name']} is known", known)


def refused(call: Any) -> str:
    """The message of the API server if it refuses `call`, otherwise empty."""
    try:
        call()
    except ApiError as error:
        return str(error)
    return ""
