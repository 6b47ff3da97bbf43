"""Requests about TrainJobs, and what else a launch reads and writes: JobSets, pods, records of cancels."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import anyio

from trainjob import names
from trainjob._backends.base import TrainJob
from trainjob._backends.kubernetes import cancels, pods
from trainjob._backends.kubernetes.client import MERGE_PATCH, ApiClient, Request
from trainjob._backends.kubernetes.errors import (
    ApiError,
    Conflict,
    Expired,
    Forbidden,
    Invalid,
    NoConnection,
    ObjectNotFound,
    Transient,
    Unauthorized,
)
from trainjob._backends.kubernetes.trainer_releases import AdaptingClient
from trainjob._manifest.attempts import Cancel, recent
from trainjob._support.kube_objects import mapping, mappings
from trainjob.errors import (
    AlreadyExists,
    BackendUnavailable,
    ConfigurationError,
    NotFound,
    Rejected,
    RetryVerdict,
    RuntimeNotFound,
)
from trainjob.job import API_VERSION, RESERVED_PREFIX, JobRef
from trainjob.status import observe

_REQUEST = RESERVED_PREFIX + "request"
_MAX_JSON_BYTES = 3 << 20  # a server closes the connection during a larger request, which looks like an outage
_SLOW_SECONDS = 8.0  # a request without a reply for so long is logged
_ALIVE = ("Pending", "Running", "Unknown")  # phases of a pod that may still write; a terminating pod has one of these

_log = logging.getLogger(__name__)

T = TypeVar("T")


class TrainJobObjects:
    """Requests about the TrainJobs of a cluster, each repeated after transient errors.

    Args:
        client: The connection.
    """

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._adapting = AdaptingClient(client)
        self._stop_requested: dict[str, float] = {}  # UID -> time, until pods are seen after it

    async def create(self, trainjob: TrainJob, *, dry_run: bool = False) -> TrainJob:
        """Create the TrainJob, as `Backend.create`. After a lost reply the job is looked up."""
        if (size := len(json.dumps(trainjob))) > _MAX_JSON_BYTES:
            raise Rejected(
                f"TrainJob {trainjob['metadata']['name']} is {size / 2**20:.1f} MiB of JSON, and an API server accepts "
                f"{_MAX_JSON_BYTES >> 20} MiB: stage large data as an input"
            )
        # After a lost reply, the annotation distinguishes the job of this request from an earlier job of the same name.
        mark = secrets.token_hex(8)
        annotations = {**(trainjob["metadata"].get("annotations") or {}), _REQUEST: mark}
        metadata = {**trainjob["metadata"], "annotations": annotations}
        # Strict: a field that this cluster's Trainer does not have is an error; otherwise it is dropped silently.
        params = {"fieldValidation": "Strict", "fieldManager": "trainjob", **({"dryRun": "All"} if dry_run else {})}
        request = Request("POST", collection(metadata["namespace"]), params, body={**trainjob, "metadata": metadata})
        namespace, name = metadata["namespace"], metadata["name"]
        backoff = self._client.timings.request_backoff()
        while True:
            slow = self._warn_when_slow("" if dry_run else f"TrainJob {namespace}/{name} is not created yet: ")
            try:
                return await self._adapting.create(request)
            except Transient as error:
                failure: ApiError = error
            except Conflict as error:  # without that reason, of a ResourceQuota that others change at the same time
                failure = error
            except ApiError as error:
                raise _refusal(error, trainjob) from error
            finally:
                slow.cancel()
            exists = failure.reason == "AlreadyExists"
            if not exists and not backoff.count and not dry_run:
                _log.warning("TrainJob %s/%s is not created yet, retrying for a minute: %s", namespace, name, failure)
            if not exists and backoff.failure():
                raise BackendUnavailable(f"TrainJob {name} could not be created: {failure}") from failure
            if exists and not backoff.count:
                raise AlreadyExists(f"TrainJob {namespace}/{name} exists") from failure
            if not exists:
                await anyio.sleep(backoff.pause(failure.retry_after))
            # This request may have created the job, which may even have ended and been deleted since.
            present = await self.get(namespace, name)
            if present is not None and (present["metadata"].get("annotations") or {}).get(_REQUEST) == mark:
                return present
            if exists or present is not None or not await self.is_free(namespace, name):
                raise AlreadyExists(f"TrainJob {namespace}/{name} exists, or existed and is being deleted") from failure

    async def recover(self, ref: JobRef) -> None:
        """Do nothing: creating a job is a single request."""

    async def get(self, namespace: str, name: str) -> TrainJob | None:
        """Return the job of that name, or None."""
        try:
            return await self.retry(lambda: self._client.send(Request("GET", collection(namespace, name))))
        except ObjectNotFound as error:
            _refuse_without_trainer(error)
            return None

    async def find(self, namespace: str, labels: Mapping[str, str]) -> list[TrainJob]:
        """Return all jobs of `namespace` that have all `labels`."""
        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        try:
            return [*await self.retry(lambda: self._client.items(collection(namespace), {"labelSelector": selector}))]
        except ApiError as error:
            if isinstance(error, ObjectNotFound):
                _refuse_without_trainer(error)
            raise Rejected(f"TrainJobs in namespace {namespace} cannot be listed: {error.message}") from error

    async def patch(self, ref: JobRef, patch: Mapping[str, Any]) -> None:
        """Merge `patch` and the UID into the object: the server refuses to change another job of the same name.

        A Conflict without a version in the patch is that of a ResourceQuota, and the patch is repeated.
        """
        versioned = "resourceVersion" in patch.get("metadata", {})
        try:
            await self.retry(
                lambda: self._client.send(patching(ref, patch)),
                lambda conflict: not versioned and "UID" not in conflict.message,
            )
        except ApiError as error:
            other_uid = isinstance(error, Invalid) and "metadata.uid" in error.message
            if other_uid or isinstance(error, ObjectNotFound | Conflict):
                changed = " or was changed" if versioned else ""
                raise NotFound(f"TrainJob {ref} (uid {ref.uid}) is gone{changed}") from error
            raise Rejected(f"TrainJob {ref} could not be changed: {error.message}") from error
        if patch.get("spec", {}).get("suspend"):
            self._note_stop(ref)

    async def cancel(self, ref: JobRef) -> None:
        """Delete the job: nothing else ends a TrainJob. Its pods and their logs are deleted with it."""
        await self.delete(ref)

    async def delete(self, ref: JobRef, version: str = "") -> None:
        """Request the deletion of the job of this UID and version; do nothing if it is gone or was changed."""
        try:
            await self.retry(lambda: self._client.send(deleting(ref, version)))
        except (ObjectNotFound, Conflict):
            return
        except ApiError as error:
            raise Rejected(f"TrainJob {ref} could not be deleted: {error.message}") from error
        self._note_stop(ref)

    def _note_stop(self, ref: JobRef) -> None:
        """Record that the job was stopped now. Earlier stops have settled, and are forgotten."""
        now, settle = time.monotonic(), self._client.timings.settle
        recent = {uid: at for uid, at in self._stop_requested.items() if now - at < settle}
        self._stop_requested = {**recent, ref.uid: now}

    async def stopped(self, ref: JobRef) -> bool:
        """Whether no pod of the job is running or pending, and none can appear any more."""
        trainjob = await self.get(ref.namespace, ref.name)
        if trainjob is not None and trainjob["metadata"]["uid"] != ref.uid:
            return True  # the pods belong to another job of this name
        suspended = trainjob is not None and trainjob["spec"].get("suspend")
        if trainjob is not None and not suspended and not observe(trainjob).phase.terminal:
            return False
        found = await self.retry(lambda: pods.list_pods(self._client, ref))
        if any(pod["status"].get("phase") in ("Pending", "Running") for pod in found):
            self._stop_requested.pop(ref.uid, None)  # Jobs end before their pods, so no pods appear after these
            return False
        return time.monotonic() >= self._stop_requested.get(ref.uid, 0) + self._client.timings.settle

    async def is_free(self, namespace: str, name: str) -> bool:
        """Whether no JobSet has that name: Trainer would take its state for that of a new TrainJob.

        True if this account may not read JobSets.
        """
        return (await self._jobset(namespace, name)) is None

    async def has_own_jobset(self, ref: JobRef) -> bool | None:
        """Whether the JobSet of that name belongs to this job; None if it is gone, has no owner or may not be read."""
        owners = mappings(await self._jobset(ref.namespace, ref.name), "metadata", "ownerReferences")
        return any(owner.get("uid") == ref.uid for owner in owners) if owners else None

    async def _jobset(self, namespace: str, name: str) -> dict[str, Any] | None:
        path = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{names.namespace(namespace)}/jobsets/{names.job(name)}"
        try:
            return await self.retry(lambda: self._client.send(Request("GET", path)))
        except ObjectNotFound:
            return None
        except Forbidden as error:
            _log.info("JobSet %s/%s cannot be read, so its absence is assumed: %s", namespace, name, error)
            return None

    async def remaining_pods(self, namespace: str, names: Sequence[str]) -> list[Mapping[str, Any]]:
        """The pods of JobSets of those names that have not ended; none if this account may not list pods."""
        try:
            found = await self.retry(lambda: pods.list_named(self._client, namespace, names))
        except Forbidden as error:
            _log.info("pods of earlier attempts cannot be listed, so their end is assumed: %s", error)
            return []
        return [pod for pod in found if mapping(pod, "status").get("phase") in _ALIVE]

    async def announce_cancel(self, namespace: str, work: str, cancel: Cancel) -> Cancel | None:
        """Write the Lease of a cancel; None if this account may not."""
        named = replace(cancel, record=f"trainjob-cancelled-{work}-{secrets.token_hex(4)}")
        try:
            return await self.retry(
                lambda: cancels.write(self._client, namespace, work, named),
                lambda conflict: conflict.reason != "AlreadyExists",
            )
        except Forbidden as error:
            _log.warning("permission for Leases is missing, so launches on their way are not cancelled: %s", error)
            return None

    async def cancels(self, namespace: str, work: str) -> tuple[int | None, list[Cancel]]:
        """The version of the Leases, and the cancels of a key."""
        version, found = await self.retry(lambda: cancels.read_if_allowed(self._client, namespace, work))
        return version, recent(found, self._client.now())

    async def all_cancels(self, namespace: str) -> dict[str, list[Cancel]]:
        """The cancels of all keys."""
        return (await self.retry(lambda: cancels.read(self._client, namespace)))[1]

    async def forget_cancel(self, namespace: str, cancel: Cancel) -> None:
        """Delete the Lease of a cancel."""
        with suppress(ObjectNotFound):
            await self.retry(lambda: self._client.send(cancels.removal(namespace, cancel)))

    def _warn_when_slow(self, about: str) -> asyncio.TimerHandle:
        """Log that the API server does not answer, unless the handle is cancelled before."""
        text = "%sthe API server, or an admission webhook that it calls, has not answered for %.0f s"
        return asyncio.get_running_loop().call_later(_SLOW_SECONDS, _log.warning, text, about, _SLOW_SECONDS)

    async def retry(
        self, request: Callable[[], Awaitable[T]], again: Callable[[Conflict], bool] = lambda _: False
    ) -> T:
        """The result of `request`, retried after transient errors until `Timings.request_backoff` is used up.

        A list that expired before its last page is restarted.

        Args:
            request: Sends the request.
            again: Whether a conflict is transient.

        Raises:
            Rejected: The credentials are refused.
            BackendUnavailable: The server did not respond for too long.
            ApiError: The request is refused for another reason.
        """
        backoff = self._client.timings.request_backoff()
        slow = self._warn_when_slow("")
        try:
            while True:
                try:
                    return await request()
                except Unauthorized as error:
                    raise Rejected(str(error)) from error
                except (Conflict, Expired, Transient) as error:
                    if isinstance(error, Conflict) and not again(error):
                        raise
                    if backoff.failure():
                        raise BackendUnavailable(f"the API server is unavailable: {error}") from error
                    if backoff.count == 1 and isinstance(error, NoConnection):
                        _log.warning("the API server cannot be reached, retrying for a minute: %s", error)
                        slow.cancel()
                    await anyio.sleep(backoff.pause(error.retry_after))
        finally:
            slow.cancel()


def patching(ref: JobRef, patch: Mapping[str, Any]) -> Request:
    """The request that merges `patch` into the job of this UID."""
    body = {**patch, "metadata": {**patch.get("metadata", {}), "uid": ref.uid}}
    params = {"fieldValidation": "Strict", "fieldManager": "trainjob"}
    return Request("PATCH", collection(ref.namespace, ref.name), params, body=body, content_type=MERGE_PATCH)


def deleting(ref: JobRef, version: str = "") -> Request:
    """The request that deletes the job of this UID, and of this version if one is given."""
    preconditions = {"uid": ref.uid, **({"resourceVersion": version} if version else {})}
    body = {"propagationPolicy": "Background", "preconditions": preconditions}
    return Request("DELETE", collection(ref.namespace, ref.name), body=body)


def collection(namespace: str, name: str | None = None) -> str:
    """The path of the TrainJobs of a namespace, or of one of them."""
    path = f"/apis/{API_VERSION}/namespaces/{names.namespace(namespace)}/trainjobs"
    return path if name is None else f"{path}/{names.job(name)}"


def _refuse_without_trainer(error: ObjectNotFound) -> None:
    """Raise if the 404 is about the path: this cluster serves no TrainJobs."""
    if "could not find the requested resource" in error.message:
        raise ConfigurationError(f"this cluster has no {API_VERSION} TrainJobs: install Kubeflow Trainer 2.1 or newer")


# Message of Trainer's webhook about a runtime that does not fit `initializer` -> advice.
_ADVICE = {
    "-initializer job when trainJob is configured": "this runtime has no such initializer: stage the data in a "
    "separate step before this one, or use a runtime with that initializer",
    "must have volumeMount with name - initializer": "mount a volume called initializer there by runtime_patches (see "
    "docs/how-to/runtimes.md)",
}
# The second is about a quota not counted yet (k8s.io/apiserver, admission/plugin/resourcequota).
_NO_QUOTA = ("exceeded quota", "status unknown for quota", "insufficient quota")


def _refusal(error: ApiError, trainjob: TrainJob) -> Exception:
    """The error for a refused job; its class says who has to act."""
    name = f"TrainJob {trainjob['metadata']['namespace']}/{trainjob['metadata']['name']}"
    if isinstance(error, ObjectNotFound):
        try:
            _refuse_without_trainer(error)
        except ConfigurationError as missing:
            return missing
    runtime = trainjob["spec"]["runtimeRef"]
    # From Trainer's webhook or Kueue's, whichever answers first.
    phrases = ("must be created before the TrainJob is created", f"runtime '{runtime['name']}' not found")
    if any(phrase in error.message for phrase in phrases):
        return RuntimeNotFound(f"{name}: there is no {runtime.get('kind', 'runtime')} {runtime['name']!r}")
    advice = [f"; {text}" for phrase, text in _ADVICE.items() if phrase in error.message]
    refused = Rejected(f"{name} was refused: {error.message}{''.join(advice)}")
    if any(phrase in error.message for phrase in _NO_QUOTA):
        refused.retry = RetryVerdict.QUOTA
    return refused
