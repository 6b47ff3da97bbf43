"""Text, JSON and YAML: UTF-8 that names no Python code to be called."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any

import yaml

from trainjob.data.formats.candidates import Candidate, Refused

_LONGEST = 100_000_000
"""Bytes of JSON or YAML that are parsed at once, as in the safetensors library: more could fill the memory."""
_LARGE, _ALONE = 1_000_000, Lock()  # bytes; see `_turn`
_PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the other one is ten times slower
# YAML's own (1.1); any other stands for what an application makes of it.
_NAMES = "binary bool float int map merge null omap pairs seq set str timestamp"
_TAGS = frozenset({"!", *(f"tag:yaml.org,2002:{name}" for name in _NAMES.split())})
# Keys whose values name Python code: of transformers (remote code, custom pipelines) and of Hydra.
_CODE = frozenset({"auto_map", "custom_pipelines", "_target_"})
_JSONPICKLE = "py/"
# Keys of an object that names a Python module, which of them does, and the packages that it may be in: layers of Keras,
# and the modules of Sentence Transformers.
_MODULES = (
    ({"class_name", "module"}, "module", ("keras", "tf_keras", "tensorflow")),
    ({"idx", "name", "path", "type"}, "type", ("sentence_transformers",)),
)


def text(candidate: Candidate) -> None:
    """Check that it is UTF-8 without NUL, and no script."""
    for _ in _decoded(candidate):
        pass
    if candidate.head(2) == b"#!":
        raise Refused("is a script")


def json_text(candidate: Candidate) -> None:
    """Check that it is one JSON value."""
    with _turn(candidate):
        _json(_whole(candidate, "JSON"))


def json_lines(candidate: Candidate) -> None:
    """Check that every line is a JSON value, or empty."""
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
    """Check that it is YAML without tags of applications, such as ``!!python/object``."""
    try:
        with _turn(candidate):
            for event in yaml.parse(_whole(candidate, "YAML"), Loader=_PARSER):
                tag = getattr(event, "tag", None)
                if tag is not None and tag not in _TAGS:
                    raise Refused(f"has the YAML tag {str(tag)[:80]!a}, which can stand for code")
                if isinstance(event, yaml.ScalarEvent) and event.value in _CODE:
                    raise Refused(f"names Python code to call ({event.value})")
    except yaml.YAMLError:
        raise Refused("is not YAML") from None


def zarray(candidate: Candidate) -> None:
    """Check that it describes an array of Zarr 2 whose chunks are no pickles."""
    json_text(candidate)
    described = json.loads(candidate.head(candidate.size))
    try:
        codecs_ = [each["id"] for each in (described["compressor"], *(described["filters"] or ())) if each]
        pickles = "pickle" in codecs_ or "O" in json.dumps(described["dtype"])
    except (KeyError, TypeError):
        raise Refused("does not describe an array of Zarr 2") from None
    if pickles:
        raise Refused("describes an array of Python objects, which are pickles")


def _turn(candidate: Candidate) -> AbstractContextManager[object]:
    """Parse one large file at a time: a tokenizer's 35 MB of JSON take 190 MB."""
    return _ALONE if candidate.size > _LARGE else nullcontext()


def _decoded(candidate: Candidate) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in candidate.chunks():
            if b"\0" in chunk:
                raise Refused("is not text")
            yield decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise Refused("is not text in UTF-8") from None


def _whole(candidate: Candidate, form: str) -> str:
    if candidate.size > _LONGEST:
        raise Refused(f"has {candidate.size} bytes of {form}; up to {_LONGEST} are checked")
    return "".join(_decoded(candidate))


def _json(value: str) -> None:
    try:
        json.loads(value, object_pairs_hook=_check_object)
    except (ValueError, RecursionError):
        raise Refused("is not JSON") from None


def _check_object(pairs: list[tuple[str, Any]]) -> bool:
    """Check the keys of one object, and return whether it has any: nothing else is kept of it."""
    names = dict(pairs)
    for key, value in pairs:
        # A vocabulary may have any of these words, with a number.
        given = bool(value) and (value is True or isinstance(value, str | list))
        if given and (key in _CODE or key.startswith(_JSONPICKLE)):
            raise Refused(f"names Python code to call ({key})")
        if key == "class_name" and value == "Lambda":
            raise Refused("has a Lambda layer of Keras, which holds Python code")
        if key == "_class_name" and isinstance(value, list):
            raise Refused("names a pipeline whose code comes with the model (_class_name)")
    for keys, key, known in _MODULES:
        module = names.get(key)
        if keys <= names.keys() and isinstance(module, str) and module.partition(".")[0] not in known:
            raise Refused(f"names Python code to call ({module[:80]})")
    return bool(pairs)
