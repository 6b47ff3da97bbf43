"""The checks of a cluster. They are independent: a check without permission is skipped, and the others continue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

from trainjob._backends.base import TrainJob
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import ApiClient, Request, Timings
from trainjob._backends.kubernetes.errors import ApiError, Forbidden, ObjectNotFound, Transient, Unauthorized
from trainjob._backends.kubernetes.trainer_releases import release_of, spec_schema
from trainjob._doctor import admission, permissions, pipelines, queues, secrets, server
from trainjob._doctor.findings import Finding, Level
from trainjob._install import STEP_IMAGE
from trainjob._jobs.reaper import REAPER
from trainjob._spec import RuntimeRef
from trainjob._spec.arguments import STEP_RUNTIME
from trainjob._support import retrying
from trainjob._support.kube_objects import mapping, mappings, parse_time
from trainjob.errors import BackendUnavailable, TrainJobError
from trainjob.job import API_VERSION, KIND
from trainjob.status import QUEUE_LABEL
from trainjob.verdicts import RetryVerdict

# An API server waits 10 s for a webhook by default, and 30 at most. No request is retried: outages must be reported.
_TIMINGS = Timings(connect=5, read=35, request_backoff=partial(retrying.REQUEST, failures=1, seconds=0))
_JOBSET = "jobset.x-k8s.io/v1alpha2"
_FAILING = timedelta(minutes=30)  # without a run of the reaper that succeeds
_SUPPORT = "trainer.kubeflow.org/support"
_FRAMEWORK = "trainer.kubeflow.org/framework"
_TRAINER = "https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.3.0"


async def examine(
    credentials: Credentials, namespace: str, runtimes: Sequence[str] = (), queue: str = ""
) -> AsyncGenerator[Finding]:
    """Check a cluster, and yield each finding as soon as it is known.

    Args:
        credentials: Credentials of the cluster.
        namespace: Namespace of the jobs.
        runtimes: Runtimes that jobs are to use.
        queue: LocalQueue that jobs are to name.
    """
    client, backend = ApiClient(credentials, _TIMINGS), KubernetesBackend(credentials, timings=_TIMINGS)
    try:
        reached, findings = await server.reach(client, credentials)
        for finding in findings:
            yield finding
        if not reached:
            return
        async with aclosing(_Cluster(client, backend, namespace, runtimes, queue).examine()) as rest:
            async for finding in rest:
                yield finding
    finally:
        await client.aclose()
        await backend.aclose()


async def examine_jobs(
    credentials: Credentials, namespace: str, jobs: Mapping[str, TrainJob]
) -> AsyncGenerator[tuple[str, Finding]]:
    """Check what jobs need before they are launched: runtimes, queues, Secrets and permissions.

    Args:
        credentials: Credentials of the cluster.
        namespace: Namespace of the jobs.
        jobs: TrainJob objects, by names for the caller. Fields that are not known yet may be missing.

    Yields:
        The name in `jobs` that a finding is about, empty for all of them, and the finding.
    """
    client, backend = ApiClient(credentials, _TIMINGS), KubernetesBackend(credentials, timings=_TIMINGS)
    try:
        reached, findings = await server.reach(client, credentials)
        for finding in findings:
            yield "", finding
        if not reached:
            return
        place = _Cluster(client, backend, namespace, (), "")
        for checks in (
            (("identity", place._identity()), ("trainer", place._trainer()), ("kueue", place._kueue())),
            (("rights", place._permissions()),),
        ):
            async for finding in _all(*checks):
                if finding != queues.NO_KUEUE:  # a job that names a queue has its own finding
                    yield "", finding
        if not place.trainer:
            return
        users: dict[Any, list[str]] = {}
        for name, job in jobs.items():
            for part in dict.fromkeys(_parts(job)):
                users.setdefault(part, []).append(name)
        # One after the other: many dry runs at once would overload Trainer's webhook.
        for part, names in users.items():
            for finding in await _guarded("job", place.part(part)):
                for name in names:
                    yield name, finding
    finally:
        await client.aclose()
        await backend.aclose()


@dataclass(frozen=True)
class _Queue:
    """A LocalQueue that a job names."""

    name: str


def _parts(job: TrainJob) -> Iterator[RuntimeRef | _Queue | secrets.Needed]:
    """The objects of the namespace and cluster that a job names."""
    runtime = mapping(job, "spec", "runtimeRef")
    if runtime.get("name"):
        yield RuntimeRef.model_validate({name: runtime[name] for name in ("name", "kind") if runtime.get(name)})
    if queue := mapping(job, "metadata", "labels").get(QUEUE_LABEL):
        yield _Queue(str(queue))
    yield from secrets.needed(mapping(job, "spec"))


@dataclass
class _Cluster:
    """A cluster that answers.

    Attributes:
        client: The connection.
        backend: Backend for dry runs.
        namespace: Namespace of the jobs.
        wanted: Runtimes that jobs are to use.
        queue: LocalQueue that jobs are to name.
        trainer: False once Trainer is known to be missing.
        release: Release of Trainer, once known.
        kueue: The installed Kueue.
        runtimes: The visible runtimes, with their objects.
        all_seen: Whether all runtimes are visible.
        active: LocalQueues that take jobs.
        user: Name of the user by the API server.
    """

    client: ApiClient
    backend: KubernetesBackend
    namespace: str
    wanted: Sequence[str]
    queue: str
    trainer: bool = True
    release: str = ""
    kueue: queues.Kueue = field(default_factory=queues.Kueue)
    runtimes: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    all_seen: bool = False
    active: list[str] = field(default_factory=list)
    user: str = ""

    async def examine(self) -> AsyncGenerator[Finding]:
        """All checks; independent ones run at the same time."""
        first = (
            ("identity", self._identity()),
            ("clock", server.clock(self.client)),
            ("trainer", self._trainer()),
            ("jobset", self._jobset()),
            ("kueue", self._kueue()),
            ("pipelines", pipelines.check(self.client, self.namespace)),
        )
        async for finding in _all(*first):
            yield finding
        second = (
            ("rights", self._permissions()),
            ("watch", self._watch()),
            ("queue", self._queues()),
            ("reaper", self._reaper()),
        )
        async for finding in _all(*second, *([("runtimes", self._runtimes())] if self.trainer else [])):
            yield finding
        async for finding in _all(*([("webhooks", self._trials())] if self.trainer else [])):
            yield finding

    async def part(self, part: RuntimeRef | _Queue | secrets.Needed) -> list[Finding]:
        """Check one object that a job names."""
        if isinstance(part, RuntimeRef):
            return [(await admission.acceptance(self.backend, self.namespace, part))[0]]
        if isinstance(part, secrets.Needed):
            return [await secrets.check(self.client, self.namespace, part)]
        if not self.kueue.version:
            return (await queues.look(self.client, part.name))[1]
        return (await queues.local_queues(self.client, self.kueue, self.namespace, part.name))[1]

    async def _identity(self) -> list[Finding]:
        kind = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        path = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
        answer = await self.client.send(Request("POST", path, body=kind))
        self.user = str(mapping(answer, "status", "userInfo").get("username") or "")
        return [Finding("identity", Level.OK, f"you are {self.user}")]

    async def _trainer(self) -> list[Finding]:
        install = f"install Kubeflow Trainer: kubectl apply --server-side -k '{_TRAINER}'"
        try:
            spec = await spec_schema(self.client, API_VERSION, KIND)
        except ObjectNotFound:
            self.trainer = False
            return [Finding("trainer", Level.FAILURE, f"this cluster has no {API_VERSION} TrainJobs", install)]
        self.release = release_of(spec)
        if not self.release:
            message = "its TrainJobs are older than those of Kubeflow Trainer 2.1"
            return [Finding("trainer", Level.FAILURE, message, install)]
        newest = " or newer" if self.release == "2.3" else ""
        return [
            Finding("trainer", Level.OK, f"Kubeflow Trainer {self.release}{newest}, according to its TrainJob schema")
        ]

    async def _jobset(self) -> list[Finding]:
        try:
            found = await self.client.send(Request("GET", f"/apis/{_JOBSET}"))
        except ObjectNotFound:
            found = {}
        if any(each.get("kind") == "JobSet" for each in mappings(found, "resources")):
            return [Finding("jobset", Level.OK, f"serves {_JOBSET}")]
        message = f"this cluster has no {_JOBSET} JobSets: no TrainJob would get pods"
        return [Finding("jobset", Level.FAILURE, message, "install JobSet; Kubeflow Trainer's manifests include it")]

    async def _kueue(self) -> list[Finding]:
        self.kueue, findings = await queues.look(self.client, self.queue)
        return findings

    async def _runtimes(self) -> list[Finding]:
        findings, scopes = [], {"ClusterTrainingRuntime": "", "TrainingRuntime": f"/namespaces/{self.namespace}"}
        for kind, scope in scopes.items():
            try:
                for each in await self.client.items(f"/apis/{API_VERSION}{scope}/{kind.lower()}s", {}):
                    self.runtimes[str(mapping(each, "metadata").get("name"))] = {**each, "kind": kind}
            except Forbidden as error:
                findings.append(Finding("runtimes", Level.SKIPPED, f"{kind}s may not be listed: {error.message}"))
        self.all_seen = not findings
        shown = ", ".join(_shown(name, self.runtimes[name]) for name in sorted(self.runtimes))
        if shown:
            findings.insert(0, Finding("runtimes", Level.OK, shown))
        elif self.all_seen:
            findings.append(
                Finding("runtimes", Level.WARNING, "none: every job would be rejected", self._install_runtimes)
            )
        findings += [found for name in dict.fromkeys(self.wanted) for found in self._runtime(name)]
        step = self.runtimes.get(STEP_RUNTIME)
        if step is not None:
            findings.append(self._step(step))
        elif self.all_seen and STEP_RUNTIME not in self.wanted:
            message = f"{STEP_RUNTIME} does not exist: initialize and export steps need it"
            findings.append(Finding("steps", Level.WARNING, message, self._install_runtimes))
        return findings

    def _step(self, runtime: Mapping[str, Any]) -> Finding:
        """Check the image of steps."""
        jobs = mappings(runtime, "spec", "template", "spec", "replicatedJobs")
        pods = [mapping(job, "template", "spec", "template") for job in jobs]
        images = [str(container.get("image")) for pod in pods for container in mappings(pod, "spec", "containers")]
        message = f"{STEP_RUNTIME} runs image {', '.join(images)}"
        if STEP_IMAGE in images:
            message += ", which names no registry: nodes without it pull it from Docker Hub"
            return Finding("steps", Level.WARNING, message, self._install_runtimes)
        if unpinned := [image for image in images if "@" not in image]:
            message += ", whose tag can be moved: a later push changes the image of steps"
            advice = self._install_runtimes.replace(f"<registry>/{STEP_IMAGE}", f"{unpinned[0]}@sha256:<digest>")
            return Finding("steps", Level.WARNING, message, advice)
        return Finding("steps", Level.OK, message)

    @property
    def _install_runtimes(self) -> str:
        words = f"trainjob install --only runtimes --image <registry>/{STEP_IMAGE}"
        # Everything can be applied to 2.2 and 2.3.
        release = " --trainer 2.1" if self.release == "2.1" else ""
        return f"{words}{release} | kubectl apply --server-side -f -"

    def _runtime(self, name: str) -> list[Finding]:
        """Check a runtime that jobs are to use; no finding if only a dry run can tell."""
        found = self.runtimes.get(name)
        if found is None and self.all_seen:
            advice = (
                self._install_runtimes if name == STEP_RUNTIME else "use an existing runtime, or have this one applied"
            )
            return [Finding("runtime", Level.FAILURE, f"runtime {name} does not exist", advice)]
        if found is not None and mapping(found, "metadata", "labels").get(_SUPPORT) == "deprecated":
            message = f"{found['kind']} {name} is deprecated"
            return [Finding("runtime", Level.WARNING, message, "use another runtime before this one is removed")]
        return []

    async def _watch(self) -> list[Finding]:
        path = f"/apis/{API_VERSION}/namespaces/{self.namespace}/trainjobs"
        # A watch of a job that does not exist, so that no event arrives before the end.
        params = {"watch": "true", "timeoutSeconds": "1", "fieldSelector": "metadata.name=trainjob-doctor"}
        try:
            async with aclosing(self.client.lines(Request("GET", path, params))) as lines:
                async for _ in lines:
                    break
        except ObjectNotFound:
            return []  # no Trainer, which is a separate finding
        except Forbidden as error:
            message = f"not allowed: changes of jobs are noticed up to 30 s late: {error.message}"
            return [Finding("watch", Level.WARNING, message, "see the findings of check rights")]
        return [Finding("watch", Level.OK, "TrainJobs can be watched")]

    async def _permissions(self) -> list[Finding]:
        return await permissions.check(self.client, self.namespace, self.user, queues=bool(self.kueue.version))

    async def _reaper(self) -> list[Finding]:
        """Whether the reaper ends unattended jobs."""
        path = f"/apis/batch/v1/namespaces/{self.namespace}/cronjobs/{REAPER}"
        install = f"trainjob install --only reaper -n {self.namespace} --image <registry>/{STEP_IMAGE}"
        advice = f"{install} | kubectl apply --server-side -f -"
        message = "unattended jobs are not ended"
        try:
            found = await self.client.send(Request("GET", path))
        except ObjectNotFound:
            return [Finding("reaper", Level.WARNING, f"CronJob {REAPER} does not exist: {message}", advice)]
        except Forbidden as error:
            return [Finding("reaper", Level.SKIPPED, f"CronJob {REAPER} cannot be read: {error.message}")]
        resume = f'kubectl patch cronjob {REAPER} -n {self.namespace} --patch \'{{"spec":{{"suspend":false}}}}\''
        if mapping(found, "spec").get("suspend"):
            return [Finding("reaper", Level.WARNING, f"CronJob {REAPER} is suspended: {message}", resume)]
        started, worked = (mapping(found, "status").get(f"last{name}Time") for name in ("Schedule", "Successful"))
        tried, since = parse_time(started), parse_time(worked or mapping(found, "metadata").get("creationTimestamp"))
        if tried is not None and (since is None or tried - since > _FAILING):
            last = f"the last success was at {worked}" if worked else "none has succeeded"
            advice = f"read the logs: kubectl logs -n {self.namespace} -l job-name --prefix"
            return [Finding("reaper", Level.WARNING, f"the runs of CronJob {REAPER} fail ({last}): {message}", advice)]
        return [Finding("reaper", Level.OK, f"CronJob {REAPER} ends unattended jobs")]

    async def _queues(self) -> list[Finding]:
        if not self.kueue.version:
            return []
        self.active, findings = await queues.local_queues(self.client, self.kueue, self.namespace, self.queue)
        return findings

    async def _trials(self) -> list[Finding]:
        """Dry runs, one after the other: if one gets no answer, the next would not get one either."""
        trials = self._references()
        if not trials:
            return [Finding("webhooks", Level.SKIPPED, "no runtime is available for a dry run")]
        findings = [await admission.webhooks(self.backend, self.namespace, trials[0])]
        if findings[0].retry is RetryVerdict.INFRASTRUCTURE or findings[0].check != "webhooks":
            return findings
        accepted = None
        for runtime in trials:
            finding, stored = await admission.acceptance(self.backend, self.namespace, runtime)
            if finding.check == "runtime" and not self.wanted:  # the user did not name it
                finding = replace(finding, check="steps", level=Level.WARNING, advice=self._install_runtimes)
            findings.append(finding)
            if stored is not None:
                accepted = runtime, stored
        if accepted is not None:
            never = queues.incompatible(self.kueue, self.release)
            findings += queues.taken_by_default(accepted[1], self.namespace, never=never)
            for queue in self.active[:1]:  # the result is the same for all
                where = (self.backend, self.namespace, accepted[0], queue)
                check = queues.integration(*where, never=never, asked=bool(self.queue))
                findings += await _guarded("queueing", check)
        return findings

    def _references(self) -> list[RuntimeRef]:
        """Runtimes for dry runs: those that the user named, else any one."""
        names = dict.fromkeys(self.wanted or (STEP_RUNTIME, *sorted(self.runtimes)))
        found = [RuntimeRef(name=name, kind=self.runtimes[name]["kind"]) for name in names if name in self.runtimes]
        if not self.all_seen:
            found += [RuntimeRef(name=name) for name in names if name not in self.runtimes]
        return found if self.wanted else found[:1]


def _shown(name: str, runtime: Mapping[str, Any]) -> str:
    labels = mapping(runtime, "metadata", "labels")
    notes = [str(labels[_FRAMEWORK])] if _FRAMEWORK in labels else []
    notes += ["of this namespace"] if runtime["kind"] == "TrainingRuntime" else []
    notes += ["deprecated"] if labels.get(_SUPPORT) == "deprecated" else []
    return f"{name} ({', '.join(notes)})" if notes else name


async def _all(*checks: tuple[str, Awaitable[list[Finding]]]) -> AsyncGenerator[Finding]:
    """Run checks at the same time; yield their findings in the order of the checks."""
    tasks = [asyncio.create_task(_guarded(name, check)) for name, check in checks]
    try:
        for task in tasks:
            for finding in await task:
                yield finding
    finally:
        for task in tasks:
            task.cancel()


async def _guarded(name: str, check: Awaitable[list[Finding]]) -> list[Finding]:
    """The findings of one check, or its error as a finding, so that the other checks continue."""
    try:
        return await check
    except Forbidden as error:
        finding = Finding(name, Level.SKIPPED, f"may not be read: {error.message}")
    except (Transient, BackendUnavailable) as error:
        finding = Finding(name, Level.FAILURE, str(error), "run trainjob doctor again", RetryVerdict.INFRASTRUCTURE)
    except Unauthorized as error:
        finding = Finding(name, Level.FAILURE, error.message, "log in again, or renew the token")
    except ApiError as error:
        finding = Finding(name, Level.SKIPPED, f"the API server refused the request: {error}")
    except TrainJobError as error:
        finding = Finding(name, Level.FAILURE, str(error))
    except Exception as error:  # noqa: BLE001 - a reply of an unexpected form must not fail the other checks
        finding = Finding(name, Level.SKIPPED, f"unexpected reply: {type(error).__name__}: {error}")
    return [finding]
