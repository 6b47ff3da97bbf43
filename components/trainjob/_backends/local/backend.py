"""`LocalBackend`: the `Backend` protocol over jobs on disk."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from trainjob import names
from trainjob._backends.base import Snapshot, TrainJob
from trainjob._backends.local import cancels, gpus, permissions, runtimes, supervision
from trainjob._backends.local.logs import LogReader
from trainjob._backends.local.store import JobFiles, OtherFormat, cancel_metadata, job_names, now
from trainjob._backends.local.watching import Watcher
from trainjob._diagnosis import READ_LINES, blockers
from trainjob._diagnosis.evidence import Evidence
from trainjob._manifest.attempts import Cancel, cancel_of, work_of
from trainjob._support.kube_objects import has_trained, mapping, name_of, rank_of
from trainjob._support.log_lines import LogLine, Splitter, merge
from trainjob.errors import (
    AlreadyExists,
    ConfigurationError,
    NotFound,
    Rejected,
    RuntimeNotFound,
)
from trainjob.job import KEY, JobRef
from trainjob.settings import Settings
from trainjob.status import CANCELLED, QUEUE_LABEL

_log = logging.getLogger(__name__)

_LOG_SECONDS = 0.1  # between two looks for new lines of a log


class LocalBackend:
    """Runs TrainJobs as processes of this machine.

    Args:
        home: Directory of jobs, Secrets and ConfigMaps; ``TRAINJOB_HOME`` if left out.
        environments: Runtime name -> virtual environment of its ranks; ``TRAINJOB_LOCAL_ENVIRONMENTS`` if left out.
    """

    default_namespace = "default"
    cluster = None

    def __init__(self, home: Path | None = None, environments: Mapping[str, Path] | None = None) -> None:
        settings = Settings()
        self.home = (home or settings.home).expanduser().absolute()
        self.environments = settings.local_environments if environments is None else environments
        self._waiting: dict[JobRef, list[int]] = {}
        self._watcher = Watcher()

    def now(self) -> datetime:
        """See `Backend.now`."""
        return datetime.now(UTC)

    async def create(self, trainjob: TrainJob, *, dry_run: bool = False) -> TrainJob:
        """See `Backend.create`. Rejects a job that this machine cannot run."""
        runtime = trainjob["spec"]["runtimeRef"]["name"]
        if runtime not in runtimes.FRAMEWORKS:
            known = ", ".join(sorted(runtimes.FRAMEWORKS))
            raise RuntimeNotFound(f"runtime {runtime!r} does not exist on this machine; use one of: {known}")
        start = self._start(runtime)
        why = await anyio.to_thread.run_sync(runtimes.refusal, trainjob, start["path"])
        if why := why or await anyio.to_thread.run_sync(gpus.refusal, trainjob):
            raise Rejected(f"TrainJob {trainjob['metadata']['name']}: {why}")
        metadata = {
            **trainjob["metadata"],
            "uid": str(uuid.uuid4()),
            "creationTimestamp": now(),
            "resourceVersion": "1",
        }
        stored = {**trainjob, "metadata": metadata}
        if QUEUE_LABEL in (metadata.get("labels") or {}):  # Kueue would admit it, however it was created
            stored["spec"] = {name: value for name, value in trainjob["spec"].items() if name != "suspend"}
        files = self._files(metadata["namespace"], metadata["name"])
        if dry_run:
            return stored
        try:
            files = await anyio.to_thread.run_sync(JobFiles.create, files.directory, stored, start)
        except FileExistsError:
            raise AlreadyExists(f"TrainJob {metadata['namespace']}/{metadata['name']} exists or existed") from None
        except OSError as error:
            raise Rejected(
                f"TrainJob {metadata['name']} cannot be stored in {self.home}: {error.strerror}; set TRAINJOB_HOME to "
                "another directory"
            ) from error
        await self.recover(JobRef.of(stored))
        return stored

    def path_of(self, runtime: str) -> str:
        """The PATH of the ranks of a runtime.

        Raises:
            ConfigurationError: The environment of the runtime has no Python; ranks would run another one.
        """
        environment = self.environments.get(runtime)
        directory = environment.expanduser().absolute() / "bin" if environment else Path(sys.executable).parent
        if environment and not os.access(directory / "python", os.X_OK):
            raise ConfigurationError(
                f"TRAINJOB_LOCAL_ENVIRONMENTS: {environment}, the environment of {runtime}, has no Python: "
                f"create it (python3 -m venv {environment}), or correct its path"
            )
        return os.pathsep.join([str(directory), os.environ.get("PATH", os.defpath)])

    def _start(self, runtime: str) -> dict[str, str]:
        return {"cwd": str(Path.cwd()), "path": self.path_of(runtime), "home": str(self.home)}

    def _files(self, namespace: str, name: str) -> JobFiles:
        """The files of a job, which need not exist.

        Raises:
            ConfigurationError: The names are invalid, or other users can write to the home.
        """
        return JobFiles(self._directory(namespace) / names.job(name))

    async def recover(self, ref: JobRef) -> None:
        """See `Backend.recover`. Starts the supervisor, if the launching process ended before it did.

        If the key was cancelled since the launch began, the job is suspended first: a launcher that is killed before it
        looks again would leave it running, and no reaper ends it on this machine.
        """
        files = self._files(ref.namespace, ref.name)
        trainjob = files.read()
        if trainjob is not None and not files.begun() and (work := work_of(ref.name)):
            _, found = await self.cancels(ref.namespace, work)
            if (cancel := cancel_of(found, trainjob)) is not None:
                metadata = {"annotations": {CANCELLED: cancel.mark}}
                with suppress(NotFound):
                    await self.patch(ref, {"metadata": metadata, "spec": {"suspend": True}})
        await anyio.to_thread.run_sync(supervision.start, files)

    async def get(self, namespace: str, name: str) -> TrainJob | None:
        """See `Backend.get`."""
        files = self._files(namespace, name)
        await anyio.to_thread.run_sync(supervision.end_if_lost, files)
        return files.read()

    async def find(self, namespace: str, labels: Mapping[str, str]) -> list[TrainJob]:
        """See `Backend.find`."""
        found, work = [], labels.get(KEY)
        for name in self._names(namespace):
            if work is not None and work_of(name) != work:
                continue
            try:
                trainjob = await self.get(namespace, name)
            except OtherFormat as error:
                if work is not None:
                    raise
                _log.warning("left out: %s", error)
                continue
            if trainjob is not None and labels.items() <= (trainjob["metadata"].get("labels") or {}).items():
                found.append(trainjob)
        return found

    async def refs(self, namespace: str, names: Collection[str]) -> tuple[dict[str, JobRef], set[str]]:
        """See `Backend.refs`."""
        found = [await self.get(namespace, name) for name in names]
        refs = {ref.name: ref for ref in (JobRef.of(trainjob) for trainjob in found if trainjob is not None)}
        return refs, {work_of(name) for name in self._names(namespace)} - {""}

    async def is_free(self, namespace: str, name: str) -> bool:
        """See `Backend.is_free`. `create` itself refuses the name of a deleted job."""
        del namespace, name
        return True

    async def remaining_pods(self, namespace: str, names: Sequence[str]) -> list[Mapping[str, Any]]:
        """See `Backend.remaining_pods`: the ranks of a job that is being cancelled may ignore SIGTERM for seconds."""
        found: list[Mapping[str, Any]] = []
        for name in sorted({*names}.intersection(self._names(namespace))):
            job = await self.get(namespace, name)  # it ends a job without a supervisor
            files = self._files(namespace, name)
            if job is None or files.finished():
                continue
            running = [pod for pod in files.pods() if mapping(pod, "status").get("phase") == "Running"]
            if not running and files.begun() and not await self.stopped(JobRef.of(job)):
                running = [_starting(name)]  # its supervisor may be about to start the ranks
            found += running
        return found

    async def announce_cancel(self, namespace: str, work: str, cancel: Cancel) -> Cancel | None:
        """See `Backend.announce_cancel`."""
        return await anyio.to_thread.run_sync(cancels.write, self._directory(namespace), work, cancel)

    async def cancels(self, namespace: str, work: str) -> tuple[int | None, list[Cancel]]:
        """See `Backend.cancels`."""
        return await anyio.to_thread.run_sync(cancels.read, self._directory(namespace), work)

    def _directory(self, namespace: str) -> Path:
        permissions.check(self.home)
        return self.home / "jobs" / names.namespace(namespace)

    def _names(self, namespace: str) -> list[str]:
        """The names of the jobs of a namespace."""
        return job_names(self._directory(namespace))

    async def runtimes(self) -> list[str]:
        """See `Backend.runtimes`."""
        return [*runtimes.FRAMEWORKS]

    async def watch(self, ref: JobRef) -> AsyncGenerator[Snapshot]:
        """See `Backend.watch`."""
        with self._watcher.listen(self._files(ref.namespace, ref.name)) as listener:
            while await listener.changed() and not listener.closed:
                trainjob = listener.files.read()
                if trainjob is None or trainjob["metadata"]["uid"] != ref.uid:
                    yield Snapshot(None)
                    return
                yield Snapshot(trainjob, blocker=blockers.in_events(listener.abandoned))

    async def has_run(self, ref: JobRef) -> bool:
        """See `Backend.has_run`."""
        return any(map(has_trained, self._files(ref.namespace, ref.name).pods()))

    async def state(self, ref: JobRef) -> Evidence:
        """See `Backend.state`."""
        trainjob = await self.get(ref.namespace, ref.name)
        if trainjob is None or trainjob["metadata"]["uid"] != ref.uid:
            return Evidence(None)
        files = self._files(ref.namespace, ref.name)
        return Evidence(trainjob, files.pods(), events=supervision.abandoned(files), reported=files.reported())

    async def states(self, namespace: str, labels: Mapping[str, str]) -> list[Evidence]:
        """See `Backend.states`."""
        return [await self.state(JobRef.of(job)) for job in await self.find(namespace, labels)]

    async def evidence(self, ref: JobRef) -> Evidence:
        """See `Backend.evidence`."""
        state = await self.state(ref)
        if state.trainjob is None:
            return state
        files = self._files(ref.namespace, ref.name)
        logs = {
            name: [line.text for line in LogReader(files, name, Splitter(rank_of(pod), raw=True)).tail(READ_LINES)]
            for pod in state.pods
            for name in [pod["metadata"]["name"]]
        }
        return replace(state, logs=logs)

    async def crashes(self, ref: JobRef) -> AsyncGenerator[Evidence]:
        """See `Backend.crashes`. Yields nothing: the first crash fails the job, and its log and exit code are kept.

        So ``fail_on_first_crash`` has no effect on this backend.
        """
        del ref
        nothing: tuple[Evidence, ...] = ()
        for evidence in nothing:
            yield evidence

    async def logs(
        self,
        ref: JobRef,
        *,
        ranks: Sequence[str] = (),
        follow: bool = False,
        since: str = "",
        tail: int | None = None,
    ) -> AsyncGenerator[LogLine]:
        """See `Backend.logs`."""
        files = self._files(ref.namespace, ref.name)
        readers: dict[str, LogReader] = {}
        with self._watcher.listen(files) as listener:
            over = False
            while not over:
                if await listener.changed(_LOG_SECONDS) or not follow:
                    over = not follow or listener.closed or files.finished() or not files.object.exists()
                fresh: list[Iterable[LogLine]] = []
                for name, rank in files.logged().items():
                    if ranks and rank not in ranks:
                        continue
                    if name not in readers:
                        readers[name] = LogReader(files, name, Splitter(rank))
                        if tail is not None and not since:
                            fresh.append(readers[name].tail(tail))
                            continue
                    fresh.append(line for line in readers[name].lines() if line.time > since)
                for line in merge(*fresh):
                    yield line

    async def tails(self, ref: JobRef, count: int) -> AsyncGenerator[tuple[Mapping[str, Any], list[LogLine]]]:
        """See `Backend.tails`."""
        files = self._files(ref.namespace, ref.name)
        for pod in (await self.state(ref)).pods:
            yield pod, LogReader(files, name_of(pod), Splitter(rank_of(pod))).tail(count)

    def attend(self, ref: JobRef) -> None:
        """See `Backend.attend`. A lock that the supervisor of the job checks, and that ends with this process."""
        lock = self._files(ref.namespace, ref.name).wait()
        if lock is not None:
            self._waiting.setdefault(ref, []).append(lock)

    def leave(self, ref: JobRef, *, ended: bool) -> None:
        """See `Backend.leave`."""
        del ended
        if locks := self._waiting.get(ref):
            os.close(locks.pop())

    async def patch(self, ref: JobRef, patch: Mapping[str, Any]) -> None:
        """See `Backend.patch`."""
        files = self._files(ref.namespace, ref.name)
        await anyio.to_thread.run_sync(_edit, files, ref, patch)
        await anyio.to_thread.run_sync(supervision.end_if_lost, files)

    async def cancel(self, ref: JobRef) -> None:
        """See `Backend.cancel`. Sets `Phase.CANCELLED` and keeps the files of the job."""
        files = self._files(ref.namespace, ref.name)
        trainjob = files.read()
        if trainjob is None or files.finished() or "deletionTimestamp" in trainjob["metadata"]:
            return
        with suppress(NotFound):
            metadata = {**cancel_metadata(), "annotations": {CANCELLED: "true"}}
            await anyio.to_thread.run_sync(_edit, files, ref, {"metadata": metadata})
            await anyio.to_thread.run_sync(supervision.end, files)

    async def delete(self, ref: JobRef, version: str = "") -> None:
        """See `Backend.delete`. Removes the files at once if the job has no supervisor."""
        files = self._files(ref.namespace, ref.name)
        with suppress(NotFound):
            required = {"resourceVersion": version} if version else {}
            asked = {"metadata": {"deletionTimestamp": now(), "finalizers": None, **required}}
            await anyio.to_thread.run_sync(_edit, files, ref, asked)
            # The supervisor of a finished job may end without having read this.
            wait_seconds = 5.0 if files.finished() else 0.0
            lock = await anyio.to_thread.run_sync(lambda: files.supervise(wait_seconds=wait_seconds))
            if lock is not None:
                await anyio.to_thread.run_sync(supervision.remove, files)
                os.close(lock)

    async def stopped(self, ref: JobRef) -> bool:
        """See `Backend.stopped`."""
        trainjob = await self.get(ref.namespace, ref.name)  # it ends a job without a supervisor
        if (
            trainjob is None
            or trainjob["metadata"]["uid"] != ref.uid
            or self._files(ref.namespace, ref.name).finished()
        ):
            return True
        if "deletionTimestamp" in trainjob["metadata"]:
            return False
        # The condition is written after the last rank has ended; the spec alone is only the request.
        conditions = trainjob["status"].get("conditions") or []
        suspended = any(c["type"] == "Suspended" and c["reason"] == "Suspended" for c in conditions)
        return suspended and bool(trainjob["spec"].get("suspend"))

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        self._watcher.close()
        for lock in chain.from_iterable(self._waiting.values()):
            os.close(lock)
        self._waiting.clear()


def _edit(files: JobFiles, ref: JobRef, patch: Mapping[str, Any]) -> None:
    try:
        with files.editing():
            trainjob = files.read()
            if trainjob is None or trainjob["metadata"]["uid"] != ref.uid:
                raise NotFound(f"TrainJob {ref} (uid {ref.uid}) does not exist any more")
            version = trainjob["metadata"].get("resourceVersion", "0")
            if patch.get("metadata", {}).get("resourceVersion", version) != version:
                raise NotFound(f"TrainJob {ref} was changed since it was read")
            del trainjob["status"]
            merged = _merged(trainjob, patch)
            merged["metadata"]["resourceVersion"] = str(int(version) + 1)
            files.write_object(merged)
    except FileNotFoundError:
        raise NotFound(f"TrainJob {ref} does not exist any more") from None
    except OSError as error:
        raise Rejected(f"TrainJob {ref} cannot be changed in {files.directory}: {error.strerror}") from error


def _starting(name: str) -> dict[str, Any]:
    """The first rank of a job, before it has started."""
    labels = {
        "jobset.sigs.k8s.io/jobset-name": name,
        "jobset.sigs.k8s.io/replicatedjob-name": "node",
        "batch.kubernetes.io/job-completion-index": "0",
    }
    return {"metadata": {"name": f"{name}-node-0-0", "labels": labels}, "status": {"phase": "Pending"}}


def _merged(value: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7386)."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(value) if isinstance(value, Mapping) else {}
    for name, part in patch.items():
        if part is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), part)
    return merged
