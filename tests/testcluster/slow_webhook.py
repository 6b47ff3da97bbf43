"""A webhook that allows every change of the TrainJobs of a namespace after a delay.

The API server calls it in addition to Trainer's, as it calls policy engines in real clusters: for UPDATE, which
includes a PATCH and its dry run, but not for DELETE.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from tests.certificates import Authority
from tests.processes import wait_until
from tests.testcluster.access import TRAINER, trainjob
from tests.testcluster.api import Api
from tests.testcluster.components import read_objects


@contextmanager
def slow_changes(api: Api, authority: Authority, namespace: str, seconds: float) -> Iterator[None]:
    """Context manager: each change of a TrainJob in `namespace` takes `seconds` longer."""
    if not seconds:
        yield
        return
    pair = authority.issue(f"slow-webhook-{namespace}", addresses=["127.0.0.1"])
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pair.certificate, pair.key)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(seconds)
            response = {"uid": review["request"]["uid"], "allowed": True}
            reply = {"apiVersion": review["apiVersion"], "kind": review["kind"], "response": response}
            body = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None: ...  # the API server closes the connection when its client has gone

    server = Server(("127.0.0.1", 0), Handler)
    # No handshake in `accept`, which handles one connection at a time.
    server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    values = {"namespace": namespace, "port": server.server_port, "bundle": authority.bundle}
    (webhook,) = read_objects("slow-webhook.yaml", values)
    api.create(webhook)
    try:
        _wait_until_called(api, namespace, seconds)
        yield
    finally:
        api.delete(webhook["apiVersion"], webhook["kind"], "", webhook["metadata"]["name"])
        server.shutdown()
        thread.join()
        server.server_close()


def _wait_until_called(api: Api, namespace: str, seconds: float) -> None:
    """Wait until the API server calls the webhook, which takes up to a second."""
    probe = trainjob("probe", namespace, runtime="trainjob-step", suspend=True, trainer={"numNodes": 1})
    api.create(probe)

    def slow() -> bool:
        began = time.monotonic()
        api.patch(TRAINER, "TrainJob", namespace, "probe", {"metadata": {"annotations": {"probe": str(began)}}})
        return time.monotonic() - began >= seconds

    wait_until("changes are slow", slow, 30)
    api.delete(TRAINER, "TrainJob", namespace, "probe")
