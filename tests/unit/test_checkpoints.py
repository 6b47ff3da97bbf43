from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from threading import Barrier, Event
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from trainjob import checkpoints

# `killed_at` ends calls between the opening of a file and its use.
pytestmark = pytest.mark.filterwarnings("ignore:.*unclosed", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of ``TRAINJOB_CHECKPOINT``; it does not exist before the first checkpoint."""
    directory = tmp_path / "of" / "the-key"
    monkeypatch.setenv("TRAINJOB_CHECKPOINT", str(directory))
    return directory


@pytest.fixture(autouse=True)
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths that were synced to the disk; syncing them takes most of the time of a small checkpoint."""
    paths: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: paths.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    return paths


def state(step: int) -> Callable[[Path], None]:
    """Writes two files, one in a folder."""

    def write(directory: Path) -> None:
        (directory / "model.bin").write_text(f"model {step}")
        (directory / "parts").mkdir()
        (directory / "parts" / "optimizer.bin").write_text(f"optimizer {step}")

    return write


def save(step: int, keep: int = 2) -> None:
    checkpoints.save(step, state(step), keep=keep)


def restored() -> int | None:
    """Step of the latest checkpoint, whose files must be complete."""
    found = checkpoints.latest()
    if found is None:
        return None
    step, directory = found
    assert (directory / "model.bin").read_text() == f"model {step}"
    assert (directory / "parts" / "optimizer.bin").read_text() == f"optimizer {step}"
    return step


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


class Killed(BaseException):
    """Stands for SIGKILL: no code catches it."""


def killed_at(number: int, function: Callable[[], object]) -> bool:
    """Call `function` and end it before the given call of the file system; False if it makes fewer calls."""
    count = 0

    def profile(_: FrameType, event: str, called: Any) -> None:
        nonlocal count
        if event == "c_call" and {called.__module__, type(called.__self__).__module__} & {"posix", "io", "_io"}:
            count += 1
            if count > number:
                raise Killed

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    except Killed:
        return True
    finally:
        sys.setprofile(before)
    return False


def test_the_latest_checkpoint_is_restored_and_older_ones_are_removed(root: Path) -> None:
    assert restored() is None
    for step in (5, 10, 15):
        save(step)
        assert restored() == step
    assert names(root) == ["000002-step-10", "000003-step-15"]
    checkpoints.clear()
    assert restored() is None
    assert names(root) == []


@pytest.mark.parametrize(
    ("before", "change", "left"),
    [
        ([5, 10], lambda: save(15), {10, 15}),
        ([], lambda: save(0, keep=1), {None, 0}),
        ([5, 10], checkpoints.clear, {10, None}),
    ],
    ids=["save", "first save", "clear"],
)
def test_a_kill_at_any_call_leaves_the_earlier_or_the_new_checkpoint(
    root: Path, before: list[int], change: Callable[[], object], left: set[int | None]
) -> None:
    seen = set()
    for call in count():
        for step in before:
            save(step)
        killed = killed_at(call, change)
        seen.add(restored())
        save(20)
        assert restored() == 20
        assert len(names(root)) <= 2, "no files of the killed process are left"
        checkpoints.clear()
        assert names(root) == []
        if not killed:
            break
    assert call > 10
    assert seen == left


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3), st.integers(0, 150)), min_size=1, max_size=8))
def test_the_latest_is_the_last_that_was_saved(
    tmp_path_factory: pytest.TempPathFactory, saves: list[tuple[int, int, int]]
) -> None:
    """Whatever the steps are: a training that began anew has lower ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINJOB_CHECKPOINT", str(tmp_path_factory.mktemp("root")))
        latest: int | None = None
        for step, keep, call in saves:
            finished = not killed_at(call, lambda step=step, keep=keep: save(step, keep))  # type: ignore[misc]  # bound
            assert restored() in ({step} if finished else {step, latest})
            latest = restored()


MARKER = ".trainjob.json"
DAMAGED = ("[]", "null", "1", "{", '{"format": 1}', '{"format": 1, "files": []}', '{"files": 1}')


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *((name, Path.unlink) for name in ("model.bin", "parts/optimizer.bin", MARKER)),
        *(
            (name, lambda path: os.truncate(path, path.stat().st_size - 1))
            for name in ("model.bin", "parts/optimizer.bin", MARKER)
        ),
        *((MARKER, partial(Path.write_text, data=text)) for text in DAMAGED),
    ],
)
def test_a_cut_or_damaged_checkpoint_is_ignored(root: Path, file: str, damage: Callable[[Path], object]) -> None:
    save(5)
    save(10)
    damage(root / "000002-step-10" / file)
    assert restored() == 5
    save(15)
    assert names(root) == ["000001-step-5", "000003-step-15"]


def test_files_and_their_names_are_synced_before_the_checkpoint_gets_its_name(root: Path, synced: list[Path]) -> None:
    save(5)
    *content, last = synced
    (unfinished,) = {path for path in content if path.parent == root}
    below = {str(path.relative_to(unfinished)) for path in content}
    assert below == {"model.bin", "parts/optimizer.bin", ".trainjob.json", "parts", "."}
    assert unfinished.name.startswith("unfinished-5-")
    assert last == root


def test_a_failed_write_keeps_the_earlier_checkpoint(root: Path) -> None:
    save(5)

    def full(directory: Path) -> None:
        (directory / "model.bin").write_text("mod")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        checkpoints.save(10, full)
    assert restored() == 5
    save(10)
    assert names(root) == ["000001-step-5", "000002-step-10"]


def test_a_replaced_process_cannot_change_the_checkpoint_of_the_new_one(root: Path) -> None:
    """Its node was unreachable, and it writes the same step while the new process does."""

    def write_while_replaced(directory: Path) -> None:
        state(5)(directory)
        save(5)
        (directory / "model.bin").write_text("of the replaced process")

    with pytest.raises(FileNotFoundError):
        checkpoints.save(5, write_while_replaced)
    assert restored() == 5
    assert names(root) == ["000001-step-5"]


def test_all_ranks_write_parts_of_one_checkpoint(root: Path) -> None:
    barrier = Barrier(3, timeout=30)
    (root / "unfinished-7").mkdir(parents=True)
    (root / "unfinished-7" / "rank-3").write_text("of a killed training with more ranks")

    def of(rank: int) -> None:
        def write(directory: Path) -> None:
            barrier.wait()
            (directory / f"rank-{rank}").write_text(str(rank))
            barrier.wait()

        for step in (7, 14):
            checkpoints.save(step, write, rank=rank, keep=3)

    with ThreadPoolExecutor(3) as ranks:
        list(ranks.map(of, range(3)))
    assert checkpoints.latest() == (14, root / "000002-step-14")
    assert names(root) == ["000001-step-7", "000002-step-14"]
    for name in names(root):
        assert names(root / name) == [".trainjob.json", "rank-0", "rank-1", "rank-2"]


def test_a_rank_may_prepare_the_directory_while_rank_0_removes_what_was_left_in_it(root: Path) -> None:
    """DCP creates the directory on every rank before its first collective, whether it exists or not."""
    both = Barrier(2, timeout=30)

    def save(step: int, rank: int, ready: Event) -> None:
        def write(directory: Path) -> None:
            while rank and not ready.is_set():
                directory.mkdir(parents=True, exist_ok=True)
            ready.set()
            both.wait()
            assert names(directory) == []
            both.wait()

        try:
            checkpoints.save(step, write, rank=rank)
        except BaseException:
            ready.set()
            both.abort()
            raise

    for step in range(30):
        left = root / f"unfinished-{step}"
        (left / "parts").mkdir(parents=True)
        for name in ("a", "parts/b"):
            (left / name).write_text("half of a file")
        with ThreadPoolExecutor() as ranks:
            ready = Event()
            for each in [ranks.submit(save, step, rank, ready) for rank in (1, 0)]:
                each.result()
    assert checkpoints.latest() == (29, root / "000030-step-29")


def test_without_the_variable_there_are_no_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINJOB_CHECKPOINT", raising=False)
    checkpoints.save(5, lambda _: pytest.fail("was called"))
    assert checkpoints.latest() is None
    checkpoints.clear()


def test_uris_and_numbers_out_of_range_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step, keep in ((-1, 2), (1, 0)):
        with pytest.raises(ValueError, match=f"step {step} must be 0 or more, and keep {keep} must be 1 or more"):
            save(step, keep)
    assert not root.exists()
    monkeypatch.setenv("TRAINJOB_CHECKPOINT", "s3://bucket/key")
    for call in (lambda: save(1), checkpoints.latest, checkpoints.clear):
        with pytest.raises(ValueError, match=r"are directories, not s3://bucket/key: set checkpoints .* to pvc://"):
            call()
