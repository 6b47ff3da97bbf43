"""Files that a training has replaced: no reader waits, follows a link or reads more than its limit."""

from __future__ import annotations

import os
import socket
import tracemalloc
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

from trainjob import checkpoints
from trainjob._backends.local.logs import LogReader
from trainjob._backends.local.ranks import Rank
from trainjob._backends.local.store import JobFiles, write_json
from trainjob._support.foreign import Absent, Unreadable, open_regular, read_regular
from trainjob._support.log_lines import Splitter
from trainjob.data import copy, evaluate, staging
from trainjob.errors import ConfigurationError, UnsafePath

JOB: Any = {"metadata": {"namespace": "ns", "name": "a", "uid": "u"}, "spec": {}, "status": {}}
POD = {"metadata": {"name": "a-node-0-0", "labels": {"jobset.sigs.k8s.io/replicatedjob-name": "node"}}}


def holes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 30)


def bound(path: Path) -> None:
    with chdir(path.parent), socket.socket(socket.AF_UNIX) as opened:
        opened.bind(path.name)  # the whole path may be too long for a socket


KINDS: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "3 GiB of holes": holes,
    "directory": Path.mkdir,
    "socket": bound,
    "nothing": lambda path: None,
}
if os.geteuid() == 0:
    KINDS["device"] = lambda path: os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero


def reported(path: Path) -> object:
    files = JobFiles(path.parents[1])
    write_json(files.status, {"status": {}, "pods": [POD]})
    return files.reported()


def logged(path: Path) -> object:
    reader = LogReader(JobFiles(path.parents[1]), path.stem, Splitter("node-0"))
    return [*reader.tail(10), *reader.lines()]


def staged(path: Path) -> object:
    with mock.patch.dict(os.environ, {"TRAINJOB_TERMINATION_LOG": str(path)}):
        staging._report({})
    return None


READERS: dict[str, tuple[str, Callable[[Path], object], tuple[type[Exception], ...]]] = {
    "any file": ("x", lambda path: read_regular(path, 100), (Unreadable,)),
    "object of a job": ("object.json", lambda path: JobFiles(path.parent).read(), (ConfigurationError,)),
    "message, supervisor": (
        "termination/a-node-0-0",
        lambda path: Rank(JOB, "node", 0, path.parents[1]).termination_message(),
        (),
    ),
    "message, waiter": ("termination/a-node-0-0", reported, ()),
    "message, program": ("log", staged, ()),
    "log": ("logs/a-node-0-0.log", logged, ()),
    "scores": ("scores", lambda path: evaluate._read(path, "model"), (ConfigurationError,)),
    "checkpoint": (".trainjob.json", lambda path: checkpoints._is_complete(path.parent), ()),
}
"""Name -> path of the file in a directory, the reader, and the errors that it documents."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_none_is_answered_at_once(name: str, kind: str, tmp_path: Path) -> None:
    below, read, errors = READERS[name]
    path = tmp_path / below
    path.parent.mkdir(exist_ok=True)
    KINDS[kind](path)
    tracemalloc.start()
    try:
        answer = read(path)
    except errors as error:
        answer = error
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300 << 20
    assert "root:" not in str(answer)


def test_a_copy_reads_and_writes_through_no_fifo(tmp_path: Path) -> None:
    for folder in ("source", "target", "target/.trainjob"):
        (tmp_path / folder).mkdir()
    (tmp_path / "source" / "a").write_text("a")
    os.mkfifo(tmp_path / "target" / ".trainjob" / "x.noted")
    with pytest.raises(UnsafePath, match=r"\.trainjob/x\.noted is neither a file nor a directory; remove it"):
        copy(str(tmp_path / "source"), str(tmp_path / "target"))
    os.mkfifo(tmp_path / "source" / "MANIFEST.json")
    with pytest.raises(UnsafePath, match=r"MANIFEST\.json is neither a file nor a directory"):
        copy(str(tmp_path / "source"), str(tmp_path / "other"))


def test_a_file_that_is_replaced_before_it_is_opened_is_not_read(tmp_path: Path) -> None:
    path, opened = tmp_path / "x", os.open
    path.write_text("text")

    def replacing(name: Any, flags: int) -> int:
        path.unlink()
        os.mkfifo(path)
        return opened(name, flags)

    with (
        mock.patch("os.open", replacing),
        pytest.raises(Unreadable, match="x is not readable: it is not a regular file"),
    ):
        open_regular(path)


def test_only_the_limit_is_read_whatever_the_size_says() -> None:
    path = Path("/proc/self/status")  # its size is 0
    assert path.stat().st_size == 0
    with pytest.raises(Unreadable, match="has more than 10 bytes"):
        read_regular(path, 10)
    assert read_regular(path, 5, cut=True) == b"Name:"
    assert read_regular(path, 3, start=2, cut=True) == b"me:"


def test_a_file_that_does_not_exist_is_told_from_one_that_is_not_readable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "nothing", tmp_path / "file" / "below"):
        with pytest.raises(Absent, match="it does not exist"):
            read_regular(path, 10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_starts_again_whatever_it_has_left(kind: str, tmp_path: Path) -> None:
    for folder in ("logs", "termination"):
        (tmp_path / folder).mkdir()
        KINDS[kind](tmp_path / folder / ("a-node-0-0" + (".log" if folder == "logs" else "")))
    rank = Rank(JOB, "node", 0, tmp_path)
    rank.launch(["true"], {"PATH": os.environ["PATH"]}, str(tmp_path))
    cast(Any, rank)._process.wait()
    assert rank.poll()
    assert (rank.terminated or {})["exitCode"] == 0
    assert rank.termination_message() == ""
