"""The real `KubernetesBackend` over the fake API server, in one process and without sockets: for tests of what uses it.

No controller runs. A test does what Trainer would do: `running`, `end`, `status`, `condition`. It decides when a
request is served, what happens before that, and whether the reply is lost: `turn`, `before`, `after`.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from tests import objects
from tests.fakes.kube.objects import JOBSET, Object, merged, with_condition
from tests.fakes.kube.replies import Reply
from tests.fakes.kube.server import Refused, Server, parsed

from trainjob import JobRef, TrainJobSpec
from trainjob._backends.credentials import Access, Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import Timings
from trainjob._backends.kubernetes.leases import JOBS
from trainjob._manifest.attempts import REPLACES
from trainjob._manifest.render import render
from trainjob.errors import NotFound
from trainjob.job import KEY, MANAGED_BY

RUNTIME = "trainjob-step"
CANCELLED_KEY = "trainjob.dev/cancelled-key"
LOST = objects.condition("Ready", "NodeStatusUnknown", value="Unknown")
"""A condition of a pod whose node does not answer."""
_LOOK_SECONDS = 0.005  # between two looks of a watch


class Store(Server):
    """The objects, with what Trainer's webhook refuses and its controller reports about a suspension.

    Attributes:
        ahead: How much its clock is ahead of this machine's.
    """

    def __init__(self) -> None:
        self.ahead = timedelta(0)
        super().__init__(lambda: time.time() + self.ahead.total_seconds())
        self.put("clustertrainingruntimes", {"metadata": {"name": RUNTIME}}, "ADDED")

    def defaulted(self, plural: str, item: Object) -> Object:
        """Refuse a job without a runtime."""
        runtime = item["spec"]["runtimeRef"]["name"] if plural == "trainjobs" else RUNTIME
        if runtime == "nosuch":
            raise Refused(403, "Forbidden", f"{runtime} must be created before the TrainJob is created")
        return item

    def changed(self, plural: str, item: Object, who: str) -> None:
        """Report a suspension, and its end."""
        if plural != "trainjobs":
            return
        suspended = bool(item["spec"].get("suspend"))
        known = any(each["type"] == "Suspended" for each in item.get("status", {}).get("conditions", ()))
        if suspended or known:
            reason = "Suspended" if suspended else "Resumed"
            stored = with_condition(item, "Suspended", str(suspended), reason, self.timestamp())
            if stored is not item:
                self.put("trainjobs", stored)

    def delete_job(self, job: Object, propagation: str) -> Object:
        """Delete a job with its pods."""
        for pod in self.items("pods"):
            if pod["metadata"]["labels"][JOBSET] == job["metadata"]["name"]:
                self.put("pods", pod, "DELETED")
        return super().delete_job(job, propagation)


class DirectBackend(KubernetesBackend):
    """`KubernetesBackend` whose requests are answered in this process.

    Args:
        store: The objects, if another backend has them already.
        shared: As of `KubernetesBackend`.

    Attributes:
        store: The objects.
        requests: What it has asked, in order: ``LIST trainjobs``, ``PATCH trainjobs``, ``WATCH pods``, ``GET log``.
        turn: Awaited before each request is served: decides when.
        before: Called with the name of each request before it is served. It may change objects, or raise: `Refused`
            is the reply, another error is the client's.
        after: The same after the request was served: an error is a lost reply.
    """

    def __init__(self, store: Store | None = None, *, shared: bool = False) -> None:
        super().__init__(Credentials(host="http://fake"), shared=shared, timings=Timings(settle=0.0))
        self.store = store or Store()
        self.requests: list[str] = []
        self.turn: Callable[[str], Awaitable[object]] | None = None
        self.before: Callable[[str], object] = lambda request: None
        self.after: Callable[[str], object] = lambda request: None
        connection = _Connection(self)
        access = Access("", ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), "", None, ())

        async def connect(refused: Access | None) -> tuple[_Connection, Access]:
            del refused
            return connection, access

        self._client._connect = connect  # type: ignore[method-assign,assignment]  # there is no network

    @property
    def jobs(self) -> dict[tuple[str, str], Object]:
        """All jobs, by namespace and name."""
        return {(job["metadata"]["namespace"], job["metadata"]["name"]): job for job in self.store.items("trainjobs")}

    @property
    def cancelled(self) -> list[str]:
        """The hash of the key in each record of a cancel."""
        found = [lease["metadata"]["labels"].get(CANCELLED_KEY) for lease in self.store.items("leases")]
        return [work for work in found if work]

    def job(self, ref: JobRef) -> Object:
        """One job."""
        found = self.store.get("trainjobs", ref.name, ref.namespace)
        if found is None or found["metadata"]["uid"] != ref.uid:
            raise NotFound(f"{ref} is gone")
        return found

    def change(self, ref: JobRef, patch: Object) -> None:
        """Merge a patch into a job, without webhooks and controllers."""
        self.store.put("trainjobs", merged(self.job(ref), patch))

    def status(self, ref: JobRef, **fields: Any) -> None:
        """Trainer changes fields of a job's status."""
        job = self.job(ref)
        self.store.put("trainjobs", {**job, "status": {**job.get("status", {}), **fields}})

    def running(self, ref: JobRef) -> None:
        """The ranks of a job run."""
        counts = {"active": 1, "ready": 1, "succeeded": 0, "failed": 0, "suspended": 0}
        self.status(ref, jobsStatus=[{"name": "node", **counts}])

    def condition(self, ref: JobRef, kind: str, reason: str, value: str = "True", *, time: str = "") -> None:
        """Trainer sets a condition, now or at a time."""
        made = objects.condition(kind, reason, value=value, time=time or self.store.timestamp())
        kept = [each for each in self.job(ref).get("status", {}).get("conditions", ()) if each["type"] != kind]
        self.status(ref, conditions=[*kept, made])

    def pod(
        self,
        ref: JobRef,
        rank: int = 0,
        code: int | None = None,
        message: str = "",
        *,
        reason: str = "",
        state: Object | None = None,
        **fields: Any,
    ) -> Object:
        """The pod of a rank that runs, has ended with a code, or is in a `state`; `fields` as `objects.pod`.

        Its job may be gone.
        """
        about = {"message": message, **dict.fromkeys(("startedAt", "finishedAt"), self.store.timestamp())}
        about |= {"reason": reason} if reason else {}
        own = {"namespace": ref.namespace, "uid": self.store.new_uid(), "name": f"{ref.name}-node-0-{rank}"}
        state = state or (objects.RUNNING if code is None else objects.ended(code, **about))
        if (code or "last" in fields) and not self.store.logs:  # an empty log of a failed rank is read again for 2 s
            self.store.logs = b"2026-11-21T10:05:00Z training\n"
        made = objects.pod(rank, state, job=ref.name, **fields)
        return self.store.put("pods", {**made, "metadata": {**made["metadata"], **own}}, "ADDED")

    def crash(self, ref: JobRef, rank: int = 0, code: int = 1, *log: str, **fields: Any) -> Object:
        """A rank crashes with the last lines of its log, and is restarted in place."""
        self.write(ref, rank, *log)
        return self.pod(ref, rank, last=objects.ended(code, finishedAt=self.store.timestamp()), **fields)

    def write(self, ref: JobRef, rank: int = 0, *lines: str) -> None:
        """A rank writes lines to its log."""
        name = f"{ref.name}-node-0-{rank}"
        new = "".join(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ} {line}\n" for line in lines)
        self.store.pod_logs[name] = self.store.pod_logs.get(name, b"") + new.encode()

    def remove_pods(self) -> None:
        """All pods are gone."""
        for pod in self.store.items("pods"):
            self.store.put("pods", pod, "DELETED")

    def end(self, ref: JobRef, code: int = 0, message: str = "", *, reason: str = "", **fields: Any) -> None:
        """The only rank of a job ends, and the job with it; `fields` as `pod`."""
        self.pod(ref, 0, code, message, reason=reason, **fields)
        self.condition(ref, *(("Failed", "FailedJobs") if code else ("Complete", "AllJobsCompleted")))

    def ago(self, seconds: float) -> str:
        """The time so many seconds ago, as objects contain it."""
        return f"{datetime.fromtimestamp(self.store.now - seconds, UTC):%Y-%m-%dT%H:%M:%S.%fZ}"

    def waits(self, *refs: JobRef, lease: str = "other", holder: str = "another-pod", age: float = 0.0) -> None:
        """Another process waits for jobs; it has renewed its Lease `age` seconds ago."""
        jobs = json.dumps({ref.uid: None for ref in refs})
        own = {"name": lease, "namespace": refs[0].namespace, "labels": {MANAGED_BY: "trainjob"}}
        spec = {"holderIdentity": holder, "leaseDurationSeconds": 90, "renewTime": self.ago(age)}
        self.store.put("leases", {"metadata": {**own, "annotations": {JOBS: jobs}}, "spec": spec}, "ADDED")

    def replaced(self, first: JobRef, spec: TrainJobSpec, *, deleted: bool = True) -> JobRef:
        """Another launcher starts the next attempt of the job's key, and deletes the one before."""
        made = render(spec, self.job(first)["metadata"]["annotations"][KEY], first.attempt + 1, first.namespace)
        made["metadata"]["annotations"][REPLACES] = first.uid
        second = JobRef.of(self.store.create("trainjobs", made, who="another launcher"))
        self.running(second)
        if deleted:
            self.store.delete("trainjobs", first.name, {}, "Background", first.namespace)
        return second

    def jobset(self, name: str, namespace: str, owner: str = "") -> Object:
        """A JobSet of that name, of the TrainJob with the UID `owner`."""
        owners = [{"kind": "TrainJob", "name": name, "uid": owner}] if owner else []
        own = {"name": name, "namespace": namespace, "uid": self.store.new_uid(), "ownerReferences": owners}
        return self.store.put("jobsets", {"metadata": own}, "ADDED")

    def event(self, ref: JobRef, reason: str, message: str, kind: str = "JobSet") -> Object:
        """An Event about an object with the name of a job."""
        made = objects.event(reason, message, about={"kind": kind, "name": ref.name})
        own = {"name": f"{ref.name}.{self.store.new_uid()}", "namespace": ref.namespace}
        return self.store.put("events", {**made, "metadata": own}, "ADDED")

    async def answer(self, method: str, path: str, params: Mapping[str, str], body: Object | None) -> Reply:
        """The reply to a request."""
        plural, _, name, sub = parsed(path)
        kind = "WATCH" if "watch" in params else "LIST" if method == "GET" and not name else method
        request = f"{kind} {sub or plural}"
        await (asyncio.sleep(0) if self.turn is None else self.turn(request))
        self.requests.append(request)
        try:
            self.before(request)
            if kind == "WATCH":
                return Reply(200, self.store.now, watch=_Watch(self.store, path, params))
            content = self.store.handle("client", method, path, params, body)
            self.after(request)
            return Reply(200, self.store.now, content)
        except Refused as refused:
            return Reply(refused.status, self.store.now, refused.body)


class _Watch:
    """A watch, which looks for new events again and again."""

    def __init__(self, store: Store, path: str, params: Mapping[str, str]) -> None:
        self._store = store
        self._plural, self._namespace, _, _ = parsed(path)
        self._selectors = params.get("labelSelector", ""), params.get("fieldSelector", "")
        self._seen = int(params.get("resourceVersion") or 0)

    async def lines(self) -> AsyncIterator[bytes]:
        while True:
            upto = self._store.version
            for line in list(self._store.events(self._plural, self._seen, upto, *self._selectors, self._namespace)):
                yield line
            self._seen = upto
            await asyncio.sleep(_LOOK_SECONDS)

    def close(self) -> None: ...


class _Connection:
    """The connections of a backend, as `ApiClient` uses `httpx.AsyncClient`."""

    def __init__(self, backend: DirectBackend) -> None:
        self._backend = backend

    def build_request(self, method: str, url: str, *, params: Any, content: bytes | None, **_: Any) -> tuple[Any, ...]:
        return method, urlsplit(url).path, params, json.loads(content) if content else None

    async def send(self, request: tuple[Any, ...], *, stream: bool) -> Reply:
        del stream
        return await self._backend.answer(*request)

    async def aclose(self) -> None: ...
