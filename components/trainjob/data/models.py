"""Check model files without a framework: safetensors headers, shard indexes, and formats that cannot run code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainjob._support.foreign import LARGE, Unreadable, mapping_of
from trainjob.data.formats import allowed
from trainjob.data.stores.base import Entry, ReadableStore
from trainjob.errors import CorruptData

# The limit of the safetensors library (100 MB); a longer header or index is an attack or garbage.
_MAX_HEADER = 100_000_000
_SHOWN = 5  # files in an error
# Bits per element, by type (safetensors 0.8, `Dtype`).
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_WEIGHTS = (
    ".bin .cb .cbm .ckpt .gguf .h5 .joblib .keras .lgb .msgpack .npy .npz .onnx .pickle .pkl .pt .pth .safetensors"
    " .tflite .ubj .xgb"
)
_FORMATS = frozenset(_WEIGHTS.split())
# Of transformers 5.24: training_args.bin beside each model of Trainer.save_model(), the others in each checkpoint-*/.
_OF_TRAINER = frozenset({"training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth"})
_OF_TRAINER_ADVICE = (
    ". Hugging Face's Trainer has written some of these files, and no model needs them: save with"
    " trainer.model.save_pretrained(DIRECTORY), into another directory than output_dir"
)


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model, from its files.

    Attributes:
        parameters: Elements of all tensors in safetensors files; 0 without such files.
        formats: Suffixes of its weights, such as ``.safetensors``.
    """

    parameters: int
    formats: tuple[str, ...]


@dataclass(frozen=True)
class _Tensor:
    start: int
    stop: int
    elements: int


def check_model(
    store: ReadableStore, entries: Iterable[Entry], *, allow_pickle: bool = False, single: bool = False
) -> ModelFacts:
    """Check the files of a model; reads only their headers.

    Args:
        store: Store of the files.
        entries: The files.
        allow_pickle: Accept all formats, including pickles and others that can run code when they are loaded.
        single: ``store`` is opened at the only file.

    Raises:
        CorruptData: A safetensors file is truncated or inconsistent, an index lists files that do not exist, or
            `allowed.refusals` refuses files and ``allow_pickle`` is false.
    """
    files = {entry.path: entry for entry in entries}
    if not allow_pickle and (refused := allowed.refusals(store, files.values(), single=single)):
        raise CorruptData(_refusal(store, refused))
    tensors: dict[str, Mapping[str, _Tensor]] = {}
    for path, entry in files.items():
        if allowed.suffix(path) == ".safetensors":
            tensors[path] = _safetensors(store, "" if single else path, entry)
    for path, entry in files.items():
        if path.endswith(".safetensors.index.json"):
            _index(store, "" if single else path, entry, tensors)
    formats = {allowed.suffix(path) for path in files} & _FORMATS
    elements = sum(tensor.elements for each in tensors.values() for tensor in each.values())
    return ModelFacts(elements, tuple(sorted(formats)))


def _refusal(store: ReadableStore, refused: Mapping[str, str]) -> str:
    shown = [f"{path!a} {reason}" for path, reason in list(refused.items())[:_SHOWN]]
    of_trainer = any(path.rpartition("/")[2] in _OF_TRAINER for path in refused)
    more = f"; {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
    return (
        f"{store.location} has files that could run code when they are loaded, or do not have the format of their"
        f" suffix: {'; '.join(shown)}{more}."
        " Save weights as safetensors and remove files that the model does not need, or accept all files with"
        f" allow_pickle (--allow-pickle){_OF_TRAINER_ADVICE if of_trainer else ''}"
    )


def _safetensors(store: ReadableStore, key: str, entry: Entry) -> Mapping[str, _Tensor]:
    """Read the tensors of a file; its header must account for every byte."""
    where = f"{store.location}: {entry.path}"
    prefix = b"".join(store.read(key, length=8))
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(entry.size - 8, _MAX_HEADER):
        raise CorruptData(f"{where} is not a safetensors file, or is truncated ({entry.size} bytes)")
    try:
        header = mapping_of(b"".join(store.read(key, start=8, length=length)), where, LARGE)
        _check_metadata(header.pop("__metadata__", None))
        tensors = {name: _tensor(value) for name, value in header.items()}
    except Unreadable as error:
        raise CorruptData(f"{where} has an invalid header: it {error.why}{error.where}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptData(f"{where} has an invalid header: {type(error).__name__}: {error}") from None
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != end:
            raise CorruptData(f"{where}: tensor {name!a} starts at byte {tensor.start} of the data, not at {end}")
        end = tensor.stop
    if 8 + length + end != entry.size:
        raise CorruptData(
            f"{where} has {entry.size} bytes, but its header states {8 + length + end}: it was truncated or appended to"
        )
    return tensors


def _check_metadata(value: object) -> None:
    if value is not None and not (isinstance(value, dict) and all(isinstance(text, str) for text in value.values())):
        raise ValueError("__metadata__ has values that are not text")


def _tensor(value: Mapping[str, object]) -> _Tensor:
    """The range of a tensor; raises ValueError if type, shape and range are inconsistent."""
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError("dtype, shape or data_offsets")
    if not all(type(number) is int and 0 <= number < 2**64 for number in (*shape, *offsets)):
        raise ValueError("a size is not a natural number")
    elements, (start, stop) = 1, offsets
    for size in shape:
        elements *= size
        if elements >= 2**64:
            raise ValueError(f"shape {shape} is too large")
    bits = _BITS.get(dtype)  # the size of types that are not in this table is not checked
    if stop < start or (bits is not None and (stop - start) * 8 != elements * bits):
        raise ValueError(f"{dtype} {shape} does not fill bytes {start} to {stop}")
    return _Tensor(start, stop, elements)


def _index(store: ReadableStore, key: str, entry: Entry, tensors: Mapping[str, Mapping[str, _Tensor]]) -> None:
    where = f"{store.location}: {entry.path}"
    folder = entry.path.rpartition("/")[0]
    if entry.size > _MAX_HEADER:
        raise CorruptData(f"{where} is not a shard index: it has {entry.size} bytes")
    try:
        index = mapping_of(b"".join(store.read(key)), where, LARGE)
        weights = index["weight_map"].items()
        promised = (index.get("metadata") or {}).get("total_size", 0)
    except Unreadable as error:
        raise CorruptData(f"{where} is not a shard index: it {error.why}{error.where}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptData(f"{where} is not a shard index: {type(error).__name__}: {error}") from None
    size = 0
    for name, shard in weights:
        path = f"{folder}/{shard}".lstrip("/")
        if path not in tensors:
            raise CorruptData(f"{where} lists the shard {shard!a}, which does not exist")
        if name not in tensors[path]:
            raise CorruptData(f"{where} lists tensor {name!a} in {shard!a}, which does not contain it")
        size += tensors[path][name].stop - tensors[path][name].start
    # A smaller total is normal: huggingface-hub counts tensors that share storage once, but writes each of them.
    if not isinstance(promised, int | float) or promised > size:
        raise CorruptData(f"{where} states {promised!a} bytes of tensors (total_size), but its shards have {size}")
