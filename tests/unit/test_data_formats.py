from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import shutil
import struct
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy
import pytest
from hypothesis import example, given, settings, strategies as st
from safetensors.numpy import save_file
from tests.trees import tree
from tests.unit.one_file import OneFile

from trainjob.data.formats import allowed
from trainjob.data.locations import parse_store
from trainjob.data.models import check_model
from trainjob.data.stores.files import FileStore
from trainjob.errors import CorruptData

SAMPLES = Path(__file__).parent / "formats"
_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c63600000000200014898e6f40000"
    "000049454e44ae426082"
)


class _MakesDirectory:
    """Loading its pickle creates a directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def _refused(folder: Path) -> dict[str, str]:
    store = FileStore(parse_store(folder))
    return allowed.refusals(store, list(store.list()))


def _zip(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            # Without the present time: the content is part of test names, which all workers must have alike.
            archive.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


def _tar(data: bytes, mode: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]  # the mode is a parameter
        info = tarfile.TarInfo("model_weights.ckpt")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _array(save: Callable[..., None], value: Any, **arrays: Any) -> bytes:
    buffer = io.BytesIO()
    save(buffer, **arrays) if arrays else save(buffer, value, allow_pickle=True)
    return buffer.getvalue()


def _load_array(data: bytes) -> Any:
    return numpy.load(io.BytesIO(data), allow_pickle=True)


def _load_torch(data: bytes) -> object:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return pickle.loads(archive.read("model/data.pkl"))


Form = tuple[str, bytes, Callable[[bytes], object]]


def _pickles(evil: object) -> Iterator[Form]:
    """Files that create the directory of ``evil`` when loaded: name, content, loader."""
    for protocol in range(6):
        yield f"protocol-{protocol}", pickle.dumps(evil, protocol), pickle.loads
    text, binary = pickle.dumps(evil, 0), pickle.dumps(evil)
    for suffix in ("txt", "md", "json", "jsonl", "yaml", "csv", "jinja", "model", "vocab", "toml"):
        yield f"text.{suffix}", text, pickle.loads
        yield f"binary.{suffix}", binary, pickle.loads
    for suffix in ("gguf", "onnx", "npy", "npz", "msgpack", "ubj", "parquet", "arrow", "png", "tflite", "cbm"):
        yield f"named.{suffix}", binary, pickle.loads
    yield "LICENSE", text, pickle.loads
    yield ".gitattributes", text, pickle.loads
    yield "tokenizer.model.v3", text, pickle.loads
    # Instructions that pickletools cannot read, harmless ones first, and text after the last one.
    for number, line in enumerate((b"I0x1", b"L0b1L", b"I0x" + b"1" * 5000)):
        yield f"prefix-{number}.txt", line + b"\n0" + text, _load_with_prefix
    for number, line in enumerate((b"I1\0", b"I012", b"L1\0", b"F1\0", b"I1\np1\0", b"I1\np1\n0g1\0", b"I 1_0 ")):
        yield f"number-{number}.txt", line + b"\n0" + text, pickle.loads
    yield "words.txt", b"S'a harmless text'\n0Vanother\n0(I1\nI2\nl0" + text, pickle.loads
    yield "unended.txt", text.rstrip(b".").replace(b"p2\n", b"").replace(b"p3\n", b"") + b"\nmore text", _to_the_error
    yield "second.txt", b"N." + text, lambda data: [pickle.load(file) for file in [io.BytesIO(data)] for _ in range(2)]
    yield "trailing.md", text + b"\n# A model\n", pickle.loads
    yield "model.pkl.gz", gzip.compress(binary), lambda data: pickle.loads(gzip.decompress(data))
    yield "model.json.gz", gzip.compress(binary), lambda data: pickle.loads(gzip.decompress(data))
    for name, pack, unpack in (
        ("gz", gzip.compress, gzip.decompress),
        ("bz2", bz2.compress, bz2.decompress),
        ("xz", lzma.compress, lzma.decompress),
        ("z", zlib.compress, zlib.decompress),
    ):
        for path in (f"weights.{name}", f"{name}-weights", f"{name}.dat"):
            yield path, pack(binary), lambda data, unpack=unpack: pickle.loads(unpack(data))  # type: ignore[misc]  # bound
    objects = numpy.array([evil], dtype=object)
    yield "objects.npy", _array(numpy.save, objects), _load_array
    fields = numpy.array([(1, evil)], dtype=[("a", "i4"), ("b", "O")])
    yield "fields.npy", _array(numpy.save, fields), _load_array
    yield (
        "objects.npz",
        _array(numpy.savez, None, good=numpy.zeros(3), bad=objects),
        lambda data: _load_array(data)["bad"],
    )
    deflated = _array(numpy.savez_compressed, None, bad=objects)
    yield "compressed.npz", deflated, lambda data: _load_array(data)["bad"]
    torch = _zip(**{"model/data.pkl": binary, "model/data/0": bytes(100_000), "model/version": b"3"})
    for name in ("archive", "archive.npz", "archive.json", "archive.gguf", "archive.onnx", "archive.zip"):
        yield name, torch, _load_torch
    yield "prefix", b"a text" + torch, _load_torch
    yield "prefix.txt", b"a text" + torch, _load_torch
    yield "prefix.npz", b"a text" + torch, _load_torch
    yield "prefix.png", _PNG + torch, _load_torch
    tensors = struct.pack("<Q", 2) + b"{}"
    yield "prefix.safetensors", tensors + torch, _load_torch
    yield "asr.nemo", _tar(binary, "w"), lambda data: _from_tar(data, "r:")
    yield "checkpoint.tar.gz", _tar(binary, "w:gz"), lambda data: _from_tar(data, "r:gz")
    yield "model-tar", _tar(binary, "w"), lambda data: _from_tar(data, "r:")


def _from_tar(data: bytes, mode: str) -> object:
    with tarfile.open(fileobj=io.BytesIO(data), mode=mode) as archive:  # type: ignore[call-overload]  # the mode is a parameter
        return pickle.load(archive.extractfile("model_weights.ckpt"))


def _load_with_prefix(data: bytes) -> None:
    """Load a pickle whose first instruction is a number with the prefix of its base, which Python 3.14 refuses."""
    if sys.version_info >= (3, 14):
        with pytest.raises(ValueError, match="int"):
            pickle.loads(data)
        data = data.partition(b"\n0")[2]
    pickle.loads(data)


def _to_the_error(data: bytes) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 - any error will do: the code has run by then
        pickle.loads(data)


def test_every_form_of_a_pickle_is_rejected(tmp_path: Path) -> None:
    made, folder = tmp_path / "made", tmp_path / "model"
    folder.mkdir()
    names = []
    for name, data, load in _pickles(_MakesDirectory(made)):
        load(data)
        made.rmdir()  # fails unless loading ran the code
        (folder / name).write_bytes(data)
        names.append(name)
    assert len(names) == len(set(names)) > 60
    safetensors = {name for name in names if name.endswith(".safetensors")}
    assert sorted(_refused(folder)) == sorted(set(names))
    for name in safetensors:
        store = FileStore(parse_store(folder))
        with pytest.raises(CorruptData):
            check_model(store, [entry for entry in store.list() if entry.path == name], allow_pickle=True)


UNSAFE = "bin ckpt dill joblib pickle pkl PT pth pyc ipynb tar tgz zip zst pmml"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("modeling_new.py", "import os\n", "Python code"),
        ("config.json", {"auto_map": {"AutoModel": "modeling_new.NewModel"}}, "auto_map"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["a--tokenization.New", None]}}, "auto_map"),
        ("config.json", '{"\\u0061uto_map": {"AutoModel": "m.M"}}', "auto_map"),
        ("config.json", '{"auto_map": {"AutoModel": "m.M"}, "auto_map": {}}', "auto_map"),
        ("config.json", {"custom_pipelines": {"x": {"impl": "pipeline.X"}}}, "custom_pipelines"),
        ("config.json", {"inner": [{"deep": {"auto_map": {"A": "b.C"}}}]}, "auto_map"),
        ("lines.jsonl", '{"a": 1}\n{"auto_map": {"A": "b.C"}}\n', "auto_map"),
        ("model.json", {"layers": [{"class_name": "Lambda", "config": {"function": ["4wEA", None, None]}}]}, "Lambda"),
        ("model.json", {"module": "builtins", "class_name": "function", "config": "exec"}, "builtins"),
        ("modules.json", [{"idx": 0, "name": "0", "path": "", "type": "modeling_new.NewModule"}], "modeling_new"),
        ("model_index.json", {"_class_name": ["pipeline", "NewPipeline"]}, "_class_name"),
        ("jsonpickle.json", {"py/reduce": [{"py/function": "os.system"}, {"py/tuple": ["id"]}]}, "py/"),
        ("hydra.json", {"model": {"_target_": "os.system", "command": "id"}}, "_target_"),
        ("hydra.yaml", "model:\n  _target_: os.system\n  command: id\n", "_target_"),
        ("python.yaml", "!!python/object/apply:os.system [id]\n", "python/object"),
        ("tag.yml", "%TAG !p! tag:yaml.org,2002:python/\n---\n!p!object/apply:os.system [id]\n", "python/object"),
        ("tag.yaml", "!<tag:yaml.org%2C2002:python/object/apply:os.system> [id]\n", "python/object"),
        ("hyperparams.yaml", "pretrainer: !apply:os.system [id]\n", "!apply"),
        ("MLmodel", "flavors: !!python/name:os.system ''\n", "python/name"),
        ("broken.yaml", "a: [1\n", "not YAML"),
        ("broken.json", "{'a': 1}", "not JSON"),
        ("two.json", "{}{}", "not JSON"),
        ("deep.json", "[" * 200_000 + "]" * 200_000, "not JSON"),
        ("latin.txt", b"caf\xe9", "UTF-8"),
        ("nul.txt", b"a\0b", "not text"),
        ("cut.txt", "é".encode()[:1], "UTF-8"),
        ("run", "#!/bin/sh\nid\n", "script"),
        *((f"a.{suffix}", "text", "") for suffix in UNSAFE.split()),
        ("run.sh", "id\n", "suffix"),
        ("model.keras", _zip(**{"config.json": b"{}"}), "Keras"),
        ("model.h5", b"\x89HDF\r\n\x1a\n", "Keras"),
        ("saved_model.pb", b"\x08\x01", "TensorFlow"),
        ("model.mar", _zip(a=b""), "archive"),
        ("unknown", b"\1\2\3\xff", "text"),
        ("data.unknown", b"text", "suffix"),
        ("a.gguf", b"GGUF\3" + bytes(10), "GGUF"),
        ("a.gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**60), "GGUF"),
        ("a.gguf", b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<IQIQ", 1, 4, 0, 999), "truncated"),
        ("a.onnx", b"", "ONNX"),
        ("a.onnx", b"\x08\x07\x3a\x05ab", "ONNX"),
        ("a.model", b"\n\x03\x0a\x01a\x2a\x09\xff", "SentencePiece"),
        ("a.msgpack", b"\x83\xa2nd\xc3\xa4kind\xc4\1O\xa4data\xc4\1.", "objects"),
        ("a.msgpack", b"\x80\x04\x95", "MessagePack"),
        ("a.msgpack", b"\x81\xa1a\xc6\0\0\1\0", "truncated"),
        ("a.npy", b"\x93NUMPY\1\0\x20\0" + b"{'descr': '<f4', 'shape': (4,)} " + bytes(8), "header states"),
        ("a.npy", b"\x93NUMPY\1\0\x20\0" + b"{'descr': exit(), 'shape': (4,)}", "an invalid header"),
        ("a.parquet", b"PAR1" + bytes(20), "Parquet"),
        ("a.arrow", bytes(20), "Arrow"),
        ("events.out.tfevents.1.host", bytes(20), "TensorBoard"),
        (".zarray", {"dtype": "|O", "compressor": None, "filters": [{"id": "json2"}]}, "Python objects"),
        (".zarray", {"dtype": "<f4", "compressor": None, "filters": [{"id": "pickle"}]}, "Python objects"),
        ("0.0", b"\x80\4.", "suffix"),
        ("manifest.ocdbt", b"\x80\4.", "format of its suffix"),
        ("d/0123456789abcdef0123456789abcdef", b"\x80\4.", "text"),
    ],
)  # fmt: skip
def test_unsafe_files_are_rejected(tmp_path: Path, name: str, content: object, reason: str) -> None:
    text = content if isinstance(content, bytes | str) else json.dumps(content)
    tree(tmp_path, {name: text.encode() if isinstance(text, str) else text})
    refused = _refused(tmp_path)
    assert list(refused) == [name]
    assert reason in refused[name]


def test_samples_of_the_libraries_are_classified() -> None:
    good = SAMPLES / "good"
    assert _refused(good) == {}
    assert len([path for path in good.rglob("*") if path.is_file()]) > 30
    pickled = SAMPLES / "pickled"
    assert sorted(_refused(pickled)) == sorted(path.name for path in pickled.iterdir())


def test_truncated_samples_are_rejected(tmp_path: Path) -> None:
    """Each is cut in its header or at its end; a check of names only would accept it."""
    names = ["flax_model.msgpack", "model.gguf", "small.onnx", "stream.arrow", "table.feather", "table.parquet"]
    for name in (*names, "tokenizer.model", "xgboost.json"):
        data = (SAMPLES / "good" / name).read_bytes()
        (tmp_path / name).write_bytes(data[:20])
        (tmp_path / f"cut-{name}").write_bytes(data[: len(data) - 9])
    refused = _refused(tmp_path)
    assert {name for name in refused if not name.startswith("cut-")} == {*names, "tokenizer.model", "xgboost.json"}
    # The tensors of a GGUF file are padded, and the end of an Arrow stream is optional.
    assert {f"cut-{name}" for name in names} - {"cut-model.gguf", "cut-stream.arrow"} <= set(refused)


def test_external_data_must_be_named_by_a_model(tmp_path: Path) -> None:
    model = (SAMPLES / "good/large.onnx").read_bytes()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/a.onnx").write_bytes(model)
    (tmp_path / "large.onnx.data").write_bytes(bytes(512))
    assert sorted(_refused(tmp_path)) == ["large.onnx.data", "model/a.onnx"]
    (tmp_path / "large.onnx.data").rename(tmp_path / "model/large.onnx.data")
    assert _refused(tmp_path) == {}
    (tmp_path / "model/a.onnx").write_bytes(model.replace(b"large.onnx.data", b"../../evil.data"))
    assert sorted(_refused(tmp_path)) == ["model/a.onnx", "model/large.onnx.data"]
    for name in ("large.onnx.json", "largest.one.npy", "large.data.yaml", "large.model.pth"):  # is checked as such
        named = model.replace(b"large.onnx.data", name.encode())
        folder = tree(tmp_path / name, {"a.onnx": named, name: pickle.dumps([1])})
        assert list(_refused(folder)) == [name]


def test_common_files_of_hub_repositories_are_accepted(tmp_path: Path) -> None:
    """Files that `transformers` and the Hub itself write, with realistic content."""
    shutil.copytree(SAMPLES / "hub", tmp_path, dirs_exist_ok=True)
    save_file({"w": numpy.zeros((2, 3), "float16")}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokenizer = (SAMPLES / "good/tokenizer.model").read_bytes()
    binaries = {"assets/figure.png": _PNG, "assets/photo.jpg": b"\xff\xd8\xff\xe0" + bytes(100)}
    binaries |= {"tokenizer.model": tokenizer, "tokenizer.model.v3": tokenizer}
    # In the repository, git would obey these two.
    binaries |= {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n", ".gitignore": b"*.bin\n"}
    tree(tmp_path, binaries)
    numpy.savez(tmp_path / "arrays.npz", a=numpy.zeros(3), b=numpy.array(["x", "yy"]))
    numpy.save(tmp_path / "fields.npy", numpy.zeros(3, [("a", "<i4"), ("b", "<f8", (2, 2)), ("c", "S3"), ("d", "U2")]))
    numpy.save(tmp_path / "times.npy", numpy.zeros((), "datetime64[ns]"))
    assert _refused(tmp_path) == {}


@pytest.mark.parametrize(
    "text",
    [
        *("", "\n", ".\n", ".gitignore\n", "N.A.\n", "(c) 2026, somebody\n", "label,score\n", "input\noutput\n"),
        *("cat\ndog\nbird\n", "cow\ncat\ncar\nbus\nbike\nape\n", "cow\ncat\ncar\nbus\nape\nbike\n"),
        *("cos\nsin\ntan\nReLU\n", "cos\nsin\n", "(cos\nsin\ntanh\nRest of the text\n", "I am a text\n", "Is\n1\n.\n"),
        *("Text is an instruction to read half a gigabyte\n", "Python\nis a language\n", "Very\n.hidden\n"),
    ],
)
def test_text_that_starts_like_a_pickle_is_accepted(tmp_path: Path, text: str) -> None:
    (tmp_path / "labels.txt").write_text(text)
    assert _refused(tmp_path) == {}


class _Broken(OneFile):
    """A store that serves only the first range."""

    def read(self, path: str, *, start: int = 0, length: int | None = None, etag: str = "") -> list[bytes]:
        if start:
            raise CorruptData("it changed while it was read")
        return super().read(path, start=start, length=length, etag=etag)


def _refusals(store: Any) -> dict[str, str]:
    return allowed.refusals(store, store.entries, single=True)


def test_unreadable_files_are_not_accepted() -> None:
    with pytest.raises(CorruptData, match="it changed"):
        _refusals(_Broken(b"S'" + b"a" * 100_000 + b"'\n.", "labels.txt"))


_WORDS = st.lists(st.from_regex(r"[a-zA-Z][a-z]{1,6}", fullmatch=True), max_size=12)


class _Named(Exception):
    """A pickle imports a class or function."""


class _Loader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise _Named(module, name)


@settings(max_examples=200)
@example(["Ja", "Aaca", "Aa", "Ja", "Aaa"], "\n")  # a number, then the import of Aa from a
@given(_WORDS, st.sampled_from(["\n", " ", ",", "\t"]))
def test_words_are_not_detected_as_a_pickle(words: list[str], separator: str) -> None:
    """Unless they are one: few words begin with instructions that import a name."""
    data = separator.join(words).encode()
    if _refusals(OneFile(data, "labels.txt")):
        with pytest.raises(_Named):
            _Loader(io.BytesIO(data)).load()


@settings(max_examples=200)
@given(st.binary(max_size=200), st.sampled_from(sorted(set(allowed.FORMS) - {"", ".safetensors"})))
def test_invalid_files_never_crash_the_check(noise: bytes, suffix: str) -> None:
    good = next((path for path in sorted((SAMPLES / "good").rglob(f"*{suffix}")) if path.is_file()), None)
    data = good.read_bytes() if good is not None else b""
    at = noise[0] % (len(data) + 1) if noise else 0
    data = data[:at] + noise + data[at + len(noise) :]
    assert set(_refusals(OneFile(data, f"a{suffix}"))) <= {f"a{suffix}"}


def test_only_headers_and_ends_of_large_files_are_read() -> None:
    gguf = OneFile((SAMPLES / "good/model.gguf").read_bytes() + bytes(50_000_000), "model.gguf")
    assert _refusals(gguf) == {}
    assert gguf.read_bytes < 300_000
    table = OneFile(b"a line of a table\n" * 500_000, "table.csv")
    assert _refusals(table) == {}
    assert table.read_bytes < len(table.data) + 300_000


def test_documentation_lists_every_format() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/provenance-and-signatures.md").read_text()
    table = page.partition("## Files that an export accepts")[2].partition("\n## ")[0]
    suffixes = " ".join(line.split("|")[2] for line in table.splitlines() if line.startswith("|"))
    named = {word.strip("`,") for word in suffixes.split() if word.startswith("`.")} - {".zarray"}
    assert named == set(allowed.FORMS) - {""}
