"""Evaluate a trained model beside the current champion, and let the verdict decide which tasks run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.providers.common.compat.sdk import BranchMixIn

from trainjob_airflow.arguments import check_switches
from trainjob_airflow.exceptions import TrainJobFatal
from trainjob_airflow.operators.data import DataOperator
from trainjob_airflow.operators.trainjob import TrainJobOperator
from trainjob_airflow.templates import StrictTemplates, is_open

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context, XComArg

    from trainjob.data.options import Step


class ModelEvaluationOperator(DataOperator):
    """Evaluates a model, and in the same job the current champion, on a held-out dataset, and applies a gate.

    `command` or `function` runs once for each model. In the words of `command`, ``{model}``, ``{dataset}`` and
    ``{scores}`` stand for local paths; the environment has them as ``TRAINJOB_MODEL``, ``TRAINJOB_DATASET`` and
    ``TRAINJOB_SCORES``. The command writes the scores of the model as JSON to the last one; `function` returns them.

    Args:
        candidate: Location of the model.
        dataset: Location of the held-out dataset.
        target: Directory for the report, ``evaluation.json``.
        champion: Location of the model to compare with, or ``models:/name@champion``: without such a version the
            candidate is evaluated alone.
        command: Command that evaluates one model.
        function: Function that evaluates one model, instead of `command`: ``def evaluate(model, dataset)`` returns the
            scores. Its source is sent, so it must import what it uses inside its body.
        dataset_digest: Expected digest of the dataset; other content is refused.
        gate: Rules that the candidate must pass: ``{"metrics": {"accuracy": {"min_improvement": 0}}}``, see
            `trainjob.evaluation.Gate`. Without a gate there is no verdict.
        code: ``uri`` and ``revision`` of the evaluation's code, for the report.
        runtime: Runtime of one node. Its image, or `image`, contains this package and what the evaluation imports.
        registry: Model registry of `champion`; ``TRAINJOB_REGISTRY`` of the worker if left out.
        **kwargs: Arguments of `TrainJobOperator`.

    Returns (XCom):
        The XCom of `TrainJobOperator`, with the metrics of the candidate, and ``outputs`` ``uri``, ``digest``,
        ``candidate``, ``champion``, and with a gate ``passed``, ``rule``, ``reason``.
    """

    step: ClassVar[Step] = "evaluate"
    refused: ClassVar[Sequence[str]] = ("spec", "args", "torchtune")
    required: ClassVar[Sequence[str]] = ("candidate", "dataset", "target")
    texts: ClassVar[Sequence[str]] = ("champion", "dataset_digest")
    checked: ClassVar[Sequence[str]] = (
        *("candidate", "dataset", "target", "champion", "dataset_digest", "gate", "command", "function"),
    )
    template_fields: Sequence[str] = (
        *TrainJobOperator.template_fields,
        *("candidate", "dataset", "target", "champion", "dataset_digest", "gate", "code", "registry"),
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **TrainJobOperator.template_fields_renderers,
        "gate": "json",
        "code": "json",
    }

    def __init__(
        self,
        *,
        candidate: str,
        dataset: str,
        target: str,
        champion: str | None = None,
        command: Sequence[str] | None = None,
        function: Callable[..., object] | None = None,
        dataset_digest: str | None = None,
        gate: Mapping[str, Any] | XComArg | str | None = None,
        code: Mapping[str, str] | str | None = None,
        **kwargs: Any,
    ) -> None:
        self.candidate = candidate
        self.dataset = dataset
        self.target = target
        self.champion = champion
        self.function = function
        self.dataset_digest = dataset_digest
        self.gate = gate
        self.code = code
        super().__init__(command=command, **kwargs)

    def options(self, key: str) -> dict[str, Any]:
        """Options of the program."""
        del key
        name, source = _source(self.function) if self.function is not None else (None, None)
        return {
            "candidate": self.candidate,
            "dataset": self.dataset,
            "target": self.target,
            "champion": self.champion,
            "dataset_digest": self.dataset_digest,
            "gate": self.gate,
            "code": self.code,
            "function": name,
            "function_source": source,
            "command": self.command,
        }

    def check_literals(self) -> None:
        """Check the command or the function and the code, then the spec and the other options."""
        if isinstance(self.command, str) and not is_open(self.command):
            raise ValueError(f"command must be a list of words, not {self.command!r}")
        if self.function is not None:
            _source(self.function)
        if self.code is not None and not is_open(self.code) and not isinstance(self.code, Mapping):
            raise ValueError(f"code must be a mapping with uri and revision, not {self.code!r}")
        super().check_literals()

    def returned(self, context: Context, result: dict[str, Any]) -> Any:
        """The result; the verdict of the gate is also counted as the metric ``trainjob.evaluated``."""
        from airflow.providers.common.compat.sdk import Stats

        if "passed" in result["outputs"]:
            ti, passed = context["ti"], str(result["outputs"]["passed"] is True).lower()
            tags = {"dag_id": ti.dag_id, "task_id": ti.task_id, "passed": passed}
            Stats.incr("trainjob.evaluated", tags=tags)
        return super().returned(context, result)

    def data_of(self, result: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """The models and the dataset as read, the report as written."""
        read = [self.candidate, self.dataset, *([self.champion] if self.champion else [])]
        return read, [result["outputs"].get("uri", "")]


class ModelGateOperator(StrictTemplates, BranchMixIn):
    """Lets the verdict of an evaluation decide which tasks run.

    If the gate has passed, the tasks of `if_passed` run. If it has not, those of `if_failed` run; without `if_failed`
    this task fails without a retry, or with `skip` it skips all tasks after it.

    Args:
        evaluation: The XCom of a `ModelEvaluationOperator` task (``evaluate.output``).
        if_passed: IDs of tasks or task groups directly after this one; if left out, all that are not in `if_failed`.
        if_failed: IDs of tasks or task groups directly after this one.
        skip: Skip the tasks after this one, instead of failing, if the gate has not passed.
        **kwargs: Arguments of `BaseOperator`.

    Returns (XCom):
        ``passed``, ``rule`` and ``reason`` of the verdict.

    Raises:
        ValueError: An argument is invalid; when the DAG is parsed.
        TrainJobFatal: The gate has not passed; or `evaluation` has no verdict (no retry).
    """

    inherits_from_skipmixin = True
    template_fields: Sequence[str] = ("evaluation",)
    ui_color = "#d7e8fc"

    def __init__(
        self,
        *,
        evaluation: Mapping[str, Any] | XComArg | str,
        if_passed: str | Sequence[str] | None = None,
        if_failed: str | Sequence[str] | None = None,
        skip: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.evaluation = evaluation
        self.if_passed = _ids("if_passed", if_passed)
        self.if_failed = _ids("if_failed", if_failed)
        check_switches(skip=skip)
        if skip and self.if_failed:
            raise ValueError("skip cannot be combined with if_failed: its tasks run if the gate has not passed")
        if both := set(self.if_passed) & set(self.if_failed):
            raise ValueError(f"if_passed and if_failed both have {', '.join(sorted(both))}")
        self.skip_all = skip
        if not is_open(evaluation) and not isinstance(evaluation, Mapping):
            raise ValueError(f"evaluation must be the XCom of a ModelEvaluationOperator task, not {evaluation!r}")

    def execute(self, context: Context) -> dict[str, Any]:
        """Follow the verdict."""
        verdict = self._verdict()
        passed, text = verdict["passed"], f"{verdict['rule']}: {verdict['reason']}"
        self.log.info("the gate %s: %s", "passed" if passed else "did not pass", text)
        if not passed and not self.if_failed and not self.skip_all:
            raise TrainJobFatal(f"the gate did not pass: {text}")
        after = self._following()
        if unknown := [each for each in (*self.if_passed, *self.if_failed) if not {*self._roots(each)} <= after]:
            raise TrainJobFatal(
                f"if_passed and if_failed must name tasks directly after {self.task_id}; {', '.join(unknown)} is not"
            )
        other = {root for each in self.if_failed for root in self._roots(each)}
        chosen: Iterable[str] = self.if_failed if not passed else self.if_passed or sorted(after - other)
        if after - {root for each in chosen for root in self._roots(each)}:
            self._push(context, verdict)
            self.do_branch(context, [*chosen] or None)
        return verdict

    def _verdict(self) -> dict[str, Any]:
        """``passed``, ``rule`` and ``reason`` of the evaluation.

        Raises:
            TrainJobFatal: There is none.
        """
        outputs = self.evaluation.get("outputs") if isinstance(self.evaluation, Mapping) else None
        if not isinstance(outputs, Mapping) or not isinstance(outputs.get("passed"), bool):
            raise TrainJobFatal(
                f"task {self.task_id}: evaluation has no verdict; set gate in the ModelEvaluationOperator"
            )
        return {name: outputs.get(name, "") for name in ("passed", "rule", "reason")}

    def _push(self, context: Context, verdict: dict[str, Any]) -> None:
        """Return the verdict now: to skip tasks, Airflow ends `execute` by an exception (3.0 to 3.3.2)."""
        if self.do_xcom_push:
            context["ti"].xcom_push(key="return_value", value=verdict)

    def _following(self) -> set[str]:
        return {*self.downstream_task_ids}

    def _roots(self, name: str) -> list[str]:
        dag = self.get_dag()
        group = dag.task_group_dict.get(name) if dag is not None else None
        return [root.task_id for root in group.roots] if group is not None else [name]


def _ids(argument: str, given: object) -> list[str]:
    ids = [given] if isinstance(given, str) else [*given] if isinstance(given, list | tuple | set) else given
    if ids is None:
        return []
    if not isinstance(ids, list) or not ids or not all(isinstance(each, str) and each for each in ids):
        raise ValueError(f"{argument} must be a task ID or a list of task IDs, not {given!r}")
    return ids


def _source(function: Callable[..., object]) -> tuple[str, str]:
    """Name and source of the author's function.

    Raises:
        ValueError: It cannot evaluate a model in a job.
    """
    import inspect

    from trainjob._spec.function import Function

    try:
        found = Function.of(function, arguments="")
        inspect.signature(function).bind("model", "dataset")
    except ValueError as error:
        raise ValueError(f"function {error}") from None
    except TypeError as error:
        raise ValueError(f"function {found.name}() must accept two paths, model and dataset: {error}") from None
    return found.name, found.source
