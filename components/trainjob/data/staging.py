"""``trainjob exec``: a program that reads and writes local paths, in a job whose inputs and outputs are elsewhere."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from trainjob import progress, returned
from trainjob.data.locations import Location, parse

_INPUT, _OUTPUT = "TRAINJOB_INPUT_", "TRAINJOB_OUTPUT_"
_REMOTE = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]*:/")
_CANNOT_START = 127


def run(command: Sequence[str], notify: Callable[[str], None]) -> int:
    """Bring the job's inputs here, run `command`, and take its outputs to where they belong; its exit code.

    Inputs and outputs are those of the spec, ``TRAINJOB_INPUT_<NAME>`` and ``TRAINJOB_OUTPUT_<NAME>``. For the command,
    these variables, and arguments in which such a URI stands, name local directories instead (a file, for an input that
    is one file), below the directory for temporary files (``TMPDIR``). Every node brings the inputs; node 0 takes the
    outputs, after the command has succeeded. What is a local path or ``file://`` already is left alone: where all of
    them are, the command takes this process's place.

    Args:
        command: What to run.
        notify: Takes lines for people.

    Raises:
        TrainJobError: What `trainjob.data.initialize` and `trainjob.data.copy` raise.
    """
    inputs, outputs = _remote(_INPUT), _remote(_OUTPUT)
    if not inputs and not outputs:
        return _become(command)
    from trainjob.data.steps import initialize  # noqa: PLC0415 - not where there is nothing to bring
    from trainjob.data.transfer import copy  # noqa: PLC0415

    signal.signal(signal.SIGTERM, _terminate)
    with tempfile.TemporaryDirectory(prefix="trainjob-") as directory:
        places = {}
        for variable, uri in inputs.items():
            place = Path(directory, "inputs", variable.removeprefix(_INPUT).lower())
            brought = initialize(uri, str(place), progress=notify)
            location = parse(uri)
            single = isinstance(location, Location) and not location.directory and brought.files == 1
            file = place / location.name
            places[variable] = file if single and file.is_file() else place
        for variable in outputs:
            places[variable] = Path(directory, "outputs", variable.removeprefix(_OUTPUT).lower())
            places[variable].mkdir(parents=True)
        code = _run(command, {**inputs, **outputs}, places)
        if code == 0 and os.environ.get("JOB_COMPLETION_INDEX", "0") == "0":
            for variable, uri in outputs.items():
                copy(str(places[variable]), uri, progress=notify)
            _report({str(places[variable]): uri.rstrip("/") for variable, uri in outputs.items()})
        return code


def _remote(prefix: str) -> dict[str, str]:
    return {name: uri for name, uri in os.environ.items() if name.startswith(prefix) and _REMOTE.match(uri)}


def _become(command: Sequence[str]) -> int:
    sys.stdout.flush()
    try:
        os.execvp(command[0], list(command))  # noqa: S606 - the author's own command
    except OSError as error:
        return _cannot_start(command, error)


def _cannot_start(command: Sequence[str], error: OSError) -> int:
    print(f"error: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)  # noqa: T201 - a program
    return _CANNOT_START


def _run(command: Sequence[str], uris: Mapping[str, str], places: Mapping[str, Path]) -> int:
    local = {uris[variable].rstrip("/"): str(place) for variable, place in places.items()}
    # Kubernetes has put the URIs into the arguments already. The longest first: one may begin with another.
    either = "|".join(re.escape(uri) for uri in sorted(local, key=len, reverse=True))
    pattern = re.compile(rf"({either})/?(?![\w.%~-])")
    words = [pattern.sub(lambda match: local[match[1]], word) for word in command]
    try:
        with (
            subprocess.Popen(
                words, env={**os.environ, **{name: str(place) for name, place in places.items()}}
            ) as child,
            _passed_on(child),
        ):
            code = child.wait()
    except OSError as error:
        return _cannot_start(command, error)
    return code if code >= 0 else 128 - code


@contextmanager
def _passed_on(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """SIGTERM and Ctrl-C are for the command; how it ends is up to it."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda number, _: child.send_signal(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(moved: Mapping[str, str]) -> None:
    """What the command reported as outputs lies elsewhere now."""
    path = progress.termination_log()
    said = progress.read(Path(path).read_text(errors="replace")) if path and Path(path).exists() else None
    if said is None:
        return
    outputs = {
        name: _elsewhere(value, moved) if isinstance(value, str) else value for name, value in said.outputs.items()
    }
    if outputs != said.outputs:
        returned.merge("outputs", outputs)


def _elsewhere(value: str, moved: Mapping[str, str]) -> str:
    path = value.removeprefix("file://")
    for place, uri in moved.items():
        if path == place or path.startswith(f"{place}/"):
            return uri + path.removeprefix(place)
    return value


def _terminate(number: int, frame: object) -> NoReturn:
    """End while something is on its way, and clean up behind it."""
    del frame
    sys.exit(128 + number)
