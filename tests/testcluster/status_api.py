"""Trainer with the feature gate ``TrainJobStatus``: pods report the progress of their training to it. Needs root.

The controller reads its certificate, and the token with the issuer of tokens, from fixed paths, so it gets a separate
root directory. Its server listens on all addresses, which cannot be changed.
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
"""Name of Trainer's service account, and of its Service for pods."""

_RELEASE = build.NEWEST  # older releases do not have the gate, or use other paths


def controller(layout: Layout, token: str) -> Component:
    """The program; `token` can be that of any service account."""
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
    """The objects of Trainer's installation for it: the certificate authority, and the Service for pods."""
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
