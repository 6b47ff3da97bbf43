"""The programs of ``python -m trainjob.data``: the options of each, their checks, and the command that has them.

`trainjob.data.initialize`, `copy`, `export` and `evaluate` document what the options mean.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from trainjob._support.foreign import LIMITS, mapping_of
from trainjob.data import file_manifest
from trainjob.data.export_evaluation import GATE_DECIDES
from trainjob.data.locations import Location, ModelRef, parse, parse_store, parse_target
from trainjob.data.trainer import TARGETS
from trainjob.errors import ConfigurationError
from trainjob.evaluation import Gate
from trainjob.registry import Mode, parse as parse_registry
from trainjob.registry.base import check_metrics, check_name, check_promotion, check_rule, check_tags
from trainjob.registry.provenance import PREFIX
from trainjob.settings import Settings

Step = Literal["initialize-dataset", "initialize-model", "copy", "evaluate", "export"]

UNKNOWN: Any = object()
"""The value of an option that is known only when the step runs: a template, or the output of another step."""


def _option(text: str, default: Any = None, **more: Any) -> Any:
    """An option that may be left out; `more` are arguments of `argparse.ArgumentParser.add_argument`."""
    return field(default=default, metadata={"help": text, **more})


def _required(text: str) -> Any:
    return field(metadata={"help": text})


def _patterns(text: str) -> Any:
    return _option(f"{text} (repeatable)", (), action="append", metavar="PATTERN")


def _json(text: str) -> Any:
    return _option(f"{text}: a JSON object or @file", metavar="JSON")


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of a program. None and empty values are options that are not set."""

    step: ClassVar[Step]
    does: ClassVar[str]

    @classmethod
    def known(cls, given: Mapping[str, Any]) -> Self:
        """The options whose values are known already; all others are `UNKNOWN`."""
        return cls(**{each.name: given.get(each.name, UNKNOWN) for each in fields(cls)})

    def _get(self, name: str) -> Any:
        """The value; None if it is unknown, not set or no option of this program."""
        value = getattr(self, name, None)
        return None if value is UNKNOWN or (isinstance(value, str) and not value) else value

    def _knows(self, *names: str) -> bool:
        return all(getattr(self, name) is not UNKNOWN for name in names)

    def check(self) -> None:
        """Check the known options, before a job is launched. Checks that need the step's pod are left to it.

        Raises:
            ConfigurationError: An option is invalid: a location has an unknown scheme, the target is read-only, the
                digest or the registry's address is malformed, the metric for promotion is not among the metrics, …
            UnsafePath: A path has ``..`` or control characters in it.
        """
        if (registry := self._get("registry")) is not None:
            parse_registry(registry)
        if (target := self._get("target")) is not None:
            parse_target(target)

    def to_command(self) -> list[str]:
        """The command of a TrainJob that runs the program; `from_words` reads it."""
        command = ["python", "-m", "trainjob.data", self.step]
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "registry":  # so that the step's pod needs no setting
                value = value or Settings().registry
            if each.name == "command":
                continue
            for part in value if isinstance(value, list | tuple) else [value]:
                if part is True:
                    command.append(_flag(each.name))
                elif part not in (None, False, "", {}):
                    is_json = isinstance(part, Mapping)
                    text = json.dumps(part, sort_keys=True, separators=(",", ":")) if is_json else str(part)
                    # One argument, so that a value may begin with a dash. Kubernetes expands "$" in commands.
                    command.append(f"{_flag(each.name)}={text.replace('$', '$$')}")
        words = getattr(self, "command", None) or ()
        return [*command, "--", *(str(word).replace("$", "$$") for word in words)] if words else command


@dataclass(frozen=True, kw_only=True)
class Copy(StepOptions):
    """Options of `trainjob.data.copy`."""

    step: ClassVar[Step] = "copy"
    does: ClassVar[str] = "copy a dataset or model to another store"

    source: str = _required("set the file or directory to copy")
    target: str = _required("set the directory to copy to")
    include: Sequence[str] = _patterns("copy only paths that match, such as '*.csv'")
    exclude: Sequence[str] = _patterns("leave out paths that match, also of --include")
    digest: str | None = _option("require this SHA-256 of the only file, or sha256:<root digest>")

    def check(self) -> None:
        """Check the known options, as `StepOptions.check`."""
        super().check()
        if (source := self._get("source")) is not None:
            parse_store(source)
        file_manifest.check_digest(self._get("digest"))


@dataclass(frozen=True, kw_only=True)
class RegistryStepOptions(StepOptions):
    """The options of a program that may use a registry.

    Attributes:
        registry: The registry; that of this process (``TRAINJOB_REGISTRY``) if it is not set.
    """

    registry: str | None = _option("use this registry instead of TRAINJOB_REGISTRY")


@dataclass(frozen=True, kw_only=True)
class InitializeDataset(RegistryStepOptions):
    """Options of `trainjob.data.initialize` for a dataset."""

    step: ClassVar[Step] = "initialize-dataset"
    does: ClassVar[str] = "download a dataset to the directory from which training reads it"

    source: str = _option("set the location to download, or models:/name@alias (default: Trainer's STORAGE_URI)")
    target: str = _option("set the directory to download to", TARGETS["dataset"])
    digest: str | None = _option("require this SHA-256 of the only file, or sha256:<root digest>")
    include: Sequence[str] = _patterns("download only matching files")
    exclude: Sequence[str] = _patterns("leave out matching files")
    verify_key: str | None = _option("require a valid signature for this public key", metavar="PATH")

    def check(self) -> None:
        """Check the known options, as `StepOptions.check`."""
        super().check()
        file_manifest.check_digest(self._get("digest"))
        if (source := self._get("source")) is not None:
            check_if_missing(self._get("if_missing") or "fail", parse(source))


@dataclass(frozen=True, kw_only=True)
class InitializeModel(InitializeDataset):
    """Options of `trainjob.data.initialize` for a model."""

    step: ClassVar[Step] = "initialize-model"
    does: ClassVar[str] = "download a model to the directory from which training reads it"

    target: str = _option("set the directory to download to", TARGETS["model"])
    if_missing: Literal["fail", "fresh"] = _option(
        "fresh: start without a model if it is not registered yet", "fail", choices=("fail", "fresh")
    )


@dataclass(frozen=True, kw_only=True)
class Export(RegistryStepOptions):
    """Options of `trainjob.data.export`."""

    step: ClassVar[Step] = "export"
    does: ClassVar[str] = "store, register and promote a trained model"

    source: str = _required("set the model to export: a file or a directory")
    target: str = _required("set the directory of all models")
    name: str = _required("set the name of the model in the registry")
    export_id: str = _required("identify the export: the same for every retry of it, different for any other")
    metrics: Mapping[str, float] | None = _json("record these metrics")
    alias: str | None = _option("move this alias, such as champion, to the version")
    metric: str | None = _option("move the alias only if this metric is better than in the alias's current version")
    mode: Mode = field(
        default="max",
        metadata={"help": "choose whether a higher or lower metric is better", "choices": ("max", "min")},
    )
    min_improvement: float = _option("require at least this improvement of the metric", 0.0, type=float)
    provenance: Mapping[str, Any] | None = _json("write this provenance beside the model")
    history: Mapping[str, Any] | None = _json("record these metrics over time")
    evaluation: str | None = _option("export with this evaluation; its gate decides about the alias", metavar="URI")
    allow_pickle: bool = _option(
        "also accept files that can run code when they are loaded", default=False, action="store_true"
    )
    sign: str | None = _option("sign the model with this private key (OpenSSF Model Signing)", metavar="PATH")

    def check(self) -> None:
        """Check the known options, as `StepOptions.check`."""
        super().check()
        if (source := self._get("source")) is not None:
            parse_store(source)
        if (name := self._get("name")) is not None:
            check_name(name)
        if (evaluation := self._get("evaluation")) is not None:
            parse_store(evaluation)
            if self._get("metric") or self._get("min_improvement"):
                raise ConfigurationError(GATE_DECIDES)
        if self._knows("metric", "mode", "min_improvement"):
            check_rule(self._get("metric"), self._get("mode") or "max", self._get("min_improvement") or 0.0)
        registry = self._get("registry") or Settings().registry
        if (provenance := self._get("provenance")) and registry and parse_registry(registry)[0] == "mlflow":
            check_tags(f"{PREFIX}{name}" for name in provenance)
        measured = check_metrics(self._get("metrics") or {})
        if self._knows("metrics", "alias", "metric"):
            check_promotion(measured, self._get("alias"), self._get("metric"))


@dataclass(frozen=True, kw_only=True)
class Evaluate(RegistryStepOptions):
    """Options of `trainjob.data.evaluate`; its function is given by name and source."""

    step: ClassVar[Step] = "evaluate"
    does: ClassVar[str] = "evaluate a model beside the current champion"

    candidate: str = _required("set the model to evaluate")
    dataset: str = _required("set the held-out dataset")
    target: str = _required("set the directory for the report")
    champion: str | None = _option("set the champion: a location, or models:/name@alias")
    dataset_digest: str | None = _option("require this digest of the dataset")
    gate: Mapping[str, Any] | None = _json("decide by these rules")
    code: Mapping[str, str] | None = _json("record this code, uri and revision")
    function: str | None = _option("evaluate with this function of --function-source", metavar="NAME")
    function_source: str | None = _option("define the function: Python source or @file", metavar="SOURCE")
    command: Sequence[str] | None = _option("evaluate one model with this command", nargs="*", metavar="COMMAND")

    def check(self) -> None:
        """Check the known options, as `StepOptions.check`."""
        super().check()
        file_manifest.check_digest(self._get("dataset_digest"))
        for location in (self._get("candidate"), self._get("dataset")):
            if location is not None:
                parse_store(location)
        if (champion := self._get("champion")) is not None:
            parse(champion)
        if (gate := self._get("gate")) is not None:
            Gate.read(gate)
        if self._knows("command", "function") and bool(self._get("command")) == bool(self._get("function")):
            raise ConfigurationError("set exactly one of command and function: it evaluates one model")


STEPS: Mapping[Step, type[StepOptions]] = {
    each.step: each for each in (InitializeDataset, InitializeModel, Copy, Evaluate, Export)
}
"""Name of each program -> its options."""


def check_if_missing(if_missing: str, source: Location | ModelRef) -> None:
    """Check the value of ``if_missing``; raises ConfigurationError."""
    if if_missing not in ("fail", "fresh"):
        raise ConfigurationError(f"if_missing must be 'fail' or 'fresh', not {if_missing!r}")
    if if_missing != "fail" and not isinstance(source, ModelRef):
        raise ConfigurationError(f"if_missing={if_missing!r} is for registered models (models:/name@alias) only")


def from_words(words: Sequence[str]) -> StepOptions:
    """Read the name of a program and its options, as `StepOptions.to_command` writes them.

    Raises:
        SystemExit: They are invalid; the reason was printed. Or help was asked for.
        ConfigurationError: The value of an option is no JSON object.
    """
    parser = argparse.ArgumentParser(prog="python -m trainjob.data", description="Run a step around a training job.")
    steps = parser.add_subparsers(dest="step", required=True)
    for name, options in STEPS.items():
        step = steps.add_parser(name, help=options.does)
        for each in fields(options):
            more = dict(each.metadata)
            if each.name == "command":
                step.add_argument("command", **more)
            elif each.default is MISSING:
                step.add_argument(_flag(each.name), required=True, **more)
            else:
                step.add_argument(_flag(each.name), default=None if "append" in more.values() else each.default, **more)
    given = vars(parser.parse_args(words))
    chosen = STEPS[given.pop("step")]
    for each in fields(chosen):
        value = given[each.name]
        if each.metadata.get("metavar") == "JSON" and value is not None:
            given[each.name] = json_object(_flag(each.name), value)
        elif value is None and each.default is not MISSING:
            given[each.name] = each.default
    return chosen(**given)


def json_object(option: str, text: str) -> dict[str, Any]:
    """Parse the value of a command's option: a JSON object, or ``@path`` of a file with one.

    Raises:
        ConfigurationError: The value is not a JSON object.
    """
    try:
        if not text.startswith("@"):
            return mapping_of(text, option)
        with Path(text[1:]).open("rb") as file:
            return mapping_of(file.read(LIMITS.size + 1), text[1:])
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{option} must be a JSON object, or @file with one: {error}") from None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
