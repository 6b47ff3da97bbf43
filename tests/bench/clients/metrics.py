"""Reports metrics of many running jobs, directly in etcd, as a second API server of the same cluster would.

``metrics.py PORT NAMESPACE EVERY SECONDS``, names on stdin: each job reports loss and accuracy every EVERY seconds, for
SECONDS. Prints the number of reports and the seconds that they took.
"""

from __future__ import annotations

import base64
import http.client
import json
import sys
import time
from typing import Any

from tests.bench.clients.driver import RUNNING

_EACH = 20  # jobs in a transaction; etcd allows 128


def main(port: str, namespace: str, every: str, seconds: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(port))

    def ask(body: object) -> dict[str, Any]:
        connection.request("POST", "/v3/kv/txn", json.dumps(body))
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"etcd: {answer.status} {answer.read()!r}")
        found: dict[str, Any] = json.load(answer)
        return found

    names = sys.stdin.read().split()
    stored: list[tuple[str, dict[str, Any]]] = []
    for some in _parts(names):
        keys = [_base64(f"/registry/trainer.kubeflow.org/trainjobs/{namespace}/{name}".encode()) for name in some]
        for read in ask({"success": [{"requestRange": {"key": key}} for key in keys]})["responses"]:
            found = read["response_range"]["kvs"][0]
            stored.append((found["key"], json.loads(base64.b64decode(found["value"]))))

    parts = list(_parts(stored))
    rounds = round(float(seconds) / float(every))
    began = time.monotonic()
    for number in range(rounds):
        for i, part in enumerate(parts):
            time.sleep(max(0.0, began + (number + i / len(parts)) * float(every) - time.monotonic()))
            writes = []
            for key, job in part:
                changed = {**job, "status": {**RUNNING, "trainerStatus": _report(number, rounds)}}
                writes.append({"requestPut": {"key": key, "value": _base64(json.dumps(changed).encode())}})
            ask({"success": writes})
    print(f"{rounds * len(stored)}\t{time.monotonic() - began:.3f}")


def _report(number: int, rounds: int) -> dict[str, Any]:
    metrics = {"loss": 1 / (number + 1.1), "accuracy": 1 - 1 / (number + 1.1), "trainjob.step": 100 * number}
    return {
        "progressPercentage": 100 * number // rounds,
        "metrics": [{"name": name, "value": f"{value:.6g}"} for name, value in metrics.items()],
        "lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _parts(items: list[Any]) -> list[list[Any]]:
    return [items[i : i + _EACH] for i in range(0, len(items), _EACH)]


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


if __name__ == "__main__":
    main(*sys.argv[1:])
