"""A node that runs real pods: containerd, kubelet, kube-proxy and CoreDNS. Needs root.

Everything runs in separate namespaces (processes, mounts, network, host name): otherwise two kubelets or kube-proxies
on one machine would destroy each other's pods and rules. When the first process of the namespaces is killed, the kernel
ends every pod, mount and interface. Only files and cgroups remain (`remove_cgroups`).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from tests.processes import Component, ComponentError, identity, pid_of, wait_until
from tests.testcluster import build, image_store, images
from tests.testcluster.access import condition
from tests.testcluster.api import Api, client_user, write_kubeconfig
from tests.testcluster.components import Layout, read_flags, write_file
from tests.testcluster.nodes import LABEL

NAME = "real-0"

_BRIDGE = "cni0"
_BRIDGE_MAC = "0a:58:0a:58:00:01"  # a local one
_PODS = "10.88.0.0/16"
_DNS = "10.88.0.1"  # the bridge's address: the name server of all pods
_SOCKET = "/run/containerd.sock"  # the node has a separate /run
_CNI_PROGRAMS = Path("/usr/lib/cni")  # where Debian puts them

_CGROUPS = Path("/sys/fs/cgroup")
BLKIO = _CGROUPS / "blkio"
"""Limits disks in version 1 of cgroups. In version 2, the kubelet does not enable this controller."""
_PROGRAMS = ("runc", "iptables", "ip", "nsenter", "unshare")
_IMAGE_PROGRAMS = ("debootstrap", "gcc")

# The first process of the namespaces. Programs leave files in /run, /var/lib and /var/log (sockets of containerd's
# shims, results of CNI, links to logs), so the node has separate ones in memory. The loop reaps processes.
_INIT = """
set -e
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib
mount -t tmpfs tmpfs /var/log
hostname "$2"
touch "$1"
while :; do sleep 3600; done
"""


def why_unsupported() -> str:
    """Why this machine cannot run a real node, as text; empty if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "it needs Linux and root"
    programs = _PROGRAMS if (images.directory() / "python.tar").exists() else (*_PROGRAMS, *_IMAGE_PROGRAMS)
    missing = [each for each in programs if shutil.which(each) is None]
    if not (_CNI_PROGRAMS / "bridge").exists():
        missing.append("the CNI plugins")
    return f"{', '.join(missing)} missing: apt-get install the packages of apt-packages.txt" if missing else ""


class RealNode:
    """The node of one cluster: of this process, or of another process, which then has the components.

    Args:
        layout: Layout of the cluster.
        api: The administrator's client.
    """

    def __init__(self, layout: Layout, api: Api) -> None:
        self.layout = layout
        self.api = api
        self.directory = layout.directory / "node"
        self.address = str(IPv4Address(layout.gateway) + 1)
        number = int(IPv4Address(layout.gateway)) & 0xFFFF
        self.cgroup = f"trainjob-{number:04x}"
        self._interface = f"tj{number:04x}"
        self._values = {
            **layout.values,
            "node": self.directory,
            "name": NAME,
            "address": self.address,
            "cgroup": self.cgroup,
            "bridge": _BRIDGE,
            "pods": _PODS,
            "dns": _DNS,
            "socket": _SOCKET,
            "cni": _CNI_PROGRAMS,
            "pause": images.PAUSE,
        }
        self._init = self.directory / "init"  # the identity of the first process of the namespaces
        self.components: dict[str, Component] = {}

    @property
    def exists(self) -> bool:
        """Whether the node was started."""
        return self._init.exists()

    def _pid(self) -> int | None:
        """The first process of the namespaces, in the machine's PID namespace; None if it has ended."""
        return pid_of(self._init.read_text()) if self.exists else None

    def start(self) -> None:
        """Start the node and return when pods can run on it."""
        if why := why_unsupported():
            raise ComponentError(f"no real node: {why}")
        self.directory.mkdir()
        self._make_cgroups()
        self._enter()
        self._connect()
        self._write("resolv.conf")
        self._containerd()
        self._user("kubelet", f"system:node:{NAME}", "system:nodes")
        self._write("kubelet.yaml")
        self._run("kubelet")
        self._user("coredns", "coredns", "system:masters")
        self._write("Corefile")
        self._run("coredns")
        self._user("kube-proxy", "system:kube-proxy")
        self._run("kube-proxy")
        wait_until("the real node is ready", self._ready, 60, among=list(self.components.values()), poll=0.2)

    # ------------------------------------------------------------------ namespaces and network

    def _enter(self) -> None:
        ready = self.directory / "init-ready"
        # --kill-child: when unshare is killed, as all components are at the end, the kernel kills its child processes.
        flags = ["--mount", "--pid", "--net", "--uts", "--ipc", "--fork", "--kill-child=SIGKILL", "--mount-proc"]
        command = ["unshare", *flags, "sh", "-c", _INIT, "init", str(ready), NAME]
        init = Component("node-init", command, self.layout.directory / "logs", {})
        self._start(init)
        wait_until("the node's namespaces exist", ready.exists, 10, among=[init])
        first = Path(f"/proc/{init.pid}/task/{init.pid}/children").read_text().split()[0]
        self._init.write_text(identity(int(first)))

    def inside(self, *command: str) -> list[str]:
        """The command line that runs `command` on the node."""
        flags = ["--target", str(self._pid()), "--mount", "--net", "--pid", "--uts", "--ipc", "--"]
        return ["nsenter", *flags, *command]

    def _connect(self) -> None:
        """Create a veth pair between this machine (`gateway`) and the node (`address`), and the bridge of the pods."""
        node = [
            "ip link set lo up",
            f"ip address add {self.address}/30 dev eth0",
            "ip link set eth0 up",
            f"ip route add default via {self.layout.gateway}",
            # With an own address: else it has the lowest one of its pods, and changes it when pods come and go.
            f"ip link add {_BRIDGE} address {_BRIDGE_MAC} type bridge",
            f"ip address add {_DNS}/16 dev {_BRIDGE}",
            f"ip link set {_BRIDGE} up",
            "echo 1 > /proc/sys/net/ipv4/ip_forward",
        ]
        _run(["ip", "link", "add", self._interface, "type", "veth", "peer", "name", "eth0", "netns", str(self._pid())])
        _run(["ip", "address", "add", f"{self.layout.gateway}/30", "dev", self._interface])
        _run(["ip", "link", "set", self._interface, "up"])
        _run(self.inside("sh", "-ec", "\n".join(node)))
        port = str(self.layout.ports["api"])
        command = [sys.executable, "-m", "tests.testcluster.relay", self.layout.gateway, port, port]
        root = str(Path(__file__).parents[2])
        self._start(Component("relay", command, self.layout.directory / "logs", {"PYTHONPATH": root}))

    # ------------------------------------------------------------------ programs

    def _start(self, component: Component) -> Component:
        self.components[component.name] = component
        component.start()
        return component

    def _run(self, name: str) -> Component:
        program = build.program(name)
        environment = {"PATH": f"{program.parent}:{os.environ.get('PATH', os.defpath)}"}  # containerd finds its shim
        command = self.inside(str(program), *read_flags(name, self._values))
        return self._start(Component(name, command, self.layout.directory / "logs", environment))

    def _write(self, name: str, directory: str = "") -> None:
        write_file(name, self.directory / directory, self._values)

    def _user(self, program: str, name: str, organization: str = "") -> None:
        """Write the kubeconfig of a program of the node."""
        pair = self.layout.authority.issue(name, organization)
        authority = self.layout.authority.certificate.read_bytes()
        server = f"https://{self.layout.gateway}:{self.layout.ports['api']}"
        user = client_user(pair.certificate, pair.key)
        write_kubeconfig(self.directory / f"{program}.kubeconfig", server, authority, user)

    def _containerd(self) -> None:
        image_store.link(self.directory / "containerd")
        for name in ("cni", "registries"):
            (self.directory / name).mkdir()
        self._write("bridge.conflist", "cni")
        self._write("containerd.toml")
        containerd = self._run("containerd")
        wait_until("containerd answers", lambda: self._ctr("version"), 30, among=[containerd])

    def load(self, archive: Path) -> None:
        """Make an image (`images.write_image`) available to pods under the name it has in the archive."""
        if not self._ctr("images", "import", "--no-unpack", str(archive)):
            raise ComponentError(f"cannot import {archive}: {self._error}")

    def kill_container(self, reference: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the first process of a container (``containerd://…`` in its pod's status)."""
        if not self._ctr("tasks", "kill", "--signal", how.name, reference.removeprefix("containerd://")):
            raise ComponentError(f"cannot send {how.name} to {reference}: {self._error}")

    def kill_unnoticed(self, reference: str, seconds: float) -> None:
        """Kill the first process of a container. The node notices it after some seconds, as a busy node does."""
        pid = self._process(reference)
        shim = f"$(awk '/^PPid:/ {{print $2}}' /proc/{pid}/status)"
        script = f"shim={shim}; kill -STOP $shim; kill -KILL {pid}; sleep {seconds}; kill -CONT $shim"
        _run(self.inside("sh", "-ec", script))

    def drop_packets(self, reference: str, address: str) -> None:
        """Drop all packets that arrive at the pod of a container from an address. The rule ends with the pod."""
        pid = self._process(reference)
        rule = ["iptables", "--wait", "--insert", "INPUT", "--source", address, "--jump", "DROP"]
        _run(self.inside("nsenter", "--target", str(pid), "--net", "--", *rule))

    @contextmanager
    def slow_disk(self, reference: str, disk: Path, bytes_per_second: int) -> Iterator[None]:
        """Limit the reads and writes of a container that bypass the page cache.

        A process that waits for a disk cannot be killed: the container does not end before its limit.

        Args:
            reference: The container.
            disk: A file on the disk; without partitions, since the kernel limits whole disks.
            bytes_per_second: The limit, for reads and for writes.
        """
        device = disk.stat().st_dev
        (group,) = BLKIO.glob(f"{self.cgroup}/**/{reference.removeprefix('containerd://')}")

        def limit(number: int) -> None:
            for direction in ("read", "write"):
                text = f"{os.major(device)}:{os.minor(device)} {number}"
                (group / f"blkio.throttle.{direction}_bps_device").write_text(text)

        limit(bytes_per_second)
        try:
            yield
        finally:
            with suppress(FileNotFoundError):
                limit(0)

    def _process(self, reference: str) -> int:
        """The first process of a container, in the node's PID namespace."""
        self._ctr("tasks", "list")
        found = re.search(rf"^{reference.removeprefix('containerd://')}\s+(\d+)", self._output, re.MULTILINE)
        if found is None:
            raise ComponentError(f"{reference} does not run: {self._error}")
        return int(found[1])

    def _ctr(self, *arguments: str) -> bool:
        command = self.inside(str(build.program("ctr")), "--address", _SOCKET, "--namespace", "k8s.io")
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        self._output, self._error = done.stdout, done.stderr.strip()
        return done.returncode == 0

    def _ready(self) -> bool:
        node = self.api.get("v1", "Node", "", NAME)
        taints: list[dict[str, Any]] = (node or {}).get("spec", {}).get("taints") or []
        return condition(node, "Ready") is not None and [each["key"] for each in taints] == [LABEL]

    # ------------------------------------------------------------------ end

    def stop(self) -> None:
        """End the node with all its pods, and wait for its end; `remove_cgroups` removes its cgroups."""
        if pid := self._pid():
            # Do not kill its parent or those of the programs: the kernel ends the namespace only after they have reaped
            # their child processes. The machine's first process can take seconds to reap orphans.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            inside = [each for name, each in self.components.items() if name != "relay"]
            wait_until("the node's processes have ended", lambda: not any(each.alive for each in inside), 30)
        for component in self.components.values():
            component.kill()
        # The kernel deletes it with the namespace, but a moment later.
        subprocess.run(["ip", "link", "delete", self._interface], capture_output=True, check=False)

    def _make_cgroups(self) -> None:
        """Create one cgroup per hierarchy: the kubelet requires an existing root."""
        (self.layout.directory / "cgroup").write_text(self.cgroup)
        for hierarchy in _hierarchies():
            (hierarchy / self.cgroup).mkdir(exist_ok=True)


def _hierarchies() -> list[Path]:
    if (_CGROUPS / "cgroup.controllers").exists():
        return [_CGROUPS]
    return [each for each in _CGROUPS.iterdir() if (each / "cgroup.procs").exists() and not each.is_symlink()]


def remove_cgroups(name: str) -> None:
    """Remove a cgroup and its children; the kernel refuses until all killed processes have ended, so retry."""
    deadline = time.monotonic() + 10
    for hierarchy in _hierarchies():
        for directory, _, _ in os.walk(hierarchy / name, topdown=False):
            while True:
                with suppress(FileNotFoundError):
                    try:
                        Path(directory).rmdir()
                    except OSError:
                        if time.monotonic() > deadline:
                            raise
                        time.sleep(0.05)
                        continue
                break


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ComponentError(f"{' '.join(command)}: {done.stderr.strip()}")
