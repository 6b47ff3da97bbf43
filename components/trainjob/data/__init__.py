"""Moving datasets and models between locations: the steps around training.

As functions here; as programs, ``python -m trainjob.data``.
"""

from __future__ import annotations

from trainjob.data.content import ContentManifest
from trainjob.data.steps import Exported, Initialized, export, initialize
from trainjob.data.transfer import copy, read_manifest

__all__ = ["ContentManifest", "Exported", "Initialized", "copy", "export", "initialize", "read_manifest"]
