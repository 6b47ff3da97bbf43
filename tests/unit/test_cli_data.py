from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from tests.trees import tree

from trainjob._support import retrying
from trainjob.cli import main
from trainjob.data import read_manifest


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tree(tmp_path / "source", {"a.csv": b"1,2\n", "sub/b.txt": b"x" * 100_000})


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["data", "copy", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_copy_prints_digest_and_target(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(str(source), str(tmp_path / "t")) == 0
    printed = capsys.readouterr()
    manifest = read_manifest(str(tmp_path / "t"))
    assert manifest is not None
    assert printed.out == f"{manifest.digest}  {(tmp_path / 't').as_uri()}\n"
    assert "copied 100 %" in printed.err
    assert _run(str(tmp_path / "t"), str(tmp_path / "t2"), "--digest", manifest.digest, "-q") == 0
    assert capsys.readouterr().err == ""


def test_copy_with_patterns_prints_json(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patterns = ("--include", "*.csv", "--include", "b*", "--exclude", "sub/*")
    assert _run("--json", str(source), str(tmp_path / "t"), *patterns) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["files"], answer["bytes"], answer["uri"]) == (1, 4, (tmp_path / "t").as_uri())


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("{}/none", "{}/t"), 2, "does not exist or is empty"),
        (("{}/source", "{}/source/sub"), 2, "overlaps"),
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
