"""Trainer, JobSet, kubelets, Kueue and people, as far as they change the objects of the simulated API server.

* A JobSet is an object of its own, owned by the UID of its TrainJob, and outlives a deleted TrainJob for a while.
  Trainer finds it by its name: a new TrainJob of that name takes over its ``Complete`` or ``Failed``.
* Pods that are stopped terminate for their grace period; those of a node that does not answer never end.
* Trainer (up to 2.3) takes ``Failed`` back when the JobSet of a job is deleted (kubeflow/trainer#3891).
* Kueue suspends jobs of a queue at their creation, admits and preempts them, and resumes an admitted job that another
  client suspends.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.fakes.kube.objects import (
    JOBSET,
    NAMESPACE,
    OWNER,
    Object,
    Place,
    conditions,
    has_condition,
    in_queue,
    is_active,
    is_deleting,
    is_ended,
    is_lost,
    is_suspended,
    place_of,
    with_condition,
    without_condition,
)
from tests.fakes.kube.server import Entry, Refused, Server

RUNTIME = "trainjob-step"


class Cluster(Server):
    """The API server with the controllers of a cluster.

    Args:
        clock: Seconds since the world began.
        epoch: Unix time of that beginning.
        grace: Seconds until a rank that is stopped ends. Kubernetes' default is 30 s.
        jobset_seconds: How long a JobSet outlives its TrainJob, at least.

    Attributes:
        completed: UIDs of the jobs whose own ranks have completed.
        reused: UID of a job whose name had a JobSet of an earlier job -> version of that JobSet's creation.
        taken_over: UIDs of jobs that have taken over the end of an earlier one, in the second of their own creation:
            times of objects are whole seconds, so that a reader of the job cannot tell.
        admitted: UIDs of the jobs that Kueue has admitted.
        lost: Names of the pods whose node did not answer at some time.
    """

    def __init__(
        self, clock: Callable[[], float], epoch: float = 0.0, *, grace: float = 30.0, jobset_seconds: float = 20.0
    ) -> None:
        super().__init__(clock, epoch)
        self._grace = grace
        self._jobset_seconds = jobset_seconds
        self.completed: set[str] = set()
        self.reused: dict[str, int] = {}
        self.taken_over: set[str] = set()
        self.admitted: set[str] = set()
        self.lost: set[str] = set()
        self._ends: dict[Place, float] = {}  # terminating pod -> when it is gone
        self._jobsets_end: dict[Place, float] = {}
        self._missing_runtime = False
        self.set_runtime(exists=True)

    # --- the clock

    def due(self) -> float | None:
        """When the next pod or JobSet is gone; None if none is terminating."""
        return min((*self._ends.values(), *self._jobsets_end.values()), default=None)

    def advance(self) -> None:
        """Remove what has ended by now."""
        for pod, at in list(self._ends.items()):
            if at <= self.now:
                del self._ends[pod]
                self._remove_pod(pod)
        for jobset, at in list(self._jobsets_end.items()):
            left = [pod for pod in self._pods_of_name(jobset) if not is_lost(pod)]
            if at <= self.now and left:
                self._jobsets_end[jobset] = max(self._ends.get(place_of(pod), self.now) for pod in left) + 0.1
            elif at <= self.now:
                self._remove_jobset(jobset)

    # --- what webhooks and controllers do after a request

    def defaulted(self, plural: str, item: Object) -> Object:
        """Kueue's webhook suspends jobs of a queue; Trainer's refuses each change of a job without a runtime."""
        if plural != "trainjobs":
            return item
        runtime = item["spec"]["runtimeRef"]["name"]
        if self.get("clustertrainingruntimes", runtime, "") is None:
            raise Refused(403, "Forbidden", f"{runtime} must be created before the TrainJob is created")
        if item["spec"].get("initializer"):
            raise Refused(403, "Forbidden", "must have dataset-initializer job when trainJob is configured with it")
        if in_queue(item) and not is_ended(item) and item["metadata"]["uid"] not in self.finished:
            admitted = item["metadata"]["uid"] in self.admitted
            return {**item, "spec": {**item["spec"], "suspend": not admitted}}
        return item

    def changed(self, plural: str, item: Object, who: str) -> None:
        """Trainer creates the JobSet of a job, and adapts its pods."""
        if plural == "trainjobs" and item["metadata"].get("labels", {}).get("trainjob.dev/key"):
            self._reconcile(item)

    def _reconcile(self, job: Object) -> None:
        (namespace, name), uid = place_of(job), job["metadata"]["uid"]
        if is_ended(job) or is_deleting(job):
            return
        jobset = self.get("jobsets", name, namespace)
        if jobset is None:
            owner = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "name": name, "uid": uid}
            own: Object = {"name": name, "namespace": namespace, "uid": self.new_uid(), "ownerReferences": [owner]}
            self.put("jobsets", {"metadata": own}, "ADDED")
            self.born[own["uid"]] = self.version
        elif jobset["metadata"]["ownerReferences"][0]["uid"] != uid:
            self.reused.setdefault(uid, self.born[jobset["metadata"]["uid"]])
            if state := jobset.get("state"):  # the end of an earlier job of this name, with its time
                if jobset["ended"] == job["metadata"]["creationTimestamp"]:
                    self.taken_over.add(uid)
                self.put("trainjobs", with_condition(job, state, "True", "FromJobSet", jobset["ended"]))
            return
        suspended = is_suspended(job)
        if suspended:
            self._stop_pods(uid)
        elif not self.running_pods(uid):
            self._start_pods(job)
        if suspended or "Suspended" in conditions(job):
            reason = "Suspended" if suspended else "Resumed"
            job = with_condition(job, "Suspended", str(suspended), reason, self.timestamp())
        on = int(not suspended)
        status = {"name": "node", "active": on, "ready": on, "succeeded": 0, "failed": 0, "suspended": 1 - on}
        changed = {**job, "status": {**job.get("status", {}), "jobsStatus": [status]}}
        if changed != self.get("trainjobs", name, namespace):
            self.put("trainjobs", changed)

    def delete_job(self, job: Object, propagation: str) -> Object:
        """Stop the pods of a job, and remove it: at once, or in the foreground after its last pod."""
        uid = job["metadata"]["uid"]
        self._stop_pods(uid)
        if propagation == "Foreground" and self.pods(uid):
            if is_deleting(job):
                return job
            marked = {"deletionTimestamp": self.timestamp(), "finalizers": ["foregroundDeletion"]}
            return self.put("trainjobs", {**job, "metadata": {**job["metadata"], **marked}})
        return self._remove_job(job)

    def _remove_job(self, job: Object) -> Object:
        (namespace, name), uid = place_of(job), job["metadata"]["uid"]
        for lease in self.items("leases"):  # garbage collection
            if any(owner["uid"] == uid for owner in lease["metadata"].get("ownerReferences") or ()):
                self.put("leases", lease, "DELETED")
        if self.get("jobsets", name, namespace) is not None:
            self._jobsets_end.setdefault((namespace, name), self.now + self._jobset_seconds)
        return self.put("trainjobs", job, "DELETED")

    def _remove_jobset(self, place: Place) -> None:
        """Remove a JobSet; Trainer creates another one for a new TrainJob of its name."""
        namespace, name = place
        self._jobsets_end.pop(place, None)
        if (jobset := self.get("jobsets", name, namespace)) is not None:
            self.put("jobsets", jobset, "DELETED")
        if (job := self.get("trainjobs", name, namespace)) is not None:
            self._reconcile(job)

    # --- pods

    def pods(self, uid: str) -> list[Object]:
        """The pods of a job."""
        return [pod for pod in self.items("pods") if pod["metadata"]["annotations"][OWNER] == uid]

    def running_pods(self, uid: str) -> list[Object]:
        """The pods of a job that run and are not terminating, on nodes that answer."""
        return [
            pod
            for pod in self.pods(uid)
            if pod["status"]["phase"] == "Running" and not is_deleting(pod) and not is_lost(pod)
        ]

    def _pods_of_name(self, jobset: Place) -> list[Object]:
        pods = self.items("pods")
        return [pod for pod in pods if (pod["metadata"]["namespace"], pod["metadata"]["labels"][JOBSET]) == jobset]

    def _start_pods(self, job: Object) -> None:
        metadata = job["metadata"]
        for rank in range((job["spec"].get("trainer") or {}).get("numNodes") or 1):
            uid = self.new_uid()
            self.put(
                "pods",
                {
                    "metadata": {
                        "name": f"{metadata['name']}-node-0-{rank}-{uid}",
                        "namespace": metadata["namespace"],
                        "uid": uid,
                        "creationTimestamp": self.timestamp(),
                        "labels": {
                            JOBSET: metadata["name"],
                            "jobset.sigs.k8s.io/replicatedjob-name": "node",
                            "batch.kubernetes.io/job-completion-index": str(rank),
                        },
                        "annotations": {OWNER: metadata["uid"]},
                    },
                    "spec": {"containers": [{"name": "node"}], "nodeName": f"node-{rank}"},
                    "status": {"phase": "Running", "containerStatuses": [self._container(running=True)]},
                },
                "ADDED",
            )
            self.born[uid] = self.version

    def _container(self, *, running: bool, code: int = 0, reason: str = "") -> Object:
        now = self.timestamp()
        ended = {"exitCode": code, "reason": reason, "startedAt": now, "finishedAt": now}
        state = {"running": {"startedAt": now}} if running else {"terminated": ended}
        return {"name": "node", "ready": running, "restartCount": 0, "state": state}

    def _stop_pods(self, uid: str) -> None:
        for pod in self.pods(uid):
            if pod["status"]["phase"] != "Running":
                self.put("pods", pod, "DELETED")
            elif not is_deleting(pod):
                if not is_lost(pod):
                    self._ends[place_of(pod)] = self.now + self._grace
                self.put("pods", {**pod, "metadata": {**pod["metadata"], "deletionTimestamp": self.timestamp()}})

    def _remove_pod(self, place: Place) -> None:
        if (pod := self.get("pods", place[1], place[0])) is None:
            return
        self.put("pods", pod, "DELETED")
        job = self.job(pod["metadata"]["annotations"][OWNER])
        if job is not None and is_deleting(job) and not self.pods(job["metadata"]["uid"]):
            self._remove_job(job)

    # --- what happens by itself; each returns whether it could happen

    def crash(self, name: str, reason: str = "Error", code: int = 7) -> bool:
        """A rank crashes and is restarted in place."""
        job = self.get("trainjobs", name)
        pods = self.running_pods(job["metadata"]["uid"]) if job is not None and is_active(job) else []
        for pod in pods[:1]:
            status = pod["status"]["containerStatuses"][0]
            last = self._container(running=False, code=code, reason=reason)["state"]
            status = {**status, "restartCount": status["restartCount"] + 1, "lastState": last}
            self.put("pods", {**pod, "status": {**pod["status"], "containerStatuses": [status]}})
        return bool(pods)

    def end(self, name: str, code: int = 0, namespace: str = NAMESPACE) -> bool:
        """A job completes, or a rank fails it and the others are stopped."""
        job = self.get("trainjobs", name, namespace)
        pods = self.running_pods(job["metadata"]["uid"]) if job is not None and is_active(job) else []
        jobset = self.get("jobsets", name, namespace)
        if job is None or jobset is None or not pods:
            return False
        for pod in pods if not code else pods[:1]:
            container = self._container(running=False, code=code, reason="Error" if code else "Completed")
            status = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [container]}
            self.put("pods", {**pod, "status": status})
        for pod in pods[1:] if code else ():
            self._ends[place_of(pod)] = self.now + self._grace
            self.put("pods", {**pod, "metadata": {**pod["metadata"], "deletionTimestamp": self.timestamp()}})
        state = "Failed" if code else "Complete"
        if not code:
            self.completed.add(job["metadata"]["uid"])
        self.finished.add(job["metadata"]["uid"])
        self.put("jobsets", {**jobset, "state": state, "ended": self.timestamp()})
        self.put("trainjobs", with_condition(job, state, "True", "JobSetEnded", self.timestamp()))
        return True

    def report(self, name: str) -> bool:
        """The training reports progress, which Trainer writes to the status of its job."""
        job = self.get("trainjobs", name)
        if job is None or not is_active(job) or not self.running_pods(job["metadata"]["uid"]):
            return False
        status = job.get("status", {})
        done = status.get("trainerStatus", {}).get("progressPercentage", 0) + 1
        self.put("trainjobs", {**job, "status": {**status, "trainerStatus": {"progressPercentage": min(done, 99)}}})
        return True

    def take_back(self, name: str) -> bool:
        """The JobSet of a failed job is deleted: Trainer takes ``Failed`` back, and trains again unless suspended."""
        job = self.get("trainjobs", name)
        if job is None or not has_condition(job, "Failed") or is_deleting(job):
            return False
        uid = job["metadata"]["uid"]
        for pod in self.pods(uid):
            if not is_deleting(pod):
                self.put("pods", pod, "DELETED")
        failed = self.failed.pop(uid)
        self.put("trainjobs", without_condition(job, "Failed"))
        self._remove_jobset(place_of(job))
        self._note("trainer", "PATCH", job, {"spec": {}})
        self.log[-1].failed = failed
        return True

    def lose_node(self, name: str) -> bool:
        """The nodes of a job do not answer any more: its ranks may still run."""
        job = self.get("trainjobs", name)
        pods = self.running_pods(job["metadata"]["uid"]) if job is not None else []
        for pod in pods:
            self.lost.add(pod["metadata"]["name"])
            unknown = [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]
            self.put("pods", {**pod, "status": {**pod["status"], "conditions": unknown}})
        return bool(pods)

    def find_nodes(self) -> None:
        """All nodes answer again."""
        for pod in self.items("pods"):
            if is_lost(pod):
                self.put("pods", {**pod, "status": {**pod["status"], "conditions": []}})
                if is_deleting(pod):
                    self._ends[place_of(pod)] = self.now + self._grace

    def admit(self, name: str) -> bool:
        """Kueue admits a job."""
        return self._queue(name, admitted=True)

    def preempt(self, name: str) -> bool:
        """Kueue preempts a job."""
        return self._queue(name, admitted=False)

    def _queue(self, name: str, *, admitted: bool) -> bool:
        job = self.get("trainjobs", name)
        if job is None or not in_queue(job) or is_ended(job) or is_deleting(job) or is_suspended(job) is not admitted:
            return False
        uid = job["metadata"]["uid"]
        if uid in self.finished:
            return False
        (self.admitted.add if admitted else self.admitted.discard)(uid)
        patch = {"spec": {"suspend": not admitted}}
        try:
            stored = self.patch("trainjobs", name, patch, who="kueue")
        except Refused:  # without the runtime
            return False
        self._note("kueue", "PATCH", stored, patch)
        return True

    def set_runtime(self, *, exists: bool) -> bool:
        """Create or delete the runtime of all jobs."""
        present = self.get("clustertrainingruntimes", RUNTIME, "")
        if exists is (present is not None):
            return False
        item = {"metadata": {"name": RUNTIME, "uid": self.new_uid()}} if present is None else present
        self.put("clustertrainingruntimes", item, "ADDED" if exists else "DELETED")
        return True

    def by_person(self, method: str, name: str, body: Object, who: str = "person") -> bool:
        """A change with kubectl, or by a TTL."""
        job = self.get("trainjobs", name)
        if job is None:
            return False
        try:
            if method == "DELETE":
                self.delete("trainjobs", name, {}, body["propagationPolicy"])
            else:
                self.patch("trainjobs", name, body, who=who)
        except Refused:
            return False
        self._note(who, method, job, body)
        return True

    def _note(self, who: str, method: str, job: Object, body: Object) -> None:
        """Add a change that was not requested by a process to the log."""
        metadata = job["metadata"]
        entry = Entry(self.now, who, method, "trainjobs", metadata["name"], 200, self.version, metadata["uid"], body)
        self.log.append(entry)
