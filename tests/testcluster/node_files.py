"""The configuration files of the real node's programs."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from tests.testcluster import images
from tests.testcluster.nodes import LABEL

BRIDGE = "cni0"
BRIDGE_MAC = "0a:58:0a:58:00:01"  # a local one
PODS = "10.88.0.0/16"
DNS = "10.88.0.1"  # the bridge's address: the name server of all pods
SOCKET = "/run/containerd.sock"  # the node has a separate /run
CNI_PROGRAMS = Path("/usr/lib/cni")  # where Debian puts them


def containerd(directory: Path) -> str:
    """config.toml of containerd."""
    (directory / "cni").mkdir()
    (directory / "registries").mkdir()
    (directory / "cni" / "10-bridge.conflist").write_text(json.dumps(_cni(directory)))
    return f"""\
version = 3
root = "{directory}/containerd"
state = "/run/containerd"

[grpc]
address = "{SOCKET}"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{images.PAUSE}"

[plugins."io.containerd.cri.v1.images".registry]
config_path = "{directory}/registries"

[plugins."io.containerd.cri.v1.runtime"]
# Without CAP_SYS_RESOURCE (a container, a sandbox) every pod would fail: "can't get final child's PID from pipe: EOF".
restrict_oom_score_adj = true

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{CNI_PROGRAMS}"]
conf_dir = "{directory}/cni"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"""


def _cni(directory: Path) -> dict[str, object]:
    addresses = {"type": "host-local", "dataDir": str(directory / "addresses"), "ranges": [[{"subnet": PODS}]]}
    routes = [{"dst": "0.0.0.0/0"}]
    bridge = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "ipMasq": True,
        "hairpinMode": True,
        "ipam": {**addresses, "routes": routes},
    }
    loopback = {"type": "loopback"}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, loopback]}


def kubelet(directory: Path, authority: Path, cgroup: str) -> str:
    """KubeletConfiguration."""
    (directory / "resolv.conf").write_text(f"nameserver {DNS}\n")
    return yaml.safe_dump(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(authority)},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{cgroup}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "clusterDNS": [DNS],
            "clusterDomain": "cluster.local",
            "resolvConf": str(directory / "resolv.conf"),
            "containerRuntimeEndpoint": f"unix://{SOCKET}",
            "podLogsDir": str(directory / "pod-logs"),
            "enforceNodeAllocatable": [],
            # The disk is the developer's; the tests must not depend on its free space.
            "evictionHard": {"memory.available": "100Mi"},
            "imageGCHighThresholdPercent": 100,
            "registerWithTaints": [{"key": LABEL, "value": "real", "effect": "NoSchedule"}],
            "serializeImagePulls": False,  # a registry that does not answer must not delay other pods
            "syncFrequency": "10s",
        }
    )


def corefile(kubeconfig: Path) -> str:
    """Corefile of CoreDNS: the names of services, and of pods of headless services."""
    return f"""\
.:53 {{
    bind {DNS}
    errors
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
        ttl 1
    }}
}}
"""
