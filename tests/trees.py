"""Writes and reads the files of a folder as a mapping of paths to bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainjob.data import file_manifest


def tree(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write files."""
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """All files below a folder, without the manifest."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found.pop(file_manifest.NAME, None)
    return found
