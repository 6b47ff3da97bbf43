"""Other ways to wait for jobs, with as little as possible around them.

``peers.py watch|poll SERVER CA CERTIFICATE KEY NAMESPACE``, names on stdin; prints NAME, a tab and the Unix time of its
end. ``watch`` is one LIST and one WATCH over one connection, by the standard library: no phases, deadlines, outages or
bookmarks. ``poll`` is the way of most launchers: GET every job every 2 seconds, on one event loop.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import ssl
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import httpx

PERIOD = 2.0


def ended(job: dict[str, Any]) -> bool:
    conditions = job.get("status", {}).get("conditions", [])
    return any(each["type"] in ("Complete", "Failed") and each["status"] == "True" for each in conditions)


def watch(server: str, context: ssl.SSLContext, path: str, names: set[str]) -> None:
    connection, headers = http.client.HTTPSConnection(urlsplit(server).netloc, context=context), {"User-Agent": "watch"}

    def see(job: dict[str, Any]) -> None:
        name = job["metadata"]["name"]
        if name in names and ended(job):
            names.discard(name)
            print(f"{name}\t{time.time():.6f}", flush=True)

    connection.request("GET", path, headers=headers)
    found = json.load(connection.getresponse())
    for job in found["items"]:
        see(job)
    version = found["metadata"]["resourceVersion"]
    connection.request("GET", f"{path}?watch=true&resourceVersion={version}", headers=headers)
    events = connection.getresponse()
    while names:
        see(json.loads(events.readline())["object"])


async def poll(server: str, context: ssl.SSLContext, path: str, names: set[str]) -> None:
    limits, headers = httpx.Limits(max_connections=20), {"User-Agent": "poll"}
    async with httpx.AsyncClient(base_url=server, verify=context, headers=headers, timeout=60, limits=limits) as client:

        async def wait(name: str) -> None:
            await asyncio.sleep(random.uniform(0, PERIOD))
            while not ended((await client.get(f"{path}/{name}")).json()):
                await asyncio.sleep(PERIOD)
            print(f"{name}\t{time.time():.6f}", flush=True)

        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(wait(name))


def main(way: str, server: str, authority: str, certificate: str, key: str, namespace: str) -> None:
    context = ssl.create_default_context(cafile=authority)
    context.load_cert_chain(certificate, key)
    path = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{namespace}/trainjobs"
    names = set(sys.stdin.read().split())
    if way == "watch":
        watch(server, context, path, names)
    else:
        asyncio.run(poll(server, context, path, names))


if __name__ == "__main__":
    main(*sys.argv[1:])
