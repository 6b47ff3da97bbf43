"""Real processes, forked from one that has done the imports: importing MLflow would be nearly all of their time.

One place for all tests, since Python has one such process for all: what is not said before its first child is not
imported there at all.
"""

from __future__ import annotations

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "trainjob.client",
        "trainjob.backends.local.backend",
        "trainjob.data.__main__",
        "trainjob.data.stores.huggingface",
        "trainjob.data.stores.object_stores",
        "trainjob.data.stores.oci",
        "trainjob.registry.kubeflow",
        "trainjob.registry.mlflow",
        "huggingface_hub.hf_api",
        "mlflow.tracking",
        "mlflow.store.tracking.sqlalchemy_store",
        "mlflow.store.model_registry.sqlalchemy_store",
        "obstore.store",
    ]
)
