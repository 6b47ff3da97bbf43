"""``oci://``: models in container registries.

`trainjob.data.stores.opening` opens `store.OciStore`. A model is pushed as an index of images (KServe's ModelCar) and a
ModelPack manifest over the same layers. Images and artifacts in one of these forms, also from other tools, can be read.
"""

from __future__ import annotations

from trainjob.data.stores.oci.referrers import attach, attached
from trainjob.data.stores.oci.store import OciStore

__all__ = ["OciStore", "attach", "attached"]
