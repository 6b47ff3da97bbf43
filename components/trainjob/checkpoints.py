"""Atomic checkpoints of several files in the directory of ``TRAINJOB_CHECKPOINT``. Standard library only.

::

    from trainjob import checkpoints

    if found := checkpoints.latest():
        step, directory = found
        model.load_state_dict(torch.load(directory / "model.pt"))
    ...
    checkpoints.save(step, lambda directory: torch.save(model.state_dict(), directory / "model.pt"))

A process may be killed at any instruction, and the machine may fail: `latest` returns the checkpoint before or the new
one, never a part of one. Without ``TRAINJOB_CHECKPOINT`` there are no checkpoints, and the same script runs anywhere.

Each checkpoint is a directory ``<number>-step-<step>``; later ones have higher numbers. It is written under a temporary
name, synced to the disk and renamed. The file ``.trainjob.json`` in it lists the sizes of its files.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainjob._support import durable, volumes
from trainjob._support.foreign import LARGE, mapping_of, read_regular
from trainjob._support.formats import wrong_format

__all__ = ["clear", "latest", "save"]

_MARKER = ".trainjob.json"
_FORMAT = 1  # of the marker
_MARKER_LIMIT = 64 << 20  # bytes: of 500,000 files
_NAME = re.compile(r"(\d+)-step-(\d+)")
_UNFINISHED, _REMOVED = "unfinished-", "removed-"


def save(step: int, write: Callable[[Path], object], *, keep: int = 2, rank: int | None = None) -> None:
    """Save a checkpoint, then remove older and incomplete ones.

    Call it on rank 0 alone, or with `rank` on every rank that writes a part of the checkpoint, as PyTorch's distributed
    checkpoints (DCP) do. All ranks then write to one directory, on a volume that they share, and only one training of a
    key may run at a time.

    Args:
        step: Step of the training, 0 or more.
        write: Writes the files of the checkpoint into the given directory. With `rank`, it writes after a collective of
            all ranks, and returns on rank 0 once all ranks have written, as DCP's `save` does. Not called without
            ``TRAINJOB_CHECKPOINT``.
        keep: How many of the latest checkpoints are kept, 1 or more.
        rank: Rank of this process, if `save` is called on every rank.

    Raises:
        ValueError: `step` or `keep` is out of range, ``TRAINJOB_CHECKPOINT`` is not a directory, or a newer trainjob
            has saved checkpoints in it.
        OSError: The checkpoint cannot be written, for example because the disk is full, or because another process
            saves checkpoints of the same key. Earlier checkpoints are kept.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"step {step} must be 0 or more, and keep {keep} must be 1 or more")
    root = _root()
    if root is None:
        return
    # A replaced process that still runs, on a node that is unreachable, must not write to the files of this one. With
    # `rank`, all ranks have to know the name.
    unfinished = root / (f"{_UNFINISHED}{step}" + (f"-{secrets.token_hex(4)}" if rank is None else ""))
    if not rank:
        _clean(root, _UNFINISHED, unfinished)
        _empty(unfinished)
    unfinished.mkdir(parents=True, exist_ok=True)
    write(unfinished)
    if rank:
        return
    _complete(unfinished, step)
    number = max((number for number, _, _ in _saved(root)), default=0) + 1
    unfinished.rename(root / f"{number:06}-step-{step}")
    durable.sync(root)
    saved = _saved(root)
    kept = [each for each in saved if _is_complete(each[2])][-keep:]
    _remove(root, [path for number, step, path in saved if (number, step, path) not in kept])


def latest() -> tuple[int, Path] | None:
    """Step and directory of the latest complete checkpoint; None if there is none.

    All ranks must resume from the same one. Nodes may see a new directory at different times, for example on NFS: let
    rank 0 ask, and broadcast its answer.

    Raises:
        ValueError: ``TRAINJOB_CHECKPOINT`` is not a directory, or a newer trainjob has saved checkpoints in it.
    """
    root = _root()
    complete = [(step, path) for _, step, path in _saved(root) if _is_complete(path)] if root else []
    return complete[-1] if complete else None


def clear() -> None:
    """Remove all checkpoints: the training has ended, and a later one of the same key begins anew. Call it on rank 0.

    Raises:
        ValueError: ``TRAINJOB_CHECKPOINT`` is not a directory.
        OSError: A checkpoint cannot be removed.
    """
    root = _root()
    if root is not None:
        _clean(root, _UNFINISHED)
        _remove(root, [path for _, _, path in _saved(root)])  # the latest last


def _root() -> Path | None:
    location = os.environ.get(volumes.CHECKPOINT_VARIABLE, "")
    if "://" in location:
        raise ValueError(
            f"checkpoints of trainjob.checkpoints are directories, not {location}: set checkpoints of the spec to "
            "pvc://claim/path or file:///path"
        )
    return Path(location) if location else None


def _saved(root: Path) -> list[tuple[int, int, Path]]:
    """Number, step and directory of each checkpoint, in the order of the numbers."""
    if not root.is_dir():
        return []
    names = [(path, name) for path in root.iterdir() if (name := _NAME.fullmatch(path.name))]
    return sorted((int(name[1]), int(name[2]), path) for path, name in names)


def _is_complete(directory: Path) -> bool:
    """Whether all its files have the recorded size. A copy of a volume, or a full one, may have cut some.

    Raises:
        ValueError: A newer trainjob wrote it: to call it incomplete would remove it.
    """
    marker = directory / _MARKER
    try:
        recorded = mapping_of(read_regular(marker, _MARKER_LIMIT), str(marker), LARGE)
        number, sizes = recorded.get("format", _FORMAT), recorded["files"]
        newer = isinstance(number, int) and number > _FORMAT
        complete = newer or all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return False
    if newer:
        raise ValueError(wrong_format(str(marker), number, _FORMAT))
    return complete


def _complete(directory: Path, step: int) -> None:
    """Write the marker, and everything in `directory` to the disk."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in files}
    marker = directory / _MARKER
    marker.write_text(json.dumps({"format": _FORMAT, "step": step, "files": sizes}))
    for path in [*files, marker, *(path for path in directory.rglob("*") if path.is_dir()), directory]:
        durable.sync(path)


def _remove(root: Path, directories: list[Path]) -> None:
    """Remove checkpoints in this order. Each is renamed first: a half-removed one is not a checkpoint."""
    _clean(root, _REMOVED)  # of killed processes: their names are free again
    for path in directories:
        path.rename(root / (_REMOVED + path.name))
    _clean(root, _REMOVED)


def _clean(root: Path, prefix: str, but: Path | None = None) -> None:
    """Remove directories that are no checkpoints. Those that cannot be removed now are left for the next call."""
    for path in root.glob(f"{prefix}*"):
        if path != but:
            shutil.rmtree(path, ignore_errors=True)


def _empty(directory: Path) -> None:
    """Remove what a killed training has left. The directory stays, since other ranks may be about to write to it."""
    for path in directory.glob("*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
