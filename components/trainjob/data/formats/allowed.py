"""Which files of a model cannot run code when they are loaded: the decision."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath

from trainjob.data.formats import pickled, tables, tensors, texts, wires
from trainjob.data.formats.candidates import Candidate, Refused
from trainjob.data.parallel import for_each
from trainjob.data.stores.base import Entry, ReadableStore

Check = Callable[[Candidate], object]
"""Raises Refused."""

_AT_ONCE = 16  # files; most of the time is spent waiting for the first bytes
_ZIP_END = re.compile(rb"PK\x05\x06(?:\x00{4}|\xff{4})")
_ZIP_TAIL = 22 + 65_535  # bytes: the record at the end of a zip archive, and the longest comment behind it


def _starts(*signatures: bytes, at: int = 0) -> Check:
    def check(candidate: Candidate) -> None:
        head = candidate.head(64)
        if not any(re.match(signature, head[at:], re.DOTALL) for signature in signatures):
            raise Refused("is not what its name says")

    return check


def _text_or(other: Check) -> Check:
    """For names that two programs use: text, or something else."""

    def check(candidate: Candidate) -> None:
        try:
            texts.text(candidate)
        except Refused:
            other(candidate)

    return check


def _safetensors(candidate: Candidate) -> None:
    """Checked by `trainjob.data.models`, allowed or not."""


_TEXTS = (
    ".bpe .bib .cfg .chk .crt .csv .j2 .jinja .jinja2 .labels .lgb .log .md .md5 .merges .names .pbtxt .pem .rst"
    " .sha256 .tiktoken .tmpl .toml .tsv .txt .vocab"
)
_XGBOOST = rb"\{L\x00{7}\x07learner"  # UBJSON: an object, the length of its first key, and the key

FORMS: Mapping[str, Check] = {
    "": texts.text,
    **dict.fromkeys(_TEXTS.split(), texts.text),
    **dict.fromkeys((".json", ".sig"), texts.json_text),
    **dict.fromkeys((".jsonl", ".ndjson"), texts.json_lines),
    **dict.fromkeys((".yaml", ".yml", ".cff"), texts.yaml_text),
    ".safetensors": _safetensors,
    ".gguf": tensors.gguf,
    ".npy": tensors.npy,
    ".npz": tensors.npz,
    ".onnx": wires.onnx,
    ".msgpack": wires.msgpack,
    **dict.fromkeys((".model", ".spm"), _text_or(wires.sentencepiece)),
    **dict.fromkeys((".ubj", ".xgb"), _starts(_XGBOOST)),
    **dict.fromkeys((".cbm", ".cb"), _starts(rb"CBM1")),
    ".tflite": _starts(rb"TFL3", at=4),
    ".ort": _starts(rb"ORTM", at=4),
    ".parquet": tables.parquet,
    **dict.fromkeys((".arrow", ".feather"), tables.arrow),
    ".tfevents": tables.events,
    ".png": _starts(rb"\x89PNG\r\n\x1a\n"),
    **dict.fromkeys((".jpg", ".jpeg"), _starts(rb"\xff\xd8\xff")),
    ".gif": _starts(rb"GIF8[79]a"),
    ".webp": _starts(rb"RIFF....WEBP"),
    ".bmp": _starts(rb"BM"),
    ".ico": _starts(rb"\x00\x00\x01\x00"),
    ".wav": _starts(rb"RIFF....WAVE"),
}
"""The forms, by the suffix of the name. Of each, the content is checked."""

_KNOWN = {
    **dict.fromkeys((".bin", ".ckpt", ".dill", ".joblib", ".pickle", ".pkl", ".pt", ".pth"), "is a pickle by its name"),
    **dict.fromkeys((".py", ".pyc", ".ipynb"), "is Python code"),
    **dict.fromkeys((".h5", ".hdf5", ".keras"), "is a form of Keras, which can hold Python code"),
    ".pb": "is a TensorFlow graph, whose operators read and write files",
    **dict.fromkeys(
        (".7z", ".bz2", ".gz", ".mar", ".nemo", ".tar", ".tgz", ".xz", ".zip", ".zst"),
        "is an archive, which is not looked into",
    ),
}
_NUMBERED = re.compile(r"\.v\d+$")  # Mistral's tokenizer.model.v3
_CHUNK = re.compile(r"\d+(?:\.\d+)*")
_BLOB = re.compile(r"[0-9a-f]{32}")


def refusals(store: ReadableStore, files: Iterable[Entry], *, single: bool = False) -> dict[str, str]:
    """Which of the files could run code when they are loaded, or are not of the form that their name says, and why.

    Text is read as a whole; of other forms the headers, and the last 64 KiB, where readers of zip archives look.

    Args:
        store: Where they are.
        files: All files of the model.
        single: ``store`` is the one file.

    Returns:
        Reasons by path, in order; each completes a sentence whose subject is the file.
    """
    folder = _Folder({entry.path: Candidate(store, "" if single else entry.path, entry) for entry in files})
    return dict(sorted(folder.refused().items()))


def suffix(path: str) -> str:
    """Of the file's name, in lower case, with the dot; empty for a name without one, such as ``.gitattributes``."""
    return PurePosixPath(_NUMBERED.sub("", path)).suffix.lower()


class _Folder:
    """The files of one model. Some of them only name what is in others, which have no form by themselves."""

    def __init__(self, files: Mapping[str, Candidate]) -> None:
        self._files = files
        self._reasons: dict[str, str] = {}
        self._external: set[str] = set()
        self._ocdbt: set[str] = set()
        self._zarr: set[str] = set()

    def refused(self) -> dict[str, str]:
        """Reasons by path."""
        naming = [path for path in self._files if self._naming(path) is not None]
        for_each(self._check, naming, _AT_ONCE)
        for_each(self._check, [path for path in self._files if path not in set(naming)], _AT_ONCE)
        return self._reasons

    def _check(self, path: str) -> None:
        candidate = self._files[path]
        try:
            check = self._naming(path) or self._form(path)
            if check is not None:
                check(candidate)
                pickled.check(candidate.file, candidate.size)
                if suffix(path) != ".npz" and _ZIP_END.search(candidate.tail(_ZIP_TAIL)):
                    raise Refused("ends as a zip archive does")
        except Refused as refused:
            self._reasons[path] = refused.reason
        finally:
            candidate.close()

    def _naming(self, path: str) -> Check | None:
        """The check of a file that names what is in others."""
        name = path.rpartition("/")[2]
        if name == "manifest.ocdbt":
            return self._ocdbt_manifest
        if name == ".zarray":
            return self._zarray
        return self._onnx if suffix(path) == ".onnx" else None

    def _form(self, path: str) -> Check | None:
        """The check of any other file; None for the data that one of those has named."""
        parent, _, name = path.rpartition("/")
        kind = ".tfevents" if "tfevents" in name.split(".") else ".yaml" if name == "MLmodel" else suffix(path)
        if kind in _KNOWN:
            raise Refused(_KNOWN[kind])
        if kind in FORMS and kind:
            return FORMS[kind]
        if (
            path in self._external
            or (_BLOB.fullmatch(name) and parent in self._ocdbt)
            or (_CHUNK.fullmatch(name) and parent in self._zarr)
        ):
            return None
        if kind:
            raise Refused(f"has the suffix {kind!a}, which stands for no form that is known to be safe")
        return FORMS[kind]

    def _onnx(self, candidate: Candidate) -> None:
        for location in wires.onnx(candidate):
            path = str(PurePosixPath(candidate.path).parent / location)
            if path not in self._files:
                raise Refused(f"names the file {location[:200]!a}, which is not there")
            self._external.add(path)

    def _ocdbt_manifest(self, candidate: Candidate) -> None:
        _starts(rb"\x0c\xdb\x3a\x2a")(candidate)
        self._ocdbt.add(str(PurePosixPath(candidate.path).parent / "d"))

    def _zarray(self, candidate: Candidate) -> None:
        texts.zarray(candidate)
        self._zarr.add(candidate.path.rpartition("/")[0])
