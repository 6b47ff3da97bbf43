"""Moving datasets and models between locations: the steps around training.

As functions here, imported when they are first used: who copies needs nothing of registries and specs. As programs,
``python -m trainjob.data``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

_HOME = {
    "ContentManifest": "trainjob.data.content",
    "Exported": "trainjob.data.steps",
    "Initialized": "trainjob.data.steps",
    "copy": "trainjob.data.transfer",
    "export": "trainjob.data.steps",
    "initialize": "trainjob.data.steps",
    "read_manifest": "trainjob.data.transfer",
}

__all__ = ["ContentManifest", "Exported", "Initialized", "copy", "export", "initialize", "read_manifest"]

if TYPE_CHECKING:
    from trainjob.data.content import ContentManifest
    from trainjob.data.steps import Exported, Initialized, export, initialize
    from trainjob.data.transfer import copy, read_manifest
else:  # hidden from type checkers: they would take any name for one of this module

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOME[name]), name)
