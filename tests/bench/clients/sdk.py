"""The Kubeflow SDK's own wait, in the environment that `make .venv-sdk/stamp` makes.

``sdk.py KUBECONFIG NAMESPACE NAME``: prints the Unix time at which it says that the job has failed, a tab, and how.
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
