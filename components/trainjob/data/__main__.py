"""``python -m trainjob.data``: the steps around training as programs, for TrainJobs of one node.

::

    python -m trainjob.data initialize-dataset --source s3://data/digits/ --target /workspace/dataset
    python -m trainjob.data initialize-model --source models:/digits@champion --target /workspace/model
    python -m trainjob.data evaluate --candidate /workspace/output --dataset s3://test/ --target /workspace/evaluation
        -- python evaluate.py
    python -m trainjob.data export --source /workspace/output --target s3://models --name digits --export-id run-7

Without ``--source``, or without any arguments, it acts as an initializer of Kubeflow Trainer: ``STORAGE_URI`` and other
environment variables set what to download (`trainjob.data.trainer`). If ``STORAGE_URI`` is empty, nothing is
downloaded.

Progress is printed to stdout, and the result is reported to `trainjob.progress`. An error is one line on stderr. The
exit code is 2 if a person must change something, and 75 (EX_TEMPFAIL of sysexits.h) if a retry may succeed. The
termination message contains the verdict too, from which the diagnosis of the job reads it
(`trainjob._diagnosis.verdicts`).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from trainjob import progress
from trainjob._diagnosis import termination_messages
from trainjob.data import trainer
from trainjob.data.evaluate import CommandFailed, Evaluated, Function, evaluate
from trainjob.data.steps import Exported, Initialized, export, initialize
from trainjob.data.strict import json_object
from trainjob.errors import TrainJobError
from trainjob.progress.message import MAX_METRICS, MAX_NAME, termination_log

_REASON = 500  # characters of a reason in the termination message
TRY_AGAIN = 75
"""Exit code of errors for which a retry may succeed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one step; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words and trainer.is_idle():
        _print("STORAGE_URI is empty: nothing to download")
        return 0
    given = None if not words and trainer.is_initializer() else _parser().parse_args(words)
    try:
        if given is None:
            result: Initialized | Exported = _initialize_for_trainer(trainer.task(os.environ))
        elif given.step == "evaluate":
            _report_evaluation(_evaluate(given))
            return 0
        else:
            result = _export(given) if given.step == "export" else _initialize(given)
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
    _report(result)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainjob.data", description="Run a step around a training job.")
    steps = parser.add_subparsers(dest="step", required=True)
    for what in ("dataset", "model"):
        step = steps.add_parser(
            f"initialize-{what}", help=f"download a {what} to the directory from which training reads it"
        )
        step.add_argument(
            "--source", help="set the location to download, or models:/name@alias (default: Trainer's STORAGE_URI)"
        )
        step.add_argument("--target", default=trainer.TARGETS[what], help="set the directory to download to")
        step.add_argument("--digest", help="require this SHA-256 of the only file, or sha256:<root digest>")
        step.add_argument(
            "--include",
            action="append",
            default=[],
            metavar="PATTERN",
            help="download only matching files (repeatable)",
        )
        step.add_argument(
            "--exclude", action="append", default=[], metavar="PATTERN", help="leave out matching files (repeatable)"
        )
        step.add_argument("--registry", help="use this registry instead of TRAINJOB_REGISTRY")
        step.add_argument("--verify-key", metavar="PATH", help="require a valid signature for this public key")
        step.set_defaults(if_missing="fail", what=what)
        if what == "model":
            step.add_argument(
                "--if-missing",
                choices=("fail", "fresh"),
                help="fresh: start without a model if it is not registered yet",
            )
    step = steps.add_parser("export", help="store, register and promote a trained model")
    step.add_argument("--source", required=True, help="set the model to export: a file or a directory")
    step.add_argument("--target", required=True, help="set the directory of all models")
    step.add_argument("--name", required=True, help="set the name of the model in the registry")
    step.add_argument(
        "--export-id",
        required=True,
        help="identify the export: the same for every retry of it, different for any other",
    )
    step.add_argument("--registry", help="use this registry instead of TRAINJOB_REGISTRY")
    step.add_argument("--metrics", default="{}", metavar="JSON", help="record these metrics: a JSON object or @file")
    step.add_argument("--alias", help="move this alias, such as champion, to the version")
    step.add_argument(
        "--metric", help="move the alias only if this metric is better than that of the alias's current version"
    )
    step.add_argument(
        "--mode", choices=("max", "min"), default="max", help="choose whether a higher or lower metric is better"
    )
    step.add_argument(
        "--min-improvement", type=float, default=0.0, help="require at least this improvement of the metric"
    )
    step.add_argument(
        "--provenance",
        default="{}",
        metavar="JSON",
        help="write this provenance beside the model: a JSON object or @file",
    )
    step.add_argument(
        "--history", default="{}", metavar="JSON", help="record these metrics over time: a JSON object or @file"
    )
    step.add_argument(
        "--allow-pickle", action="store_true", help="also accept files that can run code when they are loaded"
    )
    step.add_argument("--sign", metavar="PATH", help="sign the model with this private key (OpenSSF Model Signing)")
    step.add_argument(
        "--evaluation", metavar="URI", help="export with this evaluation; its gate decides about the alias"
    )
    step = steps.add_parser("evaluate", help="evaluate a model beside the current champion")
    step.add_argument("--candidate", required=True, help="set the model to evaluate")
    step.add_argument("--champion", help="set the champion: a location, or models:/name@alias")
    step.add_argument("--dataset", required=True, help="set the held-out dataset")
    step.add_argument("--dataset-digest", help="require this digest of the dataset")
    step.add_argument("--target", required=True, help="set the directory for the report")
    step.add_argument("--gate", metavar="JSON", help="decide by these rules: a JSON object or @file")
    step.add_argument("--code", default="{}", metavar="JSON", help="record this code: uri and revision, a JSON object")
    step.add_argument("--registry", help="use this registry instead of TRAINJOB_REGISTRY")
    step.add_argument("--function", metavar="NAME", help="evaluate with this function of --function-source")
    step.add_argument("--function-source", metavar="SOURCE", help="define the function: Python source or @file")
    step.add_argument("command", nargs="*", metavar="COMMAND", help="evaluate one model with this command")
    return parser


def _initialize_for_trainer(task: trainer.Task) -> Initialized:
    return initialize(task.source, task.target, include=task.include, exclude=task.exclude, progress=_print)


def _initialize(given: argparse.Namespace) -> Initialized:
    if not given.source:
        task = trainer.task(os.environ, given.what)
        return _initialize_for_trainer(replace(task, target=given.target))
    return initialize(
        given.source,
        given.target,
        digest=given.digest,
        include=given.include,
        exclude=given.exclude,
        registry=given.registry,
        if_missing=given.if_missing,
        verify_key=given.verify_key,
        progress=_print,
    )


def _export(given: argparse.Namespace) -> Exported:
    return export(
        given.source,
        given.target,
        name=given.name,
        export_id=given.export_id,
        registry=given.registry,
        metrics=json_object("--metrics", given.metrics),
        alias=given.alias,
        metric=given.metric,
        mode=given.mode,
        min_improvement=given.min_improvement,
        provenance=json_object("--provenance", given.provenance),
        allow_pickle=given.allow_pickle,
        sign=given.sign,
        history=json_object("--history", given.history),
        evaluation=given.evaluation,
        progress=_print,
    )


def _evaluate(given: argparse.Namespace) -> Evaluated:
    function = None
    if given.function:
        source = given.function_source or ""
        text = Path(source[1:]).read_text(encoding="utf-8") if source.startswith("@") else source
        function = Function(given.function, text)
    return evaluate(
        given.candidate,
        given.dataset,
        given.target,
        command=given.command,
        function=function,
        champion=given.champion,
        dataset_digest=given.dataset_digest,
        gate=json_object("--gate", given.gate) if given.gate else None,
        code=json_object("--code", given.code),
        registry=given.registry,
        progress=_print,
    )


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
    metrics = {name: each.candidate for name, each in report.metrics.items() if len(name) <= MAX_NAME}
    progress.report(progress=100, metrics=dict(list(metrics.items())[:MAX_METRICS]), outputs=outputs)


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
    path = termination_log()
    if path is not None:
        with suppress(OSError):  # log and exit code report it too
            Path(path).write_text(termination_messages.write(error), encoding="utf-8")


def _print(line: str) -> None:
    print(line, flush=True)


def _terminate(number: int, frame: object) -> NoReturn:
    """End on SIGTERM as on Ctrl-C, so that partial uploads are cleaned up."""
    del frame
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(main())
