"""Preemptions of a training in real pods: its weights are those of no preemption, and its lost time is counted.

A campaign (`tests.campaigns`). `tests.local.preempted` is the training.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from tests import campaigns
from tests.cluster import failing, lost_time
from tests.cluster.backends import backend_of
from tests.cluster.pods import evict, pods_of
from tests.cluster.waits import until
from tests.local import preempted
from tests.local.training_logs import Files, Life, Result, lives_of
from tests.processes import free_port
from tests.testcluster import kueue, step_image as steps
from tests.testcluster.access import Access
from tests.testcluster.control_plane import Cluster

from trainjob import JobRef, TrainJobResult, TrainJobSpec
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.cancellation import cancel
from trainjob._jobs.launching import launch
from trainjob._jobs.waiting import wait
from trainjob.goodput import Activity

pytestmark = pytest.mark.anyio

PER_RUN = 4 if campaigns.FULL else 2
PREEMPTIONS = campaigns.runs(100, 2)
AT_ONCE = 4
INSTANTS = ("time", "step", "write", "write")
SAVERS = ("digits", "trainjob")
WAYS = ("queue", "node", "eviction", "SIGTERM")
EPOCHS = 14
KERNELS = {name: value for name, value in os.environ.items() if name.startswith("OPENBLAS_")} | {
    "OPENBLAS_NUM_THREADS": "1"
}
"""Environment of each training, on this machine and in pods: the same kernels of OpenBLAS, and sums in one order."""
ROOT = Path(preempted.__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory for pods, with the training and what it reads."""
    for part in ("tests/local/preempted.py", "dags_examples/training/digits.py"):
        (tmp_path / part).parent.mkdir(parents=True)
        shutil.copy(ROOT / part, tmp_path / part)
    shutil.copytree(preempted.DATA, tmp_path / "dags_examples" / "data")
    tmp_path.chmod(0o775)  # a volume of type hostPath does not get the pods' `fsGroup`
    return tmp_path


def undisturbed(world: int, directory: Path) -> Result:
    """The result of a training on this machine, which has the same versions of its libraries as the pods."""
    files = Files(directory)
    command = [sys.executable, preempted.__file__, "digits", f"--dataset={preempted.DATA}"]
    common = {"JAX_NUM_PROCESSES": str(world), "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}"}
    ranks = [
        subprocess.Popen(
            [*command, f"--output={files.model}", f"--epochs={EPOCHS}"],
            env={**os.environ, **common, **KERNELS, "JAX_PROCESS_ID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    return files.result([line for rank in ranks for line in rank.communicate()[0].splitlines()], world)


class Training:
    """One training on the real node, in a queue in which only it or something more urgent has room.

    The namespace has the PVC ``volume``, whose directory is `folder`, and a priority class of its name.
    """

    def __init__(
        self,
        cluster: Cluster,
        backend: KubernetesBackend,
        namespace: str,
        folder: Path,
        key: str,
        chance: random.Random,
        world: int,
        saver: str,
    ) -> None:
        self.cluster, self.backend, self.namespace = cluster, backend, namespace
        self.key, self.chance, self.world, self.saver = key, chance, world, saver
        self.scripts, self.folder = folder, folder / key
        self.queue = f"{namespace}-{key}"
        self.files = Files(self.folder)
        for directory in (self.folder, self.files.model, self.files.checkpoints):
            directory.mkdir()
            directory.chmod(0o775)
        self.queued: list[tuple[float, float]] = []  # for each preemption by Kueue, its shortest and longest time
        self.seen = Counter[str]()
        self.result: TrainJobResult | None = None
        self.ended = 0.0

    async def run(self, ways: list[str]) -> TrainJobResult:
        """Train, with these preemptions."""
        api = self.cluster.api
        api.apply(kueue.cluster_queue(self.queue, cpu="100m"))
        api.create(kueue.local_queue(self.namespace, self.key, self.queue))
        self.launched = [time.time()]
        fields = {"runtime": "jax-resilient", "checkpoints": f"pvc://volume/{self.key}/checkpoints"}
        self.ref = await self._launch(self.key, self.command, self.world, 30, **fields)
        self.launched.append(time.time())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._wait)
            for way in ways:
                await self._instant()
                if self.result is not None:
                    break
                await self._preempt(way)
                self.seen.update(["preemptions", way])
        assert self.result is not None
        api.delete(kueue.API, "ClusterQueue", "", self.queue)
        return self.result

    async def _wait(self) -> None:
        with anyio.fail_after(400):
            self.result = await wait(self.backend, self.ref)
            self.ended = time.time()

    @property
    def command(self) -> str:
        """The command of a rank, whose log is a file: the log of a pod is gone with the pod."""
        data, model = f"{self.scripts}/dags_examples/data", self.files.model
        script = f"python {self.scripts}/tests/local/preempted.py {self.saver} --dataset={data} --output={model}"
        log = f"{self.folder}/log-$JOB_COMPLETION_INDEX-`date +%s%N`"
        return f"umask 2; exec {script} --epochs={EPOCHS} >> {log} 2>&1"

    async def _launch(self, key: str, command: str, world: int, cpu: int, **fields: Any) -> JobRef:
        spec = {
            "image": steps.IMAGE,
            "num_nodes": world,
            "command": ["sh", "-c", command],
            # An empty variable, and a quantity that the API server normalizes: Kueue must still start the job.
            "env": {**KERNELS, "STEP_SECONDS": "0.05", "EMPTY": ""},
            "resources_per_node": {"requests": {"cpu": f"0.{cpu:03}", "memory": "100Mi"}},
            **failing.mounted({"name": "folder", "hostPath": {"path": str(self.scripts)}}, str(self.scripts)),
            **fields,
        }
        labels = {kueue.QUEUE_LABEL: self.key, **spec.pop("labels", {})}
        return await launch(self.backend, TrainJobSpec.parse({**spec, "labels": labels}), key, namespace=self.namespace)

    # ------------------------------------------------------------------ preemptions

    def logs(self, rank: int = 0) -> list[Path]:
        """The logs of a rank, the latest last."""
        return sorted(self.folder.glob(f"log-{rank}-*"))

    def life(self) -> Life:
        """What the current process of rank 0 has logged."""
        return lives_of(self.logs()[-1].read_text().splitlines())[0] if self.logs() else Life()

    async def _until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition, or for the end of the training."""
        await until(lambda: self.result is not None or condition(), 200)

    async def _instant(self) -> None:
        """Wait for a random instant: at any time, in a step or while a checkpoint is written."""
        await self._until(lambda: self.life().resumed is not None)
        instant = self.chance.choice(INSTANTS)
        if instant == "write":
            earlier = self.files.unfinished()
            await self._until(lambda: self.files.unfinished() - earlier)
        elif instant == "step":
            number = self.chance.randint(1, 12)
            await self._until(lambda: len(self.life().steps) >= number)
        await anyio.sleep(self.chance.uniform(0, 0.5 if instant == "time" else 0.03))

    def _pods(self) -> list[dict[str, Any]]:
        return pods_of(self.cluster, self.ref)

    async def _preempt(self, way: str) -> None:
        """Preempt the training, and wait until it has resumed."""
        lives = len(self.logs())
        if way == "queue":
            await self._by_queue()
        else:
            await anyio.to_thread.run_sync(self._disrupt, way)
        await self._until(lambda: len(self.logs()) > lives and self.life().resumed is not None)
        if way == "queue":
            shortest, begun = self.queued[-1]
            self.queued[-1] = shortest, time.time() - begun

    async def _by_queue(self) -> None:
        """Let a more urgent job take its place, until no pod is left and some time has passed."""
        number, began = len(self.queued), time.time()
        ends = self.folder / f"end-{number}"
        command = f"until [ -e {ends} ]; do sleep 0.1; done"
        labels = {kueue.PRIORITY_LABEL: self.namespace}
        key = f"{self.key}-urgent-{number}"
        urgent = await self._launch(key, command, 1, 90, runtime="torch-distributed", labels=labels)
        await self._until(lambda: not self._pods())
        stopped = time.time()
        saved = self.files.complete()
        await anyio.sleep(self.chance.uniform(1, 3))
        assert self.files.complete() == saved
        self.queued.append((time.time() - stopped, began))
        ends.touch()
        await cancel(self.backend, urgent)

    def _disrupt(self, way: str) -> None:
        api, node = self.cluster.api, self.cluster.real_node
        assert node is not None
        pods = [pod for pod in self._pods() if "deletionTimestamp" not in pod["metadata"]]
        if not pods:
            return
        name = self.chance.choice(pods)["metadata"]["name"]
        path = api.path("v1", "Pod", self.namespace, name)
        if way == "SIGTERM":
            status = next(pod for pod in pods if pod["metadata"]["name"] == name)["status"]
            node.kill_container(status["containerStatuses"][0]["containerID"], signal.SIGTERM)
        elif way == "eviction":
            evict(self.cluster, self.namespace, name)
        else:  # as PodGC does with the pods of a node that is gone; their processes still run for a moment
            gone = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
            content = "application/merge-patch+json"
            body = {"status": {"phase": "Failed", "conditions": [gone]}}
            api.request("PATCH", f"{path}/status", body, content_type=content)
            api.delete("v1", "Pod", self.namespace, name, grace=0)

    # ------------------------------------------------------------------ results

    def repeated(self) -> int:
        """Check all lives; return the number of steps that were done again."""
        all_lives = (lives_of(log.read_text().splitlines())[0] for log in self.logs())
        lives = [life for life in all_lives if life.resumed is not None]
        assert lives[0].resumed == 0
        for life, following in pairwise(lives):
            assert following.resumed is not None
            life.check(following.resumed, life.resumed)
        return sum(life.begun - (following.resumed or 0) for life, following in pairwise(lives))

    def weights(self) -> Result:
        """Its result."""
        logs = [self.logs(rank)[-1] for rank in range(self.world)]
        return self.files.result([line for log in logs for line in log.read_text().splitlines()], self.world)

    async def check_time(self) -> Mapping[str, float]:
        """Check the time that was lost, as the waiter saw it."""
        assert self.result is not None
        seconds: Mapping[str, float] = self.result.goodput["seconds"]
        measured = await lost_time.measured(self.backend, self.namespace, self.key)
        assert abs(sum(seconds.values()) - measured.wall_seconds) <= max(1.5, 0.01 * measured.wall_seconds)
        last = self.logs()[-1].stat().st_mtime
        shortest, longest = last - self.launched[1], self.ended - self.launched[0]
        lost_time.lasted(measured, shortest, longest, Activity.STALLED)
        slack = lost_time.SECONDS * (len(self.queued) + 1)
        # The lives of rank 0, which sets the time of its log until it ends.
        lives = [(int(log.name.rpartition("-")[2]) / 1e9, log.stat().st_mtime) for log in self.logs()]
        shortest, longest = (sum(each[i] for each in self.queued) for i in (0, 1))
        longest += lives[0][0] - self.launched[0]  # Kueue admits it in that time, too
        assert shortest - slack <= seconds["queued"] <= longest + slack, f"{self.queued}, {seconds}"
        trained = sum(end - begin for begin, end in lives)
        assert seconds["training"] + seconds["repeated"] <= trained + slack, f"{trained}, {lives}, {seconds}"
        assert seconds["starting"] + seconds["restarting"] > 0, seconds
        return seconds


@pytest.mark.timeout(3600)
async def test_a_preempted_training_repeats_at_most_one_interval_and_ends_with_the_same_weights(
    own_cluster: Cluster, real_node: Access, step_image: str, folder: Path, record_property: campaigns.Record
) -> None:
    del real_node, step_image
    campaigns.begin(record_property, PREEMPTIONS)
    worlds = [2 - run // 2 % 2 for run in range(PREEMPTIONS // PER_RUN)]
    expected = {world: undisturbed(world, folder / f"of-{world}") for world in set(worlds)}
    api = own_cluster.api
    backend = backend_of(own_cluster.kubeconfig)
    limiter, total = anyio.CapacityLimiter(AT_ONCE), Counter[str]()
    with (
        own_cluster.namespace("preempted", real=True) as namespace,
        own_cluster.volume(namespace, "volume", folder),
    ):
        api.create(kueue.priority_class(namespace, 1000))

        async def one(run: int) -> None:
            async with limiter:
                chance = random.Random(f"{campaigns.SEED}/{run}")
                ways = [*WAYS[:2], *chance.choices(WAYS, k=PER_RUN - 2)]
                chance.shuffle(ways)
                what = chance, worlds[run], SAVERS[run % 2]
                training = Training(own_cluster, backend, namespace, folder, f"run-{run}", *what)
                await training.run(ways)
                repeated = training.repeated()
                assert training.weights() == expected[training.world], (run, ways)
                seconds = await training.check_time()
                total.update(training.seen)
                total["repeated"] += repeated
                spent = ", ".join(f"{name} {each:.1f}" for name, each in seconds.items() if each)
                campaigns.done(
                    f"run {run}, checkpoints of {training.saver}, {training.world} rank(s): {', '.join(ways)}: "
                    f"{repeated} steps repeated; seconds: {spent}"
                )

        async with anyio.create_task_group() as tasks:
            for run in range(len(worlds)):
                tasks.start_soon(one, run)
    await backend.aclose()
    campaigns.done(f"{dict(total)}")
    assert total["preemptions"] >= 0.9 * len(worlds) * PER_RUN, "few trainings completed before their last preemption"
