"""What every model registry does, and the rules that are the same for all of them."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from trainjob.errors import ConfigurationError

History = Mapping[str, Sequence[tuple[int, float, float]]]
"""Metric -> its values over time: step, Unix time in seconds, value."""

Mode = Literal["max", "min"]
"""Whether more of a metric is better, or less."""


@dataclass(frozen=True)
class ModelVersion:
    """A registered version of a model.

    Attributes:
        name: The model.
        version: As the registry numbers it.
        uri: Where its files are.
        digest: ``sha256:<root digest>`` of its files; empty if it was registered by other means.
        metrics: What it was measured to reach.
        aliases: Names that point to it now.
        tags: All else that was recorded.
        created: Unix time in seconds.
        run_id: MLflow's run of the training; empty if there is none.
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
    """What became of a request to move an alias.

    Attributes:
        promoted: The version holds the alias now (with ``dry_run``: would hold it).
        reason: One sentence for people.
        previous: The version that held it before; None if none did.
    """

    promoted: bool
    reason: str
    previous: str | None


class Registry(Protocol):
    """A model registry.

    Every method raises RegistryUnavailable if it cannot be reached in bounded time, and ConfigurationError for names
    that it could not hold or credentials that it does not take.
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
        """Find before an upload what `register` would refuse after it. Changes nothing.

        Args:
            name: See `register`.
            uri: Where the model will be.
            export_id: See `register`.
            metrics: See `register`.
            tags: As far as they are known.

        Returns:
            What is registered under this ``export_id`` already; without a location if that was not finished.
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
        """Record a version, once for each ``export_id``: the same call again gives the same version.

        MLflow gets a run for the TrainJob that ``tags`` name, see `trainjob.registry.runs`, with ``history``.

        Raises:
            RegistryConflict: Another digest or location is recorded under this ``export_id``.
        """
        ...

    def resolve(self, name: str, version: str) -> ModelVersion:
        """The version of this number or alias.

        Raises:
            ModelNotFound: There is none.
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
    ) -> Promotion:
        """Move ``alias`` to ``version`` if it is better than the version that holds it, or none does.

        Better means that ``metric`` differs in the right direction, and by ``min_improvement`` or more (absolute).
        Without ``metric`` the alias moves always.

        Raises:
            ModelNotFound: There is no such version.
            ConfigurationError: ``version`` has no such metric; ``min_improvement`` is below 0, or without a metric.
        """
        ...

    def list(self, name: str) -> Sequence[ModelVersion]:
        """All versions, oldest first; none if there is no such model."""
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
    """Decide whether ``candidate`` takes over ``alias`` from ``holder``; see `Registry.promote`."""
    previous = holder.version if holder else None
    if metric is not None and metric not in candidate.metrics:
        have = ", ".join(sorted(candidate.metrics)) or "none"
        raise ConfigurationError(
            f"version {candidate.version} of {candidate.name!r} has no metric {metric!r}; it has: {have}"
        )
    if holder is not None and holder.version == candidate.version:
        return Promotion(True, f"version {candidate.version} holds {alias!r} already", previous)
    if metric is None:
        return Promotion(True, f"{alias!r} moves to version {candidate.version}; no metric was asked for", previous)
    new = candidate.metrics[metric]
    if math.isnan(new):
        return Promotion(False, f"{metric} of version {candidate.version} is not a number", previous)
    if holder is None:
        return Promotion(True, f"no version held {alias!r}; version {candidate.version} has {metric} {new:g}", None)
    old = holder.metrics.get(metric, math.nan)
    if math.isnan(old):
        why = f"version {holder.version}, which holds {alias!r}, has no {metric} to compare with; move it by hand once"
        return Promotion(False, why, previous)
    gain = new - old if mode == "max" else old - new
    better = gain > 0 and gain >= min_improvement
    change = f"{metric} {new:g} of version {candidate.version}, {old:g} of version {holder.version}"
    if better:
        return Promotion(True, f"{alias!r} moves: {change}", previous)
    needed = (
        f"{'more' if mode == 'max' else 'less'} is needed"
        if not min_improvement
        else f"a gain of {min_improvement:g} is needed"
    )
    return Promotion(False, f"{alias!r} stays: {change}; {needed}", previous)


_NAME = re.compile(r"(?!\.\.)[^/:@\\'\"`\x00-\x1f\x7f\ud800-\udfff]{1,200}")
# MLflow: letters, digits, '_' and '-'; 'latest' and v1, v2, ... are reserved. All digits would read as a version.
_ALIAS = re.compile(r"(?!latest$)(?!v\d+$)(?!\d+$)[\w-]{1,255}", re.IGNORECASE)
_METRIC = re.compile(r"[\w.\- /]{1,200}")
_TAG = re.compile(r"[\w.\- /:]{1,250}")
_UNSTORABLE = re.compile(r"[\x00\ud800-\udfff]")  # NUL: PostgreSQL; halves of a pair: no UTF-8


def is_metric(name: str) -> bool:
    """Whether every registry can hold ``name`` as that of a metric.

    MLflow makes a tag of it, whose name must be a path in its shortest form (3.17, ``_validate_tag_name``).
    """
    shortest = posixpath.normpath(name) == name and not name.startswith("/")
    return bool(_METRIC.fullmatch(name)) and shortest and ".." not in name


def check_name(name: str) -> str:
    """``name``, if every registry can hold it as the name of a model; else ConfigurationError.

    ``/`` and ``:`` have a meaning in model URIs, quotes in MLflow's search filters, which know no escape.
    """
    if not _NAME.fullmatch(name) or name != name.strip() or name == ".":
        raise ConfigurationError(
            f"{name!a} cannot be the name of a model: use 1 to 200 characters other than / : @ \\ and quotes, and not"
            " .. at the beginning"
        )
    return name


def check_export_id(export_id: str) -> str:
    """``export_id``, if every registry can hold it; else ConfigurationError."""
    if not export_id:
        raise ConfigurationError("export_id is empty; it has to be the same when the same export is tried again")
    if _UNSTORABLE.search(export_id):
        raise ConfigurationError(f"export_id {export_id[:200]!a} has a NUL or half a character, which databases refuse")
    return export_id


def check_tags(names: Iterable[str]) -> None:
    """Check names of tags by MLflow's rule; ConfigurationError.

    mlflow 3.17, utils/validation.py: ``_validate_tag_name``, ``MAX_MODEL_REGISTRY_TAG_KEY_LENGTH``.
    """
    for name in names:
        if not _TAG.fullmatch(name) or posixpath.normpath(name) != name or name.startswith(("/", "..")):
            raise ConfigurationError(
                f"{name!a} cannot be the name of a tag in MLflow: use 1 to 250 letters, digits and '_.-/: ',"
                " the '/' as in a/b"
            )


def check_alias(alias: str) -> str:
    """``alias``, if a registry can hold it; else ConfigurationError."""
    if not _ALIAS.fullmatch(alias):
        raise ConfigurationError(
            f"{alias!a} cannot be an alias: use letters, digits, '_' and '-', not only digits,"
            " and neither 'latest' nor v1, v2, ..."
        )
    return alias


def check_rule(metric: str | None, mode: str, min_improvement: float | str) -> float:
    """Check what is to decide over an alias, see `Registry.promote`; ConfigurationError if it could not.

    Returns:
        ``min_improvement`` as a number.
    """
    if mode not in ("max", "min"):
        raise ConfigurationError(f"mode is 'max' or 'min', not {mode!r}")
    try:
        gain = float(min_improvement)
    except (TypeError, ValueError):
        gain = math.nan
    if not 0 <= gain < math.inf:
        raise ConfigurationError(
            f"min_improvement is a number of 0 or more, in units of the metric, not {min_improvement!r}"
        )
    if gain and not metric:
        raise ConfigurationError(f"min_improvement={gain:g} is about a metric, but no metric is named")
    return gain


def check_promotion(metrics: Mapping[str, float], alias: str | None, metric: str | None) -> None:
    """Find before the upload what a registry would find after it; ConfigurationError."""
    if alias is None and metric is not None:
        raise ConfigurationError(f"metric={metric!r} decides over an alias, but no alias is given")
    if alias is not None:
        check_alias(alias)
    if metric is not None and metric not in metrics:
        have = ", ".join(sorted(metrics)) or "none"
        raise ConfigurationError(f"metric {metric!r} is to decide over {alias!r}, but the metrics given are: {have}")


def check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """``metrics`` as floats, if a registry can hold their names; else ConfigurationError."""
    for name in metrics:
        if not is_metric(name):
            raise ConfigurationError(
                f"{name!a} cannot be the name of a metric: use 1 to 200 letters, digits and '_.- /', the last as in a/b"
            )
    try:
        return {name: float(value) for name, value in metrics.items()}
    except (TypeError, ValueError):
        raise ConfigurationError(f"metrics have to be numbers: {dict(metrics)!a}") from None
