"""Decide which files of a model cannot run code when they are loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath

from trainjob.data.formats import onnx, pickled, tables, tensors, texts
from trainjob.data.formats.candidates import Candidate, Refused
from trainjob.data.parallel import for_each
from trainjob.data.stores.base import Entry, ReadableStore

Check = Callable[[Candidate], object]
"""Raises Refused if the file is not allowed."""

_AT_ONCE = 16  # files; most of the time is spent waiting for the first bytes
_ZIP_END = re.compile(rb"PK\x05\x06(?:\x00{4}|\xff{4})")
_ZIP_TAIL = 22 + 65_535  # bytes: the end record of a zip archive, and the longest comment after it


def _starts(*signatures: bytes, at: int = 0) -> Check:
    def check(candidate: Candidate) -> None:
        head = candidate.head(64)
        if not any(re.match(signature, head[at:], re.DOTALL) for signature in signatures):
            raise Refused("does not have the format of its suffix")

    return check


def _text_or(other: Check) -> Check:
    """For suffixes that two programs use: text, or another format."""

    def check(candidate: Candidate) -> None:
        try:
            texts.text(candidate)
        except Refused:
            other(candidate)

    return check


def _safetensors(candidate: Candidate) -> None:
    """Always checked by `trainjob.data.models`."""


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
    ".onnx": onnx.onnx,
    ".msgpack": onnx.msgpack,
    **dict.fromkeys((".model", ".spm"), _text_or(onnx.sentencepiece)),
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
"""Allowed formats, by suffix, with the check of the content."""

_KNOWN = {
    **dict.fromkeys(
        (".bin", ".ckpt", ".dill", ".joblib", ".pickle", ".pkl", ".pt", ".pth"), "has the suffix of a pickle"
    ),
    **dict.fromkeys((".py", ".pyc", ".ipynb"), "is Python code"),
    **dict.fromkeys((".h5", ".hdf5", ".keras"), "is a Keras model, which can contain Python code"),
    ".pb": "is a TensorFlow graph, whose operators can read and write files",
    **dict.fromkeys(
        (".7z", ".bz2", ".gz", ".mar", ".nemo", ".tar", ".tgz", ".xz", ".zip", ".zst"),
        "is an archive, whose content is not checked",
    ),
}
_NUMBERED = re.compile(r"\.v\d+$")  # Mistral's tokenizer.model.v3
_CHUNK = re.compile(r"\d+(?:\.\d+)*")
_BLOB = re.compile(r"[0-9a-f]{32}")


def refusals(store: ReadableStore, files: Iterable[Entry], *, single: bool = False) -> dict[str, str]:
    """Find the files that could run code when they are loaded, or do not have the format of their suffix.

    Text is read completely. Of other formats the headers and the last 64 KiB are read, where readers of zip archives
    look.

    Args:
        store: Store of the files.
        files: All files of the model.
        single: ``store`` is opened at the only file.

    Returns:
        Reasons by path, in order; each completes a sentence whose subject is the file.
    """
    folder = _Folder({entry.path: Candidate(store, "" if single else entry.path, entry) for entry in files})
    return dict(sorted(folder.refused().items()))


def suffix(path: str) -> str:
    """The suffix of the file's name, in lower case, with the dot; empty without one, as in ``.gitattributes``."""
    return PurePosixPath(_NUMBERED.sub("", path)).suffix.lower()


class _Folder:
    """The files of one model. Some files refer to others, which have no format of their own."""

    def __init__(self, files: Mapping[str, Candidate]) -> None:
        self._files = files
        self._reasons: dict[str, str] = {}
        self._external: set[str] = set()
        self._ocdbt: set[str] = set()
        self._zarr: set[str] = set()

    def refused(self) -> dict[str, str]:
        """Reasons by path."""
        referring = {path: None for path in self._files if self._referring(path) is not None}
        for_each(self._check, referring, _AT_ONCE)
        for_each(self._check, [path for path in self._files if path not in referring], _AT_ONCE)
        return self._reasons

    def _check(self, path: str) -> None:
        candidate = self._files[path]
        try:
            check = self._referring(path) or self._format(path)
            if check is not None:
                check(candidate)
                pickled.check(candidate.file, candidate.size)
                if suffix(path) != ".npz" and _ZIP_END.search(candidate.tail(_ZIP_TAIL)):
                    raise Refused("ends like a zip archive")
        except Refused as refused:
            self._reasons[path] = refused.reason
        finally:
            candidate.close()

    def _referring(self, path: str) -> Check | None:
        """The check of a file that refers to others."""
        name = path.rpartition("/")[2]
        if name == "manifest.ocdbt":
            return self._ocdbt_manifest
        if name == ".zarray":
            return self._zarray
        return self._onnx if suffix(path) == ".onnx" else None

    def _format(self, path: str) -> Check | None:
        """The check of any other file; None for data to which a checked file refers."""
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
            raise Refused(f"has the suffix {kind!a}, which is not a format known to be safe")
        return FORMS[kind]

    def _onnx(self, candidate: Candidate) -> None:
        for location in onnx.onnx(candidate):
            path = str(PurePosixPath(candidate.path).parent / location)
            if path not in self._files:
                raise Refused(f"refers to the file {location[:200]!a}, which does not exist")
            self._external.add(path)

    def _ocdbt_manifest(self, candidate: Candidate) -> None:
        _starts(rb"\x0c\xdb\x3a\x2a")(candidate)
        self._ocdbt.add(str(PurePosixPath(candidate.path).parent / "d"))

    def _zarray(self, candidate: Candidate) -> None:
        texts.zarray(candidate)
        self._zarr.add(candidate.path.rpartition("/")[0])
