"""Sets the status of many jobs at once, directly in etcd, as a second API server of the same cluster would.

A PATCH costs the API server 5 ms of CPU, so a single API server on two cores cannot end 1,000 jobs within a second.

``store.py PORT NAMESPACE running|complete|failed SECONDS``, names on stdin; prints NAME, a tab and the Unix time of its
commit.
"""

from __future__ import annotations

import base64
import http.client
import json
import sys
import time
from typing import Any

from tests.bench.clients.driver import RUNNING, ended

_EACH = 20  # jobs in a transaction; etcd allows 128


def main(port: str, namespace: str, state: str, seconds: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(port))

    def ask(what: str, body: object) -> dict[str, Any]:
        connection.request("POST", f"/v3/kv/{what}", json.dumps(body))
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"etcd: {answer.status} {answer.read()!r}")
        found: dict[str, Any] = json.load(answer)
        return found

    def key(name: str) -> str:
        return _base64(f"/registry/trainer.kubeflow.org/trainjobs/{namespace}/{name}".encode())

    names = sys.stdin.read().split()
    status = RUNNING if state == "running" else ended(state.title())
    transactions = []
    for i in range(0, len(names), _EACH):
        writes = []
        reads = [{"requestRange": {"key": key(name)}} for name in names[i : i + _EACH]]
        for read in ask("txn", {"success": reads})["responses"]:
            stored = read["response_range"]["kvs"][0]
            changed = {**json.loads(base64.b64decode(stored["value"])), "status": status}
            writes.append({"requestPut": {"key": stored["key"], "value": _base64(json.dumps(changed).encode())}})
        transactions.append((names[i : i + _EACH], json.dumps({"success": writes}).encode()))

    began = time.monotonic()
    for i, (some, body) in enumerate(transactions):
        time.sleep(max(0.0, began + i * float(seconds) / len(transactions) - time.monotonic()))
        connection.request("POST", "/v3/kv/txn", body)
        connection.getresponse().read()
        committed = time.time()
        print("\n".join(f"{name}\t{committed:.6f}" for name in some))


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


if __name__ == "__main__":
    main(*sys.argv[1:])
