"""Decoding of an API server's replies."""

from __future__ import annotations

import gc
import json
from typing import Any

import msgspec
import pytest

from trainjob._backends.kubernetes.client import decode_list

META: dict[str, Any] = {
    "name": "a",
    "generateName": "a-",
    "namespace": "b",
    "uid": "c",
    "resourceVersion": "1",
    "generation": 2,
    "creationTimestamp": None,
    "deletionTimestamp": "2026-11-21T10:00:00Z",
    "deletionGracePeriodSeconds": 30,
    "labels": {"d": "e"},
    "annotations": {"f": '"managedFields":[]'},
    "ownerReferences": [{"uid": "g", "controller": True}],
    "finalizers": ["h"],
}
REST = {
    "spec": {"i": [1, 2.5, None, {"metadata": {"managedFields": [1]}}]},
    "status": {},
    "involvedObject": {"name": "j"},
}


def test_managed_fields_of_items_are_removed() -> None:
    item = {"metadata": META | {"managedFields": [{"manager": "k"}]}, **REST}
    reply = {"kind": "PodList", "metadata": {"continue": "m", "resourceVersion": "9"}, "items": [item]}
    found = decode_list(json.dumps(reply).encode())
    assert found == {"metadata": reply["metadata"], "items": [{"metadata": META, **REST}]}


@pytest.mark.parametrize("reply", [b"{}", b'{"items": null, "metadata": null}', b'{"items": []}'])
def test_empty_lists_are_decoded(reply: bytes) -> None:
    assert decode_list(reply) == {"metadata": {}, "items": []}


@pytest.mark.parametrize("reply", [b"", b"[]", b'{"items": [{"metadata"', b'{"items": [1]}', b'{"items": {}}'])
def test_invalid_replies_are_rejected_and_garbage_collection_stays_enabled(reply: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_list(reply)
    assert gc.isenabled()
