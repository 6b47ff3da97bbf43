"""Which jobs of a run another run waits for: runs of one study key share the trials of the study."""

from __future__ import annotations

import os
from contextlib import suppress

from trainjob import TrainJobClient, TrainJobError
from trainjob._backends.base import Run, TrainJob
from trainjob._jobs.ended_runs import Waits, others_wait, run_of
from trainjob._manifest.workflow_labels import kfp_label
from trainjob._support.kube_objects import mapping
from trainjob.job import KEY
from trainjob_kfp.steplog import write_line


class SharedJobs:
    """Decides which jobs this run may stop.

    Jobs whose key contains the id of the run belong to it alone. Other jobs can have been adopted by another run: one
    is stopped only if this run launched it, or if its origin is unknown, and no process of another run waits for it.
    Which process waits for which jobs is in Leases; where they cannot be listed, only jobs of this run's label are
    stopped.

    Args:
        client: A client of the jobs' backend and namespace.
        run: Id of the run.
        own: Whether this process is in a pod of that run.
    """

    def __init__(self, client: TrainJobClient, run: str, *, own: bool = True) -> None:
        self._client = client
        self._prefix = f"kfp/{run}/"
        self._label = kfp_label(run)
        self._own = own
        self._workflow: str | None = None
        self._waits: Waits | None = None
        self._refused = ""

    def is_shared(self, key: str) -> bool:
        """Whether another run can wait for the jobs of that key."""
        return bool(key) and not key.startswith(self._prefix)

    async def refresh(self) -> None:
        """Read which jobs other runs wait for. After an error, what was known before remains."""
        cluster = self._client.backend.cluster
        if cluster is None:
            return
        if self._own and self._workflow is None:
            self._workflow = await self._workflow_of_this_pod()
        try:
            waiters = await cluster.waiters(self._client.namespace)
        except TrainJobError as error:
            if not self._refused:
                self._refused = str(error)
                write_line(f"only jobs that this run has launched would be stopped: Leases cannot be listed: {error}")
            return
        self._waits = others_wait([each for each in waiters if not each.own], cluster.now())

    def may_stop(self, job: TrainJob) -> bool:
        """Whether no other run needs the job, as far as is known since the latest `refresh`."""
        if not self.is_shared(str(mapping(job, "metadata", "annotations").get(KEY) or "")):
            return True
        if self._waits is None:
            return run_of(job) == self._label
        run = Run(self._label, self._workflow or "", "running")
        return run_of(job) in ("", self._label) and not self._waits(job, run)

    async def _workflow_of_this_pod(self) -> str:
        """The name of the Argo Workflow that created this step's pod; empty if it is unknown."""
        cluster, pod = self._client.backend.cluster, os.environ.get("KFP_POD_NAME", "")
        if cluster is not None and pod:
            with suppress(TrainJobError):
                for owner in await cluster.owners_of_pod(cluster.default_namespace, pod):
                    if owner.get("kind") == "Workflow":
                        return str(owner.get("name") or "")
        return ""
