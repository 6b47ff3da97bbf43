from __future__ import annotations

import json
import math
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors
from hypothesis import given, settings, strategies as st
from safetensors.numpy import save_file
from tests.trees import tree
from tests.unit.one_file import OneFile

from trainjob.data.locations import parse_store
from trainjob.data.models import _BITS, ModelFacts, check_model
from trainjob.data.stores.files import FileStore
from trainjob.errors import CorruptData

deserialize: Any = safetensors.deserialize  # has no types


def _safetensors(tensors: dict[str, int], **change: Any) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, count in tensors.items():
        header[name] = {"dtype": "F32", "shape": [count], "data_offsets": [end, end + 4 * count]} | change
        end += 4 * count
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def _check(folder: Path, **options: Any) -> ModelFacts:
    store = FileStore(parse_store(folder))
    return check_model(store, list(store.list()), **options)


def test_a_file_of_the_library_is_read(tmp_path: Path) -> None:
    save_file(
        {"a": numpy.zeros((3, 4), "float16"), "b": numpy.zeros((), "float64"), "c": numpy.zeros((0, 5), "int8")},
        tmp_path / "model.safetensors",
        metadata={"x": "y"},
    )
    assert _check(tmp_path) == ModelFacts(13, (".safetensors",))


def test_sharded_models_are_checked_against_their_index(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(_safetensors({"a": 2, "b": 3}))
    (tmp_path / "model-2.safetensors").write_bytes(_safetensors({"c": 5}))
    index = tmp_path / "model.safetensors.index.json"
    weights = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    assert _check(tmp_path).parameters == 10
    index.write_text(json.dumps({"weight_map": weights | {"d": "model-3.safetensors"}}))
    with pytest.raises(CorruptData, match=r"model-3.*does not exist"):
        _check(tmp_path)
    index.write_text(json.dumps({"weight_map": weights | {"d": "model-2.safetensors"}}))
    with pytest.raises(CorruptData, match="does not contain it"):
        _check(tmp_path)
    for wrong in ("{", "[]", '{"weight_map": []}', '{"metadata": 1, "weight_map": {}}', '{"weight_map": {"a": []}}'):
        index.write_text(wrong)
        with pytest.raises(CorruptData):
            _check(tmp_path)
    for total in (40, 40.0, 0, 32):  # lower totals are valid: tensors that share one storage are counted once
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weights}))
        assert _check(tmp_path).parameters == 10
    for wrong in ("41", '"40"', "null"):
        index.write_text(f'{{"metadata": {{"total_size": {wrong}}}, "weight_map": {json.dumps(weights)}}}')
        with pytest.raises(CorruptData, match="total_size"):
            _check(tmp_path)
    index.write_text('{"weight_map": {"a": "model-1.safetensors", "a": "model-1.safetensors"}}')
    with pytest.raises(CorruptData, match="twice"):
        _check(tmp_path)
    os.truncate(index, 100_000_001)  # not read completely: the index could exhaust memory
    with pytest.raises(CorruptData, match="100000001 bytes"):
        _check(tmp_path)


def _parameters(data: bytes) -> int:
    store: Any = OneFile(data, "model.safetensors")
    return check_model(store, store.entries, single=True).parameters


def _header(text: str | bytes, size: int = 4) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data + bytes(size)


def _tensor(start: int, stop: int) -> str:
    return f'{{"dtype":"U8","shape":[{stop - start}],"data_offsets":[{start},{stop}]}}'


_U8 = _tensor(0, 4)
_NUMBERS = st.sampled_from(
    ["0", "1", "2", "3", "4", "5", "8", "-0", "-1", "4.0", "4e0", "null", '"4"', "true", str(2**63), str(2**64)]
)
_SIZES = st.lists(_NUMBERS, max_size=4).map(lambda numbers: f"[{','.join(numbers)}]")
_DTYPES = st.sampled_from(['"U8"', '"F16"', '"F4"', '"F6_E2M3"', '"BF16"', '"F32"', '"C64"', '"Q8"', "null", "8"])
_TENSORS = st.builds('{{"dtype":{},"shape":{},"data_offsets":{}}}'.format, _DTYPES, _SIZES, _SIZES)
_SOUND = st.sampled_from(
    [
        _U8,
        '{"dtype":"U8","shape":[2,1],"data_offsets":[0,2]}',
        '{"dtype":"F16","shape":[1],"data_offsets":[2,4]}',
        '{"dtype":"F4","shape":[2],"data_offsets":[4,5]}',
        '{"dtype":"F32","shape":[],"data_offsets":[0,4]}',
        '{"dtype":"F32","shape":[0,9],"data_offsets":[4,4]}',
    ]
)
_KEYS = st.sampled_from(['"a"', '"b"', '"\\u0061"', '"\\ud800"', '"\\ud83d\\ude00"', '""', '"__metadata__"'])
_METADATA = st.sampled_from(
    ["null", "{}", '{"x":"y"}', '{"x":1}', '{"x":null}', '"x"', "[]", "NaN", '{"x":"\\ud800"}', '{"x":"1","y":"1"}']
)
_ITEMS = st.one_of(
    st.tuples(_KEYS, _SOUND), st.tuples(_KEYS, _TENSORS), st.tuples(st.just('"__metadata__"'), _METADATA)
)
_HEADERS = st.lists(_ITEMS, max_size=3).map(lambda items: "{" + ",".join(f"{k}:{v}" for k, v in items) + "}")


@st.composite
def _mutated(draw: st.DrawFn) -> bytes:
    """A valid file, or one with errors in the meaning of its header or in any of its bytes."""
    text = draw(_HEADERS).encode()
    if draw(st.booleans()):
        text = draw(st.sampled_from([b"", b" ", b"\xef\xbb\xbf"])) + text + draw(st.sampled_from([b" ", b"\0", b"x"]))
    data = bytearray(_header(text, draw(st.integers(0, 8))))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: len(data) - draw(st.sampled_from([0, 0, 0, 0, 1, 5]))])


def check_agreement(data: bytes) -> None:
    """Check that our result equals the library's, or is stricter in one of the cases listed here."""
    ours, theirs = "", ""
    parameters, tensors = 0, {}
    try:
        parameters = _parameters(data)
    except CorruptData as error:
        ours = str(error)
    try:
        tensors = dict(deserialize(data))
    except safetensors.SafetensorError as error:
        theirs = str(error)
    if ours and not theirs:
        # The library accepts duplicate names (the last one wins), which the format forbids, and types or tensors in
        # JSON forms that the format does not define.
        assert "occurs twice" in ours or "dtype, shape or data_offsets" in ours, ours
    elif theirs and not ours:
        assert "unknown variant" in theirs, theirs  # possibly a type of a newer version
    elif not ours:
        assert parameters == sum(math.prod(tensor["shape"]) for tensor in tensors.values())


@settings(max_examples=250)
@given(_mutated())
def test_check_agrees_with_the_library(data: bytes) -> None:
    check_agreement(data)


TWO = {"a": 2}


@pytest.mark.parametrize(
    ("data", "sound"),
    [
        *((text, False) for text in (b"", b"1234567", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 1) + b"{")),
        *((struct.pack("<Q", 2) + text, False) for text in (b"[]", b"{}x")),
        *((_safetensors(TWO)[:-1], False), (_safetensors(TWO) + b"x", False)),
        (_safetensors(TWO | {"b": 2}, data_offsets=[0, 8]), False),
        *((_safetensors(TWO, shape=shape), False) for shape in ([3], [-2], "2")),
        *((_safetensors(TWO, data_offsets=offsets), False) for offsets in ([8, 0], [4, 12])),
        (_safetensors(TWO, dtype="F16"), False),
        (_header(f'{{"a":{_U8}}}'), True),
        (_header(f' {{"a":{_U8}}}\n'), True),
        (_header(f'{{"__metadata__":null,"a":{_U8}}}'), True),
        (_header(f'{{"a":{_U8[:-1]},"of a newer version":[1]}}}}'), True),
        (_header(f'{{"a":{_U8},"b":{{"dtype":"U8","shape":[0,{2**40},{2**40}],"data_offsets":[4,4]}}}}'), True),
        (_header(f'{{"a":{_U8},"b":{{"dtype":"U8","shape":[{2**40},{2**40},0],"data_offsets":[4,4]}}}}'), False),
        (_header(f'{{"a":{_U8},"a":{_U8}}}'), False),
        (_header(f'{{"a":{_U8},"\\u0061":{_U8}}}'), False),
        (_header('{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}'), False),
        (_header(f'{{"__metadata__":{{"x":1}},"a":{_U8}}}'), False),
        (_header(f'{{"__metadata__":{{"x":"1","x":"2"}},"a":{_U8}}}'), False),
        (_header(f'{{"a":{_tensor(0, 2)},"b":{_tensor(3, 4)}}}'), False),
        (_header(f'{{"a":{_tensor(0, 3)},"b":{_tensor(2, 4)}}}'), False),
        (_header('{"a":{"dtype":{"U8":null},"shape":[3],"data_offsets":[0,4]}}'), False),
        (_header(f'{{"a":{_U8}}}'.encode("utf-16-le")), False),
        (_header(b"\xef\xbb\xbf" + f'{{"a":{_U8}}}'.encode()), False),
        (_header(f'{{"\\ud800":{_U8}}}'), False),
    ],
)
def test_files_are_checked_as_the_format_specifies(data: bytes, sound: bool) -> None:
    if sound:
        assert _parameters(data) == 4
    else:
        with pytest.raises(CorruptData):
            _parameters(data)
    check_agreement(data)


def test_tensor_types_equal_those_of_the_library() -> None:
    with pytest.raises(safetensors.SafetensorError, match="unknown variant") as raised:
        deserialize(_header('{"a":{"dtype":"?","shape":[4],"data_offsets":[0,4]}}'))
    known = re.findall(r"`([A-Z0-9_]+)`", str(raised.value))
    assert sorted(known) == sorted(_BITS)
    for dtype, bits in _BITS.items():
        data = _header(f'{{"a":{{"dtype":"{dtype}","shape":[8],"data_offsets":[0,{bits}]}}}}', bits)
        assert _parameters(data) == 8
        assert deserialize(data)


def test_pickles_are_rejected_unless_allowed(tmp_path: Path) -> None:
    """`test_data_formats` has all suffixes."""
    tree(tmp_path, {"pytorch_model.bin": b"\x80\x04.", "a/model.PT": b"\x80\x04."})
    with pytest.raises(CorruptData, match="--allow-pickle"):
        _check(tmp_path)
    assert _check(tmp_path, allow_pickle=True).formats == (".bin", ".pt")


@pytest.mark.parametrize(
    ("path", "advised"),
    [
        *[("training_args.bin", True), ("checkpoint-5/optimizer.pt", True), ("checkpoint-5/rng_state.pth", True)],
        *[("weights.bin", False), ("my_training_args.bin", False)],
    ],
)
def test_files_of_hugging_faces_trainer_are_explained(tmp_path: Path, path: str, advised: bool) -> None:
    tree(tmp_path, {path: b"PK\x03\x04", "config.json": b"{}"})
    with pytest.raises(CorruptData, match=path) as refused:
        _check(tmp_path)
    assert ("trainer.model.save_pretrained(DIRECTORY)" in str(refused.value)) is advised
