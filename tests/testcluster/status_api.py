"""Trainer with the feature gate ``TrainJobStatus``: pods report to it how their training goes. Needs root.

It serves its certificate, and reads the token that tells it who signs tokens, from fixed paths: the controller gets a
root directory of its own. Its server listens on all addresses, for which there is no setting.
"""

from __future__ import annotations

import shutil
from typing import Any

import yaml
from tests.processes import Component
from tests.testcluster import build, components
from tests.testcluster.components import Layout

NAMESPACE = "kubeflow-system"
ACCOUNT = "kubeflow-trainer-controller-manager"
"""Trainer's service account, and the Service that leads pods to it."""

_RELEASE = build.NEWEST  # older ones have no such gate, or other paths


def controller(layout: Layout, token: str) -> Component:
    """The program; `token` is any service account's."""
    root = layout.directory / "trainer-root"
    account = root / "var/run/secrets/kubernetes.io/serviceaccount"
    serving = root / "tmp/k8s-webhook-server/serving-certs"
    for directory in (account, serving):
        directory.mkdir(parents=True, exist_ok=True)
    (account / "token").write_text(token)
    shutil.copy(layout.api.certificate, serving / "tls.crt")
    shutil.copy(layout.api.key, serving / "tls.key")
    shutil.copy(layout.kubeconfig, root / "kubeconfig")
    shutil.copy(build.program("trainer", _RELEASE), root / "trainer")
    configuration = components.trainer_configuration(layout) | {
        "featureGates": {"TrainJobStatus": True},
        "statusServer": {"port": layout.ports["trainer-status"]},
    }
    (root / "trainer.yaml").write_text(yaml.safe_dump(configuration))
    command = ["chroot", str(root), "/trainer", "--config=/trainer.yaml"]
    return Component("trainer", command, layout.directory / "logs", {"KUBECONFIG": "/kubeconfig"})


def objects(layout: Layout) -> list[dict[str, Any]]:
    """What Trainer's installation has for it: the certificate's authority, and the way from the pods' network."""
    port = {"name": "status-server", "port": layout.ports["trainer-status"], "protocol": "TCP"}
    service = {"name": ACCOUNT, "namespace": NAMESPACE}
    endpoints = {**service, "labels": {"kubernetes.io/service-name": ACCOUNT}}
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "kubeflow-trainer-webhook-cert", "namespace": NAMESPACE},
            "data": {"ca.crt": layout.authority.bundle},
        },
        {"apiVersion": "v1", "kind": "Service", "metadata": service, "spec": {"ports": [port]}},
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": endpoints,
            "addressType": "IPv4",
            "ports": [port],
            "endpoints": [{"addresses": [layout.gateway], "conditions": {"ready": True}}],
        },
    ]
