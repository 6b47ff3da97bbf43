"""Triggers for asset watchers: a TrainJob that ends, or a new model version, can start a DAG.

::

    finished = Asset("trained", watchers=[AssetWatcher(name="trained", trigger=TrainJobEventTrigger(
        labels={"team": "research"}, phases=["Complete"]))])
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.triggers import BaseEventTrigger
from airflow.triggers.base import TriggerEvent

from trainjob_airflow.hooks.trainjob import TrainJobHook

if TYPE_CHECKING:
    from trainjob._backends.base import TrainJob

_STATE = "trainjob_seen"
_PAUSE = 60.0  # seconds after a failed poll
_OVERLAP = timedelta(minutes=5)  # a finished job may become visible after one with a later timestamp


class _Watcher(BaseEventTrigger):
    """Polls a source of events, and stores its position in the asset's state where Airflow has one (3.3).

    Before Airflow 3.3, changes while no triggerer runs create no event.
    """

    poll_interval: float

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # BaseTrigger's has no types

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield one event for each change. After any error, log it and poll again."""
        seen = await self._seen()
        while True:
            try:
                events, seen = await self._poll(seen)
            except Exception as error:  # noqa: BLE001 - if a trigger raises, the watch ends and the UI does not show it
                self._log_retry(error, max(_PAUSE, self.poll_interval))
                await asyncio.sleep(max(_PAUSE, self.poll_interval))
                continue
            for event in events:
                yield TriggerEvent(event)
            if events:
                await self._store_position(seen)
            await asyncio.sleep(self.poll_interval)

    async def _poll(self, seen: str) -> tuple[list[dict[str, Any]], str]:
        """The events since position `seen`, and the new position."""
        raise NotImplementedError

    async def _start_position(self) -> str:
        """The position from which a watcher without a stored position starts."""
        raise NotImplementedError

    async def _seen(self) -> str:
        store = getattr(self, "asset_state_store", None)
        stored = await store.aget(_STATE) if store is not None else None
        if isinstance(stored, str):
            return stored
        while True:
            try:
                seen = await self._start_position()
            except Exception as error:  # noqa: BLE001 - as in `run`
                self._log_retry(error, _PAUSE)
                await asyncio.sleep(_PAUSE)
            else:
                await self._store_position(seen)
                return seen

    def _log_retry(self, error: Exception, seconds: float) -> None:
        self.log.warning("polling failed, next attempt in %g s: %s: %s", seconds, type(error).__name__, error)

    async def _store_position(self, seen: str) -> None:
        store = getattr(self, "asset_state_store", None)
        if store is not None:
            await store.aset(_STATE, seen)


class TrainJobEventTrigger(_Watcher):
    """An event for each TrainJob that ends, with ``{"namespace", "name", "uid", "phase", "finished"}``.

    Args:
        labels: Labels that a job must have; any job if left out.
        phases: Final phases that create an event: ``Complete``, ``Failed`` or both.
        namespace: Namespace of the jobs; the connection's if left out.
        trainjob_conn_id: Connection of type ``trainjob``. If the default one does not exist, ``TRAINJOB_*`` in the
            environment of the triggerer decides.
        poll_interval: Seconds between two polls, each of which is one request.
    """

    def __init__(
        self,
        *,
        labels: dict[str, str] | None = None,
        phases: Sequence[str] = ("Complete",),
        namespace: str | None = None,
        trainjob_conn_id: str = TrainJobHook.default_conn_name,
        poll_interval: float = 30,
    ) -> None:
        super().__init__()
        if wrong := set(phases) - {"Complete", "Failed"}:
            raise ValueError(f"phases must be Complete, Failed or both, not {min(wrong)}")
        self.labels = labels
        self.phases = list(phases)
        self.namespace = namespace
        self.trainjob_conn_id = trainjob_conn_id
        self.poll_interval = poll_interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        names = ("labels", "phases", "namespace", "trainjob_conn_id", "poll_interval")
        return f"{type(self).__module__}.{type(self).__qualname__}", {name: getattr(self, name) for name in names}

    async def _start_position(self) -> str:
        _, now = await self._jobs()  # by the clock that writes when a job ended, which a reply brings
        return now.isoformat()

    async def _jobs(self) -> tuple[list[TrainJob], datetime]:
        """The jobs with the labels, and the current time."""
        hook = TrainJobHook(self.trainjob_conn_id)
        async with hook.shared_backend() as backend:
            namespace = self.namespace or await hook.namespace() or backend.default_namespace
            return await backend.find(namespace, self.labels or {}), backend.now()

    async def _poll(self, seen: str) -> tuple[list[dict[str, Any]], str]:
        from trainjob import JobRef
        from trainjob.status import observe

        jobs, _ = await self._jobs()
        timestamp, *reported = seen.split()
        since = datetime.fromisoformat(timestamp)
        ended = [(latest.finished, JobRef.of(job), latest.phase.value) for job in jobs if (latest := observe(job))]
        recent = [
            (time, ref, phase)
            for time, ref, phase in ended
            if phase in self.phases and time is not None and time >= since
        ]
        new = sorted((each for each in recent if each[1].uid not in reported), key=lambda each: each[0])
        if not new:
            return [], seen
        since = max(since, new[-1][0] - _OVERLAP)
        return [
            {"namespace": ref.namespace, "name": ref.name, "uid": ref.uid, "phase": phase, "finished": time.isoformat()}
            for time, ref, phase in new
        ], " ".join([since.isoformat(), *(ref.uid for time, ref, _ in recent if time >= since)])


class ModelVersionEventTrigger(_Watcher):
    """An event for each new version of a registered model, with ``{"name", "version", "uri", "digest", "metrics"}``.

    Args:
        name: Name of the model.
        alias: Only versions that get this alias, such as ``champion``, create an event.
        registry: URL of the registry, see `trainjob.registry.connect`; ``TRAINJOB_REGISTRY`` of the triggerer if left
            out. It must not contain credentials: Airflow stores it unencrypted.
        poll_interval: Seconds between two polls.
    """

    def __init__(
        self, *, name: str, alias: str | None = None, registry: str | None = None, poll_interval: float = 60
    ) -> None:
        super().__init__()
        self.name = name
        self.alias = alias
        self.registry = registry
        self.poll_interval = poll_interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        names = ("name", "alias", "registry", "poll_interval")
        return f"{type(self).__module__}.{type(self).__qualname__}", {name: getattr(self, name) for name in names}

    async def _start_position(self) -> str:
        return " ".join(version.version for version in await asyncio.to_thread(self._versions))

    async def _poll(self, seen: str) -> tuple[list[dict[str, Any]], str]:
        versions = await asyncio.to_thread(self._versions)
        known = set(seen.split())
        events = [
            {
                "name": version.name,
                "version": version.version,
                "uri": version.uri,
                "digest": version.digest,
                "metrics": dict(version.metrics),
            }
            for version in versions
            if version.version not in known
        ]
        # The position holds only versions with the alias: if it returns to a version, that is another event.
        return events, " ".join(version.version for version in versions)

    def _versions(self) -> list[Any]:
        from trainjob.registry import connect

        found = connect(self.registry).list(self.name)
        return [version for version in found if self.alias is None or self.alias in version.aliases]
