"""The checks of a cluster. They are independent: a check without permission is skipped, and the others continue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from trainjob._backends.base import TrainJob
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import ApiClient, Request, Timings
from trainjob._backends.kubernetes.errors import ApiError, Forbidden, ObjectNotFound, Transient, Unauthorized
from trainjob._backends.kubernetes.trainer_releases import release_of, spec_schema
from trainjob._doctor import admission, permissions, queues, secrets, server
from trainjob._doctor.findings import Finding, Level
from trainjob._install import STEP_IMAGE
from trainjob._jobs.controller import CONTROLLER
from trainjob._jobs.reaper import REAPER
from trainjob._spec import RuntimeRef
from trainjob._spec.arguments import STEP_RUNTIME
from trainjob._support import retrying
from trainjob._support.kube_objects import mapping, mappings, parse_time
from trainjob.errors import BackendUnavailable, RetryVerdict, TrainJobError
from trainjob.job import API_VERSION, KIND
from trainjob.status import QUEUE_LABEL

# An API server waits 10 s for a webhook by default, and 30 at most. No request is retried: outages must be reported.
_TIMINGS = Timings(connect=5, read=35, request_backoff=partial(retrying.REQUEST, failures=1, seconds=0))
_JOBSET = "jobset.x-k8s.io/v1alpha2"
_FAILING = timedelta(minutes=30)  # without a run of the reaper that succeeds
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
    async with _opened(credentials, namespace) as cluster:
        reached, findings = await server.reach(cluster.client, credentials)
        for finding in findings:
            yield finding
        if not reached:
            return
        async with aclosing(cluster.examine(runtimes, queue)) as rest:
            async for finding in rest:
                yield finding


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
    async with _opened(credentials, namespace) as cluster:
        reached, findings = await server.reach(cluster.client, credentials)
        for finding in findings:
            yield "", finding
        if not reached:
            return
        async for finding in cluster.examine_basics():
            if finding != queues.NO_KUEUE:  # a job that names a queue has its own finding
                yield "", finding
        if not cluster.trainer:
            return
        users: dict[Any, list[str]] = {}
        for name, job in jobs.items():
            for part in dict.fromkeys(_parts(job)):
                users.setdefault(part, []).append(name)
        # One after the other: many dry runs at once would overload Trainer's webhook.
        for part, names in users.items():
            for finding in await _guarded("job", cluster.part(part)):
                for name in names:
                    yield name, finding


@asynccontextmanager
async def _opened(credentials: Credentials, namespace: str) -> AsyncGenerator[_Cluster]:
    client, backend = ApiClient(credentials, _TIMINGS), KubernetesBackend(credentials, timings=_TIMINGS)
    try:
        yield _Cluster(client, backend, namespace)
    finally:
        await client.aclose()
        await backend.aclose()


def _parts(job: TrainJob) -> Iterator[RuntimeRef | str | secrets.Needed]:
    """The objects of the namespace and cluster that a job names; a LocalQueue by its name."""
    runtime = mapping(job, "spec", "runtimeRef")
    if runtime.get("name"):
        yield RuntimeRef.model_validate({name: runtime[name] for name in ("name", "kind") if runtime.get(name)})
    if queue := mapping(job, "metadata", "labels").get(QUEUE_LABEL):
        yield str(queue)
    yield from secrets.needed(mapping(job, "spec"))


@dataclass
class _Cluster:
    """A cluster that answers.

    Attributes:
        client: The connection.
        backend: Backend for dry runs.
        namespace: Namespace of the jobs.
        trainer: False once Trainer is known to be missing.
        release: Release of Trainer, once known.
        kueue: Version of the API of Kueue; empty without Kueue.
        user: Name of the user by the API server.
    """

    client: ApiClient
    backend: KubernetesBackend
    namespace: str
    trainer: bool = True
    release: str = ""
    kueue: str = ""
    user: str = ""

    async def examine(self, runtimes: Sequence[str], queue: str) -> AsyncGenerator[Finding]:
        """All checks; independent ones run at the same time."""
        async for finding in self.examine_basics(queue):
            yield finding
        queue_missing = not self.kueue
        checks = [
            ("clock", server.clock(self.client)),
            ("controller", self._controller()),
            ("sidecars", self._sidecars()),
        ]
        if self.kueue:
            checks.append(("queue", queues.check(self.client, self.kueue, self.namespace, queue)))
        async for finding in _all(*checks):
            queue_missing |= (finding.check, finding.level) == ("queue", Level.FAILURE)
            yield finding
        if self.trainer:
            # The server accepts jobs for a queue that does not exist.
            async for finding in _all(("admission", self._admission(runtimes, "" if queue_missing else queue))):
                yield finding

    async def examine_basics(self, queue: str = "") -> AsyncGenerator[Finding]:
        """What is installed, and the permissions."""
        first = (
            ("identity", self._identity()),
            ("trainer", self._trainer()),
            ("jobset", self._jobset()),
            ("kueue", self._kueue(queue)),
        )
        async for finding in _all(*first):
            yield finding
        async for finding in _all(("rights", self._permissions())):
            yield finding

    async def part(self, part: RuntimeRef | str | secrets.Needed) -> list[Finding]:
        """Check one object that a job names."""
        if isinstance(part, RuntimeRef):
            return [await admission.check(self.backend, self.namespace, part)]
        if isinstance(part, secrets.Needed):
            return [await secrets.check(self.client, self.namespace, part)]
        if not self.kueue:
            return await self._kueue(part)
        return await queues.check(self.client, self.kueue, self.namespace, part)

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

    async def _kueue(self, queue: str) -> list[Finding]:
        self.kueue, finding = await queues.look(self.client, queue)
        return [finding]

    async def _permissions(self) -> list[Finding]:
        return await permissions.check(self.client, self.namespace, self.user, queues=bool(self.kueue))

    async def _controller(self) -> list[Finding]:
        """Whether the controller, or the reaper in its place, ends jobs that nobody waits for."""
        path = f"/apis/apps/v1/namespaces/{self.namespace}/deployments/{CONTROLLER}"
        try:
            found = await self.client.send(Request("GET", path))
        except ObjectNotFound:
            return await self._reaper()
        except Forbidden as error:
            return [Finding("controller", Level.SKIPPED, f"Deployment {CONTROLLER} cannot be read: {error.message}")]
        if mapping(found, "status").get("availableReplicas"):
            return [Finding("controller", Level.OK, f"Deployment {CONTROLLER} has a pod that is ready")]
        message = f"Deployment {CONTROLLER} has no pod that is ready: unattended jobs are not ended"
        advice = f"look for the reason: kubectl describe deployment {CONTROLLER} -n {self.namespace}"
        return [Finding("controller", Level.WARNING, message, advice)]

    async def _reaper(self) -> list[Finding]:
        """Whether the reaper ends unattended jobs."""
        path = f"/apis/batch/v1/namespaces/{self.namespace}/cronjobs/{REAPER}"
        message = "unattended jobs are not ended"
        try:
            found = await self.client.send(Request("GET", path))
        except ObjectNotFound:
            install = f"trainjob install --only controller -n {self.namespace} --image <registry>/{STEP_IMAGE}"
            missing = f"there is neither a Deployment {CONTROLLER} nor a CronJob {REAPER}: {message}"
            return [
                Finding("controller", Level.WARNING, missing, f"{install} | kubectl apply --server-side -f -"),
            ]
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

    async def _sidecars(self) -> list[Finding]:
        """Whether Istio adds a sidecar to the pods of the namespace; no finding if not, or if that is hidden."""
        try:
            found = await self.client.send(Request("GET", f"/api/v1/namespaces/{self.namespace}"))
        except (Forbidden, ObjectNotFound):
            return []
        labels = mapping(found, "metadata", "labels")
        if labels.get("istio-injection") != "enabled" and not labels.get("istio.io/rev"):
            return []
        message = (
            f"Istio adds a sidecar to the pods of {self.namespace}; unless it is a native sidecar, it keeps a pod "
            "running after its training has ended"
        )
        advice = 'set the label sidecar.istio.io/inject: "false" in the pod template of the runtimes'
        return [Finding("sidecars", Level.WARNING, message, advice)]

    async def _admission(self, runtimes: Sequence[str], queue: str) -> list[Finding]:
        """A dry run of a job of each runtime; of the runtime of steps if none is given."""
        findings: list[Finding] = []
        for name in runtimes or [STEP_RUNTIME]:
            finding = await admission.check(self.backend, self.namespace, RuntimeRef(name=name), queue)
            if finding.check == "runtime":  # a TrainingRuntime of the namespace may have the name
                own = RuntimeRef(name=name, kind="TrainingRuntime")
                other = await admission.check(self.backend, self.namespace, own, queue)
                finding = finding if other.check == "runtime" else other
            if finding.check == "runtime" and name == STEP_RUNTIME:
                # Everything can be applied to 2.2 and 2.3.
                release = " --trainer 2.1" if self.release == "2.1" else ""
                install = f"trainjob install --only runtimes --image <registry>/{STEP_IMAGE}{release}"
                advice = f"{install} | kubectl apply --server-side -f -"
                message = f"{finding.message}: initialize and export steps need it"
                level = Level.FAILURE if runtimes else Level.WARNING
                finding = Finding("runtime", level, message, advice)
            if finding not in findings:  # without an answer, the finding is the same for each
                findings.append(finding)
        if not runtimes and findings[0].check == "runtime":
            message = "not checked: name an existing runtime for a dry run, by --runtime"
            findings.append(Finding("admission", Level.SKIPPED, message))
        return findings


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
