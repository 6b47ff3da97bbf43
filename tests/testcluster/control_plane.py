"""`Cluster`: the cluster that runs on this machine."""

from __future__ import annotations

import fcntl
import secrets
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import httpx
import yaml
from tests.processes import Component, ComponentError, listens, wait_until
from tests.testcluster import build, kueue, nodes, status_api, webhooks
from tests.testcluster.access import JOBSET, TRAINER, Access, condition
from tests.testcluster.api import ApiError, client_user, write_kubeconfig
from tests.testcluster.components import Layout, read_objects
from tests.testcluster.manifests import load, point
from tests.testcluster.real_node import RealNode, remove_cgroups

_PREFIX = "trainjob-cluster-"
_NOT_YET = (ApiError, httpx.TransportError)


class Cluster(Access):
    """etcd, API server, controller manager, scheduler, JobSet, Trainer, Kueue and simulated nodes.

    All components listen on 127.0.0.1 only, have their files in one directory, and end with this process.

    Args:
        directory: Directory of all files, empty or missing; by default a temporary one. `stop` removes it.
        kueue: Whether to run Kueue, with the ClusterQueue ``gpus`` for all simulated GPUs.
        simulated_nodes: Number of simulated nodes.
        gpus_per_node: GPUs of each simulated node.
        controllers: Whether to run more than etcd, the API server and the definitions of Trainer and JobSet. Without
            controllers only the test changes objects; there are no runtimes, service accounts and webhooks.
        api_server_flags: Additional flags of the API server.
        real_node: Whether to start a node that runs real pods (`start_real_node`).
        older: Group of `build.OLDER` whose older releases replace the newest, e.g. trainer-2.1.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        kueue: bool = True,
        simulated_nodes: int = 4,
        gpus_per_node: int = 8,
        controllers: bool = True,
        api_server_flags: Sequence[str] = (),
        real_node: bool = False,
        older: str = "",
    ) -> None:
        self._given = directory.absolute() if directory else None
        self._kueue = kueue
        self._nodes = [nodes.node(index, gpus_per_node) for index in range(simulated_nodes)]
        self._quota = simulated_nodes * gpus_per_node
        self._with_controllers = controllers
        self._api_server_flags = api_server_flags
        self._with_real_node = real_node
        self._older = older
        self._lock: IO[str] | None = None
        self.components: dict[str, Component] = {}
        self.real_node: RealNode | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @classmethod
    def attached(cls, directory: Path) -> Self:
        """The cluster that another process started in `directory`, without its components: that process ends them."""
        cluster = cls(directory)
        cluster.layout = Layout.read(directory)
        Access.__init__(cluster, cluster.layout.kubeconfig, directory)
        node = RealNode(cluster.layout, cluster.api)
        cluster.real_node = node if node.exists else None
        return cluster

    # ------------------------------------------------------------------ start

    def start(self) -> None:
        """Build missing programs, start all components, and return once a TrainJob can be created."""
        build.ensure("control-plane", *filter(None, [self._older, "node" if self._with_real_node else ""]))
        sweep()
        self._directory = directory = self._given or Path(tempfile.mkdtemp(prefix=_PREFIX))
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ComponentError(f"another cluster is up in {directory}") from None
        self._lock = lock
        # A separate /30 network between this machine and the real node.
        number = secrets.randbelow(16384)
        self.layout = Layout.make(directory, f"10.87.{number // 64}.{number % 64 * 4 + 1}", self._older)
        user = client_user(self.layout.client.certificate, self.layout.client.key)
        authority = self.layout.authority.certificate.read_bytes()
        write_kubeconfig(self.layout.kubeconfig, self.layout.server, authority, user)
        super().__init__(self.layout.kubeconfig, directory)
        self._run("etcd")
        self._run("kube-apiserver", *self._api_server_flags)
        self._api_ready()
        if self._with_controllers:
            self._run("kube-controller-manager")
            self._run("kube-scheduler")
        self._controllers()
        if self._with_controllers:
            self._simulated_nodes()
            self._create_runtimes_and_queues()
        if self._with_real_node:
            self.start_real_node()

    def _run(self, program: str, *flags: str) -> Component:
        self.components[program] = component = self.layout.component(program, *flags)
        component.start()
        return component

    def _api_ready(self) -> None:
        alive = [self.components["etcd"], self.components["kube-apiserver"]]
        is_ready = partial(self.api.request, "GET", "/readyz")  # an ApiError until then
        wait_until("the API server is ready", is_ready, 60, among=alive, ignore=_NOT_YET)

    def _serves_stored_objects(self) -> bool:
        """Request each kind: even a ready API server answers 429 until it has read the objects of a kind from etcd."""
        for api, kind in ((TRAINER, "TrainJob"), (JOBSET, "JobSet"), ("v1", "Pod"), ("v1", "Event")):
            self.api.find(api, kind, "default")
        return True

    def _controllers(self) -> None:
        """Start JobSet, Trainer and Kueue: first definitions, then the programs, then the webhooks."""
        owners = ("jobset", "trainer", *(["kueue"] if self._kueue else []))
        bundle = self.layout.authority.bundle

        def objects(kind: str) -> list[dict[str, Any]]:
            return [
                each
                for owner in owners
                for each in point(load(build.rendered(owner, self._older), kind), self.layout.ports[owner], bundle)
            ]

        self.define(objects("crds"))
        if not self._with_controllers:
            return
        for owner in owners:
            self._run(owner)
        self._apply(objects("webhooks"))

    def define(self, definitions: Sequence[dict[str, Any]]) -> None:
        """Create CustomResourceDefinitions, and return when clients can discover them."""
        self._apply(definitions)
        for name in [each["metadata"]["name"] for each in definitions]:
            wait_until(f"{name} is served", partial(self._established, name), 60)

    def _established(self, definition: str) -> bool:
        found = self.api.get("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", definition)
        return found is not None and condition(found, "Established") is not None and self._discovered(found["spec"])

    def _discovered(self, definition: dict[str, Any]) -> bool:
        """Whether clients can discover the definition, which takes a moment; Kueue exits if its kinds are missing."""
        versions = [each["name"] for each in definition["versions"] if each["served"]]
        with suppress(ApiError):  # the first definition of a group
            found = [self.api.request("GET", f"/apis/{definition['group']}/{version}") for version in versions]
            return all(definition["names"]["plural"] in {each["name"] for each in one["resources"]} for one in found)
        return False

    def _apply(self, objects: Iterable[dict[str, Any]]) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self.api.apply, objects))

    def _simulated_nodes(self) -> None:
        log = self.directory / "simulated-pods.log"
        log.write_text("2026-01-01T00:00:00.000000000Z stdout F log of a simulated pod\n")
        documents = nodes.configuration(load(build.rendered("kwok"), "stages"), str(log))
        (self.directory / "kwok.yaml").write_text(yaml.safe_dump_all(documents))
        self._run("kwok")
        for each in (*self._nodes, *nodes.volumes()):
            self.api.create(each)

    def _create_runtimes_and_queues(self) -> None:
        """Create runtimes and queues, and wait until their webhooks admit them."""
        among = [each for name, each in self.components.items() if name in ("trainer", "kueue", "jobset")]
        runtimes = load(build.rendered("trainer", self._older), "runtimes")
        queues = [kueue.flavor(), kueue.cluster_queue(gpu=self._quota)] if self._kueue else []
        for each in (*runtimes, *queues):
            what = f"{each['kind']} {each['metadata']['name']} is admitted"
            wait_until(what, partial(self.api.apply, each), 60, among=among, ignore=_NOT_YET)
        webhooks.wait(self.api, self.components)
        among = [self.components["kwok"], self.components["kube-controller-manager"]]
        wait_until("the simulated nodes are ready", self._nodes_ready, 60, among=among)

    def _nodes_ready(self) -> bool:
        # A taint blocks scheduling; it is removed after the condition is set.
        found = self.api.find("v1", "Node", labels=f"{nodes.LABEL}=simulated")
        return len(found) == len(self._nodes) and not any(each["spec"].get("taints") for each in found)

    def start_real_node(self) -> None:
        """Start the node that runs real pods (`real_node.RealNode`)."""
        build.ensure("node")
        self.real_node = RealNode(self.layout, self.api)
        self.real_node.start()

    def start_gang_scheduling(self) -> None:
        """Define the PodGroups of coscheduling and Volcano, and start the scheduler of the former.

        Trainer creates PodGroups only of kinds that are defined when it starts, so it is restarted.
        """
        build.ensure("gangs")
        self.define([each for owner in ("coscheduling", "volcano") for each in load(build.rendered(owner), "crds")])
        self.restart("trainer")
        self._run("coscheduler")

    @contextmanager
    def status_api(self) -> Iterator[None]:
        """Context manager: run Trainer with the feature gate ``TrainJobStatus`` (`tests.testcluster.status_api`)."""
        self.api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": status_api.NAMESPACE}})
        self._apply(status_api.objects(self.layout))
        token = self.token_for(status_api.ACCOUNT, status_api.NAMESPACE)
        usual = self.components["trainer"]
        usual.kill()
        self.components["trainer"] = reporting = status_api.controller(self.layout, token)
        try:
            self.start_component("trainer")
            port = self.layout.ports["trainer-status"]
            wait_until("Trainer's status server listens", lambda: listens(port), 30, among=[reporting])
            yield
        finally:
            reporting.kill()
            self.components["trainer"] = usual
            self.start_component("trainer")

    @contextmanager
    def visibility_api(self) -> Iterator[None]:
        """Context manager: serve Kueue's pending workloads as an API."""
        with self.forwarded("visibility.kueue.x-k8s.io", ("v1beta2", "v1beta1"), self.layout.ports["kueue-visibility"]):
            yield

    @contextmanager
    def metrics_api(self) -> Iterator[None]:
        """Context manager: serve the CPU and memory that pods of the real node use, by metrics-server."""
        server = self._run("metrics-server")
        try:
            port = self.layout.ports["metrics"]
            wait_until("metrics-server listens", lambda: listens(port), 30, among=[server])
            with self.forwarded("metrics.k8s.io", ("v1beta1",), port):
                yield
        finally:
            server.kill()
            del self.components["metrics-server"]

    @contextmanager
    def forwarded(self, group: str, versions: Sequence[str], port: int) -> Iterator[None]:
        """Context manager: the API server forwards requests for `group` to `port` of this machine (HTTPS)."""
        values = {"group": group, "name": group.replace(".", "-"), "port": port}
        objects = [
            each for version in versions for each in read_objects("forwarded.yaml", {**values, "version": version})
        ]
        try:
            for each in objects:
                self.api.apply(each)
            for version in versions:
                path = f"/apis/{group}/{version}"
                wait_until(f"{path} is served", partial(self.api.request, "GET", path), 60, ignore=_NOT_YET)
            yield
        finally:
            for each in objects:
                metadata = each["metadata"]
                self.api.delete(each["apiVersion"], each["kind"], metadata.get("namespace", ""), metadata["name"])

    # ------------------------------------------------------------------ stop

    def stop(self) -> None:
        """End every process and remove every file."""
        if self._lock is None:
            return
        self.close()
        try:
            if self.real_node is not None:
                self.real_node.stop()
        finally:
            # In reverse order, so that no component logs errors about the others.
            for component in reversed(self.components.values()):
                component.kill()
            clean(self._directory)
            self._lock.close()
            self._lock = None

    # ------------------------------------------------------------------ faults

    def lacks(self, feature: str) -> str:
        """Why the cluster lacks a feature; the process that started it can kill and restart its components."""
        return "" if feature == "processes" and self._lock else super().lacks(feature)

    def kill(self, program: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Kill one component, e.g. ``kube-apiserver``."""
        self._component(program).kill(how)

    def start_component(self, program: str) -> None:
        """Restart a killed component on the same port and data, and return when it answers."""
        component = self._component(program)
        component.start()
        if program in ("etcd", "kube-apiserver"):
            self._api_ready()
            alive = [self.components["etcd"], self.components["kube-apiserver"]]
            wait_until("the stored objects are served", self._serves_stored_objects, 60, among=alive, ignore=_NOT_YET)
            # Its watches retry only after up to 30 s each; until then a new namespace has no service account.
            if "kube-controller-manager" in self.components:
                self.restart("kube-controller-manager")
        webhooks.wait(self.api, {program: component})

    def restart(self, program: str) -> None:
        """Kill a component and start it again."""
        self.kill(program)
        self.start_component(program)

    def pause(self, program: str) -> None:
        """Stop a component with SIGSTOP: its connections stay open but nothing answers, until `resume`."""
        self._component(program).send(signal.SIGSTOP)

    def resume(self, program: str) -> None:
        """Undo `pause`."""
        self._component(program).send(signal.SIGCONT)

    def _component(self, program: str) -> Component:
        node = self.real_node.components if self.real_node else {}
        known = {**self.components, **node}
        if program not in known:
            raise ComponentError(f"unknown component {program!r}; known: {', '.join(known)}")
        return known[program]

    def compact(self) -> int:
        """Compact etcd's history, and return the current revision.

        The API server serves watches and pages of lists from its memory as long as it can. Restart it as well to make
        it answer 410 to requests for old revisions.
        """
        with httpx.Client(base_url=f"http://127.0.0.1:{self.layout.ports['etcd']}", timeout=30) as etcd:
            revision = int(etcd.post("/v3/maintenance/status", json={}).json()["header"]["revision"])
            answer = etcd.post("/v3/kv/compaction", json={"revision": str(revision), "physical": True})
            if not answer.is_success and "compacted" not in answer.text:
                raise ComponentError(f"etcd does not compact: {answer.text}")
        return revision

    def versions(self) -> dict[str, str]:
        """Component -> version."""
        found = {"kubernetes": self.api.request("GET", "/version")["gitVersion"]}
        for name in ("jobset", "trainer", "kwok", "kueue"):
            module = build.module_of(name, self._older)
            found[name] = module.version(module.manifests[name])
        return found


def clean(directory: Path) -> None:
    """Remove the files and cgroups of a cluster whose process has ended; its components ended with it."""
    with suppress(OSError):
        remove_cgroups((directory / "cgroup").read_text())
    subprocess.run(["rm", "-rf", "--", directory], check=False, capture_output=True)  # unpacked images: 100,000 files


def sweep() -> None:
    """`clean` the directories of all clusters whose process was killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError), (directory / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            clean(directory)
