"""Trainer's contract with its initializers: environment in, files below /workspace out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.trees import tree

from trainjob.data import trainer
from trainjob.data.__main__ import main
from trainjob.data.trainer import Task, task
from trainjob.errors import ConfigurationError

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
    monkeypatch.setenv("STORAGE_URI", source.as_uri())
    monkeypatch.setenv("IGNORE_PATTERNS", "*.log")
    monkeypatch.setenv("HOSTNAME", "train-x-dataset-initializer-0-0")
    assert main([]) == 0
    assert {path.name for path in (tmp_path / "workspace/dataset").iterdir()} == {"a.csv", "MANIFEST.json"}
    monkeypatch.setenv("HOSTNAME", "odd")
    assert main([]) == 2
    assert main(["initialize-dataset", "--target", str(tmp_path / "t")]) == 0
    assert (tmp_path / "t/a.csv").exists()
    del os.environ["STORAGE_URI"]
    assert main(["initialize-model"]) == 2
