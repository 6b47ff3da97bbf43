"""The programs of `trainjob.data`, without a registry; `tests/registry` tests them with registries."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainjob.data import read_manifest
from trainjob.data.__main__ import main
from trainjob.data.options import Copy
from trainjob.progress import message


@pytest.fixture
def no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINJOB_REGISTRY", raising=False)


@pytest.mark.usefixtures("no_registry")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("initialize-dataset", "--source", "{}/none", "--target", "{}/t"), 2, "does not exist or is empty"),
        (
            ("initialize-dataset", "--source", "pvc://b/x", "--target", "{}/t"),
            2,
            "PersistentVolumeClaim b is not mounted at /mnt/",
        ),
        (("initialize-dataset", "--source", "{}", "--target", "{}/t"), 2, "overlaps"),
        (
            ("export", "--source", "{}", "--target", "{}/t", "--name", "m", "--export-id", "a", "--metrics", "["),
            2,
            "JSON",
        ),
        (("export", "--source", "{}", "--target", "{}/t", "--name", "m", "--export-id", "a"), 2, "TRAINJOB_REGISTRY"),
    ],
)
def test_program_errors_have_exit_codes(
    arguments: tuple[str, ...], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.format(tmp_path) for argument in arguments]) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert error.count("\n") == 1


def test_the_program_copies_and_reports_what_it_has_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    monkeypatch.setenv("TRAINJOB_TERMINATION_LOG", str(log))
    source = tmp_path / "set"
    source.mkdir()
    for name in ("a.csv", "b.txt"):
        (source / name).write_text("1,2\n")
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
