"""The steps around training as operators: download a dataset or a model, export a trained model.

Each runs ``python -m trainjob.data`` as a TrainJob of one node, so queueing, waiting, logs, cancelling and diagnosis
work as for any other job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trainjob_airflow.arguments import check_switches, check_texts, is_mapped_element
from trainjob_airflow.links import LINKS, MODEL_LINK
from trainjob_airflow.operators.trainjob import TrainJobOperator
from trainjob_airflow.templates import is_open

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context, XComArg

    from trainjob import TrainJobSpec
    from trainjob.data.options import Step, StepOptions


class DataOperator(TrainJobOperator):
    """A TrainJob that runs one of the programs of `trainjob.data`."""

    step: ClassVar[Step]
    refused: ClassVar[Sequence[str]] = ("spec", "command", "args", "torchtune")
    """Arguments of `TrainJobOperator` that the operator sets."""

    def __init__(self, *, runtime: str = "trainjob-step", registry: str | None = None, **kwargs: Any) -> None:
        for field in set(self.refused) & set(kwargs):
            raise TypeError(f"{type(self).__name__} sets the command of the job: remove {field}")
        self.registry = registry
        super().__init__(runtime=runtime, **kwargs)  # calls check_literals(), which reads the attributes

    def options(self, key: str) -> dict[str, Any]:
        """Options of the program, as `trainjob.data.options` has them."""
        raise NotImplementedError

    required: ClassVar[Sequence[str]]
    """Options that must not be empty."""
    texts: ClassVar[Sequence[str]]
    """Other options that are strings."""
    checked: ClassVar[Sequence[str]]
    """Options that can be checked before the program runs."""

    def checked_options(self) -> dict[str, Any]:
        """The options in `checked` and the registry, as written in the DAG."""
        return {name: getattr(self, name) for name in (*self.checked, "registry")}

    def check_literals(self) -> None:
        """Check the spec and the options for errors that no template can fix."""
        from trainjob._spec.literals import has_open
        from trainjob.data.options import STEPS

        super().check_literals()
        check_texts(required=True, **{name: getattr(self, name) for name in self.required})
        check_texts(**{name: getattr(self, name) for name in self.texts}, registry=self.registry)
        given = self.checked_options()
        known = {name: value for name, value in given.items() if not has_open(value, is_open)}
        STEPS[self.step].known(known).check()

    def job_spec(self, key: str, context: Context) -> TrainJobSpec:
        """Build the spec; invalid options are refused before a job is launched."""
        self._program(key).check()
        return super().job_spec(key, context)

    def spec_fields(self, key: str) -> dict[str, Any]:
        """The fields of the spec with the program as the command."""
        return super().spec_fields(key) | {"command": self._program(key).to_command()}

    def _program(self, key: str) -> StepOptions:
        from trainjob.data.options import STEPS

        return STEPS[self.step](**(self.options(key) | {"registry": self.registry}))


class DatasetInitializerOperator(DataOperator):
    """Downloads a dataset to a directory for training and verifies it.

    Args:
        source: Location: ``file://``, ``s3://``, ``hf://``, ``https://``, …
        target: Directory for the files.
        digest: Expected SHA-256 of a single file, or ``sha256:<root digest>`` of all files. Other content is refused.
        include: Pattern or patterns; only files that match one are downloaded.
        exclude: Pattern or patterns; files that match one are not downloaded.
        verify_key: Path, in the pod, of the public key that must verify the signature of all files.
        runtime: Runtime of one node whose image contains this package.
        registry: Model registry; ``TRAINJOB_REGISTRY`` of the worker if left out.
        **kwargs: Arguments of `TrainJobOperator`.

    Returns (XCom):
        The XCom of `TrainJobOperator`, with ``outputs`` ``uri``, ``digest``, ``source``.
    """

    step: ClassVar[Step] = "initialize-dataset"
    required: ClassVar[Sequence[str]] = ("source", "target")
    texts: ClassVar[Sequence[str]] = ("digest", "verify_key")
    checked: ClassVar[Sequence[str]] = ("source", "target", "digest")
    template_fields: Sequence[str] = (
        *TrainJobOperator.template_fields,
        *("source", "target", "digest", "include", "exclude", "verify_key", "registry"),
    )

    def __init__(
        self,
        *,
        source: str,
        target: str,
        digest: str | None = None,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        verify_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.source = source
        self.target = target
        self.digest = digest
        self.include = include
        self.exclude = exclude
        self.verify_key = verify_key
        super().__init__(**kwargs)

    def data_of(self, result: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """The source as read, the target as written."""
        return [result["outputs"].get("source") or self.source], [result["outputs"].get("uri", "")]

    def options(self, key: str) -> dict[str, Any]:
        """Options of the program."""
        from trainjob.data.selection import as_patterns

        del key
        return {
            "source": self.source,
            "target": self.target,
            "digest": self.digest,
            "include": as_patterns(self.include),
            "exclude": as_patterns(self.exclude),
            "verify_key": self.verify_key,
        }


class ModelInitializerOperator(DatasetInitializerOperator):
    """Downloads a model to a directory for training.

    Args:
        if_missing: ``fail`` fails the task if the registry does not have the model. ``fresh`` lets the training start
            without a model; ``uri`` and ``digest`` are then empty.
        **kwargs: Arguments of `DatasetInitializerOperator`; `source` may also be ``models:/name@alias`` or
            ``models:/name/version``.

    Returns (XCom):
        The XCom of `TrainJobOperator`, with ``outputs`` ``uri``, ``digest``, ``version``, ``fresh``.
    """

    step: ClassVar[Step] = "initialize-model"
    checked: ClassVar[Sequence[str]] = (*DatasetInitializerOperator.checked, "if_missing")
    template_fields: Sequence[str] = (*DatasetInitializerOperator.template_fields, "if_missing")

    def __init__(self, *, if_missing: Literal["fail", "fresh"] = "fail", **kwargs: Any) -> None:
        self.if_missing = if_missing
        super().__init__(**kwargs)

    def options(self, key: str) -> dict[str, Any]:
        """Options of the program."""
        return super().options(key) | {"if_missing": self.if_missing}


class ModelExportOperator(DataOperator):
    """Stores a trained model, registers it as a version, and moves an alias to the version if it is better.

    A retry is the same export and returns the same version.

    Args:
        source: The model: a file or a directory.
        target: Directory of all models.
        name: Name of the model in the registry.
        metrics: Metrics of the model: numbers by name, or the XCom of the training task (``train.output``). Of an XCom
            the numeric metrics are used, and their history for the MLflow run of its job.
        alias: Alias to move to the version, such as ``champion``.
        metric: Metric that must be better than that of the version with `alias`; None: always move the alias.
        mode: ``max`` if higher values of `metric` are better, ``min`` if lower ones are.
        min_improvement: Minimum difference of `metric`.
        datasets: Datasets of the training: XComs of `DatasetInitializerOperator` tasks, or ``{"uri", "digest"}``.
        base_model: Model that the training started from: the XCom of a `ModelInitializerOperator` task, or
            ``{"uri", "digest"}``; empty for a fresh start.
        provenance: Further provenance as JSON values; overrides values from the arguments above.
        export_id: Identity of the export, the same for all its tries and different from that of any other export. The
            default is the identity of this task in this run (of a mapped task with its index), plus that of the
            training's job if `metrics` is an XCom: after another training it is another export. Without such an XCom,
            an export of another model by the same index fails: set an `export_id` with the name of the item.
        evaluation: Evaluation of this model: the XCom of a `ModelEvaluationOperator` task, or the location of its
            directory. Its metrics replace `metrics`, and its gate decides alone about the alias; `metric` and
            `min_improvement` must be left out. The default `export_id` then also has the digest of the evaluation, if
            it is an XCom: after another evaluation it is another export.
        allow_pickle: Accept all file formats, including pickles and others that can run code when loaded.
        sign: Path, in the pod, of the private key that signs the model, for example mounted from a Secret.
        runtime: Runtime of one node whose image contains this package.
        registry: Model registry; ``TRAINJOB_REGISTRY`` of the worker if left out.
        **kwargs: Arguments of `TrainJobOperator`.

    Returns (XCom):
        The XCom of `TrainJobOperator`, with ``outputs`` ``uri``, ``digest``, ``name``, ``version``, ``promoted``,
        ``reason``.
    """

    step: ClassVar[Step] = "export"
    required: ClassVar[Sequence[str]] = ("source", "target", "name")
    texts: ClassVar[Sequence[str]] = ("alias", "metric", "export_id", "sign")
    checked: ClassVar[Sequence[str]] = ("source", "target", "name", "alias", "metric", "mode", "min_improvement")
    operator_extra_links = (*LINKS, MODEL_LINK)
    template_fields: Sequence[str] = (
        *TrainJobOperator.template_fields,
        *("source", "target", "name", "metrics", "alias", "metric", "mode", "min_improvement"),
        *("datasets", "base_model", "provenance", "export_id", "evaluation", "sign", "registry"),
    )

    def __init__(
        self,
        *,
        source: str,
        target: str,
        name: str,
        metrics: Mapping[str, Any] | XComArg | str | None = None,
        alias: str | None = None,
        metric: str | None = None,
        mode: Literal["max", "min"] = "max",
        min_improvement: float | str = 0.0,
        datasets: Sequence[Mapping[str, Any] | XComArg] | str = (),
        base_model: Mapping[str, Any] | XComArg | str | None = None,
        provenance: Mapping[str, Any] | str | None = None,
        export_id: str | None = None,
        evaluation: Mapping[str, Any] | XComArg | str | None = None,
        allow_pickle: bool = False,
        sign: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.source = source
        self.target = target
        self.name = name
        self.metrics = metrics
        self.alias = alias
        self.metric = metric
        self.mode = mode
        self.min_improvement = min_improvement
        self.datasets = datasets
        self.base_model = base_model
        self.provenance: Any = provenance
        self.export_id = export_id
        self.evaluation = evaluation
        if not is_mapped_element(self):
            check_switches(allow_pickle=allow_pickle)
        self.allow_pickle = allow_pickle
        self.sign = sign
        super().__init__(**kwargs)

    def options(self, key: str) -> dict[str, Any]:
        """Options of the program."""
        metrics = self.metrics if isinstance(self.metrics, Mapping) else {}
        training = _job(metrics)
        evaluation, evaluated = _evaluation(self.evaluation)
        provenance = {"run": key, "trainjob": training, **self._origins(), **(self.provenance or {})}
        return {
            "source": self.source,
            "target": self.target,
            "name": self.name,
            "export_id": self.export_id or "/".join([key, *([training["uid"]] if training else []), *evaluated]),
            "metrics": self.metrics_of({}),
            "alias": self.alias,
            "metric": self.metric,
            "mode": self.mode,
            "min_improvement": self.min_improvement,
            "provenance": {name: value for name, value in provenance.items() if value},
            "history": metrics.get("history") if training else None,
            "evaluation": evaluation,
            "allow_pickle": self.allow_pickle,
            "sign": self.sign,
        }

    def check_literals(self) -> None:
        """Check metrics, datasets and base model, then the spec and the other options."""
        metrics = {} if self.metrics is None or is_open(self.metrics) else self.metrics
        if not isinstance(metrics, Mapping):
            raise ValueError(f"metrics must be a mapping of names to numbers, not {metrics!r}")
        if isinstance(self.metric, str) and isinstance(value := metrics.get(self.metric), str) and not is_open(value):
            raise ValueError(f"metrics[{self.metric!r}] must be a number, not {value!r}")
        several = (
            not is_open(self.datasets) and isinstance(self.datasets, Sequence) and not isinstance(self.datasets, str)
        )
        for each in [*(self.datasets if several else [self.datasets]), self.base_model or {}]:
            if not is_open(each) and not isinstance(each, Mapping):
                raise ValueError(
                    f"datasets and base_model must be XComs of initializers or {{'uri', 'digest'}}, not {each!r}"
                )
        super().check_literals()

    def checked_options(self) -> dict[str, Any]:
        """The options in `checked`, the registry, the metrics, and the location of the evaluation."""
        more: dict[str, Any] = {"metrics": self.metrics if is_open(self.metrics) else self.metrics_of({})}
        if self.evaluation is not None:
            # With a location that only a run knows, the rules that exclude each other are still checked.
            more["evaluation"] = _UNKNOWN if is_open(self.evaluation) else _evaluation(self.evaluation)[0]
        return super().checked_options() | more

    def version_of(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """The registered version, for the link to the registry."""
        return {"model": result["outputs"]["name"], "version": result["outputs"]["version"]}

    def metrics_of(self, result: Mapping[str, Any]) -> Mapping[str, Any]:
        """The metrics that the model was exported with."""
        from trainjob._support.display import numeric
        from trainjob.registry.base import storable_metrics

        notify = None if result else self.log.warning  # before the launch
        if _job(self.evaluation) and isinstance(self.evaluation, Mapping):
            return storable_metrics(self.evaluation["metrics"], notify)
        metrics = self.metrics if isinstance(self.metrics, Mapping) else {}
        return storable_metrics(metrics.get("metrics", metrics), notify) if _job(metrics) else numeric(metrics)

    def data_of(self, result: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """The source as read, the stored model as written."""
        return [self.source], [result["outputs"].get("uri", "")]

    def _origins(self) -> dict[str, Any]:
        datasets = [origin for dataset in self.datasets if (origin := _origin(dataset))]
        return {"datasets": datasets, "base_model": _origin(self.base_model)}


def _job(xcom: object) -> dict[str, Any]:
    """The job that an XCom comes from; empty if it is not the XCom of a TrainJob."""
    names = ("namespace", "name", "uid", "attempt")
    return {name: xcom[name] for name in names} if isinstance(xcom, Mapping) and set(names) <= set(xcom) else {}


_UNKNOWN = "file:///evaluation"


def _evaluation(given: object) -> tuple[str | None, list[str]]:
    """Location of an evaluation, and its digest if it is an XCom.

    Raises:
        ValueError: It is neither an XCom of a `ModelEvaluationOperator` task nor a location.
    """
    if given is None or isinstance(given, str):
        return given or None, []
    outputs = given.get("outputs") if _job(given) and isinstance(given, Mapping) else None
    if not isinstance(outputs, Mapping) or not outputs.get("uri") or not outputs.get("digest"):
        raise ValueError(f"evaluation must be the XCom of a ModelEvaluationOperator or a location, not {given!r}")
    return outputs["uri"], [outputs["digest"]]


def _origin(given: object) -> dict[str, str]:
    """Location and digest from an initializer's XCom or a mapping; empty for a fresh start."""
    if not isinstance(given, Mapping):
        return {}
    values = given["outputs"] if _job(given) else given
    uri = values.get("source") or values.get("uri", "")
    digest = values.get("digest", "")
    if not digest:
        return {}
    version = {"version": values["version"]} if values.get("version") else {}
    return {"uri": uri, "digest": digest, **version}
