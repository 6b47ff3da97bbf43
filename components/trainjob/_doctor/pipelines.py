"""Kubeflow Pipelines: defaults of its workflow controller that prevent retries of steps and cleanup tasks."""

from __future__ import annotations

from typing import Any

import yaml

from trainjob._backends.kubernetes.client import ApiClient, Request
from trainjob._backends.kubernetes.errors import Forbidden, ObjectNotFound
from trainjob._doctor.findings import Finding, Level
from trainjob._install import objects
from trainjob._support.kube_objects import mapping

CONFIG = "workflow-controller-configmap"
_WORKFLOWS = "/apis/argoproj.io/v1alpha1"


async def check(client: ApiClient, namespace: str) -> list[Finding]:
    """Check the defaults of KFP's workflow controller; no finding on a cluster without one.

    Args:
        client: The connection.
        namespace: Namespace of the jobs; KFP is in this one or in ``kubeflow``.

    Raises:
        ApiError: The server does not answer.
    """
    try:
        await client.send(Request("GET", _WORKFLOWS))
    except ObjectNotFound:
        return []
    (ours,) = objects("kfp")
    hidden = ""
    for where in dict.fromkeys((namespace, ours["metadata"]["namespace"])):
        try:
            path = f"/api/v1/namespaces/{where}/configmaps/{CONFIG}"
            found = await client.send(Request("GET", path))
        except ObjectNotFound:
            continue
        except Forbidden as error:
            hidden = f"ConfigMap {where}/{CONFIG} cannot be read: {error.message}"
            continue
        return [_defaults(where, found)]
    return [Finding("pipelines", Level.SKIPPED, hidden)] if hidden else []


def _defaults(namespace: str, config: dict[str, Any]) -> Finding:
    name = f"ConfigMap {namespace}/{CONFIG}"
    try:
        defaults = yaml.safe_load(str(mapping(config, "data").get("workflowDefaults") or ""))
    except yaml.YAMLError as error:
        return Finding("pipelines", Level.SKIPPED, f"{name}: workflowDefaults is not valid YAML ({error})")
    if not mapping(defaults, "spec", "templateDefaults", "retryStrategy"):
        return Finding("pipelines", Level.OK, f"{name} leaves retries to each step")
    message = (
        f"{name} has a retryStrategy in templateDefaults: after Terminate, a cleanup task whose driver's pod is "
        "Pending for longer than 10 s does not run, and set_retry retries no step that fails"
    )
    patch = f"kubectl patch configmap {CONFIG} -n {namespace} --type merge --patch-file /dev/stdin"
    return Finding("pipelines", Level.WARNING, message, f"trainjob install --only kfp -n {namespace} | {patch}")
