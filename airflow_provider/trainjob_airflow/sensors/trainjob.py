"""`TrainJobSensor`: waits for a TrainJob that somebody else launched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.providers.common.compat.sdk import (
    AirflowSkipException,
    BaseSensorOperator,
    PokeReturnValue,
    conf,
)

from trainjob_airflow.arguments import check_place, check_switches, check_texts
from trainjob_airflow.exceptions import TrainJobFailure, TrainJobFatal
from trainjob_airflow.hooks.trainjob import TrainJobHook
from trainjob_airflow.running import connected
from trainjob_airflow.states import Wanted, wanted
from trainjob_airflow.templates import StrictTemplates, is_open

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from trainjob import TrainJobClient


class TrainJobSensor(StrictTemplates, BaseSensorOperator):
    """Waits until a TrainJob is in a phase, or has passed it, or has a condition.

    A job that does not exist yet is waited for. One that ends otherwise (waiting for ``Complete``, it failed) fails
    the sensor at once, or skips it with ``soft_fail``.

    Args:
        name: Name of the TrainJob.
        labels: Instead of a name: labels that it has. Of several jobs the youngest is waited for.
        phases: One phase or several: ``Running``, ``Complete``, ``Failed``, …, see `trainjob.Phase`.
        condition: Instead of phases: type of a condition of its status that has to be true, such as ``Suspended``.
        namespace: Its namespace; the connection's if left out.
        trainjob_conn_id: See `TrainJobOperator`.
        deferrable: Wait in the triggerer.
        **kwargs: Of `BaseSensorOperator`: ``mode``, ``poke_interval``, ``timeout``, ``soft_fail``, …

    Returns (XCom):
        As `TrainJobOperator`: what the job has left when it is in that state.

    Raises:
        ValueError: The arguments name no job, or a phase that does not exist; when the DAG is parsed.
    """

    template_fields: Sequence[str] = ("name", "labels", "phases", "condition", "namespace", "trainjob_conn_id")
    ui_color = "#d7e8fc"

    def __init__(
        self,
        *,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        phases: str | Sequence[str] = "Complete",
        condition: str | None = None,
        namespace: str | None = None,
        trainjob_conn_id: str = TrainJobHook.default_conn_name,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.name = name
        self.labels = labels
        self.phases = phases
        self.condition = condition
        self.namespace = namespace
        self.trainjob_conn_id = trainjob_conn_id
        self.deferrable = deferrable
        if kwargs.get("_airflow_from_mapped"):  # whose values are decided in the run
            return
        from trainjob.spec.literals import has_open

        check_switches(deferrable=deferrable)
        check_place(namespace, trainjob_conn_id)
        check_texts(required=True, trainjob_conn_id=trainjob_conn_id)
        if not has_open([name, labels, phases, condition], is_open):
            wanted(name, labels, phases, condition)

    def sample_spec(self) -> tuple[None, list[str]]:
        """As that of `TrainJobTask`, which launches a job: check what a run of this moment would wait for."""
        from trainjob_airflow.sample import left_open, rendered

        made = rendered(self)
        missing = [*left_open({name: getattr(made, name) for name in made.template_fields})]
        if not {"name", "labels", "phases", "condition"} & {
            path.partition(".")[0].partition("[")[0] for path in missing
        }:
            wanted(made.name, made.labels, made.phases, made.condition)
        return None, missing

    def execute(self, context: Context) -> Any:
        """Look once; then wait here or in the triggerer."""
        if not self.deferrable:
            return super().execute(context)
        found = self.poke(context)
        if not found:
            from trainjob_airflow.triggers.trainjob import TrainJobStateTrigger

            sought = self._wanted()
            self.defer(
                trigger=TrainJobStateTrigger(
                    trainjob_conn_id=self.trainjob_conn_id,
                    namespace=self.namespace,
                    name=sought.name,
                    labels=dict(sought.labels) if sought.labels else None,
                    phases=list(sought.phases),
                    condition=sought.condition,
                    poll_interval=self.poke_interval,
                    target=TrainJobHook(self.trainjob_conn_id).target(),
                ),
                method_name="execute_complete",
                timeout=timedelta(seconds=self.timeout),
            )
        return found.xcom_value

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> Any:
        """Go on after the trigger's event."""
        del context
        if event["status"] == "error" and event["retryable"]:
            raise TrainJobFailure(event["message"])
        if event["status"] != "reached":
            self._fail(event["message"])
        self.log.info("%s", event["message"])
        return self._result(event["namespace"], event["job"]) if "job" in event else None

    def poke(self, context: Context) -> PokeReturnValue:
        """Look at the job."""
        del context
        from trainjob.status import observe

        sought = self._wanted()
        with connected(self.trainjob_conn_id, self.namespace) as client:
            trainjob = client.call(lambda: sought.find(client.backend, client.namespace))
        if trainjob is None:
            self.log.info("there is no TrainJob %s yet", sought)
            return PokeReturnValue(is_done=False)
        name, observation = trainjob["metadata"]["name"], observe(trainjob)
        self.log.info("TrainJob %s is %s", name, observation.phase)
        if sought.reached(trainjob, observation):
            return PokeReturnValue(is_done=True, xcom_value=self._result(trainjob["metadata"]["namespace"], name))
        if observation.phase.terminal:
            self._fail(f"TrainJob {name} is {observation.phase} and will never {sought.state}")
        return PokeReturnValue(is_done=False)

    def _result(self, namespace: str, name: str) -> dict[str, Any] | None:
        """What the job has left so far; None if it is gone."""
        from trainjob import JobRef
        from trainjob.status import observe
        from trainjob.waiting import result_of

        async def look(client: TrainJobClient) -> dict[str, Any] | None:
            trainjob = await client.backend.get(namespace, name)
            if trainjob is None:
                return None
            ref = JobRef.of(trainjob)
            return result_of(ref, await client.backend.evidence(ref), observe(trainjob)).as_dict()

        with connected(self.trainjob_conn_id, namespace) as client:
            return client.call(lambda: look(client))

    def _fail(self, message: str) -> NoReturn:
        if self.soft_fail:
            raise AirflowSkipException(message)
        raise TrainJobFatal(message)

    def _wanted(self) -> Wanted:
        try:
            return wanted(self.name, self.labels, self.phases, self.condition)
        except ValueError as error:
            raise TrainJobFatal(str(error)) from None
