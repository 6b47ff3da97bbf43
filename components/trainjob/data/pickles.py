"""Find weights that run code when they are loaded: pickles, by name and by content."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from trainjob.data.stores.base import Entry, Store

SUFFIXES = frozenset({".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth"})
"""Suffixes of weights that are usually pickles: loading one runs whatever code its maker put into it."""

# Not looked into: text, and safetensors files, whose headers are checked anyway.
_HARMLESS = frozenset({".csv", ".jinja", ".json", ".jsonl", ".md", ".safetensors", ".txt", ".yaml", ".yml"})
_HEAD = 4096
# A zip archive's list of files is at its end, followed by a comment of up to 65535 bytes.
_TAIL = 65_536


def pickles(store: Store, files: Iterable[Entry], *, single: bool = False) -> list[str]:
    """Paths of files that are pickles, or archives of them such as `torch.save` writes, whatever they are called.

    It reads 4 KiB of each file that is not text, and 64 KiB more of zip archives. That finds what someone renamed or
    saved under a name of their own; it is no defence against a file that was made to deceive it.
    """
    return sorted(
        entry.path
        for entry in files
        if suffix(entry.path) in SUFFIXES
        or (suffix(entry.path) not in _HARMLESS and _unpickles(store, "" if single else entry.path, entry.size))
    )


def suffix(path: str) -> str:
    """Of the file's name, in lower case, with the dot; a name without one is taken as a suffix itself."""
    return "." + PurePosixPath(path).name.rpartition(".")[2].lower()


def _unpickles(store: Store, key: str, size: int) -> bool:
    if not size:
        return False
    head = b"".join(store.read(key, length=_HEAD))
    if head.startswith(b"PK\x03\x04"):
        tail = b"".join(store.read(key, start=max(0, size - _TAIL)))
        return b".pkl" in head or b".pkl" in tail
    # PROTO, the first instruction of every pickle since protocol 2, and the protocol.
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5
