"""A minimal client that waits by LIST and WATCH, with the standard library and one connection.

No phases, no deadlines, no outages, no bookmarks. ``watch.py SERVER CA CERTIFICATE KEY NAMESPACE``, names on stdin;
prints NAME, a tab and the Unix time of its end.
"""

from __future__ import annotations

import http.client
import json
import ssl
import sys
import time
from typing import Any
from urllib.parse import urlsplit


def ended(job: dict[str, Any]) -> bool:
    conditions = job.get("status", {}).get("conditions", [])
    return any(each["type"] in ("Complete", "Failed") and each["status"] == "True" for each in conditions)


def main(server: str, authority: str, certificate: str, key: str, namespace: str) -> None:
    names = set(sys.stdin.read().split())
    context = ssl.create_default_context(cafile=authority)
    context.load_cert_chain(certificate, key)
    connection = http.client.HTTPSConnection(urlsplit(server).netloc, context=context)
    path = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{namespace}/trainjobs"

    def see(job: dict[str, Any]) -> None:
        name = job["metadata"]["name"]
        if name in names and ended(job):
            names.discard(name)
            print(f"{name}\t{time.time():.6f}", flush=True)

    connection.request("GET", path, headers={"User-Agent": "plain-watch"})
    found = json.load(connection.getresponse())
    for job in found["items"]:
        see(job)
    version = found["metadata"]["resourceVersion"]
    connection.request("GET", f"{path}?watch=true&resourceVersion={version}", headers={"User-Agent": "plain-watch"})
    events = connection.getresponse()
    while names:
        see(json.loads(events.readline())["object"])


if __name__ == "__main__":
    main(*sys.argv[1:])
