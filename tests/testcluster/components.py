"""The programs of one cluster: their files, ports, certificates and command lines.

files/<program>.flags has the flags of a program, one a line, files/<program>.yaml its configuration; ``$names`` in them
are `Layout.values`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import Template
from typing import Any

import yaml
from tests.certificates import Authority, Pair
from tests.processes import Component, free_port
from tests.testcluster import build, nodes
from tests.testcluster.manifests import KUEUE_FRAMEWORKS

COSCHEDULER = "scheduler-plugins-scheduler"
"""``schedulerName`` of pods that are scheduled all or none, as in the chart of scheduler-plugins."""

_FILES = Path(__file__).parent / "files"
_LAYOUT = "layout.json"
_API_SERVICE = "10.96.0.1"  # the first address of --service-cluster-ip-range is the API server's
_PORTS = (
    *("etcd", "etcd-peer", "api", "kwok", "metrics"),
    *("jobset", "jobset-health"),
    *("trainer", "trainer-health", "trainer-status"),
    *("kueue", "kueue-health", "kueue-visibility"),
)
_ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "jobset": {"KUBECONFIG": "$kubeconfig"},
    "trainer": {"KUBECONFIG": "$kubeconfig", "TMPDIR": "$certificates/trainer"},
    "kueue": {"KUBECONFIG": "$kubeconfig", "KUEUE_METRICS_CERTS": "$certificates/kueue"},
}
# Directories of tls.crt and tls.key. That of Trainer cannot be set: it is this path below TMPDIR.
_SERVING = ("jobset", "trainer/k8s-webhook-server/serving-certs", "kueue")


@dataclass(frozen=True)
class Layout:
    """Files, ports and certificates of one cluster.

    Attributes:
        directory: Directory of the cluster.
        gateway: Address of this machine for pods of the real node.
        ports: Name -> port of 127.0.0.1.
        older: Group of `build.OLDER` with older releases, or nothing.
    """

    directory: Path
    gateway: str
    ports: Mapping[str, int]
    older: str

    @classmethod
    def make(cls, directory: Path, gateway: str, older: str) -> Layout:
        """Choose ports, issue certificates, and write what `read` reads."""
        (directory / "logs").mkdir()
        layout = cls(directory, gateway, {name: free_port() for name in _PORTS}, older)
        service = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"]
        trainer = "kubeflow-trainer-controller-manager.kubeflow-system.svc"  # the status server's name for pods
        addresses = ["127.0.0.1", "localhost", gateway, _API_SERVICE, *service, trainer]
        layout.authority.issue("kube-apiserver", addresses=addresses)
        layout.authority.issue("admin", "system:masters")
        layout.authority.issue("service-accounts")
        layout.front_proxy.issue("front-proxy-client")
        for name in _SERVING:
            serving = layout.authority.directory / name
            serving.mkdir(parents=True)
            (serving / "tls.crt").symlink_to(layout.api.certificate)
            (serving / "tls.key").symlink_to(layout.api.key)
        state = {"gateway": gateway, "ports": layout.ports, "older": older}
        (directory / _LAYOUT).write_text(json.dumps(state))
        return layout

    @classmethod
    def read(cls, directory: Path) -> Layout:
        """The layout of a cluster that another process started."""
        return cls(directory, **json.loads((directory / _LAYOUT).read_text()))

    @cached_property
    def authority(self) -> Authority:
        """Signs all certificates."""
        return Authority(self.directory / "certificates")

    @cached_property
    def front_proxy(self) -> Authority:
        """Another authority: an owner of its certificates may act for any user."""
        return Authority(self.directory / "front-proxy")

    @property
    def api(self) -> Pair:
        """The API server's certificate."""
        return self.authority.pair("kube-apiserver")

    @property
    def client(self) -> Pair:
        """The administrator's certificate."""
        return self.authority.pair("admin")

    @property
    def service_accounts(self) -> Pair:
        """Key pair that signs tokens; the certificate has the public key."""
        return self.authority.pair("service-accounts")

    @property
    def server(self) -> str:
        """URL of the API server."""
        return f"https://127.0.0.1:{self.ports['api']}"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.directory / "kubeconfig"

    @property
    def values(self) -> dict[str, object]:
        """The values of ``$names`` in the files of this cluster."""
        return {
            **{name.replace("-", "_"): port for name, port in self.ports.items()},
            "directory": self.directory,
            "certificates": self.authority.directory,
            "front_proxy": self.front_proxy.directory,
            "kubeconfig": self.kubeconfig,
            "gateway": self.gateway,
            "server": self.server,
            "label": nodes.LABEL,
            "scheduler": COSCHEDULER,
            "frameworks": json.dumps(KUEUE_FRAMEWORKS),
        }

    def component(self, program: str, *flags: str) -> Component:
        """A program of this cluster, with more flags than those in its file; its configuration is written."""
        values = self.values
        if (_FILES / f"{program}.yaml").exists():
            write_file(f"{program}.yaml", self.directory, values)
        environment = _ENVIRONMENTS.get(program, {})
        return Component(
            program,
            [str(build.program(program, self.older)), *read_flags(program, values), *flags],
            self.directory / "logs",
            {name: Template(text).substitute(values) for name, text in environment.items()},
        )


def read_file(name: str, values: Mapping[str, object]) -> str:
    """The file `name` of files/ with these values of its ``$names``."""
    return Template((_FILES / name).read_text()).substitute(values)


def write_file(name: str, directory: Path, values: Mapping[str, object]) -> None:
    """Write the file `name` of files/ into `directory`."""
    (directory / name).write_text(read_file(name, values))


def read_objects(name: str, values: Mapping[str, object]) -> list[dict[str, Any]]:
    """The objects of a YAML file of files/."""
    return list(yaml.safe_load_all(read_file(name, values)))


def read_flags(program: str, values: Mapping[str, object]) -> list[str]:
    """The flags of a program."""
    lines = read_file(f"{program}.flags", values).splitlines()
    return [line for line in lines if not line.startswith("#")]
