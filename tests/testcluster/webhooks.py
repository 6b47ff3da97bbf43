"""Waits until webhooks answer.

An admitted object proves nothing: for up to a second after a webhook configuration is created, the API server does not
call the webhook. So each check requires an effect that only the webhook has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import httpx
from tests.processes import Component, wait_until
from tests.testcluster import kueue
from tests.testcluster.access import refused, trainjob
from tests.testcluster.api import Api, ApiError

_NOT_YET = (ApiError, httpx.TransportError)


def wait(api: Api, components: Mapping[str, Component]) -> None:
    """Wait until the webhooks of those of JobSet, Trainer and Kueue that run are called and answer."""
    checks: dict[str, Callable[[Api], bool]] = {"jobset": _jobset, "trainer": _trainer, "kueue": _kueue}
    for program, check in checks.items():
        if program in components:
            what = f"the webhooks of {program} answer"
            among = [components[program]]
            wait_until(what, partial(check, api), 60, among=among, ignore=_NOT_YET)


def _jobset(api: Api) -> bool:
    spec = {"restartPolicy": "Never", "containers": [{"name": "node", "image": "none"}]}
    replicated = {"name": "node", "template": {"spec": {"template": {"spec": spec}}}}
    probe: dict[str, Any] = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "probe", "namespace": "default"},
        "spec": {"replicatedJobs": [replicated]},
    }
    defaulted = "successPolicy" in api.create(probe, dry_run=True)["spec"]
    too_long = {**probe, "metadata": {"name": "probe" * 12, "namespace": "default"}}
    return defaulted and "vjobset.kb.io" in refused(lambda: api.create(too_long, dry_run=True))


def _trainer(api: Api) -> bool:
    # Not an unknown runtime: Kueue's webhook also refuses it, and can answer first.
    # Trainer 2.1 validates the environment only if numProcPerNode is set.
    reserved = {"numNodes": 1, "numProcPerNode": 1, "env": [{"name": "PET_NNODES", "value": "1"}]}
    probe = trainjob("probe", "default", trainer=reserved)
    return "validator.trainjob.trainer.kubeflow.org" in refused(lambda: api.create(probe, dry_run=True))


def _kueue(api: Api) -> bool:
    """Needs a runtime, because Trainer's webhook is called as well."""
    probe = trainjob("probe", "default", trainer={"numNodes": 1})
    probe["metadata"]["labels"] = {kueue.QUEUE_LABEL: "no-such-queue"}
    suspended = api.create(probe, dry_run=True)["spec"].get("suspend") is True
    bad = {**kueue.cluster_queue("probe"), "spec": {"resourceGroups": [_EMPTY, _EMPTY]}}
    return suspended and "vclusterqueue.kb.io" in refused(lambda: api.create(bad, dry_run=True))


_EMPTY = {"coveredResources": ["cpu"], "flavors": [{"name": "x", "resources": [{"name": "cpu", "nominalQuota": "1"}]}]}
