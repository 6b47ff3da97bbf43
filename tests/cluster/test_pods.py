"""What a spec refuses is what a real API server refuses: TrainJob's schema, and pods that cannot exist."""

from __future__ import annotations

import json
from typing import Any

from tests.impossible_pods import IMPOSSIBLE, USELESS
from tests.testcluster.access import Access
from tests.testcluster.api import ApiError
from tests.testcluster.crd import DATA, merged, schema_of

CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainjobs.trainer.kubeflow.org"
STRICT = {"dryRun": "All", "fieldValidation": "Strict"}


def test_the_schema_accepts_all_that_the_cluster_accepts(cluster: Access) -> None:
    known = json.loads(DATA.read_text())
    assert merged(known, schema_of(cluster.api.request("GET", CRD))) == known


def refusal(cluster: Access, pod: dict[str, Any]) -> int | None:
    """The status with which the API server refuses a pod; None if it accepts it."""
    template = pod if {*pod} <= {"metadata", "spec"} else {"spec": pod}
    spec = template.get("spec") or {}
    containers = [{"name": "node", "image": "i", **each} for each in spec.get("containers") or [{}]]
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "impossible", **template.get("metadata", {})},
        "spec": {**spec, "containers": containers},
    }
    try:
        cluster.api.request("POST", "/api/v1/namespaces/default/pods", body, params=STRICT)
    except ApiError as error:
        return error.status
    return None


def test_impossible_pods_are_refused_by_the_api_server(cluster: Access) -> None:
    accepted = [pod for pod, _, _ in IMPOSSIBLE if refusal(cluster, pod) not in (400, 403, 422)]
    assert accepted == []


def test_useless_pods_are_accepted_by_the_api_server(cluster: Access) -> None:
    """So that the list in `impossible_pods` stays true: nobody else refuses them."""
    assert [pod for pod, _, _ in USELESS if refusal(cluster, pod) is not None] == []
