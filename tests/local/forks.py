"""Real processes, forked from one that has done the imports: most of their time would be the import of MLflow.

All tests use this module, since Python has one fork server for a process: only modules that are set before its first
child are imported there.
"""

from __future__ import annotations

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "trainjob.client",
        "trainjob._backends.local.backend",
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
        "trainjob.tuning",
        "optuna",
    ]
)
