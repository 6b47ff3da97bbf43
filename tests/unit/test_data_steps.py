"""Errors of the initializer and export programs; `tests/registry` tests them with registries."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainjob.data.__main__ import main


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
