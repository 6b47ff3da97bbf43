"""Evaluate a candidate beside the current champion: both models see the same dataset and the same code, in one job.

The author's command, or function, runs once for each model. In its arguments ``{model}``, ``{dataset}`` and
``{scores}`` stand for local paths, which are also in the environment: ``TRAINJOB_MODEL``, ``TRAINJOB_DATASET`` and
``TRAINJOB_SCORES``. It writes the scores of the model to that file, as `trainjob.evaluation.scores` describes.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainjob._support.foreign import LARGE, Absent, Unreadable, json_of, read_regular
from trainjob.data import file_manifest, transfer
from trainjob.data.export_evaluation import Evaluation
from trainjob.data.locations import Location, ModelRef, parse, parse_target
from trainjob.data.steps import Initialized, initialize
from trainjob.errors import ConfigurationError, SourceNotFound
from trainjob.evaluation import Decision, EvaluationReport, Gate, Scores, compare
from trainjob.registry import Registry

MAX_BYTES = 64 * 2**20  # of the scores of one model
_CALL = """
if __name__ == "__main__":
    import json, os
    found = {name}(os.environ["TRAINJOB_MODEL"], os.environ["TRAINJOB_DATASET"])
    with open(os.environ["TRAINJOB_SCORES"], "w", encoding="utf-8") as file:
        json.dump(found, file)
"""


class CommandFailed(Exception):
    """The author's command failed.

    Attributes:
        code: Its exit code; 128 + N for a signal N.
    """

    def __init__(self, of: str, code: int) -> None:
        super().__init__(f"the evaluation of the {of} exited with code {code}")
        self.code = code


@dataclass(frozen=True)
class Function:
    """A function of the author: ``def evaluate(model: str, dataset: str) -> dict``.

    Attributes:
        name: Its name.
        source: Python source that defines it.
    """

    name: str
    source: str


@dataclass(frozen=True)
class Evaluated:
    """Result of `evaluate`.

    Attributes:
        uri: Location of the directory with ``evaluation.json``.
        digest: ``sha256:<digest>`` of the report.
        report: The report.
        decision: The decision of the gate; None without a gate.
    """

    uri: str
    digest: str
    report: EvaluationReport
    decision: Decision | None


def evaluate(
    candidate: str,
    dataset: str,
    target: str,
    *,
    command: Sequence[str] = (),
    function: Function | None = None,
    champion: str | None = None,
    dataset_digest: str | None = None,
    gate: Mapping[str, Any] | None = None,
    code: Mapping[str, str] | None = None,
    registry: str | Registry | None = None,
    progress: Callable[[str], None] | None = None,
) -> Evaluated:
    """Evaluate both models, compare them, and apply the gate.

    Args:
        candidate: Location of the model.
        dataset: Location of the held-out dataset.
        target: Directory for the report.
        command: Evaluates one model.
        function: Evaluates one model, instead of `command`.
        champion: Location of the champion, or ``models:/name@alias``; without such a version there is no champion.
        dataset_digest: Required digest of the dataset.
        gate: Rules, see `trainjob.evaluation.Gate`; without them there is no decision.
        code: ``uri`` and ``revision`` of the evaluation's code, as the author knows them.
        registry: The registry of the champion; see `trainjob.registry.connect`.
        progress: Called with lines for people.

    Raises:
        InvalidGate: The gate is invalid.
        ConfigurationError: The scores are malformed, or those of the two models cannot be compared.
        CommandFailed: The command failed.
        TrainJobError: Any error of `trainjob.data.initialize` and `trainjob.data.copy`.
    """
    if bool(command) == (function is not None):
        raise ConfigurationError("set exactly one of command and function: it evaluates one model")
    rules = Gate.read(gate) if gate is not None else None
    parse_target(target)
    notify = progress or _silent
    with tempfile.TemporaryDirectory(prefix="trainjob-evaluate-") as temporary:
        work = Path(temporary)
        data = initialize(dataset, str(work / "dataset"), digest=dataset_digest, progress=progress)
        words = list(command) if function is None else _program(work, function)
        evaluations = _Evaluations(work, data, words, registry, notify)
        found = evaluations.of("candidate", candidate)
        if found is None:
            raise SourceNotFound(f"the candidate {candidate} does not exist")
        one, scores = found
        other = evaluations.of("champion", champion) if champion else None
        report = compare(
            scores,
            other[1] if other is not None else None,
            models=(one, other[0] if other is not None else None),
            dataset={"uri": data.source, "digest": data.digest},
            code={"digest": _code_digest(command, function), **(code or {})},
        )
        decision = rules.decide(report) if rules is not None else None
        made = work / "report"
        made.mkdir()
        (made / file_manifest.EVALUATION).write_bytes(Evaluation(target, report, decision).as_json())
        transfer.copy(str(made), target, progress=None)
    if decision is not None:
        notify(f"the gate {'passed' if decision.passed else 'failed'}: {decision.rule}: {decision.reason}")
    return Evaluated(parse_target(target).uri, report.digest, report, decision)


@dataclass(frozen=True)
class _Evaluations:
    """Both evaluations of one job."""

    work: Path
    data: Initialized
    command: Sequence[str]
    registry: str | Registry | None
    notify: Callable[[str], None]

    def of(self, which: str, source: str) -> tuple[dict[str, str], Scores] | None:
        """The model and its scores; None for a champion that is not registered."""
        place, scores = self.work / which, self.work / f"{which}.json"
        registered = isinstance(parse(source), ModelRef)
        fresh = which == "champion" and registered
        model = initialize(
            source,
            str(place),
            registry=self.registry if registered else None,
            if_missing="fresh" if fresh else "fail",
            progress=self.notify,
        )
        if model.fresh:
            self.notify(f"there is no {source}: the candidate is evaluated without a champion")
            return None
        self.notify(f"evaluating the {which}, {source}")
        paths = {
            "model": _path(model, place),
            "dataset": _path(self.data, self.work / "dataset"),
            "scores": str(scores),
        }
        self._run(which, paths)
        known = {"uri": source, "digest": model.digest, **({"version": model.version} if model.version else {})}
        return known, Scores.parse(_read(scores, which), which)

    def _run(self, which: str, paths: Mapping[str, str]) -> None:
        words = [_filled(word, paths) for word in self.command]
        environment = {f"TRAINJOB_{name.upper()}": path for name, path in paths.items()}
        try:
            code = subprocess.run(words, env={**os.environ, **environment}, check=False).returncode
        except OSError as error:
            raise ConfigurationError(f"the command {words[0]} cannot be started: {error.strerror}") from None
        if code:
            raise CommandFailed(which, code if code > 0 else 128 - code)


def _path(staged: Initialized, place: Path) -> str:
    """The local path of the directory, or of the only file if the source is one."""
    location = parse(staged.source)
    single = isinstance(location, Location) and not location.directory and staged.files == 1
    file = place / location.name if isinstance(location, Location) else place
    return str(file) if single and file.is_file() else str(place)


def _filled(word: str, paths: Mapping[str, str]) -> str:
    for name, path in paths.items():
        word = word.replace(f"{{{name}}}", path)
    return word


def _read(path: Path, of: str) -> Any:
    try:
        return json_of(read_regular(path, MAX_BYTES), f"the scores of the {of}", LARGE)
    except Absent:
        raise ConfigurationError(
            f"the evaluation of the {of} wrote no scores: write them as JSON to the path in TRAINJOB_SCORES"
        ) from None
    except Unreadable as error:
        if error.limit == "size":
            raise ConfigurationError(
                f"the evaluation of the {of} wrote more than {MAX_BYTES >> 20} MiB of scores"
            ) from None
        raise ConfigurationError(f"the scores of the {of} are not valid JSON: it {error.why}{error.where}") from None


def _program(work: Path, function: Function) -> list[str]:
    script = work / f"function_{function.name}.py"  # the name alone could hide a module, such as json
    script.write_text(f"{function.source}\n\n{_CALL.format(name=function.name)}", encoding="utf-8")
    return [sys.executable, str(script)]


def _code_digest(command: Sequence[str], function: Function | None) -> str:
    """Digest of the command and of its scripts on this machine, or of the function's source."""
    hashed = hashlib.sha256()
    if function is not None:
        hashed.update(function.source.encode())
    for word in command:
        hashed.update(word.encode() + b"\0")
        path = Path(word)
        if word.endswith((".py", ".sh")) and path.is_file():
            hashed.update(path.read_bytes())
    return f"sha256:{hashed.hexdigest()}"


def _silent(line: str) -> None:
    del line
