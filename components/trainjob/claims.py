"""``pvc://claim/path``: a place on a PersistentVolumeClaim, which a job that names it mounts. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

MOUNT = "/mnt/trainjob-claims"
"""Each claim is mounted below it under its own name."""

NAME = r"[a-z0-9](?:[-a-z0-9.]*[a-z0-9])?"
"""Of a claim, as a regular expression."""

_NAMED = re.compile(rf"(?:^|=)pvc://({NAME})(?=/|$)")
_MOUNTED = re.compile(rf"(?:file://)?{MOUNT}/({NAME})(?=/|$)")


def directory(claim: str) -> Path:
    """Where a claim is, in the pods that mount it."""
    return Path(MOUNT, claim)


def named(texts: Iterable[str]) -> list[str]:
    """The claims of all ``pvc://`` URIs among `texts`, which may also be options with one (``--source=pvc://…``)."""
    return sorted({found[1] for text in texts if (found := _NAMED.search(text))})


def as_file(uri: str) -> str:
    """A ``pvc://`` URI as the pods see it, ``file://``; any other as it is."""
    return uri.replace("pvc://", f"file://{quote(MOUNT)}/", 1) if uri.startswith("pvc://") else uri


def as_claim(place: str) -> str:
    """What a pod calls a place on a claim, ``file://`` or a path, as everybody else does; any other place as it is."""
    return _MOUNTED.sub(lambda found: f"pvc://{found[1]}", place, count=1) if _MOUNTED.match(place) else place


def pod(claims: Iterable[str]) -> dict[str, Any]:
    """What mounts them, a PodSpecPatch as in the API."""
    volumes, mounts = [], []
    for number, claim in enumerate(claims):
        name = f"trainjob-claim-{number}"
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": name, "mountPath": str(directory(claim))})
    return {"volumes": volumes, "containers": [{"name": "node", "volumeMounts": mounts}]}
