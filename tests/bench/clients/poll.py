"""The way of most launchers to wait for jobs: GET each job every 2 seconds, on one event loop.

``poll.py KUBECONFIG NAMESPACE NAME...``; prints NAME, a tab and the Unix time of its end.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from typing import Any

import httpx

from trainjob._backends.credentials import Credentials

PERIOD = 2.0


def ended(job: dict[str, Any]) -> bool:
    conditions = job.get("status", {}).get("conditions", [])
    return any(each["type"] in ("Complete", "Failed") and each["status"] == "True" for each in conditions)


async def main(kubeconfig: str, namespace: str, *names: str) -> None:
    access = Credentials(kubeconfig=kubeconfig).load()
    limits, headers = httpx.Limits(max_connections=20), {"User-Agent": "poll"}
    path = f"{access.host}/apis/trainer.kubeflow.org/v1alpha1/namespaces/{namespace}/trainjobs"
    async with httpx.AsyncClient(verify=access.verify, headers=headers, timeout=60, limits=limits) as client:

        async def wait(name: str) -> None:
            await asyncio.sleep(random.uniform(0, PERIOD))
            while not ended((await client.get(f"{path}/{name}")).json()):
                await asyncio.sleep(PERIOD)
            print(f"{name}\t{time.time():.6f}", flush=True)

        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(wait(name))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
