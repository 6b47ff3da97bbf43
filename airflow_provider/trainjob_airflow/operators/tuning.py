"""`TrainJobTuningOperator`: a hyperparameter search as one task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

from trainjob_airflow import assets, links
from trainjob_airflow.arguments import check_texts
from trainjob_airflow.exceptions import TrainJobFatal
from trainjob_airflow.hooks.trainjob import TrainJobHook
from trainjob_airflow.identity import begin_deferral, key_of, warn_about_name, was_cleared
from trainjob_airflow.operators.base import BACKSTOP, CANCEL_SECONDS, MAX_RESUMED
from trainjob_airflow.operators.trainjob import TrainJobOperator
from trainjob_airflow.running import seconds_to_wait
from trainjob_airflow.running_study import RunningStudy
from trainjob_airflow.step import outage_of
from trainjob_airflow.study import TaskStudy
from trainjob_airflow.tasklog import write_group, write_study
from trainjob_airflow.templates import is_open

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context, XComArg

    from trainjob import JobRef, TrainJobClient, TrainJobSpec
    from trainjob.tuning import Study, StudyState

_REFUSED = ("get_logs", "on_crash_action", "retry_user_errors", "skip_on_exit_code", "wait_for_completion")


class TrainJobTuningOperator(TrainJobOperator):
    """Searches hyperparameters: each trial is a TrainJob of the same template with other parameters.

    The arguments of `TrainJobOperator` about the job are the template of the trials. A parameter ``lr`` of the space is
    the environment variable ``KUBEFLOW_TRAINER_OPT_LR`` of the nodes, and ``$(KUBEFLOW_TRAINER_OPT_LR)`` in `command`,
    `args` and `env`. Each trial has a separate directory below `outputs`. The script reports the metric of the study
    with `trainjob.progress`.

    The state of the study is a journal in the workspace. If a worker or triggerer dies, the running trials keep
    running, and the next try continues the same study with the same parameters. Clearing the task continues it, too:
    trials that have ended are not repeated, and with a larger ``max_trials`` more trials run.

    Samplers and pruners need Optuna (extra ``tune``) in the worker, or in the triggerer if `deferrable`.

    Args:
        study: ``space``, ``metric``, ``direction``, ``max_trials``, and optionally ``sampler``, ``pruner``,
            ``parallel``, ``max_seconds``, ``max_failed_trials``, ``stop_at``, ``retries``, see `trainjob.tuning.Study`.
        workspace: Directory or object store of the journals, which all workers and triggerers can reach;
            ``TRAINJOB_WORKSPACE``, else ``TRAINJOB_HOME`` of the machine if left out.
        key: Identity of the study; that of the task instance if left out. With a key, tasks and DAG runs that have the
            same key continue the same study.
        queue_timeout: How long a trial may wait for admission. A trial that exceeds a timeout, or that is blocked with
            `fail_fast`, is cancelled and counts as failed; so does a trial whose rank crashes, with
            `fail_on_first_crash`.
        on_kill_action: Action on the running trials when a person marks or clears the task: ``cancel`` or ``keep``.
        deferrable: Run the study in the triggerer, without a worker. All studies there share one watch.
        **kwargs: Arguments of `TrainJobOperator`, without ``get_logs``, ``on_crash_action``, ``retry_user_errors``,
            ``skip_on_exit_code`` and ``wait_for_completion``.

    Returns (XCom):
        ``{"key", "metric", "direction", "best", "trials", "importances", "reason", "counts", "journal"}``, see
        `trainjob.tuning.StudyResult.summary`: ``best`` has ``parameters``, ``value``, ``metrics`` and ``outputs``;
        ``trials`` has the best complete trials, at most 50. The XCom ``best`` is the best trial as `TrainJobOperator`
        returns a job, so ``search.output["best"]`` can be the `metrics` of a `ModelExportOperator`.

    Raises:
        InvalidStudy: The study or the template is invalid; when the DAG is parsed.
        TrainJobFatal: The study is invalid, it began with another space or template, or no trial has completed (no
            retry).
        TrainJobFailure: Another try may continue the study (retried if ``retries`` is set).
        TrainJobTimeout: ``execution_timeout`` expired (retried if ``retries`` is set).
    """

    template_fields: Sequence[str] = (*TrainJobOperator.template_fields, "study", "workspace", "key")
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **TrainJobOperator.template_fields_renderers,
        "study": "json",
    }

    def __init__(
        self,
        *,
        study: Mapping[str, Any] | XComArg | str,
        workspace: str | None = None,
        key: str | None = None,
        on_kill_action: Literal["cancel", "keep"] = "cancel",
        **kwargs: Any,
    ) -> None:
        if given := [name for name in _REFUSED if name in kwargs]:
            raise TypeError(f"{type(self).__name__} waits for all trials: remove {', '.join(given)}")
        if on_kill_action not in ("cancel", "keep"):
            raise ValueError(
                f"on_kill_action must be 'cancel' or 'keep', not {on_kill_action!r}: no trial is suspended"
            )
        self.study = study
        self.workspace = workspace
        self.key = key
        super().__init__(on_kill_action=on_kill_action, **kwargs)  # calls check_literals(), which reads the attributes

    def check_literals(self) -> None:
        """Check the template, and the study if no part of it is set later.

        Raises:
            InvalidStudy: The study is invalid, or the template uses a parameter that the space does not have.
        """
        from trainjob._spec.literals import check_literals, has_open
        from trainjob.tuning import Study
        from trainjob.tuning.template import check_template

        super().check_literals()
        check_texts(workspace=self.workspace, key=self.key)
        if has_open(self.study, is_open):
            return
        with _argument_names("study."):
            study = Study.read(self.study)
        fields = self.written_fields(None)
        template = check_literals(fields, is_open) if fields is not None else None
        if template is not None:
            with _argument_names():
                check_template(study, template)

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> Any:
        """Continue after the trigger's event."""
        from trainjob._jobs.steps import unpack_error

        key, outage = event["key"], outage_of(event, self.log)
        if outage is not None and not outage.retry.retryable:
            return self._run(context, defer=False)
        study, template = self._parsed(context, key)
        with self._connected(context, event["namespace"], key) as running:
            self._begin(context, running, study)
            if outage is not None and event["resumed"] < MAX_RESUMED:
                self._defer_study(context, running, study, template, event["resumed"] + 1)
            if "error" in event:
                raise unpack_error(event["error"])
            return self._finish(context, running, template, event["result"])

    def _run(self, context: Context, *, defer: bool) -> Any:
        if self.key is None:
            warn_about_name(self.log)
        key = self.key or key_of(context)
        study, template = self._parsed(context, key)
        with self._connected(context, self.namespace, key) as running:
            if self.on_kill_action == "cancel" and was_cleared(context):
                running.stop("cancel", CANCEL_SECONDS)
            self._begin(context, running, study)
            if self.do_xcom_push:
                self.links = {links.TrainJobLink.template: links.xcom_page(context["ti"])}
                links.push(context, self)
            lines = [f"key: {key}", f"journal: {self._journal(key)}", f"more about it: trainjob report {key}"]
            write_group(self.log, f"study of {study.metric}: at most {study.max_trials} trials", lines)
            # Airflow (3.3.2) can treat a task whose trigger fires at once as lost ("state mismatch").
            if defer and not self._has_ended(key, study):
                if running.page is not None:
                    running.page.store()
                self._defer_study(context, running, study, template)
            result = running.tune(
                study,
                template,
                self._journal(key),
                self.wait_options,
                self.log,
                origin=self._origin(context),
                seconds=seconds_to_wait(self._deadline(context), self._margin()),
            )
            return self._finish(context, running, template, result.summary())

    def _parsed(self, context: Context, key: str) -> tuple[Study, TrainJobSpec]:
        """The study and the template of the trials.

        Raises:
            TrainJobFatal: One of them is invalid.
        """
        from trainjob import TrainJobError
        from trainjob.tuning import Study
        from trainjob.tuning.template import check_template

        template = self._spec(key, context)
        try:
            with _argument_names("study."):
                study = Study.read(self.study)
            with _argument_names():
                check_template(study, template)
        except TrainJobError as error:
            self._log_error(str(error))
            raise TrainJobFatal(str(error)) from None
        return study, template

    def _begin(self, context: Context, running: RunningStudy, study: Study) -> None:
        """Prepare what the task stores about its study."""
        if self.do_xcom_push:
            where = {"namespace": running.client.namespace, "journal": self._journal(running.key)}
            running.page = TaskStudy(context, self.trainjob_conn_id, study, key=running.key, **where)

    def _defer_study(
        self, context: Context, running: RunningStudy, study: Study, template: TrainJobSpec, resumed: int = 0
    ) -> NoReturn:
        from trainjob_airflow.triggers.tuning import TrainJobStudyTrigger

        deadline = self._deadline(context)
        target = self._call_hook(TrainJobHook.target)
        begin_deferral(context)
        self.defer(
            trigger=TrainJobStudyTrigger(
                trainjob_conn_id=self.trainjob_conn_id,
                namespace=running.client.namespace,
                key=running.key,
                journal=self._journal(running.key),
                study=study.model_dump(mode="json", exclude_defaults=True),
                template=template.model_dump(mode="json", exclude_defaults=True),
                origin=self._origin(context),
                deadline=deadline.isoformat() if deadline else None,
                on_kill_action=self.on_kill_action,
                resumed=resumed,
                target=target,
                stored=self.do_xcom_push,
                **self.wait_options.as_json(),
            ),
            method_name="execute_complete",
            # The trigger itself enforces the deadline, because Airflow's timeout ends it without on_kill().
            timeout=deadline - datetime.now(UTC) + BACKSTOP if deadline else None,
        )
        raise AssertionError("defer() raises")

    def _finish(
        self, context: Context, running: RunningStudy, template: TrainJobSpec, result: dict[str, Any]
    ) -> dict[str, Any]:
        """What `execute` returns."""
        from trainjob.tuning.template import spec_of

        found = result["best"]
        outputs = spec_of(template, found["number"], found["parameters"]).outputs
        summary = {**result, "best": {**found, "outputs": {**outputs, **found["outputs"]}}}
        if running.page is not None:
            running.page.end(self._state(running.key), summary["importances"])
        write_study(self.log, summary)
        best = self._result = self._best(running, summary["best"])
        values = {"namespace": best["namespace"], "name": best["name"], "started": context["ti"].start_date}
        values |= {"uid": best["uid"]} if best["uid"] else {}
        self.links |= links.format_urls(TrainJobHook(self.trainjob_conn_id).links(), values)
        assets.set_extra(context, self, best)
        if self.do_xcom_push:
            context["ti"].xcom_push(key="best", value=best)
        return {**summary, "journal": self._journal(running.key)}

    def _best(self, running: RunningStudy, best: Mapping[str, Any]) -> dict[str, Any]:
        """The best trial as `TrainJobOperator` returns a job; without UID if its job was deleted."""
        from trainjob import JobRef, TrainJobError

        ref = JobRef(running.client.namespace, best["job"], "")
        with suppress(TrainJobError):
            ref = running.client.find(ref.name)
        parts = {name: best[name] for name in ("metrics", "outputs")}
        return {**_identity(ref), **parts, "seconds": {"total": best["seconds"]}}

    def _store_end(self, running: Any) -> None:
        """Store the study as its journal has it."""
        if running.page is not None:
            running.page.end(self._state(running.key), {})

    def _has_ended(self, key: str, study: Study) -> bool:
        """Whether the study has ended before, with the same limits."""
        state = self._state(key)
        return state is not None and state.ended and study.limits().items() <= state.fields.items()

    def _state(self, key: str) -> StudyState | None:
        """The study as its journal has it; None if it has none, or cannot be read now."""
        from trainjob import TrainJobError
        from trainjob._pages.study import find_study
        from trainjob.job import key_hash

        try:
            return find_study(key_hash(key), self.workspace)
        except TrainJobError as error:
            self.log.warning("the journal of study %s cannot be read: %s", key, error)
            return None

    def _journal(self, key: str) -> str:
        from trainjob.job import key_hash
        from trainjob.tuning.journal import journal_location

        return journal_location(key_hash(key), self.workspace)

    def _held(self, client: TrainJobClient, key: str, ref: JobRef | None, tried: int) -> RunningStudy:
        del ref, tried
        return RunningStudy(client, key)

    def _client(self, namespace: str | None) -> TrainJobClient:
        return self._call_hook(lambda hook: hook.client(namespace, shared=True))


def _identity(ref: JobRef) -> dict[str, Any]:
    return {"namespace": ref.namespace, "name": ref.name, "uid": ref.uid, "attempt": ref.attempt}


@contextmanager
def _argument_names(prefix: str = "") -> Iterator[None]:
    """Report problems of a study under the names of the arguments."""
    from trainjob import InvalidStudy

    try:
        yield
    except InvalidStudy as error:
        named = [replace(each, path=prefix + each.path.removeprefix("template.")) for each in error.problems]
        raise InvalidStudy([replace(each, path=each.path.rstrip(".")) for each in named]) from None
