"""`TrainJobSensor`: waits for a TrainJob that somebody else launched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import BaseSensorOperator, conf

from trainjob_airflow.exceptions import TrainJobFailure, TrainJobFatal, airflow_error
from trainjob_airflow.hooks.trainjob import TrainJobHook
from trainjob_airflow.narrator import has_reached

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context


class TrainJobSensor(BaseSensorOperator):
    """Waits until a TrainJob is in a phase, or has passed it.

    A job that does not exist yet is waited for. One that ends otherwise (waiting for ``Complete``, it failed) fails
    the sensor at once.

    Args:
        name: Name of the TrainJob.
        phases: One phase or several: ``Running``, ``Complete``, ``Failed``, …, see `trainjob.Phase`.
        namespace: Its namespace; the connection's if left out.
        trainjob_conn_id: See `TrainJobOperator`.
        deferrable: Wait in the triggerer.
        **kwargs: Of `BaseSensorOperator`: ``mode``, ``poke_interval``, ``timeout``, ``soft_fail``, …
    """

    template_fields: Sequence[str] = ("name", "phases", "namespace", "trainjob_conn_id")
    ui_color = "#d7e8fc"

    def __init__(
        self,
        *,
        name: str,
        phases: str | Sequence[str] = "Complete",
        namespace: str | None = None,
        trainjob_conn_id: str = TrainJobHook.default_conn_name,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.name = name
        self.phases = phases
        self.namespace = namespace
        self.trainjob_conn_id = trainjob_conn_id
        self.deferrable = deferrable

    def execute(self, context: Context) -> Any:
        """Look once; then wait here or in the triggerer."""
        if not self.deferrable:
            return super().execute(context)
        if not self.poke(context):
            from trainjob_airflow.triggers.trainjob import TrainJobPhaseTrigger  # noqa: PLC0415

            self.defer(
                trigger=TrainJobPhaseTrigger(
                    trainjob_conn_id=self.trainjob_conn_id,
                    namespace=self.namespace,
                    name=self.name,
                    phases=self._phases(),
                    poll_interval=self.poke_interval,
                ),
                method_name="execute_complete",
                timeout=timedelta(seconds=self.timeout),
            )
        return None

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> None:
        """Go on after the trigger's event."""
        del context
        if event["status"] == "reached":
            self.log.info("TrainJob %s is %s", self.name, event["message"])
            return
        again = event["status"] == "error" and event["retryable"]
        raise (TrainJobFailure if again else TrainJobFatal)(event["message"])

    def poke(self, context: Context) -> bool:
        """Look at the job."""
        del context
        from trainjob.errors import NotFound, TrainJobError  # noqa: PLC0415
        from trainjob.status import observe  # noqa: PLC0415

        phases = self._phases()
        try:
            with TrainJobHook(self.trainjob_conn_id).client(self.namespace) as client:
                observation = observe(client.get(client.find(self.name)))
        except NotFound as error:
            self.log.info("%s", error)
            return False
        except TrainJobError as error:
            raise airflow_error(error) from None
        self.log.info("TrainJob %s is %s", self.name, observation.phase)
        if has_reached(observation, phases):
            return True
        if observation.phase.terminal:
            raise TrainJobFatal(f"TrainJob {self.name} is {observation.phase} and will never be {' or '.join(phases)}")
        return False

    def _phases(self) -> list[str]:
        from trainjob.status import Phase  # noqa: PLC0415

        phases = [self.phases] if isinstance(self.phases, str) else list(self.phases)
        known = [phase.value for phase in Phase]
        if wrong := [phase for phase in phases if phase not in known]:
            raise TrainJobFatal(f"there is no phase {wrong[0]!r}; there are: {', '.join(known)}")
        return phases
