"""The method of most launchers: GET every job every 2 seconds, on one event loop and one connection pool.

``poll.py SERVER CA CERTIFICATE KEY NAMESPACE``, names on stdin; prints NAME, a tab and the Unix time of its end.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import sys
import time

import httpx
from tests.bench.clients.watch import ended

PERIOD = 2.0


async def main(server: str, authority: str, certificate: str, key: str, namespace: str) -> None:
    context = ssl.create_default_context(cafile=authority)
    context.load_cert_chain(certificate, key)
    path = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{namespace}/trainjobs"
    async with httpx.AsyncClient(
        base_url=server,
        verify=context,
        headers={"User-Agent": "poll"},
        timeout=60,
        limits=httpx.Limits(max_connections=20),
    ) as client:

        async def wait(name: str) -> None:
            await asyncio.sleep(random.uniform(0, PERIOD))
            while True:
                answer = await client.get(f"{path}/{name}")
                if ended(answer.json()):
                    break
                await asyncio.sleep(PERIOD)
            print(f"{name}\t{time.time():.6f}", flush=True)

        async with asyncio.TaskGroup() as tasks:
            for name in sys.stdin.read().split():
                tasks.create_task(wait(name))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
