"""Where the attempts at one piece of work hand checkpoints over to each other (`TrainJobSpec.checkpoints`).

A directory belongs to the key of the work, not to a job: a rank that is started again, a job that Kueue preempts and
the job of the next attempt all find the same one.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from trainjob.spec.checks import RESERVED_PREFIX
from trainjob.spec.patches import for_every_node

VARIABLE = "TRAINJOB_CHECKPOINT"
_VOLUME = "trainjob-checkpoints"
_MOUNT = "/mnt/trainjob-checkpoints"


def place(checkpoints: str, work: str) -> str:
    """What the nodes find in `VARIABLE`: a path for ``file://`` and ``pvc://``, else a URI.

    Args:
        checkpoints: `TrainJobSpec.checkpoints`.
        work: Relative path that the work has to itself.
    """
    scheme, _, rest = checkpoints.partition("://")
    below = {"file": unquote(rest), "pvc": _MOUNT + unquote("/" + rest.partition("/")[2])}.get(scheme, checkpoints)
    return f"{below.rstrip('/')}/{work}"


def runtime_patches(checkpoints: str, runtime: str) -> list[dict[str, Any]]:
    """The volume of ``pvc://claim/path``, on every node; nothing for other places."""
    scheme, _, rest = checkpoints.partition("://")
    if scheme != "pvc":
        return []
    pod = {
        "volumes": [{"name": _VOLUME, "persistentVolumeClaim": {"claimName": rest.partition("/")[0]}}],
        "containers": [{"name": "node", "volumeMounts": [{"name": _VOLUME, "mountPath": _MOUNT}]}],
    }
    return [for_every_node(runtime, pod, f"{RESERVED_PREFIX}checkpoints")]
