"""``trainjob exec``: run a program on local paths, in a job whose inputs and outputs are in stores."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import trainjob
from trainjob import progress
from trainjob._support.foreign import Unreadable, read_regular
from trainjob._support.signals import exiting, handled
from trainjob.data.locations import Location, parse
from trainjob.progress import message
from trainjob.progress.message import STALL_TIMEOUT

_INPUT, _OUTPUT = "TRAINJOB_INPUT_", "TRAINJOB_OUTPUT_"
_REMOTE = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]*:/")
_CANNOT_START = 127


def run(command: Sequence[str], notify: Callable[[str], None]) -> int:
    """Download the job's inputs, run `command`, and upload its outputs; returns the command's exit code.

    Inputs and outputs are those of the spec, ``TRAINJOB_INPUT_<NAME>`` and ``TRAINJOB_OUTPUT_<NAME>``. For the command,
    these variables, and arguments that contain such a URI, are replaced by local directories (a file, if the input is a
    single file) below the directory for temporary files (``TMPDIR``). Every node downloads the inputs; node 0 uploads
    the outputs after the command has succeeded. Local paths and ``file://`` URIs are not changed; if there are no
    others, the command replaces this process.

    Args:
        command: What to run.
        notify: Takes lines for people.

    Raises:
        TrainJobError: What `trainjob.data.initialize` and `trainjob.data.copy` raise.
    """
    inputs, outputs = _remote(_INPUT), _remote(_OUTPUT)
    if not inputs and not outputs:
        return _become(command)
    from trainjob.data.steps import initialize  # noqa: PLC0415 - only if there is something to download
    from trainjob.data.transfer import copy  # noqa: PLC0415

    with handled(exiting), tempfile.TemporaryDirectory(prefix="trainjob-") as directory:
        places = {}
        for variable, uri in inputs.items():
            place = Path(directory, "inputs", variable.removeprefix(_INPUT).lower())
            staged = initialize(uri, str(place), progress=notify)
            location = parse(uri)
            single = isinstance(location, Location) and not location.directory and staged.files == 1
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
        os.execvpe(command[0], list(command), _environment())
    except OSError as error:
        return _cannot_start(command, error)


def _environment() -> dict[str, str]:
    """The environment of the command: with a stall timeout, Python starts the watchdog of `trainjob.progress`."""
    if not os.environ.get(STALL_TIMEOUT):
        return {**os.environ}
    folder = str(Path(trainjob.__file__).with_name("_startup"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))}


def _cannot_start(command: Sequence[str], error: OSError) -> int:
    print(f"error: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)
    return _CANNOT_START


def _run(command: Sequence[str], uris: Mapping[str, str], places: Mapping[str, Path]) -> int:
    local = {uris[variable].rstrip("/"): str(place) for variable, place in places.items()}
    # Kubernetes has already put the URIs into the arguments. The longest first: a URI may begin with another one.
    either = "|".join(re.escape(uri) for uri in sorted(local, key=len, reverse=True))
    pattern = re.compile(rf"({either})/?(?![\w.%~-])")
    words = [pattern.sub(lambda match: local[match[1]], word) for word in command]
    try:
        with (
            subprocess.Popen(
                words, env={**_environment(), **{name: str(place) for name, place in places.items()}}
            ) as child,
            handled(lambda number, _: child.send_signal(number)),  # the command decides how to end
        ):
            code = child.wait()
    except OSError as error:
        return _cannot_start(command, error)
    return code if code >= 0 else 128 - code


def _report(moved: Mapping[str, str]) -> None:
    """Replace local paths in the outputs that the command reported by their uploaded locations."""
    path = message.termination_log()
    try:
        text = read_regular(Path(path), message.MAX_BYTES, cut=True).decode("utf-8", "replace") if path else ""
    except Unreadable:
        return
    reported = progress.read(text)
    if reported is None:
        return
    outputs = {
        name: _uploaded(value, moved) if isinstance(value, str) else value for name, value in reported.outputs.items()
    }
    if outputs != reported.outputs:
        try:
            message.merge("outputs", outputs)
        except (OSError, ValueError) as error:  # the training is complete
            message.warn(f"outputs keep their local paths, because the uploaded ones cannot be written: {error}")


def _uploaded(value: str, moved: Mapping[str, str]) -> str:
    path = value.removeprefix("file://")
    for place, uri in moved.items():
        if path == place or path.startswith(f"{place}/"):
            return uri + path.removeprefix(place)
    return value
