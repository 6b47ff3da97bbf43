"""The interface of all model registries, and the rules that they share."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from trainjob._support.numbers import is_finite
from trainjob.errors import ConfigurationError

History = Mapping[str, Sequence[tuple[int, float, float]]]
"""Metric -> values over time: step, Unix time in seconds, value."""

Mode = Literal["max", "min"]
"""Whether a higher (``max``) or lower (``min``) metric is better."""


@dataclass(frozen=True)
class ModelVersion:
    """A registered version of a model.

    Attributes:
        name: The model.
        version: Its number in the registry.
        uri: Location of its files.
        digest: ``sha256:<root digest>`` of its files; empty if another program registered it.
        metrics: Its measured metrics.
        aliases: Aliases that point to it now.
        tags: Everything else that was recorded.
        created: Unix time in seconds.
        run_id: MLflow run of the training; empty without a run.
    """

    name: str
    version: str
    uri: str
    digest: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    created: float = 0.0
    run_id: str = ""


@dataclass(frozen=True)
class Promotion:
    """Result of a request to move an alias.

    Attributes:
        promoted: Whether the version holds the alias now (with ``dry_run``: would hold it).
        reason: One sentence for people.
        previous: The version that held the alias before; None if no version did.
    """

    promoted: bool
    reason: str
    previous: str | None


class Registry(Protocol):
    """A model registry.

    Every method raises RegistryUnavailable if the registry cannot be reached in bounded time, and ConfigurationError
    for names that it cannot store or credentials that it rejects.
    """

    def check(
        self,
        name: str,
        uri: str,
        *,
        export_id: str,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> ModelVersion | None:
        """Find problems before an upload that `register` would report after it. Changes nothing.

        Args:
            name: Name of the model.
            uri: Future location of the model.
            export_id: ID of the export.
            metrics: Metrics of the version.
            tags: Tags of the version, as far as they are known.

        Returns:
            The version that is already registered under this ``export_id``; without a location if its registration is
            incomplete.
        """
        ...

    def register(
        self,
        name: str,
        uri: str,
        *,
        export_id: str,
        digest: str,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        history: History | None = None,
    ) -> ModelVersion:
        """Register a version, once per ``export_id``: a repeated call returns the same version.

        MLflow gets a run for the TrainJob in ``tags``, see `trainjob.registry.runs`, with ``history``.

        Raises:
            RegistryConflict: Another digest or location is registered under this ``export_id``.
        """
        ...

    def resolve(self, name: str, version: str) -> ModelVersion:
        """Find the version with this number or alias.

        Raises:
            ModelNotFound: There is no such version.
        """
        ...

    def promote(
        self,
        name: str,
        version: str,
        *,
        alias: str,
        metric: str | None = None,
        mode: Mode = "max",
        min_improvement: float = 0.0,
        dry_run: bool = False,
        once: bool = False,
    ) -> Promotion:
        """Move ``alias`` to ``version`` if no version holds it, or ``version`` is better than the holder.

        Better means that ``metric`` differs in the direction of ``mode``, by at least ``min_improvement`` (absolute).
        Without ``metric`` the alias always moves. With ``once``, as exports request it, the alias does not move to a
        version that has held it before: a retry must not undo what others did since.

        Raises:
            ModelNotFound: There is no such version.
            ConfigurationError: ``version`` does not have the metric, or ``min_improvement`` is below 0 or without
                metric.
        """
        ...

    def list(self, name: str) -> Sequence[ModelVersion]:
        """List all versions, oldest first; empty if the model does not exist."""
        ...


def compare(  # noqa: PLR0911 - one for each verdict
    candidate: ModelVersion,
    holder: ModelVersion | None,
    *,
    alias: str,
    metric: str | None,
    mode: Mode,
    min_improvement: float,
) -> Promotion:
    """Decide whether ``alias`` moves from ``holder`` to ``candidate``, by the rules of `Registry.promote`."""
    previous = holder.version if holder else None
    if metric is not None and metric not in candidate.metrics:
        available = ", ".join(sorted(candidate.metrics)) or "none"
        raise ConfigurationError(
            f"version {candidate.version} of {candidate.name!r} has no metric {metric!r}; it has: {available}"
        )
    if holder is not None and holder.version == candidate.version:
        return Promotion(True, f"version {candidate.version} already holds {alias!r}", previous)
    if metric is None:
        return Promotion(True, f"{alias!r} moves to version {candidate.version}; no metric was given", previous)
    new = candidate.metrics[metric]
    if math.isnan(new):
        return Promotion(False, f"{metric} of version {candidate.version} is not a number", previous)
    if holder is None:
        return Promotion(True, f"no version held {alias!r}; version {candidate.version} has {metric} {new:g}", None)
    old = holder.metrics.get(metric, math.nan)
    if math.isnan(old):
        why = f"version {holder.version}, which holds {alias!r}, has no {metric} to compare with"
        return Promotion(False, f"{why}; promote once without a metric", previous)
    gain = new - old if mode == "max" else old - new
    better = gain > 0 and gain >= min_improvement
    change = f"{metric} {new:g} of version {candidate.version}, {old:g} of version {holder.version}"
    if better:
        return Promotion(True, f"{alias!r} moves: {change}", previous)
    needed = (
        f"a {'higher' if mode == 'max' else 'lower'} value is required"
        if not min_improvement
        else f"an improvement of {min_improvement:g} is required"
    )
    return Promotion(False, f"{alias!r} stays: {change}; {needed}", previous)


_NAME = re.compile(r"(?!\.\.)[^/:@\\'\"`\x00-\x1f\x7f\ud800-\udfff]{1,200}")
# MLflow: letters, digits, '_' and '-'; 'latest' and v1, v2, ... are reserved. Digits only would mean a version.
_ALIAS = re.compile(r"(?!latest$)(?!v\d+$)(?!\d+$)[\w-]{1,255}", re.IGNORECASE)
_METRIC = re.compile(r"[\w.\- /]{1,200}")
_TAG = re.compile(r"[\w.\- /:]{1,250}")
_UNSTORABLE = re.compile(r"[\x00\ud800-\udfff]")  # NUL: not in PostgreSQL; lone surrogates: not in UTF-8


def is_metric(name: str) -> bool:
    """Whether every registry can store ``name`` as the name of a metric.

    For MLflow it becomes a tag, whose name must be a normalized path (3.17, ``_validate_tag_name``).
    """
    normalized = posixpath.normpath(name) == name and not name.startswith("/")
    return bool(_METRIC.fullmatch(name)) and normalized and ".." not in name


def storable_metrics(reported: Mapping[str, Any], notify: Callable[[str], None] | None = None) -> dict[str, float]:
    """The metrics of a training that every registry can store: finite numbers with the name of a metric.

    Args:
        reported: Metrics of a result.
        notify: Called with a line about numbers whose names registries do not accept.
    """
    found = {name: value for name, value in reported.items() if is_finite(value)}
    if (left := sorted(name for name in found if not is_metric(name))) and notify is not None:
        notify(f"metrics with names that registries do not accept are left out: {', '.join(map(ascii, left))}")
    return {name: value for name, value in found.items() if is_metric(name)}


def check_name(name: str) -> str:
    """Return ``name`` if every registry can store it as the name of a model; else raise ConfigurationError.

    ``/`` and ``:`` have a meaning in model URIs, and quotes in MLflow's search filters, which have no escapes.
    """
    if not _NAME.fullmatch(name) or name != name.strip() or name == ".":
        raise ConfigurationError(
            f"{name!a} is not a valid model name: use 1 to 200 characters except / : @ \\ and quotes, not beginning"
            " with .."
        )
    return name


def check_export_id(export_id: str) -> str:
    """Return ``export_id`` if every registry can store it; else raise ConfigurationError."""
    if not export_id:
        raise ConfigurationError("export_id is empty; set an ID that is the same for every retry of the export")
    if _UNSTORABLE.search(export_id):
        raise ConfigurationError(
            f"export_id {export_id[:200]!a} contains NUL or a lone surrogate, which databases cannot store"
        )
    return export_id


def check_tags(names: Iterable[str]) -> None:
    """Check names of tags by MLflow's rule; raises ConfigurationError.

    mlflow 3.17, utils/validation.py: ``_validate_tag_name``, ``MAX_MODEL_REGISTRY_TAG_KEY_LENGTH``.
    """
    for name in names:
        if not _TAG.fullmatch(name) or posixpath.normpath(name) != name or name.startswith(("/", "..")):
            raise ConfigurationError(
                f"{name!a} is not a valid name of a tag in MLflow: use 1 to 250 letters, digits and '_.-/: ',"
                " with '/' as in a/b"
            )


def check_alias(alias: str) -> str:
    """Return ``alias`` if every registry can store it; else raise ConfigurationError."""
    if not _ALIAS.fullmatch(alias):
        raise ConfigurationError(
            f"{alias!a} is not a valid alias: use letters, digits, '_' and '-', but not digits only, 'latest', or v1,"
            " v2, ..."
        )
    return alias


def check_rule(metric: str | None, mode: str, min_improvement: float | str) -> float:
    """Check the rule of a promotion, see `Registry.promote`; raises ConfigurationError.

    Returns:
        ``min_improvement`` as a number.
    """
    if mode not in ("max", "min"):
        raise ConfigurationError(f"mode must be 'max' or 'min', not {mode!r}")
    try:
        improvement = float(min_improvement)
    except (TypeError, ValueError):
        improvement = math.nan
    if not 0 <= improvement < math.inf:
        raise ConfigurationError(
            f"min_improvement must be a number of at least 0, in units of the metric, not {min_improvement!r}"
        )
    if improvement and not metric:
        raise ConfigurationError(f"min_improvement={improvement:g} requires a metric; set metric")
    return improvement


def check_promotion(metrics: Mapping[str, float], alias: str | None, metric: str | None) -> None:
    """Check alias and metric before the upload; raises ConfigurationError."""
    if alias is None and metric is not None:
        raise ConfigurationError(f"metric={metric!r} requires an alias; set alias")
    if alias is not None:
        check_alias(alias)
    if metric is not None and metric not in metrics:
        given = ", ".join(sorted(metrics)) or "none"
        raise ConfigurationError(f"metric {metric!r} decides about {alias!r}, but the metrics given are: {given}")


def check_metrics(metrics: Mapping[str, float | str]) -> dict[str, float]:
    """Return ``metrics``, numbers or their text, as floats.

    Raises:
        ConfigurationError: One of them is not a number, or has a name that a registry cannot store.
    """
    for name in metrics:
        if not is_metric(name):
            raise ConfigurationError(
                f"{name!a} is not a valid name of a metric: use 1 to 200 letters, digits and '_.- /', '/' as in a/b"
            )
    try:
        return {name: float(value) for name, value in metrics.items()}
    except (TypeError, ValueError):
        raise ConfigurationError(f"metrics must be numbers: {dict(metrics)!a}") from None
