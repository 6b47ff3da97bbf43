"""The programs of `trainjob.data`, without a registry; `tests/registry` tests them with registries."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.trees import tree

from trainjob.data import read_manifest
from trainjob.data.__main__ import main
from trainjob.data.options import Copy
from trainjob.progress import message

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
    reported = message.read(log.read_text())
    assert reported is not None
    assert reported.outputs["digest"] == copied.digest
    assert (reported.metrics["files"], reported.metrics["bytes"]) == (1, 4)
