"""`TrainJobSensor`: waits for a TrainJob that something else launched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.providers.common.compat.sdk import (
    AirflowSkipException,
    BaseSensorOperator,
    PokeReturnValue,
    conf,
)

from trainjob_airflow.arguments import check_place, check_switches, check_texts, is_mapped_element
from trainjob_airflow.exceptions import TrainJobFailure, TrainJobFatal, airflow_error
from trainjob_airflow.hooks.trainjob import TrainJobHook
from trainjob_airflow.running import airflow_errors, connected
from trainjob_airflow.states import Wait, Wanted, diagnosis_of_end, wanted
from trainjob_airflow.templates import StrictTemplates, is_open

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from trainjob import Diagnosis, JobRef, Observation, TrainJobClient
    from trainjob._backends.base import TrainJob
    from trainjob._jobs.stalls import StallWatch


class TrainJobSensor(StrictTemplates, BaseSensorOperator):
    """Waits until a TrainJob reaches a phase or a condition. A short phase that has passed counts as reached.

    The sensor also waits for a job that does not exist yet. If the job ends in another phase (it failed while the
    sensor waits for ``Complete``), the sensor fails at once, or is skipped with ``soft_fail``. The same applies if it
    waits for the end of a job that hangs by its ``stall_timeout``. With ``mode="reschedule"`` this timeout is not
    checked: each poke is a separate process, which knows no earlier progress.

    The sensor counts as a process that waits for the job, so a job that nothing else waits for is not suspended as
    unattended, and one that was is resumed. A sensor that waits for ``Suspended`` does neither. If the job is gone or
    was given up, and another attempt of its key counts, the sensor waits for that one.

    Args:
        job: Name of the TrainJob.
        labels: Labels that select the job, instead of its name. If several jobs match, the newest is used.
        phases: One phase or several: ``Running``, ``Complete``, ``Failed``, …, see `trainjob.Phase`.
        condition: Type of a status condition that must be true, such as ``Suspended``, instead of phases.
        namespace: Namespace of the job; the connection's if left out.
        trainjob_conn_id: Connection of type ``trainjob``. If the default one does not exist, ``TRAINJOB_*`` in the
            environment decides.
        deferrable: Wait in the triggerer.
        **kwargs: Of `BaseSensorOperator`: ``mode``, ``poke_interval``, ``timeout``, ``soft_fail``, …

    Returns (XCom):
        ``{"namespace", "name", "uid", "attempt", "metrics", "outputs", "seconds", "history", "goodput"}``, what
        the job has reported when it reaches that state; see `trainjob.TrainJobResult`.

    Raises:
        ValueError: The arguments select no job, or name an unknown phase; when the DAG is parsed.
    """

    template_fields: Sequence[str] = ("job", "labels", "phases", "condition", "namespace", "trainjob_conn_id")
    ui_color = "#d7e8fc"

    def __init__(
        self,
        *,
        job: str | None = None,
        labels: Mapping[str, str] | None = None,
        phases: str | Sequence[str] = "Complete",
        condition: str | None = None,
        namespace: str | None = None,
        trainjob_conn_id: str = TrainJobHook.default_conn_name,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.job = job
        self.labels = labels
        self.phases = phases
        self.condition = condition
        self.namespace = namespace
        self.trainjob_conn_id = trainjob_conn_id
        self.deferrable = deferrable
        self._stalls: tuple[JobRef, StallWatch] | None = None
        self._wait: Wait | None = None
        self._open: tuple[ExitStack, TrainJobClient] | None = None
        if is_mapped_element(self):  # mapped arguments have values only at run time
            return
        from trainjob._spec.literals import has_open

        check_switches(deferrable=deferrable)
        check_place(namespace, trainjob_conn_id)
        check_texts(required=True, trainjob_conn_id=trainjob_conn_id)
        if not has_open([job, labels, phases, condition], is_open):
            wanted(job, labels, phases, condition)

    def sample_spec(self) -> tuple[None, list[str]]:
        """Check what a run started now would wait for; no spec, and the paths that only a run knows.

        Raises:
            ValueError: The arguments select no job, or name an unknown phase.
            TrainJobFatal: A template is invalid.
        """
        from trainjob_airflow.sample import rendered, unknown_paths

        made = rendered(self)
        unknown = [*unknown_paths({name: getattr(made, name) for name in made.template_fields})]
        if not {"job", "labels", "phases", "condition"} & {
            path.partition(".")[0].partition("[")[0] for path in unknown
        }:
            wanted(made.job, made.labels, made.phases, made.condition)
        return None, unknown

    def execute(self, context: Context) -> Any:
        """Check the job once, then wait in this worker or in the triggerer."""
        job: list[Any] | None = None
        try:
            if not self.deferrable:
                return super().execute(context)
            found = self.poke(context)
            if self._wait is not None:
                ref = self._wait.ref
                job = [ref.namespace, ref.name, ref.uid, ref.attempt]
        finally:
            self._close()
        if not found:
            from trainjob_airflow.triggers.state import TrainJobStateTrigger

            sought = self._wanted()
            self.defer(
                trigger=TrainJobStateTrigger(
                    trainjob_conn_id=self.trainjob_conn_id,
                    namespace=self.namespace,
                    name=sought.name,
                    labels=dict(sought.labels) if sought.labels else None,
                    phases=list(sought.phases),
                    condition=sought.condition,
                    job=job,
                    poll_interval=self.poke_interval,
                    target=TrainJobHook(self.trainjob_conn_id).target(),
                ),
                method_name="execute_complete",
                timeout=timedelta(seconds=self.timeout),
            )
        return found.xcom_value

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> Any:
        """Continue after the trigger's event."""
        from trainjob._diagnosis.serialization import unpack_diagnosis

        del context
        if event["status"] == "error" and event["retryable"]:
            raise TrainJobFailure(event["message"])
        if event["status"] == "hung":
            self._fail_hung(unpack_diagnosis(event["diagnosis"]))
        if event["status"] != "reached":
            self._fail(event["message"], unpack_diagnosis(event["diagnosis"]) if "diagnosis" in event else None)
        self.log.info("%s", event["message"])
        return self._result(event["namespace"], event["job"]) if "job" in event else None

    def poke(self, context: Context) -> PokeReturnValue:
        """Check the job once."""
        del context
        from trainjob import TrainJobFailed

        sought = self._wanted()
        with airflow_errors():
            client = self._client()
            try:
                trainjob, observation = client.call(lambda: self._look(client, sought))
            except TrainJobFailed as error:  # another process has given up the job
                self._fail(str(error), error.diagnosis)
            if trainjob is not None and observation is not None and sought.is_end:
                self._check_progress(client, trainjob, observation)
        if self._wait is None or observation is None:
            self.log.info("TrainJob %s does not exist yet", sought)
            return PokeReturnValue(is_done=False)
        namespace, name = self._wait.ref.namespace, self._wait.ref.name
        self.log.info("TrainJob %s is %s", name, observation.phase)
        if sought.reached(trainjob, observation):
            return PokeReturnValue(is_done=True, xcom_value=self._result(namespace, name))
        if observation.phase.terminal:
            ref = self._wait.ref
            why = client.call(lambda: diagnosis_of_end(client.backend, ref, observation))
            self._fail(f"TrainJob {name} is {observation.phase}; it can no longer {sought.state}", why)
        return PokeReturnValue(is_done=False)

    async def _look(self, client: TrainJobClient, sought: Wanted) -> tuple[TrainJob | None, Observation | None]:
        """The job that is waited for, and its observation; the job is None if it is gone, both if none was found yet.

        Raises:
            TrainJobFailed: Another process has given up the job.
        """
        from trainjob import JobRef
        from trainjob._jobs.successors import JobReplaced

        if self._wait is not None and sought.name:  # perhaps another attempt than the one of that name
            ref = self._wait.ref
            found = await client.backend.get(ref.namespace, ref.name)
            trainjob = found if found is not None and found["metadata"]["uid"] == ref.uid else None
        else:
            trainjob = await sought.find(client.backend, client.namespace)
            if trainjob is None:
                return None, None
            self._wait_for(client, JobRef.of(trainjob), sought)
        while self._wait is not None:
            try:
                observation, notice = await self._wait.observe(trainjob)
            except JobReplaced as replaced:
                self.log.warning("TrainJob %s is gone or was given up; waiting for %s", self._wait.ref, replaced.by)
                self._wait_for(client, replaced.by, sought)
                trainjob = await client.backend.get(replaced.by.namespace, replaced.by.name)
                continue
            if notice:
                self.log.info("%s", notice)
            return trainjob, observation
        return None, None

    def _wait_for(self, client: TrainJobClient, ref: JobRef, sought: Wanted) -> None:
        """Wait for that job from now on, and for no other one."""
        if self._wait is None or self._wait.ref != ref:
            if self._wait is not None:
                self._wait.leave()
            lasts = self.mode == "poke" and not self.deferrable
            self._wait = Wait(client.backend, ref, sought, lasts=lasts)

    def _client(self) -> TrainJobClient:
        """The client of all pokes of this process: it records that the process waits for the job."""
        if self._open is None:
            stack = ExitStack()
            client = stack.enter_context(TrainJobHook(self.trainjob_conn_id).client(self.namespace))
            self._open = stack, client
        return self._open[1]

    def _close(self) -> None:
        """End the wait of this process. In ``reschedule`` mode, another process continues it at the next poke."""
        from trainjob import TrainJobError

        if self._open is None:
            return
        (stack, client), wait = self._open, self._wait
        self._open = self._wait = None
        with stack:
            if wait is None:
                return
            if self.reschedule:
                with suppress(TrainJobError):
                    client.call(wait.record)
            else:
                client.call(lambda: _leave(wait))

    def _check_progress(self, client: TrainJobClient, trainjob: TrainJob, observation: Observation) -> None:
        """Fail if no rank made progress for the job's ``stall_timeout``, by what pokes of this process have seen."""
        from trainjob import JobHung, JobRef
        from trainjob._jobs.stalls import StallWatch

        ref = JobRef.of(trainjob)
        if observation.stall_timeout is None or self.mode != "poke":
            return
        if self._stalls is None or self._stalls[0] != ref:
            self._stalls = ref, StallWatch(client.backend, ref, self._log_notice, compares=False)
        stalls = self._stalls[1]
        stalls.observe(observation)
        try:
            client.call(stalls.check)
        except JobHung as error:
            self._fail_hung(error.diagnosis)

    def _log_notice(self, observation: Observation, notice: str) -> None:
        del observation
        self.log.info("%s", notice)

    def _result(self, namespace: str, name: str) -> dict[str, Any] | None:
        """What the job has reported so far; None if it no longer exists."""
        from trainjob import JobRef
        from trainjob._jobs.results import result_of
        from trainjob.status import observe

        async def reported(client: TrainJobClient) -> dict[str, Any] | None:
            trainjob = await client.backend.get(namespace, name)
            if trainjob is None:
                return None
            ref = JobRef.of(trainjob)
            evidence = await client.backend.evidence(ref)
            return result_of(ref, evidence, observe(trainjob), client.backend.now()).as_dict()

        with connected(self.trainjob_conn_id, namespace) as client:
            return client.call(lambda: reported(client))

    def _fail_hung(self, diagnosis: Diagnosis) -> NoReturn:
        from trainjob import JobHung

        error = JobHung(diagnosis)
        for line in str(error).splitlines():
            self.log.error("%s", line)
        if self.soft_fail:
            raise AirflowSkipException(str(error))
        raise airflow_error(error)

    def _fail(self, message: str, diagnosis: Diagnosis | None = None) -> NoReturn:
        """Fail or skip the task; `diagnosis` is that of a job that has failed."""
        from trainjob import TrainJobFailed

        if diagnosis is None:
            text, verdict = message, None
        else:
            failed = TrainJobFailed(diagnosis)
            text, verdict = str(failed), failed.retry
            for line in text.splitlines():
                self.log.error("%s", line)
        if self.soft_fail:
            raise AirflowSkipException(text)
        raise TrainJobFatal(text, verdict, diagnosis)

    def _wanted(self) -> Wanted:
        try:
            return wanted(self.job, self.labels, self.phases, self.condition)
        except ValueError as error:
            raise TrainJobFatal(str(error)) from None


async def _leave(wait: Wait) -> None:
    wait.leave()
