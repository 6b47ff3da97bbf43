"""Triggers for asset watchers: a TrainJob that ended, or a new version of a model, can start a DAG.

::

    finished = Asset("trained", watchers=[AssetWatcher(name="trained", trigger=TrainJobEventTrigger(
        labels={"team": "research"}, phases=["Complete"]))])
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.providers.common.compat.triggers import BaseEventTrigger
from airflow.triggers.base import TriggerEvent

from trainjob_airflow.hooks.trainjob import TrainJobHook

_STATE = "trainjob_seen"
_PAUSE = 60.0  # after a look that failed
_OVERLAP = timedelta(minutes=5)  # an end may be seen later than one with a later timestamp


class _Watcher(BaseEventTrigger):
    """Looks again and again, and remembers how far it has seen in the asset's own state, where Airflow keeps one (3.3).

    Without that, what happens while no triggerer runs makes no event.
    """

    poll_interval: float

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """One event for each thing that is new. An outage is waited out, whatever it is."""
        seen = await self._seen()
        while True:
            try:
                events, seen = await self._look(seen)
            except Exception as error:  # noqa: BLE001 - a trigger that raises ends the watch without a word in the UI
                self.log.warning("%s: %s", type(error).__name__, error)
                await asyncio.sleep(max(_PAUSE, self.poll_interval))
                continue
            for event in events:
                yield TriggerEvent(event)  # type: ignore[no-untyped-call]
            if events:
                await self._remember(seen)
            await asyncio.sleep(self.poll_interval)

    async def _look(self, seen: str) -> tuple[list[dict[str, Any]], str]:
        """What is new since `seen`, and how far that is."""
        raise NotImplementedError

    async def _begin(self) -> str:
        """How far has been seen when nothing is known."""
        raise NotImplementedError

    async def _seen(self) -> str:
        store = getattr(self, "asset_state_store", None)
        kept = await store.aget(_STATE) if store is not None else None
        if isinstance(kept, str):
            return kept
        while True:
            try:
                seen = await self._begin()
            except Exception as error:  # noqa: BLE001
                self.log.warning("%s: %s", type(error).__name__, error)
                await asyncio.sleep(_PAUSE)
            else:
                await self._remember(seen)
                return seen

    async def _remember(self, seen: str) -> None:
        store = getattr(self, "asset_state_store", None)
        if store is not None:
            await store.aset(_STATE, seen)


class TrainJobEventTrigger(_Watcher):
    """An event for each TrainJob that ends, with ``{"namespace", "name", "uid", "phase", "finished"}``.

    Args:
        labels: All of which a job has to have; any job if left out.
        phases: Ends that count: ``Complete``, ``Failed`` or both.
        namespace: Of the jobs; the connection's if left out.
        trainjob_conn_id: See `TrainJobOperator`.
        poll_interval: Seconds between two looks, each of which is one request.
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
        super().__init__()  # type: ignore[no-untyped-call]
        if wrong := set(phases) - {"Complete", "Failed"}:
            raise ValueError(f"a job ends Complete or Failed, not {min(wrong)}")
        self.labels = labels
        self.phases = list(phases)
        self.namespace = namespace
        self.trainjob_conn_id = trainjob_conn_id
        self.poll_interval = poll_interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        names = ("labels", "phases", "namespace", "trainjob_conn_id", "poll_interval")
        return f"{type(self).__module__}.{type(self).__qualname__}", {name: getattr(self, name) for name in names}

    async def _begin(self) -> str:
        return datetime.now(UTC).isoformat()

    async def _look(self, seen: str) -> tuple[list[dict[str, Any]], str]:
        from trainjob.manifest import JobRef
        from trainjob.status import observe

        hook = TrainJobHook(self.trainjob_conn_id)
        async with hook.shared_backend() as backend:
            namespace = self.namespace or await hook.namespace() or backend.default_namespace
            jobs = await backend.find(namespace, self.labels or {})
        moment, *told = seen.split()
        since = datetime.fromisoformat(moment)
        ended = [(latest.finished, JobRef.of(job), latest.phase.value) for job in jobs if (latest := observe(job))]
        counted = [
            (time, ref, phase)
            for time, ref, phase in ended
            if phase in self.phases and time is not None and time >= since
        ]
        new = sorted((each for each in counted if each[1].uid not in told), key=lambda each: each[0])
        if not new:
            return [], seen
        since = max(since, new[-1][0] - _OVERLAP)
        return [
            {"namespace": ref.namespace, "name": ref.name, "uid": ref.uid, "phase": phase, "finished": time.isoformat()}
            for time, ref, phase in new
        ], " ".join([since.isoformat(), *(ref.uid for time, ref, _ in counted if time >= since)])


class ModelVersionEventTrigger(_Watcher):
    """An event for each new version of a registered model, with ``{"name", "version", "uri", "digest", "metrics"}``.

    Args:
        name: Of the model.
        alias: Only when a version gets this alias, such as ``champion``.
        registry: See `trainjob.registry.connect`; ``TRAINJOB_REGISTRY`` of the triggerer if left out. No credentials
            belong in it: Airflow stores it in clear.
        poll_interval: Seconds between two looks.
    """

    def __init__(
        self, *, name: str, alias: str | None = None, registry: str | None = None, poll_interval: float = 60
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self.alias = alias
        self.registry = registry
        self.poll_interval = poll_interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        names = ("name", "alias", "registry", "poll_interval")
        return f"{type(self).__module__}.{type(self).__qualname__}", {name: getattr(self, name) for name in names}

    async def _begin(self) -> str:
        return " ".join(version.version for version in await asyncio.to_thread(self._versions))

    async def _look(self, seen: str) -> tuple[list[dict[str, Any]], str]:
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
        # An alias that comes back to a version is another event, so what has none any more is forgotten.
        return events, " ".join(version.version for version in versions)

    def _versions(self) -> list[Any]:
        from trainjob.registry import connect

        found = connect(self.registry).list(self.name)
        return [version for version in found if self.alias is None or self.alias in version.aliases]
