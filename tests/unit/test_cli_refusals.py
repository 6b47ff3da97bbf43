"""Mistakes: blank keys, invalid paths, settings and filters, options without effect. Each message names the fix."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from tests import objects
from tests.fakes.kube.direct import DirectBackend
from tests.unit.program import Program, launched

from trainjob import InvalidSpec, Settings, TrainJobClient
from trainjob._backends.local.backend import LocalBackend
from trainjob._diagnosis import diagnosis_of
from trainjob._diagnosis.evidence import Evidence
from trainjob._jobs.launching import dry_run, launch
from trainjob._manifest.render import render
from trainjob._spec import TrainJobSpec
from trainjob.cli.output import fitted
from trainjob.errors import ConfigurationError
from trainjob.job import labels_of

STEP = ("--runtime", "trainjob-step")
SPEC = TrainJobSpec.parse({"runtime": "trainjob-step", "command": ["true"]})


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINJOB_BACKEND", "local")
    monkeypatch.setenv("TRAINJOB_HOME", str(tmp_path / "home"))


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize("key", ["", " ", "\t\n"])
@pytest.mark.parametrize("words", [("run", *STEP), ("render", *STEP), ("list",)])
def test_a_blank_key_is_rejected(program: Program, tmp_path: Path, words: tuple[str, ...], key: str) -> None:
    code, out, err = program(*words, "--key", key, *(("--", "true") if words[1:] else ()))
    assert (code, out) == (2, "")
    assert "is blank: give a name for the work, such as nightly/train" in err
    assert not (tmp_path / "home").exists()


def test_every_launch_function_rejects_a_blank_key(tmp_path: Path) -> None:
    backend = DirectBackend()
    with TrainJobClient(LocalBackend(tmp_path)) as client:
        calls: list[Callable[[], object]] = [
            lambda: client.launch(SPEC, ""),
            lambda: client.launch(SPEC, " ", tried=2),
            lambda: client.dry_run(SPEC, ""),
            lambda: client.dry_run(SPEC, None),  # type: ignore[arg-type]  # a caller may pass None
            lambda: anyio.run(lambda: launch(backend, SPEC, "", namespace="default")),
            lambda: anyio.run(lambda: dry_run(backend, SPEC, " ", namespace="default")),
            lambda: render(SPEC, "", 1, "default"),
            lambda: labels_of(""),
        ]
        for call in calls:
            with pytest.raises(InvalidSpec, match=r"key: (is blank|must be text, not NoneType)"):
                call()
    assert backend.requests == []


# ---------------------------------------------------------------- settings


FORM = '{"torch-distributed": "/path/of/a/virtual/environment"}'


@pytest.mark.parametrize(
    "value", ["{", "[1]", "5", "torch=/venv", '{"torch-distributed": 5}', '{"torch-distributed": " "}', '{"": "/x"}']
)
def test_invalid_local_environments_are_rejected(program: Program, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TRAINJOB_LOCAL_ENVIRONMENTS", value)
    for words in (["list"], ["run", *STEP, "--", "true"]):
        code, _, err = program(*words)
        assert code == 2
        (line,) = err.splitlines()
        assert line.startswith("error: TRAINJOB_LOCAL_ENVIRONMENTS: ")
        assert FORM in line
    code, out, _ = program("doctor")
    assert code == 2
    assert "TRAINJOB_LOCAL_ENVIRONMENTS" in out


@pytest.mark.parametrize("value", ["two", "-1", "1.5", "9" * 5000])
def test_an_invalid_number_of_gpus_is_rejected(program: Program, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TRAINJOB_LOCAL_GPUS", value)
    code, _, err = program("list")
    assert (code, err.splitlines()[0][:29]) == (2, "error: TRAINJOB_LOCAL_GPUS: '")


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BACKEND", "NAMESPACE", "HOME", "LOCAL_ENVIRONMENTS", "LOCAL_GPUS", "REGISTRY"):
        monkeypatch.setenv(f"TRAINJOB_{name}", "")
    settings = Settings()
    assert (settings.backend, settings.namespace, settings.registry) == ("kubernetes", None, None)
    assert settings.home == Path.home() / ".trainjob", "not the working directory"


def test_error_of_an_unknown_backend_names_the_variable(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINJOB_BACKEND", "lokal")
    error = "error: TRAINJOB_BACKEND: unknown backend 'lokal'; use one of: kubernetes, local\n"
    assert program("list") == (2, "", error)


def test_an_environment_without_python_is_rejected(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRAINJOB_LOCAL_ENVIRONMENTS", json.dumps({"trainjob-step": str(tmp_path / "gone")}))
    code, _, err = program("run", *STEP, "--", "python", "-c", "1")
    assert code == 2
    assert f"TRAINJOB_LOCAL_ENVIRONMENTS: {tmp_path / 'gone'}, the environment of trainjob" in err
    with pytest.raises(ConfigurationError, match="python3 -m venv"):
        LocalBackend().path_of("trainjob-step")


# ---------------------------------------------------------------- paths


def test_an_unusable_home_is_rejected(program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for home in (tmp_path / "file", tmp_path / "file" / "home", Path("/proc/nosuch")):
        monkeypatch.setenv("TRAINJOB_HOME", str(home))
        code, _, err = program("run", *STEP, "--", "true")
        assert code == 2
        assert str(home) in err
        assert "set TRAINJOB_HOME to another directory" in err


def test_an_unwritable_page_is_rejected_before_the_job_is_read(program: Program, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, reason in {
        tmp_path: "is a directory: name a file in it",
        tmp_path / "no" / "page.html": f"there is no directory {tmp_path / 'no'}",
        tmp_path / "file" / "page.html": f"there is no directory {tmp_path / 'file'}",
    }.items():
        code, _, err = program("report", "nosuch", "-o", str(path))
        assert code == 2
        assert str(path) in err
        assert reason in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PermissionError(13, "Permission denied", "/data/x"), 2),
        (IsADirectoryError(21, "Is a directory", "/data/x"), 2),
        (OSError(30, "Read-only file system", "/data/x"), 2),
        (OSError(36, "File name too long", "/data/x"), 2),
        (OSError(28, "No space left on device", "/data/x"), 3),
        (ConnectionResetError(104, "Connection reset by peer"), 3),
    ],
)
def test_exit_code_of_os_errors_depends_on_whether_a_retry_may_help(
    program: Program, monkeypatch: pytest.MonkeyPatch, error: OSError, code: int
) -> None:
    async def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("trainjob._backends.local.backend.LocalBackend.find", fails)
    found, out, err = program("list", "--json")
    assert found == code
    assert json.loads(out)["error"]["exit_code"] == code
    if error.filename:
        assert err == f"error: /data/x: {error.strerror}\n"


# ---------------------------------------------------------------- filters


def test_a_list_without_a_match_names_its_filters(program: Program, backend: DirectBackend) -> None:
    assert program("list") == (0, "", "no jobs in namespace default\n")
    code, _, err = program("list", "--key", "a", "--phase", "Running")
    assert (code, err) == (0, "no jobs in namespace default with key 'a' in phase Running; list all: trainjob list\n")
    launched(backend, "a")
    code, _, err = program("list", "--key", "a", "--phase", "Failed", "--phase", "complete")
    assert code == 0
    assert err == "no jobs in namespace default with key 'a' in phase Failed or Complete; 1 in other phases\n"


def test_an_unknown_rank_is_rejected(program: Program, backend: DirectBackend) -> None:
    ref = launched(backend, "a")
    for rank in range(2):
        backend.pod(ref, rank)
    code, _, err = program("logs", ref.name, "--rank", "2")
    assert code == 2
    assert f"{ref} has no rank 2; it has node-0, node-1" in err
    code, _, err = program("logs", ref.name, "--rank", "node-1")
    assert (code, err) == (0, f"no lines of node-1 in the logs of {ref}\n")


# ---------------------------------------------------------------- terminals


def on_a_terminal(tmp_path: Path, words: list[str], **variables: str) -> tuple[int, str]:
    main_side, side = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "TRAINJOB_HOME": str(tmp_path / "home"), **variables}
    environment.pop("NO_COLOR") if "NO_COLOR" not in variables and "NO_COLOR" in environment else None
    program = [sys.executable, "-c", "from trainjob.cli import main; main()"]
    process = subprocess.Popen([*program, *words], env=environment, stdin=side, stdout=side, stderr=side)
    os.close(side)
    shown = b""
    try:
        while data := os.read(main_side, 65536):
            shown += data
    except OSError:  # Linux raises this after the other side of the terminal is closed
        pass
    os.close(main_side)
    return process.wait(60), shown.decode()


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_dumb_terminals_and_no_color_get_plain_text(tmp_path: Path, variables: dict[str, str]) -> None:
    script = "from trainjob.progress import report; report(progress=50); raise SystemExit(3)"
    run = ["run", *STEP, "--", sys.executable, "-c", script]
    if "NO_COLOR" in variables:
        code, colored = on_a_terminal(tmp_path, run)
        assert (code, "\x1b[" in colored) == (1, True), "escape sequences are the default"
    code, plain = on_a_terminal(tmp_path, run, **variables)
    assert (code, "\x1b" in plain) == (1, False), plain


def test_long_lines_are_wrapped_with_indentation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    quoted = "  | " + "word " * 40
    assert {line[:4] for line in fitted(quoted).split("\n")} == {"  | "}
    named = "  phase     " + "word " * 40
    first, *others = fitted(named).split("\n")
    assert first.startswith("  phase     word")
    assert {line[:13] for line in others} == {" " * 12 + "w"}
    for line in (quoted, named):
        assert max(map(len, fitted(line).split("\n"))) <= 60
        assert "".join(fitted(line).split()).replace("|", "") == "".join(line.split()).replace("|", "")
    for line in ("  " + "x" * 300, "what to do: trainjob logs " + "word " * 40):
        assert fitted(line) == line, "text to be copied is not wrapped"
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    assert fitted(quoted) == quoted, "files and pipes get unwrapped lines"


def test_a_cut_line_names_the_command_for_the_complete_log() -> None:
    pod = objects.pod(1, objects.ended(3))
    name, trainjob = pod["metadata"]["name"], objects.trainjob(objects.FAILED)
    text = diagnosis_of(Evidence(trainjob, [pod], {name: ["short", "x" * 5000]})).text()
    assert " … (3100 characters more)\n" in text
    assert "trainjob logs ns/x --rank node-1\n" in text
    assert "are cut" not in diagnosis_of(Evidence(trainjob, [pod], {name: ["short"]})).text()


# ---------------------------------------------------------------- options that would be ignored


RUN = ("run", "--runtime", "trainjob-step", "--detach")
EXPORT = ("export", "job", "--name", "digits")
PROMOTE = ("registry", "promote", "digits", "1", "--alias", "champion")
DIGEST = f"@sha256:{'0' * 64}"
RULE = [("--metric", "loss"), ("--mode", "max"), ("--min-improvement", "0")]
WAITING = [
    *(("--queue-timeout", "1m"), ("--start-timeout", "1m"), ("--run-timeout", "1m"), ("--fail-fast",)),
    *(("--fail-on-first-crash",), ("--on-crash-action", "suspend"), ("--no-logs",)),
]

INSTALLED = {
    ("--service-account", "a:b"): ("controller reaper kfp policy", "or use --only rbac"),
    ("--image", "a"): ("rbac kfp policy", "or use --only runtimes or --only controller or --only reaper"),
    ("--pin", f"a:1{DIGEST}"): ("rbac kfp policy", "--pin has no effect with --only"),
    ("--keep-for", "P30D"): ("rbac kfp policy", "or use --only controller or --only reaper"),
    ("--trainer", "2.3"): ("rbac controller reaper kfp policy", "--trainer has no effect with --only"),
    ("--storage-secret", "s"): ("rbac controller reaper kfp policy", "--storage-secret has no effect with --only"),
}
"""Options of `trainjob install` -> the parts that they have no effect on, and the message."""
IGNORED: list[tuple[tuple[str, ...], str]] = [
    *(((*RUN, *option, "--", "true"), "has no effect with --detach, which does not wait") for option in WAITING),
    (("wait", "a", "b", "--no-logs"), "--no-logs cannot be combined with several jobs: give the NAME of one"),
    (("wait", "a", "b", "--on-crash-action", "keep"), "--on-crash-action cannot be combined with several jobs"),
    (("wait", "a", "b", "--fail-on-first-crash"), "--fail-on-first-crash cannot be combined with several jobs"),
    (("logs", "a", "--json", "--timestamps"), "--timestamps has no effect with --json"),
    *(((*PROMOTE, *option), "has no effect without --metric: name the metric") for option in RULE[1:]),
    *(((*EXPORT, "--alias", "a", *option), "has no effect without --metric: name the metric") for option in RULE[1:]),
    *(((*EXPORT, *option), "has no effect without --alias: name an alias") for option in RULE),
    *(
        ((*EXPORT, "--alias", "a", "--evaluation", "s3://b/e", *option), "has no effect with --evaluation, whose gate")
        for option in RULE
    ),
    (("install", "--only", "runtimes", "-n", "ns"), "--namespace has no effect with --only runtimes: leave it out, or"),
    *(
        (("install", "-n", "ns", "--only", part, *option), message)
        for option, (parts, message) in INSTALLED.items()
        for part in parts.split()
    ),
    (("install", "--keep-for", "P30D"), "--keep-for has no effect without the controller"),
    (("-n", "ns", "data", "copy", "a", "b"), "trainjob data copy does not use --namespace: leave it out"),
    (("--backend", "local", "registry", "list", "m"), "trainjob registry list does not use --backend: leave it out"),
    (("--backend", "local", "install"), "trainjob install does not use --backend: leave it out"),
    (("-n", "ns", "check", "."), "trainjob check does not use --namespace: leave it out"),
    (("-n", "ns", "exec", "--", "true"), "trainjob exec does not use --namespace: leave it out"),
]
HAVE_EFFECT: list[tuple[str, ...]] = [
    (*RUN, "--stall-timeout", "15m", "--on-interrupt", "keep", "--", "true"),
    ("install", "-n", "ns", "--keep-for", "P30D", "--image", "a", "--storage-secret", "s", "--trainer", "2.1"),
    ("install", "--only", "runtimes", "--image", "a", "--storage-secret", "s", "--trainer", "2.1"),
    ("install", "-n", "ns", "--only", "controller", "--image", "a", "--keep-for", "P30D"),
    ("install", "-n", "ns", "--only", "reaper", "--image", "a", "--keep-for", "P30D"),
    ("-n", "ns", "install", "--only", "rbac", "--service-account", "a:b"),
    ("install", "--only", "kfp", "-n", "ns"),
]


@pytest.fixture
def registry(backend: DirectBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster; options are checked before a registry is connected."""
    monkeypatch.delenv("TRAINJOB_REGISTRY", raising=False)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("words", "message"), IGNORED, ids=lambda each: " ".join(each) if isinstance(each, tuple) else ""
)
def test_an_ignored_option_is_refused(
    backend: DirectBackend,
    program: Program,
    tmp_path: Path,
    words: tuple[str, ...],
    message: str,
) -> None:
    code, out, err = program(*words)
    assert (code, out.strip()) == (2, "") or json.loads(out)["error"]["type"] == "UsageError"
    assert message in " ".join(err.split())
    assert {request.split()[0] for request in backend.requests} <= {"GET", "LIST"}
    assert [*tmp_path.iterdir()] == []


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("words", HAVE_EFFECT, ids=" ".join)
def test_an_option_with_an_effect_is_accepted(program: Program, words: tuple[str, ...]) -> None:
    assert program(*words)[0] == 0


@pytest.mark.usefixtures("registry")
def test_defaults_are_no_given_options(program: Program) -> None:
    """promote and export get as far as the registry and the job."""
    assert "TRAINJOB_REGISTRY" in program(*PROMOTE)[2]
    assert "no effect" not in program(*EXPORT, "--alias", "a")[2]
