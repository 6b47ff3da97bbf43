"""The programs that copy data: the steps of `trainjob.data` and their options, `trainjob data copy`, initializers."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tests.trees import tree

from trainjob._support import retrying
from trainjob.cli import main as command_line
from trainjob.data import read_manifest, trainer
from trainjob.data.__main__ import main
from trainjob.data.options import STEPS, Copy, Step, StepOptions, from_words
from trainjob.data.trainer import Task, task
from trainjob.errors import ConfigurationError, TrainJobError
from trainjob.progress import read

INITIALIZE = {"source": "s3://b/d/", "target": "file:///w"}
EXPORTING = {"source": "file:///m", "target": "s3://models", "name": "digits", "alias": None, "metric": None}
RULE = {"mode": "max", "min_improvement": 0.0}


@pytest.mark.parametrize(
    ("step", "options", "words"),
    [
        ("initialize-dataset", {"source": "ftp://host/d"}, "ftp:// is not a supported scheme"),
        ("initialize-dataset", {"target": "ftp://host/d"}, "ftp:// is not a supported scheme"),
        ("initialize-dataset", {"target": "models:/m@champion"}, "use a location in a store"),
        ("initialize-dataset", {"source": "s3://b/../c"}, "unsafe path"),
        ("initialize-dataset", {"digest": "sha1:abc"}, "is not a digest"),
        ("initialize-dataset", {"registry": "postgresql://db"}, "is not a supported scheme of a registry"),
        ("initialize-model", {"source": "s3://b/m", "if_missing": "fresh"}, "is for registered models"),
        ("initialize-model", {"source": "models:/m@a", "if_missing": "maybe"}, "if_missing must be 'fail' or 'fresh'"),
        ("initialize-model", {"source": "models:/m"}, "models:/"),
        ("initialize-model", {"registry": "mlflow+https://u:p@host"}, "contains credentials"),
        ("copy", {"source": "models:/m@a"}, "use a location in a store"),
        ("copy", {"target": "https://host/d"}, "can only be read"),
        ("copy", {"digest": "sha1:abc"}, "is not a digest"),
        ("export", {"source": "models:/m@a"}, "use a location in a store"),
        ("export", {"name": "a/b"}, "is not a valid model name"),
        ("export", {"alias": "latest", "metrics": {}}, "is not a valid alias"),
        ("export", {"metrics": {}, "alias": "champion", "metric": "accuracy"}, "the metrics given are: none"),
        ("export", {"metrics": {"loss": 1}, "alias": "champion", "metric": "accuracy"}, "the metrics given are: loss"),
        ("export", {"metrics": {"loss": "low"}}, "metrics must be numbers"),
        ("export", {"metrics": {"a": 1}, "metric": "a"}, "requires an alias; set alias"),
        ("export", {"mode": "best"}, "mode must be 'max' or 'min'"),
        ("export", {"metric": "a", "min_improvement": -1}, "min_improvement must be a number of at least 0"),
    ],
)
def test_invalid_step_options_are_rejected(step: Step, options: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainJobError, match=words):
        STEPS[step].known((EXPORTING | RULE if step == "export" else INITIALIZE) | options).check()


PROMOTED = {"metrics": {"accuracy": 0.9}, "alias": "champion", "metric": "accuracy"}


@pytest.mark.parametrize(
    ("step", "options"),
    [
        ("export", {"alias": "champion", "metric": "accuracy"}),
        ("export", {"metrics": {"a": 1}, "metric": "a"}),
        ("export", {"metrics": {"a": 1}, "min_improvement": 0.1}),
        ("export", EXPORTING | RULE | PROMOTED),
        ("initialize-model", {"if_missing": "fresh", "digest": None, "registry": ""}),
        ("initialize-model", {"source": "models:/m@champion", "target": "/w", "if_missing": "fresh"}),
    ],
)
def test_missing_options_are_not_checked(step: Step, options: dict[str, Any]) -> None:
    STEPS[step].known(options).check()


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "PATTERN": st.lists(TEXTS, max_size=3),
    "JSON": st.none() | st.dictionaries(TEXTS, st.integers() | TEXTS, min_size=1, max_size=3),
}


def options_of(step: Step) -> st.SearchStrategy[StepOptions]:
    """Options of a program, as an author may give them."""
    drawn: dict[str, st.SearchStrategy[Any]] = {}
    for each in fields(STEPS[step]):
        choices = each.metadata.get("choices")
        if each.name == "command":
            drawn[each.name] = st.lists(TEXTS, max_size=3)
        elif choices:
            drawn[each.name] = st.sampled_from(choices)
        elif each.metadata.get("type") is float:
            drawn[each.name] = st.floats(0, 10)
        elif each.metadata.get("action") == "store_true":
            drawn[each.name] = st.booleans()
        else:
            optional = each.default is None
            known = VALUES.get(each.metadata.get("metavar", ""), TEXTS)
            drawn[each.name] = st.none() | known if optional else known
    return st.builds(STEPS[step], **drawn)


@pytest.mark.parametrize("step", STEPS)
@settings(max_examples=25)
@given(data=st.data())
def test_the_program_reads_what_the_command_says(step: Step, data: st.DataObject) -> None:
    """Kubernetes replaces each ``$$`` of a command by ``$``."""
    options = data.draw(options_of(step))
    python, _, module, *words = options.to_command()
    assert (python, module) == ("python", "trainjob.data")
    read = from_words([word.replace("$$", "$") for word in words])
    assert type(read) is type(options)
    for each in fields(options):
        given_, got = getattr(options, each.name), getattr(read, each.name)
        assert got == given_ or (not got and not given_), each.name


@pytest.mark.parametrize("words", [["export"], ["initialize-dataset", "--sauce=x"], ["bake"]])
def test_the_program_refuses_other_words(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        from_words(words)
    assert ended.value.code == 2
    assert "usage: python -m trainjob.data" in capsys.readouterr().err


# ---------------------------------------------------------------- the programs

TO = "--target {}/t"
EXPORT = f"export --source {{}} {TO} --name m --export-id a"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (f"initialize-dataset --source {{}}/none {TO}", "does not exist or is empty"),
        (f"initialize-dataset --source pvc://b/x {TO}", "PersistentVolumeClaim b is not mounted at /mnt/"),
        (f"initialize-dataset --source {{}} {TO}", "overlaps"),
        (f"{EXPORT} --metrics [", "JSON"),
        (EXPORT, "TRAINJOB_REGISTRY"),
    ],
)
def test_program_errors_have_exit_codes(
    arguments: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.replace("{}", str(tmp_path)) for argument in arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert error.count("\n") == 1


def test_the_program_copies_and_reports_what_it_has_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    monkeypatch.setenv("TRAINJOB_TERMINATION_LOG", str(log))
    source = tree(tmp_path / "set", {"a.csv": b"1,2\n", "b.txt": b"1,2\n"})
    options = Copy(source=str(source), target=str(tmp_path / "there"), include=["*.csv"])
    options.check()
    assert main(options.to_command()[3:]) == 0
    copied = read_manifest(options.target)
    assert copied is not None
    assert [each.path for each in copied.files] == ["a.csv"]
    reported = read(log.read_text())
    assert reported is not None
    assert reported.outputs["digest"] == copied.digest
    assert (reported.metrics["files"], reported.metrics["bytes"]) == (1, 4)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tree(tmp_path / "source", {"a.csv": b"1,2\n", "sub/b.txt": b"x" * 100_000})


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        command_line(["data", "copy", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_copy_prints_digest_and_target_or_json(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(str(source), str(tmp_path / "t")) == 0
    printed = capsys.readouterr()
    manifest = read_manifest(str(tmp_path / "t"))
    assert manifest is not None
    assert printed.out == f"{manifest.digest}  {(tmp_path / 't').as_uri()}\n"
    assert "copied 100 %" in printed.err
    assert _run(str(tmp_path / "t"), str(tmp_path / "t2"), "--digest", manifest.digest, "-q") == 0
    assert capsys.readouterr().err == ""
    patterns = ("--include", "*.csv", "--include", "b*", "--exclude", "sub/*")
    assert _run("--json", str(source), str(tmp_path / "t3"), *patterns) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["files"], answer["bytes"], answer["uri"]) == (1, 4, (tmp_path / "t3").as_uri())


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("{}/source", "{}/t", "--digest", "1" * 64), 2, "has digest"),
        (("ftp://host/x", "{}/t"), 2, "is not a supported scheme"),
        (("http://127.0.0.1:1/x", "{}/t"), 3, "cannot be reached"),
        (("{}/source",), 2, "Missing argument"),
    ],
)
def test_copy_errors_have_exit_codes(
    arguments: tuple[str, ...], code: int, words: str, *, source: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(retrying, "TRANSFER", partial(retrying.TRANSFER, failures=1))
    assert _run(*(argument.format(tmp_path) for argument in arguments)) == code
    assert words in capsys.readouterr().err


def test_copy_shows_a_progress_bar_on_a_terminal(source: Path, tmp_path: Path) -> None:
    """The bar is drawn on stderr and removed at the end; stdout has only the result."""
    with (source / "big").open("wb") as file:
        file.truncate(300_000_000)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", "from trainjob.cli import main; main()", "data", "copy", source, tmp_path / "t"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "NO_COLOR": ""},
    )
    os.close(theirs)
    seen = b""
    with suppress(OSError), os.fdopen(ours, "rb", buffering=0) as terminal:  # reading fails once the program has ended
        while data := terminal.read(65536):
            seen += data
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.startswith(b"sha256:")
    assert b"B/s" in seen
    assert b"copied" not in seen


POD = {"HOSTNAME": "train-x-dataset-initializer-0-0"}
MODEL_POD = {"HOSTNAME": "train-x-model-initializer-0-0"}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*trainer._SETTINGS, *trainer._SETTINGS.values(), "STORAGE_URI", "IGNORE_PATTERNS", "HOSTNAME"):
        monkeypatch.setenv(name, "x")  # registers the variable, so that changes by `task` are undone
        monkeypatch.delenv(name)


DATA, MODEL = "/workspace/dataset", "/workspace/model"
IGNORED = {"IGNORE_PATTERNS": "*.bin, *.pt,"}
NAMED = {"TRAINJOB_INITIALIZER": "model", "HOSTNAME": "odd"}


@pytest.mark.parametrize(
    ("environment", "uri", "expected"),
    [
        (POD, "s3://b/data", Task("s3://b/data", DATA, (), [])),
        (MODEL_POD | IGNORED, "s3://b/m", Task("s3://b/m", MODEL, (), ["*.bin", "*.pt"])),
        (MODEL_POD, "hf://org/m", Task("hf://org/m", MODEL, trainer._MODEL_FILES, [])),
        (POD, "hf://org/d", Task("hf://datasets/org/d/", DATA, (), [])),
        (
            POD,
            "hf://datasets/org/d@v1/data/[a]",
            Task("hf://datasets/org/d@v1/", DATA, ("data/[[]a]", "data/[[]a]/*"), []),
        ),
        (NAMED, "gs://b/m", Task("gs://b/m", MODEL, (), [])),
    ],
)
def test_task_is_read_from_the_environment(environment: dict[str, str], uri: str, expected: Task) -> None:
    assert task({**environment, "STORAGE_URI": uri}) == expected


def test_credentials_get_the_variable_names_of_the_stores() -> None:
    environment = POD | {"STORAGE_URI": "s3://b/x", "AWS_ACCESS_KEY_ID": "steps", "AWS_SESSION_TOKEN": "of-steps"}
    task(environment)
    assert environment["AWS_SESSION_TOKEN"] == "of-steps"
    environment |= {"ACCESS_TOKEN": "hf", "ENDPOINT": "http://minio:9000", "REGION": "auto"}
    environment |= {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret"}
    task(environment)
    assert {name: value for name, value in environment.items() if name.startswith(("HF_", "AWS_"))} == {
        "HF_TOKEN": "hf",
        "AWS_ENDPOINT_URL": "http://minio:9000",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }, "without the session token of other keys"


def test_a_role_requires_a_web_identity() -> None:
    environment = POD | {"STORAGE_URI": "s3://b/x", "ROLE_ARN": "arn:aws:iam::1:role/x"}
    with pytest.raises(ConfigurationError, match="AWS_WEB_IDENTITY_TOKEN_FILE"):
        task(environment)
    environment["AWS_WEB_IDENTITY_TOKEN_FILE"] = "/var/run/token"
    task(environment)
    assert environment["AWS_ROLE_ARN"] == "arn:aws:iam::1:role/x"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"HOSTNAME": "x"}, "STORAGE_URI is not set"),
        ({"STORAGE_URI": "s3://b/x", "HOSTNAME": "x"}, "TRAINJOB_INITIALIZER"),
        (POD | {"STORAGE_URI": "cache://schema/table"}, "data cache"),
        (POD | {"STORAGE_URI": "ftp://b/x"}, "not a supported scheme"),
    ],
)
def test_invalid_environments_are_rejected(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        task(environment)


def test_an_empty_storage_uri_downloads_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STORAGE_URI", "")  # the runtime's default if the job sets nothing
    assert main([]) == 0
    assert capsys.readouterr() == ("STORAGE_URI is empty: nothing to download\n", "")
    assert main(["initialize-dataset"]) == 2
    monkeypatch.delenv("STORAGE_URI")
    with pytest.raises(SystemExit, match="2"):
        main([])


def test_program_without_arguments_reads_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tree(tmp_path / "source", {"a.csv": b"1", "b.log": b"2"})
    monkeypatch.setitem(trainer.TARGETS, "dataset", str(tmp_path / "workspace/dataset"))
    for name, value in ({"STORAGE_URI": source.as_uri(), "IGNORE_PATTERNS": "*.log"} | POD).items():
        monkeypatch.setenv(name, value)
    assert main([]) == 0
    assert {path.name for path in (tmp_path / "workspace/dataset").iterdir()} == {"a.csv", "MANIFEST.json"}
    monkeypatch.setenv("HOSTNAME", "odd")
    assert main([]) == 2
    assert main(["initialize-dataset", "--target", str(tmp_path / "t")]) == 0
    assert (tmp_path / "t/a.csv").exists()
    del os.environ["STORAGE_URI"]
    assert main(["initialize-model"]) == 2
