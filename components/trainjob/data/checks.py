"""Check the options of a step before its job is launched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainjob.data import file_manifest
from trainjob.data.locations import Location, ModelRef, parse, parse_store, parse_target
from trainjob.data.program import Step
from trainjob.data.promotion import GATE_DECIDES
from trainjob.errors import ConfigurationError
from trainjob.evaluation import Gate
from trainjob.registry import parse as parse_registry
from trainjob.registry.base import check_metrics, check_name, check_promotion, check_rule, check_tags
from trainjob.registry.provenance import PREFIX
from trainjob.settings import Settings


def check_options(step: Step, options: Mapping[str, Any]) -> None:
    """Check the given options of a step. Checks that need the step's pod are left to it.

    Args:
        step: The program.
        options: Options of `trainjob.data.program.step_command`. A missing option is not known yet and not checked.
            None and empty mean that the option is not set.

    Raises:
        ConfigurationError: An option is invalid: a location has an unknown scheme, the target is read-only, the digest
            or the registry's address is malformed, the metric for promotion is not among the metrics, …
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
    if step == "evaluate":
        _check_evaluate(options, given)
        return
    file_manifest.check_digest(given.get("digest"))
    if "source" in given:
        check_if_missing(given.get("if_missing", "fail"), parse(given["source"]))


def check_if_missing(if_missing: str, source: Location | ModelRef) -> None:
    """Check the value of ``if_missing``; raises ConfigurationError."""
    if if_missing not in ("fail", "fresh"):
        raise ConfigurationError(f"if_missing must be 'fail' or 'fresh', not {if_missing!r}")
    if if_missing != "fail" and not isinstance(source, ModelRef):
        raise ConfigurationError(f"if_missing={if_missing!r} is for registered models (models:/name@alias) only")


def _check_evaluate(options: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    file_manifest.check_digest(given.get("dataset_digest"))
    for name in ("candidate", "dataset"):
        if name in given:
            parse_store(given[name])
    if "champion" in given:
        parse(given["champion"])
    if options.get("gate") is not None:
        Gate.read(options["gate"])
    if {"command", "function"} <= set(options) and bool(given.get("command")) == bool(given.get("function")):
        raise ConfigurationError("set exactly one of command and function: it evaluates one model")


def _check_export(options: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    if "source" in given:
        parse_store(given["source"])
    if "name" in given:
        check_name(given["name"])
    if "evaluation" in given:
        parse_store(given["evaluation"])
        if given.get("metric") or given.get("min_improvement"):
            raise ConfigurationError(GATE_DECIDES)
    if {"metric", "mode", "min_improvement"} <= set(options):
        check_rule(given.get("metric"), given.get("mode", "max"), given.get("min_improvement", 0.0))
    registry = given.get("registry") or Settings().registry
    if given.get("provenance") and registry and parse_registry(registry)[0] == "mlflow":
        check_tags(f"{PREFIX}{name}" for name in given["provenance"])
    measured = check_metrics(given.get("metrics") or {})
    if {"metrics", "alias", "metric"} <= set(options):
        check_promotion(measured, given.get("alias"), given.get("metric"))
