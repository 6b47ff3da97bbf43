"""Measures the cost of progress reports to Trainer for a training, compared with the Kubeflow SDK.

::

    python tests/bench/progress.py [STEPS]

A server on this machine replaces Trainer's, which accepts five posts a second of all jobs together: it answers after
0.2 s. Each client is a separate process, the SDK's in a separate environment (``make .venv-sdk/stamp``). trainjob also
writes a termination message at each update; the SDK does not.
"""

from __future__ import annotations

import json
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.serving import serving  # noqa: E402 - the path comes first

CLIENTS = {"trainjob": Path(sys.executable), "kubeflow": ROOT / ".venv-sdk" / "bin" / "python"}
DELAY = 0.2


class Status(ThreadingHTTPServer):
    """Answers each post with `answer`, and stores the progress of the last one."""

    daemon_threads = True

    def __init__(self, answer: int) -> None:
        super().__init__(("127.0.0.1", 0), Post)
        self.answer = answer
        self.posts = 0
        self.progress = 0


class Post(BaseHTTPRequestHandler):
    server: Status

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posts += 1
        self.server.progress = body["trainerStatus"]["progressPercentage"]
        time.sleep(DELAY)
        self.send_response(self.server.answer)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def emit(metric: str, value: float, unit: str, peer: float) -> None:
    figures = {"metric": metric, "value": round(value, 6), "unit": unit, "peer": round(peer, 6)}
    ratio = float(f"{value / peer:.3g}") if peer else None
    print(json.dumps({"bench": "progress", **figures, "ratio": ratio}), flush=True)


def figures(client: str, steps: int, answer: int, home: Path) -> dict[tuple[str, str], float]:
    with serving(Status(answer)) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(home / "tls.crt", home / "tls.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        trainer = {
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://localhost:{server.server_address[1]}/status",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(home / "tls.crt"),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(home / "token"),
            "TRAINJOB_TERMINATION_LOG": str(home / "termination-log"),
        }
        done = subprocess.run(
            [CLIENTS[client], ROOT / "tests" / "bench" / "clients" / "reports.py", client, str(steps)],
            env={**os.environ, **trainer},
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=600,
        )
        spent = json.loads(done.stdout)
        return {
            ("an update, median", "ms"): 1000 * statistics.median(spent),
            ("the longest update", "ms"): 1000 * max(spent),
            ("all updates", "s"): sum(spent),
            ("posts", ""): server.posts,
            ("progress in the last post", "%"): server.progress,
        }


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        (home / "token").write_text("token")
        names = ("-subj", "/CN=status", "-addext", "subjectAltName=DNS:localhost")
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", "tls.key")
        subprocess.run(
            ["openssl", "req", "-x509", *key, "-out", "tls.crt", *names], cwd=home, check=True, capture_output=True
        )
        for answer, what in ((200, "a busy server"), (503, "a server that refuses")):
            ours, theirs = (figures(client, steps, answer, home) for client in CLIENTS)
            for (metric, unit), value in ours.items():
                emit(f"{what}: {metric}", value, unit, theirs[metric, unit])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
