"""The command line and the configuration of each program of the control plane."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.certificates import Authority, Pair
from tests.processes import Component, free_port
from tests.testcluster import build, kueue, nodes
from tests.testcluster.manifests import load

SERVICES = "10.96.0.0/16"
_API_SERVICE = "10.96.0.1"  # the first address of SERVICES is the API server's
_SIMULATED_PODS = "10.128.0.0/10"  # room for 4 million
COSCHEDULER = "scheduler-plugins-scheduler"
"""``schedulerName`` of pods that are scheduled all or none, as in the chart of scheduler-plugins."""

_PORTS = (
    "etcd",
    "etcd-peer",
    "api",
    "jobset",
    "trainer",
    "trainer-status",
    "kueue",
    "kwok",
    "jobset-health",
    "trainer-health",
    "kueue-health",
    "kueue-visibility",
    "metrics",
)


@dataclass(frozen=True)
class Layout:
    """Files, ports and certificates of one cluster.

    Attributes:
        directory: Directory of the cluster.
        gateway: Address of this machine for pods of the real node.
        ports: Name -> port of 127.0.0.1.
        authority: Signs all certificates.
        api: The API server's certificate.
        client: The administrator's certificate.
        service_accounts: Key pair that signs tokens; the certificate has the public key.
        front_proxy: Another authority: an owner of its certificates may act for any user.
        proxy: The API server's certificate as a client of the APIs that it forwards requests to.
        release: Release of Trainer.
    """

    directory: Path
    gateway: str
    ports: Mapping[str, int]
    authority: Authority
    api: Pair
    client: Pair
    service_accounts: Pair
    front_proxy: Authority
    proxy: Pair
    release: str

    @classmethod
    def make(cls, directory: Path, gateway: str, release: str) -> Layout:
        """Choose ports and issue certificates."""
        (directory / "logs").mkdir()
        authority = Authority(directory / "certificates")
        front_proxy = Authority(directory / "front-proxy")
        service = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"]
        trainer = "kubeflow-trainer-controller-manager.kubeflow-system.svc"  # the status server's name for pods
        addresses = ["127.0.0.1", "localhost", gateway, _API_SERVICE, *service, trainer]
        return cls(
            directory,
            gateway,
            {name: free_port() for name in _PORTS},
            authority,
            authority.issue("kube-apiserver", addresses=addresses),
            authority.issue("admin", "system:masters"),
            authority.issue("service-accounts"),
            front_proxy,
            front_proxy.issue("front-proxy-client"),
            release,
        )

    @property
    def server(self) -> str:
        """URL of the API server."""
        return f"https://127.0.0.1:{self.ports['api']}"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.directory / "kubeconfig"

    def serving(self, name: str) -> Path:
        """Create a directory with tls.crt and tls.key for 127.0.0.1, in the form that webhook servers read."""
        directory = self.directory / "certificates" / name
        directory.mkdir(parents=True)
        (directory / "tls.crt").symlink_to(self.api.certificate)
        (directory / "tls.key").symlink_to(self.api.key)
        return directory

    def component(self, program: str, *flags: str, **environment: str) -> Component:
        """A program of this cluster with its flags."""
        command = [str(build.program(program, self.release)), *flags]
        return Component(program, command, self.directory / "logs", environment)

    def configuration(self, program: str, *documents: Mapping[str, Any]) -> str:
        """Write a program's configuration file."""
        path = self.directory / f"{program}.yaml"
        path.write_text(yaml.safe_dump_all(documents))
        return str(path)


def etcd(layout: Layout) -> Component:
    """The store, without fsync: its data need not survive a crash of the machine."""
    client, peer = (f"http://127.0.0.1:{layout.ports[name]}" for name in ("etcd", "etcd-peer"))
    return layout.component(
        "etcd",
        f"--data-dir={layout.directory / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
    )


def api_server(layout: Layout, *flags: str) -> Component:
    """The API server."""
    return layout.component(
        "kube-apiserver",
        f"--etcd-servers=http://127.0.0.1:{layout.ports['etcd']}",
        "--bind-address=127.0.0.1",
        f"--secure-port={layout.ports['api']}",
        # Not a loopback address: it becomes the endpoint of the `kubernetes` service, which pods use.
        f"--advertise-address={layout.gateway}",
        f"--tls-cert-file={layout.api.certificate}",
        f"--tls-private-key-file={layout.api.key}",
        f"--client-ca-file={layout.authority.certificate}",
        # For APIs of other servers (`control_plane.Cluster.forward`).
        f"--requestheader-client-ca-file={layout.front_proxy.certificate}",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={layout.proxy.certificate}",
        f"--proxy-client-key-file={layout.proxy.key}",
        f"--kubelet-client-certificate={layout.client.certificate}",
        f"--kubelet-client-key={layout.client.key}",
        "--kubelet-preferred-address-types=InternalIP",  # the names of the nodes do not resolve
        f"--service-account-key-file={layout.service_accounts.certificate}",
        f"--service-account-signing-key-file={layout.service_accounts.key}",
        # Must be reachable for Trainer: its status server downloads the keys that verify tokens from there.
        f"--service-account-issuer={layout.server}",
        f"--service-account-jwks-uri={layout.server}/openid/v1/jwks",
        f"--service-cluster-ip-range={SERVICES}",
        "--authorization-mode=Node,RBAC",
        "--allow-privileged=true",
        # With these, annotations of a namespace select the kind of node for all its pods.
        "--enable-admission-plugins=PodNodeSelector,PodTolerationRestriction",
        *flags,
    )


def controller_manager(layout: Layout) -> Component:
    """Jobs, garbage collection, namespaces, service accounts, node health."""
    return layout.component(
        "kube-controller-manager",
        f"--kubeconfig={layout.kubeconfig}",
        "--leader-elect=false",
        "--secure-port=0",
        f"--service-account-private-key-file={layout.service_accounts.key}",
        f"--root-ca-file={layout.authority.certificate}",
        "--use-service-account-credentials=true",
        # A quota created before TrainJobs are discovered (30 s) is counted only at the next full resync: default 5 min.
        "--resource-quota-sync-period=5s",
        "--kube-api-qps=200",
        "--kube-api-burst=400",
    )


def scheduler(layout: Layout) -> Component:
    """The scheduler."""
    flags = ("--leader-elect=false", "--secure-port=0", "--kube-api-qps=200", "--kube-api-burst=400")
    return layout.component("kube-scheduler", f"--kubeconfig={layout.kubeconfig}", *flags)


def coscheduler(layout: Layout) -> Component:
    """A second scheduler, with the coscheduling plugin, for the pods that name it."""
    plugin = {"name": "Coscheduling"}
    profile = {
        "schedulerName": COSCHEDULER,
        "plugins": {
            "multiPoint": {"enabled": [plugin]},
            "queueSort": {"enabled": [plugin], "disabled": [{"name": "*"}]},
        },
        "pluginConfig": [{**plugin, "args": {"permitWaitingTimeSeconds": 60}}],
    }
    configuration = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(layout.kubeconfig), "qps": 200, "burst": 400},
        "leaderElection": {"leaderElect": False},
        "profiles": [profile],
    }
    file = layout.configuration("coscheduler", configuration)
    # Retry pods that no event requeues after 5 s. The scheduler notifies plugins of new pods only if its built-in gang
    # scheduling is on: otherwise a gang that is scheduled before its last pod exists waits the default 5 minutes.
    requeue = "--pod-max-in-unschedulable-pods-duration=5s"
    return layout.component("coscheduler", f"--config={file}", "--secure-port=0", requeue)


def jobset(layout: Layout) -> Component:
    """JobSet's controller and webhooks."""
    configuration = {
        "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "webhook": {"port": layout.ports["jobset"], "host": "127.0.0.1", "certDir": str(layout.serving("jobset"))},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{layout.ports['jobset-health']}"},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
    }
    file = layout.configuration("jobset", configuration)
    return layout.component("jobset", f"--config={file}", KUBECONFIG=str(layout.kubeconfig))


def trainer_configuration(layout: Layout) -> dict[str, Any]:
    """Trainer's configuration file."""
    return {
        "apiVersion": "config.trainer.kubeflow.org/v1alpha1",
        "kind": "Configuration",
        "webhook": {"port": layout.ports["trainer"], "host": "127.0.0.1"},
        "certManagement": {"enable": False},
        "metrics": {"bindAddress": "0", "secureServing": False},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{layout.ports['trainer-health']}"},
        "clientConnection": {"qps": 500, "burst": 1000},
    }


def trainer(layout: Layout) -> Component:
    """Trainer's controller and webhooks."""
    file = layout.configuration("trainer", trainer_configuration(layout))
    # The path of its certificate cannot be set: it is this directory under TMPDIR.
    temporary = layout.directory / "trainer-tmp"
    certificates = temporary / "k8s-webhook-server"
    certificates.mkdir(parents=True)
    (certificates / "serving-certs").symlink_to(layout.serving("trainer"))
    return layout.component("trainer", f"--config={file}", KUBECONFIG=str(layout.kubeconfig), TMPDIR=str(temporary))


def kueue_controller(layout: Layout) -> Component:
    """Kueue's controller, scheduler and webhooks."""
    serving = str(layout.serving("kueue"))
    ports = layout.ports
    configuration = kueue.configuration(ports["kueue"], serving, ports["kueue-health"], ports["kueue-visibility"])
    file = layout.configuration("kueue", configuration)
    environment = {"KUBECONFIG": str(layout.kubeconfig), "KUEUE_METRICS_CERTS": serving}
    return layout.component("kueue", f"--config={file}", f"--kubeconfig={layout.kubeconfig}", **environment)


def kwok(layout: Layout) -> Component:
    """The kubelets of the simulated nodes; they serve the same file as the log of every pod."""
    log = layout.directory / "simulated-pods.log"
    log.write_text("2026-01-01T00:00:00.000000000Z stdout F log of a simulated pod\n")
    stages = load(build.rendered("kwok"), "stages")
    port = layout.ports["kwok"]
    return layout.component(
        "kwok",
        f"--config={layout.configuration('kwok', *nodes.configuration(stages, str(log)))}",
        f"--kubeconfig={layout.kubeconfig}",
        "--manage-all-nodes=false",
        f"--manage-nodes-with-label-selector={nodes.LABEL}=simulated",
        f"--cidr={_SIMULATED_PODS}",
        "--node-ip=127.0.0.1",
        f"--node-port={port}",
        f"--server-address=127.0.0.1:{port}",
        f"--tls-cert-file={layout.api.certificate}",
        f"--tls-private-key-file={layout.api.key}",
        "--node-lease-duration-seconds=40",
    )


def metrics_server(layout: Layout) -> Component:
    """The API of the CPU and memory that pods use; it asks the kubelets of nodes that run real pods."""
    serving = layout.directory / "certificates" / "metrics"
    serving.mkdir(exist_ok=True)
    return layout.component(
        "metrics-server",
        f"--kubeconfig={layout.kubeconfig}",
        f"--authentication-kubeconfig={layout.kubeconfig}",
        f"--authorization-kubeconfig={layout.kubeconfig}",
        "--bind-address=127.0.0.1",
        f"--secure-port={layout.ports['metrics']}",
        f"--cert-dir={serving}",  # it writes a self-signed certificate
        "--kubelet-insecure-tls",  # the certificates of kubelets are not of the cluster's authority
        "--kubelet-preferred-address-types=InternalIP",
        "--kubelet-use-node-status-port",
        f"--node-selector={nodes.LABEL}=real",
        "--kubelet-request-timeout=5s",
        "--metric-resolution=10s",  # the shortest that it accepts
    )
