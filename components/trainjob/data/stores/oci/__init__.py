"""``oci://``: models in container registries.

`store.OciStore` is what `trainjob.data.stores.opening.open_store` opens. A model is pushed as an index of images
(KServe's ModelCar) and a ModelPack manifest over the same layers; read is what anyone else has pushed in one of these
forms.
"""

from __future__ import annotations

from trainjob.data.stores.oci.referrers import attach, attached
from trainjob.data.stores.oci.store import OciStore

__all__ = ["OciStore", "attach", "attached"]
