"""Requests to a Kubeflow Model Registry in order, with the replies of the real server: a line of `recorded.jsonl` each.

::

    python -m tests.registry.recorder http://127.0.0.1:8080 v1alpha3    # sends them to a server, and writes its replies

The server is no package that can be installed: build it from a checkout of kubeflow/hub (``go build .``) and start
``model-registry proxy`` with an empty database of PostgreSQL 16 or newer. The replies in the file are those of bd07139
(2026-04-29). Names stand in place of ids: ``{e1}`` is the id of the object whose external id, otherwise name, is e1.
With ``TRAINJOB_TEST_MODEL_REGISTRY=<URL>`` the contract of the registries (`tests.registry.test_contract`) runs on such
a server as well: 12 of 12 cases passed on that one.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

RECORDED = Path(__file__).with_name("recorded.jsonl")


def read() -> list[dict[str, Any]]:
    """The recorded requests, each with ``status`` and ``reply``."""
    return [json.loads(line) for line in RECORDED.read_text().splitlines()]


def replies(url: str, version: str) -> Iterator[dict[str, Any]]:
    """Send the recorded requests to a server with an empty database; yield them with its replies."""
    ids: dict[str, str] = {}
    with httpx.Client(base_url=f"{url}/api/model_registry/{version}/", timeout=30) as client:
        for line in read():
            method, path, query, body = _filled([line[key] for key in ("method", "path", "query", "body")], ids)
            response = client.request(method, path, params=query, **({} if body is None else {"json": body}))
            is_json = response.headers.get("Content-Type", "").startswith("application/json")
            reply = response.json() if is_json else {}
            if response.status_code == 201:
                ids[_named(reply)] = reply["id"]
            yield {**line, "status": response.status_code, "reply": _plain(reply, ids)}


def _named(created: dict[str, Any]) -> str:
    """How requests of `recorded.jsonl` name an object: objects without a name get a random one."""
    table = "artifact:" if "artifactType" in created else ""
    return table + str(created.get("externalId") or created["name"])[:20]


def _filled(request: Any, ids: dict[str, str]) -> Any:
    return json.loads(re.sub(r"\{([\w:]+)\}", lambda match: ids.get(match[1], match[0]), json.dumps(request)))


def _plain(reply: Any, ids: dict[str, str]) -> Any:
    """A reply without ids, times, random names and the wording of errors."""
    if isinstance(reply, list):
        return [_plain(each, ids) for each in reply]
    if not isinstance(reply, dict):
        return reply
    table = "artifact:" if "artifactType" in reply else ""
    names = {number: name for name, number in ids.items() if name.startswith("artifact:") == bool(table)}
    plain = {key: _plain(value, ids) for key, value in reply.items() if key != "message"}
    for key in plain.keys() & {"id", "registeredModelId"}:
        plain[key] = f"{{{names.get(plain[key], plain[key])}}}"
    for key in plain.keys() & {"createTimeSinceEpoch", "lastUpdateTimeSinceEpoch", "nextPageToken"}:
        plain[key] = plain[key] and "…"
    if re.fullmatch(r"[0-9a-f-]{36}", str(plain.get("name"))):
        plain |= {"name": "…", "id": "{…}"}
    return plain


if __name__ == "__main__":
    RECORDED.write_text(
        "".join(f"{json.dumps(each, ensure_ascii=False, sort_keys=True)}\n" for each in list(replies(*sys.argv[1:3])))
    )
