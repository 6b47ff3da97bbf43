"""Writes and reads the files of a folder as a mapping of paths to bytes, and writes models."""

from __future__ import annotations

import json
import struct
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


def model(folder: Path, value: int = 0, size: int = 4) -> str:
    """Write a model with one tensor of this many bytes of a value; return the path of its folder."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes([value]) * size
    return str(tree(folder, {"model.safetensors": data, "config.json": b"{}"}))
