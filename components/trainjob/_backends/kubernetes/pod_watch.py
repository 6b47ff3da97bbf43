"""The watch of the pods of jobs: what follows their logs listens to it, and crashes of their containers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainjob._backends.kubernetes.blockers import RelatedObjects
from trainjob._backends.kubernetes.client import ApiClient
from trainjob._backends.kubernetes.errors import Transient
from trainjob._backends.kubernetes.pods import JOBSET_NAME, collection, crashes_of, gather, log_fields
from trainjob._backends.kubernetes.shared_watch import SharedWatch
from trainjob._diagnosis.cluster import terminations_in
from trainjob._diagnosis.evidence import Evidence
from trainjob.job import JobRef

# Ranks that lose their peer end within a fraction of a second of it, and a kubelet checks its containers once per
# second: the first crash reported need not be the root cause. Crashes within this time are reported together.
_GROUP_SECONDS = 0.8

Pod = Mapping[str, Any]


class PodWatch(SharedWatch):
    """All pods of a namespace's JobSets, or of one job. The key of a pod is the name of its job.

    A further listener costs no request. Of a pod it keeps the fields that reading the log needs, 1.5 KB, and the
    complete pod if it crashed.

    Args:
        client: The connection.
        namespace: Namespace of the jobs.
        job: Name of the only job to watch; all if empty.
    """

    def __init__(self, client: ApiClient, namespace: str, job: str = "") -> None:
        selector = {"labelSelector": f"{JOBSET_NAME}={job}" if job else JOBSET_NAME}
        super().__init__(client, collection(namespace, "pods"), selector, single=bool(job))
        self._related = RelatedObjects(client, namespace)

    def key_of(self, item: Pod) -> str:
        """The name of the pod's job."""
        job: str = item["metadata"]["labels"][JOBSET_NAME]
        return job

    def kept_of(self, item: Pod) -> Pod:
        """The fields that reading the log needs, or the complete pod."""
        return item if crashes_of(item) else log_fields(item)

    async def crashes(self, ref: JobRef) -> AsyncGenerator[Evidence]:
        """The crashes of a job, first those already recorded in its pods; crashes close in time come together.

        Raises:
            TrainJobError: Pods may not be listed, an outage used up its retries, or the backend was closed.
        """
        seen: dict[str, set[tuple[str, str]]] = {}
        # Only pods with a crash: of a pod that is deleted soon, a later state shows none any more.
        with self.listen(ref.name, crashes_of) as listener:
            while True:
                await listener.news()
                found, _, _ = listener.take()
                if not any(crashes_of(pod) - seen.get(uid, set()) for uid, pod in found.items()):
                    continue
                await asyncio.sleep(_GROUP_SECONDS)
                if listener.error is None:
                    found = {**found, **listener.take()[0]}
                crashed = [pod for uid, pod in found.items() if crashes_of(pod) - seen.get(uid, set())]
                present = self.known.get(ref.name, {})
                seen = {uid: crashes for uid, crashes in seen.items() if uid in present}
                seen |= {uid: crashes_of(pod) for uid, pod in found.items()}
                if crashed:
                    yield await self._evidence(ref, crashed)

    async def _evidence(self, ref: JobRef, crashed: Sequence[Pod]) -> Evidence:
        evidence = await gather(self.client, crashed, None)
        if not any(crash.killed for crash in terminations_in(crashed)):
            return evidence
        try:  # Only Events show that the kubelet killed a container after a failed probe or hook.
            events = await self._related.events(ref)
        except Transient as error:
            return replace(evidence, unseen=[*evidence.unseen, f"events: {error.message}"])
        hidden = [f"{what}: {message}" for what, message in self._related.hidden.items()]
        return replace(evidence, events=events, unseen=[*evidence.unseen, *hidden])
