"""What is certain to be wrong with the options of a step, before its job is launched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainjob.data import content
from trainjob.data.locations import Location, ModelRef, parse, parse_store, parse_target
from trainjob.data.program import Step
from trainjob.errors import ConfigurationError
from trainjob.registry import parse as parse_registry
from trainjob.registry.base import check_metrics, check_name, check_promotion, check_rule, check_tags
from trainjob.registry.provenance import PREFIX
from trainjob.settings import Settings


def check_options(step: Step, options: Mapping[str, Any]) -> None:
    """Check those options of a step that are given. What only the step's pod can tell is left to it.

    Args:
        step: Which program.
        options: See `trainjob.data.program.step_command`. What is left out is not known yet, and not checked; None and
            empty mean that there is none.

    Raises:
        ConfigurationError: A location has an unknown scheme, a digest is none, the address of the registry is wrong, a
            metric is to decide that is not among the metrics, …
        UnsafePath: A path has ``..`` or control characters in it.
    """
    given = {name: value for name, value in options.items() if value not in (None, "")}
    if "registry" in given:
        parse_registry(given["registry"])
    if "target" in given:
        parse_target(given["target"])
    if step == "export":
        _check_export(options, given)
        return
    content.check_digest(given.get("digest"))
    if "source" in given:
        check_if_missing(given.get("if_missing", "fail"), parse(given["source"]))


def check_if_missing(if_missing: str, source: Location | ModelRef) -> None:
    """Check what is to be done where the source does not exist yet; ConfigurationError."""
    if if_missing not in ("fail", "fresh"):
        raise ConfigurationError(f"if_missing is 'fail' or 'fresh', not {if_missing!r}")
    if if_missing != "fail" and not isinstance(source, ModelRef):
        raise ConfigurationError(f"if_missing={if_missing!r} is for registered models (models:/name@alias) only")


def _check_export(options: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    if "source" in given:
        parse_store(given["source"])
    if "name" in given:
        check_name(given["name"])
    if {"metric", "mode", "min_improvement"} <= set(options):
        check_rule(given.get("metric"), given.get("mode", "max"), given.get("min_improvement", 0.0))
    registry = given.get("registry") or Settings().registry
    if given.get("provenance") and registry and parse_registry(registry)[0] == "mlflow":
        check_tags(f"{PREFIX}{name}" for name in given["provenance"])
    measured = check_metrics(given.get("metrics") or {})
    if {"metrics", "alias", "metric"} <= set(options):
        check_promotion(measured, given.get("alias"), given.get("metric"))
