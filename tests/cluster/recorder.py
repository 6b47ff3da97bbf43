"""Records the objects that the controllers create for jobs."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.pods import JOBSET, REPLICATED_JOB
from tests.testcluster.access import TRAINER, Access
from tests.testcluster.api import Api

Object = dict[str, Any]


@dataclass
class Ran:
    """The TrainJob at its end, and its pods by replicated job and rank, each in its last recorded state."""

    job: Object
    pods: dict[str, list[Object]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.job["metadata"]["namespace"])


class Recorder:
    """Polls the pods of all TrainJobs: the pods of an MPI job's nodes are deleted at its end."""

    def __init__(self, cluster: Access) -> None:
        self._cluster = cluster
        self._seen: dict[str, Object] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll)

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _poll(self) -> None:
        with closing(Api(self._cluster.kubeconfig)) as api:
            last = False
            while not last:
                last = self._stop.wait(0.3)
                for pod in api.find("v1", "Pod", labels=JOBSET):
                    if "deletionTimestamp" not in pod["metadata"]:
                        self._seen[pod["metadata"]["uid"]] = pod

    def ran(self, namespace: str) -> dict[str, Ran]:
        """Runtime -> the objects of its job in that namespace."""
        jobs = self._cluster.api.find(TRAINER, "TrainJob", namespace)
        ran = {str(job["spec"]["runtimeRef"]["name"]): Ran(job) for job in jobs}
        assert len(ran) == len(jobs), "one job of each runtime"
        named = {each.name: each for each in ran.values()}
        for pod in sorted(self._seen.values(), key=lambda pod: str(pod["metadata"]["name"])):
            if pod["metadata"]["namespace"] == namespace:
                labels = pod["metadata"]["labels"]
                pods = named[labels[JOBSET]].pods
                pods.setdefault(labels[REPLICATED_JOB], []).append(pod)
        return ran
