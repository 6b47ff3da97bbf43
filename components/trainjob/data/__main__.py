"""``python -m trainjob.data``: the steps around training as programs, for TrainJobs of one node.

::

    python -m trainjob.data initialize-dataset --source s3://data/digits/ --target /workspace/dataset
    python -m trainjob.data initialize-model --source models:/digits@champion --target /workspace/model
    python -m trainjob.data export --source /workspace/output --target s3://models --name digits --export-id run-7

Without ``--source``, and without any arguments, it is what Kubeflow Trainer calls an initializer: ``STORAGE_URI`` and
the other settings of the environment say what to bring (`trainjob.data.trainer`); empty, that there is nothing.

Lines about progress go to stdout, and the result to `trainjob.progress`. An error is one line on stderr, the exit code
2 where a person has to change something and 75 (EX_TEMPFAIL of sysexits.h) where another try may succeed. The verdict
is in the termination message, too, where the diagnosis of the job finds it (`trainjob.diagnosis.verdicts`).
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
from trainjob.data import trainer
from trainjob.data.steps import Exported, Initialized, export, initialize
from trainjob.data.strict import json_object
from trainjob.diagnosis import termination_messages
from trainjob.errors import TrainJobError

TRY_AGAIN = 75
"""Exit code where another try may succeed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one step; the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words and trainer.idle():
        _say("STORAGE_URI is empty: nothing to bring")
        return 0
    given = None if not words and trainer.asked() else _parser().parse_args(words)
    try:
        if given is None:
            result: Initialized | Exported = _initialize_for_trainer(trainer.task(os.environ))
        else:
            result = _export(given) if given.step == "export" else _initialize(given)
    except TrainJobError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201 - a program
        _tell(error)
        return TRY_AGAIN if error.retry.retryable else 2
    except Exception as error:  # noqa: BLE001 - without a verdict, the diagnosis would blame a training script
        traceback.print_exc()
        _tell(error)
        return 1
    _report(result)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainjob.data", description="Steps around a training job.")
    steps = parser.add_subparsers(dest="step", required=True)
    for what in ("dataset", "model"):
        step = steps.add_parser(f"initialize-{what}", help=f"bring a {what} to where training finds it")
        step.add_argument("--source", help="location, or models:/name@alias; else Trainer's STORAGE_URI and the like")
        step.add_argument("--target", default=trainer.TARGETS[what], help="directory to bring it to")
        step.add_argument("--digest", help="SHA-256 of the one file, or sha256:<root digest>")
        step.add_argument("--include", action="append", default=[], metavar="PATTERN", help="only these; repeatable")
        step.add_argument("--exclude", action="append", default=[], metavar="PATTERN", help="not these; repeatable")
        step.add_argument("--registry", help="instead of TRAINJOB_REGISTRY")
        step.add_argument("--verify-key", metavar="PATH", help="public key with which all of it has to be signed")
        step.set_defaults(if_missing="fail", what=what)
        if what == "model":
            step.add_argument(
                "--if-missing",
                choices=("fail", "fresh"),
                help="fresh: a model that is not registered yet is no error",
            )
    step = steps.add_parser("export", help="store, register and promote a trained model")
    step.add_argument("--source", required=True, help="the model: a file or a directory")
    step.add_argument("--target", required=True, help="directory of all models")
    step.add_argument("--name", required=True, help="model in the registry")
    step.add_argument("--export-id", required=True, help="the same for every try of this export, and for no other")
    step.add_argument("--registry", help="instead of TRAINJOB_REGISTRY")
    step.add_argument("--metrics", default="{}", metavar="JSON", help="JSON object, or @file that holds one")
    step.add_argument("--alias", help="name to give to the version, such as champion")
    step.add_argument("--metric", help="metric that has to be better than that of the alias's present version")
    step.add_argument("--mode", choices=("max", "min"), default="max", help="whether more of it is better")
    step.add_argument("--min-improvement", type=float, default=0.0, help="by how much")
    step.add_argument("--provenance", default="{}", metavar="JSON", help="JSON object, or @file that holds one")
    step.add_argument("--history", default="{}", metavar="JSON", help="JSON object, or @file that holds one")
    step.add_argument("--allow-pickle", action="store_true", help="accept files that can run code when loaded, too")
    step.add_argument("--sign", metavar="PATH", help="private key to sign it with (OpenSSF Model Signing)")
    return parser


def _initialize_for_trainer(task: trainer.Task) -> Initialized:
    return initialize(task.source, task.target, include=task.include, exclude=task.exclude, progress=_say)


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
        progress=_say,
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
        progress=_say,
    )


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


def _tell(error: Exception) -> None:
    """Leave the verdict of `error` in the termination message of the container."""
    path = progress.termination_log()
    if path is not None:
        with suppress(OSError):  # the log and the exit code say it, too
            Path(path).write_text(termination_messages.write(error), encoding="utf-8")


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - a program


def _terminate(number: int, frame: object) -> NoReturn:
    """End on SIGTERM as on Ctrl-C, so that what a killed upload would leave behind is cleaned up."""
    del frame
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(main())
