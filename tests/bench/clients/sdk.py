"""The Kubeflow SDK's wait, in the environment of `make .venv-sdk/stamp`.

``sdk.py KUBECONFIG NAMESPACE NAME``: prints the Unix time of its error for the failed job, a tab, and the error.
"""

from __future__ import annotations

import sys
import time

from kubeflow.common.types import KubernetesBackendConfig
from kubeflow.trainer import TrainerClient


def main(kubeconfig: str, namespace: str, name: str) -> None:
    client = TrainerClient(KubernetesBackendConfig(namespace=namespace, config_file=kubeconfig))
    print("waits", flush=True)
    try:
        client.wait_for_job_status(name, status={"Complete"}, timeout=1200)
    except (RuntimeError, TimeoutError) as error:
        print(f"{time.time():.3f}\t{error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
