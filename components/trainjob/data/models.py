"""Check model files without a framework: safetensors headers, sharded indexes, and no pickles."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainjob.data.stores import Entry, Store
from trainjob.errors import CorruptData

PICKLES = frozenset({".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth"})
"""Suffixes of weights that are usually pickles: loading one runs whatever code its maker put into it."""

# The limit of the safetensors library (100 MB); a longer header is an attack or garbage.
_MAX_HEADER = 100_000_000
# Bits of each element type of the format (safetensors 0.8, `Dtype`).
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class ModelFacts:
    """What the files say of a model.

    Attributes:
        parameters: Elements of all tensors in safetensors files; 0 where there are none.
        formats: Suffixes of its weights, such as ``.safetensors``.
    """

    parameters: int
    formats: tuple[str, ...]


def check_model(
    store: Store, entries: Iterable[Entry], *, allow_pickle: bool = False, single: bool = False
) -> ModelFacts:
    """Check the files of a model; reads only their headers.

    Args:
        store: Where they are.
        entries: The files.
        allow_pickle: Take pickle-type weights too.
        single: ``store`` is the one file of ``entries``.

    Raises:
        CorruptData: A safetensors file is truncated or inconsistent, an index names files that are not there, or there
            are pickle-type weights and ``allow_pickle`` is false.
    """
    files = {entry.path: entry for entry in entries}
    pickles = sorted(path for path in files if _suffix(path) in PICKLES)
    if pickles and not allow_pickle:
        raise CorruptData(
            f"{store.location} has weights in a format that can run code when loaded: {', '.join(pickles[:5])};"
            " save them as safetensors, or allow it with allow_pickle (--allow-pickle)"
        )
    tensors: dict[str, Mapping[str, int]] = {}
    for path, entry in files.items():
        if _suffix(path) == ".safetensors":
            tensors[path] = _safetensors(store, "" if single else path, entry)
    for path, entry in files.items():
        if path.endswith(".safetensors.index.json"):
            _index(store, "" if single else path, entry, tensors)
    formats = {_suffix(path) for path in files} & (PICKLES | {".safetensors", ".gguf", ".msgpack", ".onnx", ".npz"})
    return ModelFacts(sum(sum(each.values()) for each in tensors.values()), tuple(sorted(formats)))


def _suffix(path: str) -> str:
    return "." + path.rpartition("/")[2].rpartition(".")[2].lower()


def _safetensors(store: Store, key: str, entry: Entry) -> Mapping[str, int]:
    """Tensor name -> number of elements, of a file whose header accounts for every byte of it."""
    where = f"{store.location}: {entry.path}"
    prefix = b"".join(store.read(key, length=8))
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(entry.size - 8, _MAX_HEADER):
        raise CorruptData(f"{where} is no safetensors file, or is truncated ({entry.size} bytes)")
    try:
        header = json.loads(b"".join(store.read(key, start=8, length=length)))
        header.pop("__metadata__", None)
        spans = sorted((*_span(value), name) for name, value in header.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptData(f"{where} has a damaged header: {type(error).__name__}: {error}") from None
    end = 0
    for start, stop, _, name in spans:
        if start != end:
            raise CorruptData(f"{where}: tensor {name!a} starts at byte {start} of the data, not at {end}")
        end = stop
    if 8 + length + end != entry.size:
        raise CorruptData(
            f"{where} has {entry.size} bytes, its header says {8 + length + end}: truncated or appended to"
        )
    return {name: count for _, _, count, name in spans}


def _span(value: Mapping[str, object]) -> tuple[int, int, int]:
    """Start, end and number of elements of a tensor; ValueError if they do not fit each other."""
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError("shape or data_offsets")
    if not all(type(number) is int and number >= 0 for number in (*shape, *offsets)):
        raise ValueError("a size is not a natural number")
    count, (start, stop) = math.prod(shape), offsets
    bits = _BITS.get(str(dtype))  # a type that is newer than this table is taken as it is
    if stop < start or (bits is not None and (stop - start) * 8 != count * bits):
        raise ValueError(f"{dtype} {shape} does not fill bytes {start} to {stop}")
    return start, stop, count


def _index(store: Store, key: str, entry: Entry, tensors: Mapping[str, Mapping[str, int]]) -> None:
    where = f"{store.location}: {entry.path}"
    folder = entry.path.rpartition("/")[0]
    try:
        weights = json.loads(b"".join(store.read(key)))["weight_map"].items()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptData(f"{where} is no index of shards: {type(error).__name__}") from None
    for name, shard in weights:
        path = f"{folder}/{shard}".lstrip("/")
        if path not in tensors:
            raise CorruptData(f"{where} names the shard {shard!a}, which is not there")
        if name not in tensors[path]:
            raise CorruptData(f"{where} says that tensor {name!a} is in {shard!a}, which lacks it")
