"""``python -m trainjob.data``: the steps around training as programs, for TrainJobs of one node.

::

    python -m trainjob.data initialize-dataset --source s3://data/digits/ --target /workspace/dataset
    python -m trainjob.data initialize-model --source models:/digits@champion --target /workspace/model
    python -m trainjob.data copy --source hf://datasets/org/digits --target s3://data/digits
    python -m trainjob.data evaluate --candidate /workspace/output --dataset s3://test/ --target /workspace/evaluation
        -- python evaluate.py
    python -m trainjob.data export --source /workspace/output --target s3://models --name digits --export-id run-7

Without ``--source``, or without any arguments, it acts as an initializer of Kubeflow Trainer: ``STORAGE_URI`` and other
environment variables set what to download (`trainjob.data.trainer`). If ``STORAGE_URI`` is empty, nothing is
downloaded.

Progress is printed to stdout, and the result is reported to `trainjob.progress`. An error is one line on stderr. The
exit code is 2 if a person must change something, and 75 (EX_TEMPFAIL of sysexits.h) if a retry may succeed. The
termination message contains the verdict too, from which the diagnosis of the job reads it
(`trainjob._diagnosis.termination_messages`).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

from trainjob import progress
from trainjob._diagnosis import termination_messages
from trainjob._support.signals import exiting, handled
from trainjob.data import trainer
from trainjob.data.evaluate import CommandFailed, Evaluated, Function, evaluate
from trainjob.data.locations import parse_target
from trainjob.data.options import Copy, Evaluate, Export, InitializeModel, StepOptions, from_words
from trainjob.data.steps import Exported, Initialized, export, initialize
from trainjob.data.transfer import copy
from trainjob.errors import TrainJobError
from trainjob.progress import message

_REASON = 500  # characters of a reason in the termination message
TRY_AGAIN = 75
"""Exit code of errors for which a retry may succeed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one step; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words and trainer.is_idle():
        _print("STORAGE_URI is empty: nothing to download")
        return 0
    try:
        if not words and trainer.is_initializer():
            result: Initialized | Exported | Evaluated = _initialize_for_trainer(trainer.task(os.environ))
        else:
            result = _run(from_words(words))
    except CommandFailed as error:  # the diagnosis reads the log of the author's program
        _print(str(error))
        return error.code
    except TrainJobError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        _write_verdict(error)
        return TRY_AGAIN if error.retry.retryable else 2
    except Exception as error:  # noqa: BLE001 - without a verdict, the diagnosis would report an error of a training script
        traceback.print_exc()
        _write_verdict(error)
        return 1
    if isinstance(result, Evaluated):
        _report_evaluation(result)
    else:
        _report(result)
    return 0


def _run(options: StepOptions) -> Initialized | Exported | Evaluated:
    given = {each.name: getattr(options, each.name) for each in fields(options)}
    if isinstance(options, Evaluate):
        name, source = given.pop("function"), given.pop("function_source") or ""
        if name and source.startswith("@"):
            source = Path(source[1:]).read_text(encoding="utf-8")
        return evaluate(**given, function=Function(name, source) if name else None, progress=_print)
    if isinstance(options, Copy):
        made = copy(**given, progress=_print)
        uri = parse_target(options.target).uri
        return Initialized(uri, made.digest, made.size, len(made.files), options.source)
    if isinstance(options, Export):
        return export(**given, progress=_print)
    if given["source"]:
        return initialize(**given, progress=_print)
    task = trainer.task(os.environ, "model" if isinstance(options, InitializeModel) else "dataset")
    return _initialize_for_trainer(replace(task, target=given["target"]))


def _initialize_for_trainer(task: trainer.Task) -> Initialized:
    return initialize(task.source, task.target, include=task.include, exclude=task.exclude, progress=_print)


def _report_evaluation(result: Evaluated) -> None:
    report, decision = result.report, result.decision
    outputs: dict[str, str | bool] = {
        "uri": result.uri,
        "digest": result.digest,
        "candidate": report.candidate["digest"],
        "champion": (report.champion or {}).get("version", "") or (report.champion or {}).get("digest", ""),
    }
    if decision is not None:
        outputs |= {"passed": decision.passed, "rule": decision.rule, "reason": decision.reason[:_REASON]}
    metrics = {name: each.candidate for name, each in report.metrics.items()}
    progress.report(progress=100, metrics=metrics, outputs=outputs)


def _report(result: Initialized | Exported) -> None:
    outputs: dict[str, str | bool] = {"uri": result.uri, "digest": result.digest, "version": result.version or ""}
    if isinstance(result, Exported):
        outputs |= {"name": result.name, "promoted": result.promoted, "reason": result.reason}
    else:
        outputs |= {"source": result.source, "fresh": result.fresh}
    metrics: dict[str, float | int | str] = {"bytes": result.bytes, "files": result.files}
    if isinstance(result, Exported) and result.parameters:
        metrics["parameters"] = result.parameters
    progress.report(progress=100, metrics=metrics, outputs=outputs)


def _write_verdict(error: Exception) -> None:
    """Write the verdict of `error` to the termination message of the container."""
    if path := message.termination_log():
        with suppress(OSError):  # log and exit code report it too
            message.write(path, termination_messages.message_of(error))


def _print(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    with handled(exiting):
        sys.exit(main())
