"""The step of a `distributed` component. It launches a TrainJob whose nodes run the component's function."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainjob import ConfigurationError, TrainJobResult
from trainjob._support.foreign import mapping_of
from trainjob.progress.message import clean, decoded
from trainjob_kfp import node
from trainjob_kfp.execution import ADDED, TRAINING_FIELDS, Execution, input_of, location
from trainjob_kfp.jobs import run_job
from trainjob_kfp.runtime import spec_of
from trainjob_kfp.steplog import report_failures, write_line

_CONFIG = "task_config"
_WITHOUT_FILE = ("system.Metrics", "system.ClassificationMetrics", "system.SlicedClassificationMetrics")


def main() -> None:
    """Run the step; `trainjob_kfp.distributed` writes its arguments into the compiled component."""
    parser = argparse.ArgumentParser(prog="python -m trainjob_kfp.distribution")
    parser.add_argument("--executor_input", required=True)
    parser.add_argument("--options", required=True)
    given = parser.parse_args()
    options = mapping_of(given.options, "--options")
    with report_failures():
        execution = Execution.of(sys.argv)
        executor_input = input_of(sys.argv)
        inputs = executor_input.setdefault("inputs", {})
        values = inputs.get("parameterValues") or {}
        config = values.pop(_CONFIG, None) or {}
        inputs["parameterValues"] = {
            # A separate number has the type that KFP knows, and a float without digits after the point stays one.
            name: execution.plain(value) if isinstance(value, str | list | Mapping) else value
            for name, value in values.items()
            if not name.startswith(ADDED)
        }
        fields = {
            **{name: options[name] for name in TRAINING_FIELDS},
            "checkpoints": location(options["checkpoints"]),
            "command": [word.replace("$", "$$") for word in _command(options, executor_input)],
        }
        if execution.local:
            del fields["image"]
        parameters = {**options, _CONFIG: execution.plain(_snake_case(config))}
        result = run_job(execution, spec_of(execution, fields, parameters), parameters)
        _write_outputs(executor_input["outputs"], result)


def _command(options: Mapping[str, Any], executor_input: Mapping[str, Any]) -> list[str]:
    payload = {
        "function": options["function"],
        "source": options["source"],
        "executor_input": executor_input,
        "inputs": dict(_remote_artifacts(executor_input, "inputs")),
        "outputs": dict(_remote_artifacts(executor_input, "outputs")),
    }
    return [*options["before"], "python3", "-c", inspect.getsource(node), json.dumps(payload)]


def _remote_artifacts(executor_input: Mapping[str, Any], side: str) -> Iterator[tuple[str, str]]:
    """URI and location of each artifact that is a file in a store."""
    for artifacts in (executor_input.get(side, {}).get("artifacts") or {}).values():
        for artifact in artifacts.get("artifacts") or []:
            file = artifact.get("type", {}).get("schemaTitle") not in _WITHOUT_FILE
            if file and "://" in artifact["uri"] and artifact.get("name") != "executor-logs":
                yield artifact["uri"], location(artifact["uri"])


def _snake_case(config: Mapping[str, Any]) -> dict[str, Any]:
    """A task config with the names of KFP's executor: the driver writes these two in camel case."""
    names = {"nodeSelector": "node_selector", "volumeMounts": "volume_mounts"}
    return {names.get(name, name): value for name, value in config.items()}


def _write_outputs(outputs: Mapping[str, Any], result: TrainJobResult) -> None:
    """Write the outputs of rank 0 where KFP expects the outputs of this step.

    Raises:
        ConfigurationError: Rank 0 has reported none, or others than those of the component's function.
    """
    job = f"TrainJob {result.namespace}/{result.name}"
    text = result.outputs.get("kfp")
    if text is None:
        raise ConfigurationError(
            f"{job} is complete, but has no outputs of rank 0: its termination message was overwritten, or its pod was "
            "deleted"
        )
    try:
        reported = decoded(str(text))
        artifacts = {
            name: {
                "artifacts": [
                    {**outputs["artifacts"][name]["artifacts"][i], "metadata": _storable(each, f"metadata of {name}: ")}
                ]
            }
            for name, metadata in reported["metadata"].items()
            for i, each in enumerate(metadata)
        }
        texts = _storable(reported["files"], "output ").items()
        files = {outputs["parameters"][name]["outputFile"]: str(text) for name, text in texts}
        given = {"parameterValues": _storable(reported["parameterValues"], "output "), "artifacts": artifacts}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{job} is complete, but its outputs are not those of the component's function ({error!r}): let only KFP's "
            "executor write the output kfp"
        ) from None
    for path, content in files.items():
        _write(path, content)
    _write(outputs["outputFile"], json.dumps(given))


def _storable(values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The values that KFP can store, without control characters; the log reports the others."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        try:
            kept |= clean({name: value})
        except ValueError as error:
            write_line(f"{what}{name} is lost: {error}")
    return kept


def _write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
