"""An API server: objects with versions, preconditions, lists, events of watches, and a log of requests.

One deterministic object without sockets, threads and clocks. `tests.fakes.kube.cluster` adds Trainer, JobSet, kubelets
and Kueue; `tests.simulation.transport` answers its requests in virtual time, `tests.fakes.kube.http` over HTTP.
Replies are bytes, so that no object is shared between the server and its clients.

As a real server does, it

* forgets a deleted object with its name,
* answers 409 with reason AlreadyExists to a create, Conflict to a precondition (UID, resourceVersion) that fails,
* leaves the version as it is when a patch changes nothing,
* answers 410 to a watch from a version that was compacted,
* calls the webhooks of TrainJobs for POST and PATCH, never for DELETE,
* counts a ResourceQuota for POST and PATCH of TrainJobs: a 409 Conflict although no version was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal

from tests.fakes.kube.objects import (
    NAMESPACE,
    Object,
    annotation,
    encode,
    has_condition,
    is_active,
    is_queued,
    key_of,
    merged,
    selector,
)

from trainjob._manifest.attempts import ADOPTED

Key = tuple[str, str, str]
"""Plural, namespace and name of an object; the namespace of some kinds is empty."""

Webhooks = Literal["answer", "refuse", "hang"]

WEBHOOK_SECONDS = 10.0
"""Kubernetes' default timeout of a webhook, after which the API server answers 500."""


class Refused(Exception):
    """A reply that is not a success.

    Attributes:
        status: HTTP status.
        reason: Its reason.
        body: The Status object.
        after: Seconds until the reply.
    """

    def __init__(self, status: int, reason: str, message: str, after: float = 0.0) -> None:
        self.status = status
        self.reason = reason
        self.body = encode({"kind": "Status", "code": status, "reason": reason, "message": message})
        self.after = after
        super().__init__(f"{status} {reason}: {message}")


@dataclass(slots=True)
class Entry:
    """One request that the server has applied or refused, or one change by a person or a controller.

    Attributes:
        at: Seconds since the world began.
        who: Process, or ``person``, ``kueue``, ``trainer``, ``ttl``.
        method: GET (a LIST has no name), POST, PATCH or DELETE.
        plural: Kind of the object.
        name: Its name; empty for a LIST.
        status: HTTP status of the reply.
        version: Version of the store after it.
        uid: UID of the object that was changed; empty if none was.
        body: Body of the request.
        reason: Reason of a refusal.
        selector: ``labelSelector`` of a LIST.
        active: Names of the active jobs in the reply to a GET or LIST of TrainJobs.
        failed: Version at which the job had failed whose ``Failed`` Trainer takes back.
        sent: Length of the log when a process sent it, which is long before for a request that arrived late.
        namespace: Its namespace.
    """

    at: float
    who: str
    method: str
    plural: str
    name: str
    status: int
    version: int
    uid: str = ""
    body: Mapping[str, Any] | None = None
    reason: str = ""
    selector: str = ""
    active: tuple[str, ...] = ()
    failed: int = 0
    sent: int = 0
    namespace: str = NAMESPACE

    def is_list(self, plural: str) -> bool:
        """Whether it is an answered LIST of that collection."""
        return self.method == "GET" and not self.name and self.plural == plural and self.status == 200

    def changes(self, plural: str) -> bool:
        """Whether it has changed an object of that collection, or may have."""
        return self.method != "GET" and self.plural == plural and self.status == 200

    def adopts(self) -> bool:
        """Whether it has created or adopted a job."""
        metadata: Mapping[str, Any] = (self.body or {}).get("metadata") or {}
        return self.changes("trainjobs") and ADOPTED in (metadata.get("annotations") or {})

    def suspends(self) -> bool:
        """Whether it is a PATCH that suspends a job."""
        return self.method == "PATCH" and bool(((self.body or {}).get("spec") or {}).get("suspend"))

    def resumes(self) -> bool:
        """Whether it is a PATCH that resumes a job."""
        return self.method == "PATCH" and ((self.body or {}).get("spec") or {}).get("suspend") is False


@dataclass(slots=True, frozen=True)
class Event:
    """One event of the watches of a collection."""

    version: int
    plural: str
    kind: str
    item: Object


class Server:
    """The store and its requests.

    Args:
        clock: Seconds since the world began.
        epoch: Unix time of that beginning.

    Attributes:
        log: Every request and every change, in their order.
        webhooks: What the webhooks of TrainJobs do.
        quota_conflicts: How many further changes of TrainJobs get a Conflict of a ResourceQuota.
        forbidden: Plurals that workers may not read, and those that they may not write.
        logs: Log of each container; each line begins with its time.
        pod_logs: The same of the containers of single pods, by the name of the pod.
        born: UID of a job or a pod -> version of its creation.
        works: UID of a job -> its key, also after its deletion.
        claims: UID of a job that is active or queued -> version and seconds since when it is.
        claimed: The same of a job that was, for the last time.
        finished: UIDs of the jobs whose Workload has finished: Kueue leaves them alone, also without ``Failed``.
        failed: UID of a job -> version of its latest failure.
        complete: UID of a job -> version of its completion.
        delivered: UID of a job -> version since when its result counts as delivered.
        replaced: UIDs of the jobs that a later attempt has replaced, also one that is gone.
    """

    def __init__(self, clock: Callable[[], float], epoch: float = 0.0) -> None:
        self._clock = clock
        self._epoch = epoch
        self._objects: dict[Key, Object] = {}
        self._encoded: dict[Key, bytes] = {}
        self._uids = 0
        self.history: list[Event] = []
        self.version = 1
        self.compacted = 0
        self.log: list[Entry] = []
        self.webhooks: Webhooks = "answer"
        self.quota_conflicts = 0
        self.forbidden: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        self.logs = b""
        self.pod_logs: dict[str, bytes] = {}
        self.born: dict[str, int] = {}
        self.works: dict[str, str] = {}
        self.claims: dict[str, tuple[int, float]] = {}
        self.claimed: dict[str, tuple[int, float]] = {}
        self.finished: set[str] = set()
        self.failed: dict[str, int] = {}
        self.complete: dict[str, int] = {}
        self.delivered: dict[str, int] = {}
        self.replaced: set[str] = set()

    # --- the store

    @property
    def now(self) -> float:
        """Seconds since the world began."""
        return self._clock()

    def timestamp(self) -> str:
        """The time as objects contain it."""
        return datetime.fromtimestamp(self._epoch + self._clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def items(self, plural: str) -> list[Object]:
        """All objects of a collection."""
        return [item for (kind, _, _), item in self._objects.items() if kind == plural]

    def jobs(self, key: str = "") -> list[Object]:
        """All TrainJobs, or all attempts of a key."""
        return [job for job in self.items("trainjobs") if not key or key_of(job) == key]

    def get(self, plural: str, name: str, namespace: str = NAMESPACE) -> Object | None:
        """One object."""
        return self._objects.get((plural, namespace, name))

    def job(self, uid: str) -> Object | None:
        """The TrainJob with that UID."""
        return next((job for job in self.items("trainjobs") if job["metadata"]["uid"] == uid), None)

    def put(self, plural: str, item: Object, kind: str = "MODIFIED") -> Object:
        """Store an object, or remove it, under the next version, and add the event for the watches."""
        self.version += 1
        metadata = {**item["metadata"], "resourceVersion": str(self.version)}
        item = {**item, "metadata": metadata}
        key = (plural, metadata.get("namespace", ""), metadata["name"])
        self._encoded.pop(key, None)
        if kind == "DELETED":
            self._objects.pop(key, None)
        else:
            self._objects[key] = item
        self.history.append(Event(self.version, plural, kind, item))
        if plural == "trainjobs":
            self._keep_facts(item, deleted=kind == "DELETED")
        return item

    def _keep_facts(self, job: Object, *, deleted: bool) -> None:
        uid = job["metadata"]["uid"]
        if deleted or not (is_active(job) or (is_queued(job) and uid not in self.finished)):
            self.claimed[uid] = self.claims.pop(uid, self.claimed.get(uid, (0, 0.0)))
        else:
            self.claims.setdefault(uid, (self.version, self._clock()))
        self.replaced.update(annotation(job, "replaces").split(","))
        if has_condition(job, "Failed"):
            self.failed.setdefault(uid, self.version)
        if has_condition(job, "Complete"):
            self.complete.setdefault(uid, self.version)
        if annotation(job, "delivered"):
            self.delivered.setdefault(uid, self.version)

    def forget_history(self) -> None:
        """Compact the store: watches from an older version get 410."""
        self.compacted = self.version
        self.history.clear()

    def events(
        self, plural: str, since: int, upto: int, labels: str, fields: str, namespace: str = NAMESPACE
    ) -> Iterator[bytes]:
        """The events of a watch after `since`, as lines."""
        matches = selector(labels, fields)
        for event in self.history:
            if since >= event.version or event.version > upto or event.plural != plural:
                continue
            if namespace in ("", event.item["metadata"].get("namespace", "")) and matches(event.item):
                yield encode({"type": event.kind, "object": event.item}) + b"\n"

    def new_uid(self) -> str:
        """A UID."""
        self._uids += 1
        return f"uid-{self._uids}"

    # --- requests

    def handle(
        self,
        who: str,
        method: str,
        path: str,
        params: Mapping[str, str],
        body: Object | None,
        *,
        is_worker: bool = True,
    ) -> bytes:
        """Apply a request, and return the reply.

        Raises:
            Refused: the request is refused, or nothing has that name.
        """
        plural, namespace, name, sub = parsed(path)
        if sub == "log":
            lines = self.pod_logs.get(name, self.logs).splitlines(keepends=True)
            return b"".join(lines[-int(params["tailLines"]) :] if "tailLines" in params else lines)
        entry = Entry(self._clock(), who, method, plural, name, 200, self.version, body=body, namespace=namespace)
        self.log.append(entry)
        try:
            return self._answer(entry, params, is_worker=is_worker)
        except Refused as refused:
            entry.status, entry.reason = refused.status, refused.reason
            raise
        finally:
            entry.version = self.version

    def _answer(self, entry: Entry, params: Mapping[str, str], *, is_worker: bool) -> bytes:
        plural, method = entry.plural, entry.method
        if is_worker and plural in self.forbidden[method != "GET"]:
            raise Refused(403, "Forbidden", f"{plural} is forbidden: this account may not {method} it")
        if method == "GET":
            return self._list(entry, params) if not entry.name else self._read(entry)
        body = dict(entry.body or {})
        if plural == "trainjobs" and method != "DELETE":
            self._admit(body)
        if method == "POST":
            own = {**body, "metadata": {**body["metadata"], "namespace": entry.namespace}}
            stored = self.create(plural, own, who=entry.who, dry="dryRun" in params)
        elif method == "PATCH":
            stored = self.patch(plural, entry.name, body, who=entry.who, namespace=entry.namespace)
        else:
            conditions, propagation = body.get("preconditions") or {}, body.get("propagationPolicy") or "Background"
            stored = self.delete(plural, entry.name, conditions, propagation, entry.namespace)
        entry.name, entry.uid = stored["metadata"]["name"], stored["metadata"].get("uid", "")
        return encode(stored)

    def _admit(self, body: Object) -> None:
        """Webhooks, then the quota."""
        if self.webhooks != "answer":
            why = "connect: connection refused" if self.webhooks == "refuse" else "context deadline exceeded"
            after = WEBHOOK_SECONDS if self.webhooks == "hang" else 0.0
            text = f'Internal error occurred: failed calling webhook "validator.trainjob.trainer.kubeflow.org": {why}'
            raise Refused(500, "InternalError", text, after)
        if self.quota_conflicts:
            self.quota_conflicts -= 1
            text = 'Operation cannot be fulfilled on resourcequotas "quota": the object has been modified'
            raise Refused(409, "Conflict", text)

    def _read(self, entry: Entry) -> bytes:
        item = self.find(entry.plural, entry.name, entry.namespace)
        if entry.plural == "trainjobs" and is_active(item):
            entry.active = (entry.name,)
        return self._bytes((entry.plural, entry.namespace, entry.name), item)

    def _list(self, entry: Entry, params: Mapping[str, str]) -> bytes:
        entry.selector = params.get("labelSelector", "")
        matches = selector(entry.selector, params.get("fieldSelector", ""))
        found = [
            key
            for key, item in self._objects.items()
            if key[0] == entry.plural and entry.namespace in ("", key[1]) and matches(item)
        ]
        if entry.plural == "trainjobs":
            entry.active = tuple(key[2] for key in found if is_active(self._objects[key]))
        items = b",".join([self._bytes(key, self._objects[key]) for key in found])
        return b'{"kind":"List","metadata":{"resourceVersion":"%d"},"items":[%b]}' % (self.version, items)

    def _bytes(self, key: Key, item: Object) -> bytes:
        encoded = self._encoded.get(key)
        if encoded is None:
            encoded = self._encoded[key] = encode(item)
        return encoded

    def find(self, plural: str, name: str, namespace: str = NAMESPACE) -> Object:
        """One object.

        Raises:
            Refused: there is none.
        """
        if (item := self._objects.get((plural, namespace, name))) is None:
            raise Refused(404, "NotFound", f'{plural} "{name}" not found')
        return item

    def create(self, plural: str, item: Object, *, who: str, dry: bool = False) -> Object:
        """Store a new object.

        Raises:
            Refused: the name is taken.
        """
        metadata = item["metadata"]
        key = (plural, metadata["namespace"], metadata["name"])
        if key in self._objects:
            raise Refused(409, "AlreadyExists", f'{plural} "{metadata["name"]}" already exists')
        own = {"uid": self.new_uid(), "creationTimestamp": self.timestamp()}
        made = self.defaulted(plural, {**item, "metadata": {**metadata, **own}})
        if dry:
            return made
        stored = self.put(plural, made, "ADDED")
        self.born[own["uid"]] = self.version
        if plural == "trainjobs":
            self.works[own["uid"]] = key_of(stored)
        self.changed(plural, stored, who)
        return self._objects.get(key, stored)

    def patch(self, plural: str, name: str, patch: Object, *, who: str, namespace: str = NAMESPACE) -> Object:
        """Merge a patch into an object.

        Raises:
            Refused: there is none, or it has another UID or version.
        """
        old = self.find(plural, name, namespace)
        metadata = patch.get("metadata") or {}
        self._check(metadata.get("uid"), metadata.get("resourceVersion"), old)
        new = self.defaulted(plural, merged(old, patch))
        if new == old:
            return old
        stored = self.put(plural, new)
        self.changed(plural, stored, who)
        return self._objects.get((plural, namespace, name), stored)

    def delete(
        self, plural: str, name: str, preconditions: Mapping[str, str], propagation: str, namespace: str = NAMESPACE
    ) -> Object:
        """Delete an object.

        Raises:
            Refused: there is none, or it has another UID or version.
        """
        old = self.find(plural, name, namespace)
        self._check(preconditions.get("uid"), preconditions.get("resourceVersion"), old)
        if plural == "trainjobs":
            return self.delete_job(old, propagation)
        return self.put(plural, old, "DELETED")

    def _check(self, uid: str | None, version: str | None, item: Object) -> None:
        metadata = item["metadata"]
        if uid is not None and uid != metadata.get("uid"):
            text = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {metadata.get('uid')}"
            raise Refused(409, "Conflict", text)
        if version is not None and version != metadata["resourceVersion"]:
            raise Refused(
                409, "Conflict", "the object has been modified; please apply your changes to the latest version"
            )

    # --- what the controllers of a cluster add

    def defaulted(self, plural: str, item: Object) -> Object:
        """The object as webhooks and defaults change it.

        Raises:
            Refused: a webhook refuses it.
        """
        return item

    def changed(self, plural: str, item: Object, who: str) -> None:
        """Called after an object was created or changed."""

    def delete_job(self, job: Object, propagation: str) -> Object:
        """Delete a TrainJob."""
        return self.put("trainjobs", job, "DELETED")


@lru_cache(maxsize=10_000)
def parsed(path: str) -> tuple[str, str, str, str]:
    """Plural, namespace, name and subresource in a path: ``/api/v1/namespaces/default/pods/x/log``."""
    parts = path.strip("/").split("/")[(2 if path.startswith("/api/") else 3) :]
    namespace, parts = (parts[1], parts[2:]) if len(parts) > 2 and parts[0] == "namespaces" else ("", parts)
    plural, name, sub = (*parts, "", "", "")[:3]
    return plural, namespace, name, sub
