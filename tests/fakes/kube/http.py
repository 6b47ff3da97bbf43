"""The fake API server over HTTP, on the real clock: for the real `KubernetesBackend`, and for programs of their own."""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.fakes.kube.cluster import Cluster
from tests.fakes.kube.objects import Object
from tests.fakes.kube.server import Refused, parsed

from trainjob import JobRef

_LOOK_SECONDS = 0.05  # between two looks at pods that terminate


class SharedCluster(Cluster):
    """A cluster that several threads use. Hold `lock` while it is changed from outside."""

    def __init__(self, *, grace: float, jobset_seconds: float) -> None:
        self.lock = threading.Condition(threading.RLock())
        super().__init__(time.time, grace=grace, jobset_seconds=jobset_seconds)

    def put(self, plural: str, item: Object, kind: str = "MODIFIED") -> Object:
        """Store or remove an object, and wake the watches."""
        with self.lock:
            stored = super().put(plural, item, kind)
            self.lock.notify_all()
            return stored


class FakeKube(ThreadingHTTPServer):
    """A server on a free port of this machine, until the end of its ``with`` block.

    Args:
        grace: Seconds until a rank that is stopped ends.
        jobset_seconds: How long a JobSet outlives its TrainJob.

    Attributes:
        cluster: Its objects.
        url: Its address.
        requests: What it was asked, in order: ``GET trainjobs``, ``PATCH trainjobs/x-1``, ``WATCH pods``.
        before: Called with each of these before the request is applied. It may change the cluster, or raise `Refused`.
    """

    daemon_threads = True

    def __init__(self, *, grace: float = 0.0, jobset_seconds: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.cluster = SharedCluster(grace=grace, jobset_seconds=jobset_seconds)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[str] = []
        self.before: Callable[[str], None] = lambda request: None
        self._closing = False

    def __enter__(self) -> FakeKube:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self.shutdown()
        self.server_close()

    def kubeconfig(self, directory: Path) -> Path:
        """Write a kubeconfig of an account that may do everything."""
        context = {"cluster": "fake", "user": "fake", "namespace": "default"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "contexts": [{"name": "fake", "context": context}],
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "fake", "user": {"token": "fake"}}],
        }
        path = directory / "kubeconfig"
        path.write_text(json.dumps(config))
        return path

    def end(self, ref: JobRef, code: int = 0) -> bool:
        """End a job with its only rank; False if no rank runs."""
        with self.cluster.lock:
            return self.cluster.end(ref.name, code, ref.namespace)

    def answer(self, method: str, path: str, params: Mapping[str, str], body: Object | None) -> bytes:
        """Apply a request.

        Raises:
            Refused: it is refused.
        """
        plural, _, name, sub = parsed(path)
        request = f"{method} {'/'.join(part for part in (plural, name, sub) if part)}"
        with self.cluster.lock:
            self.requests.append(request)
            self.before(request)
            self.cluster.advance()
            return self.cluster.handle("client", method, path, params, body)

    def events(self, path: str, params: Mapping[str, str]) -> Iterator[bytes]:
        """The events of a watch, as they happen."""
        plural, namespace, _, _ = parsed(path)
        seen = int(params.get("resourceVersion") or 0)
        selectors = params.get("labelSelector", ""), params.get("fieldSelector", "")
        self.requests.append(f"WATCH {plural}")
        while not self._closing:
            with self.cluster.lock:
                self.cluster.advance()
                if seen == self.cluster.version:
                    self.cluster.lock.wait(_LOOK_SECONDS)
                upto = self.cluster.version
                lines = list(self.cluster.events(plural, seen, upto, *selectors, namespace))
            seen = upto
            yield from lines


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeKube

    def log_message(self, *_: object) -> None: ...

    def _answer(self) -> None:
        url = urlsplit(self.path)
        params = dict(parse_qsl(url.query, keep_blank_values=True))
        length = int(self.headers.get("Content-Length") or 0)
        body: Any = json.loads(self.rfile.read(length)) if length else None
        try:
            if "watch" in params:
                self._stream(self.server.events(url.path, params))
            else:
                self._reply(200, self.server.answer(self.command, url.path, params, body))
        except Refused as refused:
            time.sleep(refused.after)
            self._reply(refused.status, refused.body)
        except Exception:  # noqa: BLE001 - a fault of this fake must not look like an outage, which clients wait for
            fault = Refused(400, "BadRequest", f"the fake API server failed: {traceback.format_exc()}")
            self._reply(fault.status, fault.body)

    do_GET = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815 - the names of http.server

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, lines: Iterator[bytes]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        try:
            for line in lines:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        except OSError:
            return
