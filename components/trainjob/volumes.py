"""PersistentVolumeClaims and checkpoint directories of a job. Standard library only.

A job mounts each PersistentVolumeClaim that a ``pvc://claim/path`` URI of its spec names.

A checkpoint directory belongs to the key of the work, not to one job: a restarted rank, a job that Kueue has preempted
and the job of the next attempt all use the same directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

MOUNT = "/mnt/trainjob-claims"
"""Each PersistentVolumeClaim is mounted below this path under its own name."""

NAME = r"[a-z0-9](?:[-a-z0-9.]*[a-z0-9])?"
"""Name of a PersistentVolumeClaim, as a regular expression."""

CHECKPOINT_VARIABLE = "TRAINJOB_CHECKPOINT"
"""Environment variable of a training process with its checkpoint directory, see `checkpoint_directory`."""

_CHECKPOINT_VOLUME = "trainjob-checkpoints"
_CHECKPOINT_MOUNT = "/mnt/trainjob-checkpoints"
_NAMED = re.compile(rf"(?:^|=)pvc://({NAME})(?=/|$)")
_MOUNTED = re.compile(rf"(?:file://)?{MOUNT}/({NAME})(?=/|$)")


def directory(claim: str) -> Path:
    """Mount path of a PersistentVolumeClaim."""
    return Path(MOUNT, claim)


def named(texts: Iterable[str]) -> list[str]:
    """PersistentVolumeClaims of all ``pvc://`` URIs among `texts`, also in options (``--source=pvc://…``)."""
    return sorted({found[1] for text in texts if (found := _NAMED.search(text))})


def as_file(uri: str) -> str:
    """The ``file://`` URI of a ``pvc://`` URI inside the pods; other URIs are returned unchanged."""
    return uri.replace("pvc://", f"file://{quote(MOUNT)}/", 1) if uri.startswith("pvc://") else uri


def as_claim(location: str) -> str:
    """The ``pvc://`` URI of a mounted location (``file://`` or a path); other locations are returned unchanged."""
    if not _MOUNTED.match(location):
        return location
    return _MOUNTED.sub(lambda found: f"pvc://{found[1]}", location, count=1)


def pod(claims: Iterable[str]) -> dict[str, Any]:
    """A PodSpecPatch, as in the API, that mounts the `claims`."""
    volumes, mounts = [], []
    for number, claim in enumerate(claims):
        name = f"trainjob-claim-{number}"
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": name, "mountPath": str(directory(claim))})
    return {"volumes": volumes, "containers": [{"name": "node", "volumeMounts": mounts}]}


def checkpoint_directory(checkpoints: str, work: str) -> str:
    """Value of `CHECKPOINT_VARIABLE`: a path for ``file://`` and ``pvc://``, else a URI.

    Args:
        checkpoints: `TrainJobSpec.checkpoints`.
        work: Relative path that is unique to the key of the work.
    """
    scheme, _, rest = checkpoints.partition("://")
    paths = {"file": unquote(rest), "pvc": _CHECKPOINT_MOUNT + unquote("/" + rest.partition("/")[2])}
    return f"{paths.get(scheme, checkpoints).rstrip('/')}/{work}"


def checkpoint_pod(checkpoints: str) -> dict[str, Any] | None:
    """A PodSpecPatch that mounts the volume of a ``pvc://claim/path`` URI; None for other locations."""
    scheme, _, rest = checkpoints.partition("://")
    if scheme != "pvc":
        return None
    return {
        "volumes": [{"name": _CHECKPOINT_VOLUME, "persistentVolumeClaim": {"claimName": rest.partition("/")[0]}}],
        "containers": [
            {"name": "node", "volumeMounts": [{"name": _CHECKPOINT_VOLUME, "mountPath": _CHECKPOINT_MOUNT}]}
        ],
    }
