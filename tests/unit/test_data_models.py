from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainjob.data.locations import parse_store
from trainjob.data.models import ModelFacts, check_model
from trainjob.data.stores import Entry, FileStore
from trainjob.errors import CorruptData


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


def test_a_real_file_of_the_library(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    from safetensors.numpy import save_file

    save_file(
        {"a": numpy.zeros((3, 4), "float16"), "b": numpy.zeros((), "float64"), "c": numpy.zeros((0, 5), "int8")},
        tmp_path / "model.safetensors",
        metadata={"x": "y"},
    )
    assert _check(tmp_path) == ModelFacts(13, (".safetensors",))


def test_shards(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(_safetensors({"a": 2, "b": 3}))
    (tmp_path / "model-2.safetensors").write_bytes(_safetensors({"c": 5}))
    index = tmp_path / "model.safetensors.index.json"
    whole = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    index.write_text(json.dumps({"metadata": {}, "weight_map": whole}))
    assert _check(tmp_path).parameters == 10
    index.write_text(json.dumps({"weight_map": whole | {"d": "model-3.safetensors"}}))
    with pytest.raises(CorruptData, match=r"model-3.*not there"):
        _check(tmp_path)
    index.write_text(json.dumps({"weight_map": whole | {"d": "model-2.safetensors"}}))
    with pytest.raises(CorruptData, match="lacks it"):
        _check(tmp_path)
    index.write_text("{")
    with pytest.raises(CorruptData, match="no index"):
        _check(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 1) + b"{",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{}x",
        _safetensors({"a": 2})[:-1],
        _safetensors({"a": 2}) + b"x",
        _safetensors({"a": 2, "b": 2}, data_offsets=[0, 8]),
        _safetensors({"a": 2}, shape=[3]),
        _safetensors({"a": 2}, shape=[-2]),
        _safetensors({"a": 2}, shape="2"),
        _safetensors({"a": 2}, data_offsets=[8, 0]),
        _safetensors({"a": 2}, data_offsets=[4, 12]),
        _safetensors({"a": 2}, dtype="F16"),
    ],
)
def test_damaged_files(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CorruptData):
        _check(tmp_path)


@given(st.binary(max_size=40), st.integers(0, 60))
def test_noise_is_refused_and_never_crashes(noise: bytes, at: int) -> None:
    good = _safetensors({"a": 2})
    data = good[:at] + noise

    class OneFile:
        location = parse_store("/model.safetensors")

        def read(self, path: str, *, start: int = 0, length: int | None = None, etag: str = "") -> list[bytes]:
            return [data[start:] if length is None else data[start : start + length]]

    entry = Entry("model.safetensors", len(data))
    try:
        facts = check_model(OneFile(), [entry], single=True)  # type: ignore[arg-type]
    except CorruptData:
        return
    assert facts.parameters * 4 <= len(data)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "a/model.PT", "x.pkl", "x.pth", "x.ckpt", "x.joblib", "x.pickle"]
)
def test_pickles_are_refused_unless_allowed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(CorruptData, match="--allow-pickle"):
        _check(tmp_path)
    assert len(_check(tmp_path, allow_pickle=True).formats) == 1
