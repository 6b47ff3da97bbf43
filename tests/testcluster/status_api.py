"""Trainer with the feature gate ``TrainJobStatus``: pods report the progress of their training to it. Needs root.

The controller reads its certificate, and the token with the issuer of tokens, from fixed paths, so it gets a separate
root directory. Its server listens on all addresses, which cannot be changed. Older releases lack the gate or differ.
"""

from __future__ import annotations

import shutil
from typing import Any

import yaml
from tests.processes import Component
from tests.testcluster import build
from tests.testcluster.components import Layout, read_objects

NAMESPACE = "kubeflow-system"
ACCOUNT = "kubeflow-trainer-controller-manager"
"""Name of Trainer's service account, and of its Service for pods."""


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
    shutil.copy(build.program("trainer"), root / "trainer")
    configuration = yaml.safe_load((layout.directory / "trainer.yaml").read_text())
    configuration["featureGates"] = {"TrainJobStatus": True}
    configuration["statusServer"] = {"port": layout.ports["trainer-status"]}
    (root / "trainer.yaml").write_text(yaml.safe_dump(configuration))
    command = ["chroot", str(root), "/trainer", "--config=/trainer.yaml"]
    return Component("trainer", command, layout.directory / "logs", {"KUBECONFIG": "/kubeconfig"})


def objects(layout: Layout) -> list[dict[str, Any]]:
    """The objects of Trainer's installation for it."""
    values = {"namespace": NAMESPACE, "account": ACCOUNT, "bundle": layout.authority.bundle}
    return read_objects("status-api.yaml", {**layout.values, **values})
