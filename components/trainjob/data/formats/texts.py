"""Check text, JSON and YAML: UTF-8 without references to Python code that a loader would call."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any

import yaml

from trainjob._support.foreign import Unreadable, json_of
from trainjob.data.formats.candidates import Candidate, Refused

_LONGEST = 100_000_000
"""Limit of JSON or YAML, in bytes, as in the safetensors library: more could fill the memory."""
_LARGE, _ONE_LARGE_FILE = 1_000_000, Lock()  # bytes; see `_lock_if_large`
_PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # SafeLoader is ten times slower
# Tags of YAML 1.1 itself; applications define the meaning of any other tag.
_NAMES = "binary bool float int map merge null omap pairs seq set str timestamp"
_TAGS = frozenset({"!", *(f"tag:yaml.org,2002:{name}" for name in _NAMES.split())})
# Keys whose values refer to Python code: of transformers (remote code, custom pipelines) and of Hydra.
_CODE = frozenset({"auto_map", "custom_pipelines", "_target_"})
_JSONPICKLE = "py/"
# Objects that refer to a Python module: their keys, the key with the module, and the allowed packages. Layers of Keras,
# and modules of Sentence Transformers.
_MODULES = (
    ({"class_name", "module"}, "module", ("keras", "tf_keras", "tensorflow")),
    ({"idx", "name", "path", "type"}, "type", ("sentence_transformers",)),
)


def text(candidate: Candidate) -> None:
    """Check that the file is UTF-8 without NUL, and not a script."""
    for _ in _decoded(candidate):
        pass
    if candidate.head(2) == b"#!":
        raise Refused("is a script")


def json_text(candidate: Candidate) -> None:
    """Check that the file is one JSON value."""
    with _lock_if_large(candidate):
        _json(_text_of(candidate, "JSON"))


def json_lines(candidate: Candidate) -> None:
    """Check that every line is a JSON value or empty."""
    rest = ""
    for each in _decoded(candidate):
        *lines, rest = (rest + each).split("\n")
        if len(rest) > _LONGEST:
            raise Refused(f"has a line of more than {_LONGEST} characters")
        for line in lines:
            if line.strip():
                _json(line)
    if rest.strip():
        _json(rest)


def yaml_text(candidate: Candidate) -> None:
    """Check that the file is YAML without tags of applications, such as ``!!python/object``."""
    try:
        with _lock_if_large(candidate):
            for event in yaml.parse(_text_of(candidate, "YAML"), Loader=_PARSER):
                tag = getattr(event, "tag", None)
                if tag is not None and tag not in _TAGS:
                    raise Refused(f"has the YAML tag {str(tag)[:80]!a}, which can run code")
                if isinstance(event, yaml.ScalarEvent) and event.value in _CODE:
                    raise Refused(f"refers to Python code ({event.value})")
    except yaml.YAMLError:
        raise Refused("is not YAML") from None


def zarray(candidate: Candidate) -> None:
    """Check that the file describes an array of Zarr 2 whose chunks are not pickles."""
    json_text(candidate)
    try:
        described = json_of(candidate.head(candidate.size), "an array of Zarr 2")
        codecs_ = [each["id"] for each in (described["compressor"], *(described["filters"] or ())) if each]
        pickles = "pickle" in codecs_ or "O" in json.dumps(described["dtype"])
    except (Unreadable, KeyError, TypeError):
        raise Refused("does not describe an array of Zarr 2") from None
    if pickles:
        raise Refused("describes an array of Python objects, which are pickles")


def _lock_if_large(candidate: Candidate) -> AbstractContextManager[object]:
    """Allow one large file at a time: parsing a tokenizer's 35 MB of JSON takes 190 MB."""
    return _ONE_LARGE_FILE if candidate.size > _LARGE else nullcontext()


def _decoded(candidate: Candidate) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in candidate.chunks():
            if b"\0" in chunk:
                raise Refused("is not text")
            yield decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise Refused("is not UTF-8 text") from None


def _text_of(candidate: Candidate, form: str) -> str:
    if candidate.size > _LONGEST:
        raise Refused(f"has {candidate.size} bytes of {form}; at most {_LONGEST} are allowed")
    return "".join(_decoded(candidate))


def _json(value: str) -> None:
    try:
        json.loads(value, object_pairs_hook=_check_object)
    except (ValueError, RecursionError):
        raise Refused("is not JSON") from None


def _check_object(pairs: list[tuple[str, Any]]) -> bool:
    """Check the keys of one object; returns whether it has any, and keeps nothing else of it."""
    names = dict(pairs)
    for key, value in pairs:
        # A vocabulary may have any of these words as a key, with a number as its value.
        given = bool(value) and (value is True or isinstance(value, str | list))
        if given and (key in _CODE or key.startswith(_JSONPICKLE)):
            raise Refused(f"refers to Python code ({key})")
        if key == "class_name" and value == "Lambda":
            raise Refused("has a Lambda layer of Keras, which contains Python code")
        if key == "_class_name" and isinstance(value, list):
            raise Refused("refers to a pipeline whose code comes with the model (_class_name)")
    for keys, key, known in _MODULES:
        module = names.get(key)
        if keys <= names.keys() and isinstance(module, str) and module.partition(".")[0] not in known:
            raise Refused(f"refers to Python code ({module[:80]})")
    return bool(pairs)
