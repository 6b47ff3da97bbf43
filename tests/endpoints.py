"""Real servers on loopback that stand for an API server and for proxies, and kubeconfigs for them."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from select import select
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

from tests.certificates import Authority, Pair

import trainjob._backends.kubernetes.client as clients
from trainjob._backends.credentials import Credentials


class Endpoint(ThreadingHTTPServer):
    """An API server without objects, until the end of its ``with`` block.

    Args:
        pair: Its certificate; without one it has no TLS.
        authority: Clients may authenticate by its certificates.

    Attributes:
        url: Its address.
        headers: Headers of each request, in order.
        tokens: The only tokens that are accepted, if there are any.
        clients: Name of the client certificate of each request, empty without one.
    """

    daemon_threads = True

    def __init__(self, pair: Pair | None = None, authority: Authority | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"{'https' if pair else 'http'}://127.0.0.1:{self.server_port}"
        self.headers: list[list[tuple[str, str]]] = []
        self.tokens: set[str] = set()
        self.clients: list[str] = []
        if pair:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(pair.certificate, pair.key)
            if authority:
                context.load_verify_locations(authority.certificate)
                context.verify_mode = ssl.CERT_OPTIONAL
            self.socket = context.wrap_socket(self.socket, server_side=True)

    def __enter__(self) -> Endpoint:
        Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Print nothing: some clients do not trust the certificate."""

    def sent(self, name: str) -> list[list[str]]:
        """The values of a header, for each request."""
        return [[value for each, value in headers if each.lower() == name.lower()] for headers in self.headers]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Endpoint

    def do_GET(self) -> None:
        self.server.headers.append(self.headers.items())
        certificate: Any = self.connection.getpeercert() if isinstance(self.connection, ssl.SSLSocket) else None
        self.server.clients.append(
            dict(part[0] for part in (certificate or {}).get("subject", ())).get("commonName", "")
        )
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        refused = self.server.tokens and token not in self.server.tokens
        body: dict[str, Any] = {"kind": "List", "metadata": {"resourceVersion": "1"}, "items": []}
        data = json.dumps({"kind": "Status", "code": 401, "message": "Unauthorized"} if refused else body).encode()
        self.send_response(401 if refused else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class _Connect(BaseHTTPRequestHandler):
    """An HTTP proxy: records requests, answers those without a tunnel by 502."""

    server: Any

    def do_CONNECT(self) -> None:
        self.server.asked.append(self.path)
        host, _, port = self.path.rpartition(":")
        with socket.create_connection((host, int(port))) as upstream:
            self.send_response(200)
            self.end_headers()
            _tunnel(self.connection, upstream)

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.send_error(502)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class _Socks(StreamRequestHandler):
    """SOCKS 5 without authentication (RFC 1928)."""

    server: Any

    def handle(self) -> None:
        self.rfile.read(self.rfile.read(2)[1])
        self.wfile.write(b"\x05\x00")
        kind = self.rfile.read(4)[3]
        host = socket.inet_ntoa(self.rfile.read(4)) if kind == 1 else self.rfile.read(self.rfile.read(1)[0]).decode()
        port = int.from_bytes(self.rfile.read(2), "big")
        self.server.asked.append(f"{host}:{port}")
        with socket.create_connection((host, port)) as upstream:
            self.wfile.write(b"\x05\x00\x00\x01" + bytes(6))
            _tunnel(self.connection, upstream)


def _tunnel(client: socket.socket, upstream: socket.socket) -> None:
    others = {client: upstream, upstream: client}
    while data := (ready := select([*others], [], [])[0][0]).recv(65536):
        others[ready].sendall(data)


@contextmanager
def proxy(scheme: str = "http") -> Iterator[tuple[str, list[str]]]:
    """A proxy of the scheme ``http`` or ``socks5``: its URL, and the hosts and URLs that it was asked for."""
    asked: list[str] = []
    with ThreadingTCPServer(("127.0.0.1", 0), _Socks if scheme == "socks5" else _Connect) as server:
        server.daemon_threads = True
        server.asked = asked  # type: ignore[attr-defined]  # read by the handlers
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"{scheme}://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


def kubeconfig(user: Mapping[str, Any], cluster: Mapping[str, Any], name: str = "c") -> dict[str, Any]:
    """A kubeconfig with one context, whose namespace is ``of-<name>``."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": f"of-{name}"}}],
        "clusters": [{"name": name, "cluster": {"server": "https://127.0.0.1:1", **cluster}}],
        "users": [{"name": name, "user": dict(user)}],
    }


def write(path: Path, content: object) -> str:
    """Write a kubeconfig as JSON, which is YAML."""
    path.write_text(json.dumps(content))
    return str(path)


async def ask(credentials: Credentials, times: int = 1) -> None:
    """Send requests by one client."""
    client = clients.ApiClient(credentials)
    try:
        for _ in range(times):
            await client.send(clients.Request("GET", "/version"))
    finally:
        await client.aclose()
