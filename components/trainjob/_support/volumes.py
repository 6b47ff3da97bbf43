"""PersistentVolumeClaims and checkpoint directories of a job. Standard library only.

A job mounts each PersistentVolumeClaim that a ``pvc://claim/path`` URI of its spec names.

A checkpoint directory does not belong to one job: a restarted rank, a job that Kueue has preempted and the job of the
next attempt all use the same directory (`trainjob._manifest.checkpoint_directories`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

MOUNT = "/mnt/trainjob-claims"
"""Each PersistentVolumeClaim is mounted below this path under its own name."""

CHECKPOINT_MOUNT = "/mnt/trainjob-checkpoints"
"""The PersistentVolumeClaim of ``pvc://`` checkpoints is mounted here."""

NAME = r"[a-z0-9](?:[-a-z0-9.]*[a-z0-9])?"
"""Name of a PersistentVolumeClaim, as a regular expression."""

CHECKPOINT_VARIABLE = "TRAINJOB_CHECKPOINT"
"""Environment variable of a training process with its checkpoint directory.

An author sets it in ``env`` of a spec to continue from another directory.
"""

_CHECKPOINT_VOLUME = "trainjob-checkpoints"
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
        work: Relative path that is unique to the work.
    """
    return f"{checkpoint_path(checkpoints).rstrip('/')}/{work}"


def checkpoint_path(location: str) -> str:
    """The path of a checkpoint location, ``file://`` or ``pvc://``, inside the pods; others are returned unchanged."""
    scheme, _, rest = location.partition("://")
    paths = {"file": unquote(rest), "pvc": CHECKPOINT_MOUNT + unquote("/" + rest.partition("/")[2])}
    return paths.get(scheme, location)


def checkpoint_location(directory: str, spec: object) -> str:
    """A checkpoint directory as its author writes it: the ``pvc://`` URI if it is on a PersistentVolumeClaim.

    Args:
        directory: Value of `CHECKPOINT_VARIABLE`.
        spec: Spec of the TrainJob, which mounts the PersistentVolumeClaim.
    """
    claim = _checkpoint_claim(spec) if directory.startswith(f"{CHECKPOINT_MOUNT}/") else ""
    return f"pvc://{claim}{quote(directory.removeprefix(CHECKPOINT_MOUNT))}" if claim else directory


def _checkpoint_claim(value: object) -> str:
    """The PersistentVolumeClaim that `checkpoint_pod` mounts, anywhere in an object of the API; empty without one."""
    if isinstance(value, Mapping):
        if value.get("name") == _CHECKPOINT_VOLUME and isinstance(claim := value.get("persistentVolumeClaim"), Mapping):
            return str(claim.get("claimName") or "")
        value = list(value.values())
    return next(filter(None, map(_checkpoint_claim, value)), "") if isinstance(value, list) else ""


def checkpoint_pod(checkpoints: str) -> dict[str, Any] | None:
    """A PodSpecPatch that mounts the volume of a ``pvc://claim/path`` URI; None for other locations."""
    scheme, _, rest = checkpoints.partition("://")
    if scheme != "pvc":
        return None
    return {
        "volumes": [{"name": _CHECKPOINT_VOLUME, "persistentVolumeClaim": {"claimName": rest.partition("/")[0]}}],
        "containers": [{"name": "node", "volumeMounts": [{"name": _CHECKPOINT_VOLUME, "mountPath": CHECKPOINT_MOUNT}]}],
    }
