"""A real S3 server: SeaweedFS, from PyPI."""

from __future__ import annotations

import json
import shutil
import sysconfig
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import boto3
from botocore.exceptions import ClientError
from tests.certificates import Authority
from tests.processes import Component, free_port, listens, wait_until

REGION = "us-east-1"
_PARTS = ("master", "volume", "filer", "s3")


class SeaweedFS:
    """Context manager for a server with a writable bucket. The kernel kills it when this process is killed.

    Args:
        folder: Folder for all data; by default a temporary one.
        bind: Address that serves S3. The parts of SeaweedFS always communicate over 127.0.0.1.
        bucket: Name of the bucket; at least three letters.
        authority: Issues the certificate of an ``https`` endpoint; without one it is ``http``.
        iam: Roles and the trusted token issuers, in the form of SeaweedFS' ``-s3.iam.config``.

    Attributes:
        endpoint: URL of S3; with ``0.0.0.0`` the one on 127.0.0.1.
        access_key: Access key of an administrator, the only user.
        secret_key: Secret key of the administrator.
        bucket: Name of the bucket.
        filer: URL of the files, readable without keys, below ``/buckets``.
    """

    access_key = "AKIASEAWEED"
    secret_key = "of-the-tests-own-seaweedfs"

    def __init__(
        self,
        folder: Path | None = None,
        *,
        bind: str = "127.0.0.1",
        bucket: str = "models",
        authority: Authority | None = None,
        iam: Mapping[str, Any] | None = None,
    ) -> None:
        self._temporary = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="trainjob-seaweedfs-"))
        self.bucket, self._authority = bucket, authority
        self._ports = {name: free_port() for part in _PARTS for name in (f"{part}.port", f"{part}.port.grpc")}
        host = "127.0.0.1" if bind == "0.0.0.0" else bind
        self.endpoint = f"{'https' if authority else 'http'}://{host}:{self._ports['s3.port']}"
        self.filer = f"http://127.0.0.1:{self._ports['filer.port']}"
        options = {
            "dir": self.folder / "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3.ip.bind": bind,
            **self._ports,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.iam.readOnly": "false",
            "master.peers": "none",  # otherwise it waits 1.5 s for peers
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": 1024,
            "volume.max": 100,
            "filer.localSocket": self.folder / "filer.sock",
            "s3.localSocket": self.folder / "s3.sock",
        }
        if authority:
            pair = authority.issue(f"seaweedfs-{self._ports['s3.port']}", addresses=[host])
            options |= {"s3.cert.file": pair.certificate, "s3.key.file": pair.key}
        if iam:
            (self.folder / "iam.json").write_text(json.dumps(iam))
            options["s3.iam.config"] = self.folder / "iam.json"
        program = Path(sysconfig.get_path("scripts"), "weed")
        arguments = [f"-logdir={self.folder}", "server", "-filer", "-s3"]
        arguments += [f"-{name}={value}" for name, value in options.items()]
        # Keys in the environment become those of an administrator.
        keys = {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}
        self._server = Component("seaweedfs", [str(program), *arguments], self.folder, keys)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pid(self) -> int | None:
        """Process id of the server."""
        return self._server.pid

    @property
    def client(self) -> Any:
        """boto3's client of S3, as the administrator."""
        return self._client("s3")

    @property
    def iam(self) -> Any:
        """boto3's IAM client, for users and their keys of this server."""
        return self._client("iam")

    @property
    def resource(self) -> Any:
        """boto3's objects for S3, as the administrator."""
        return boto3.resource("s3", **self._options)

    def _client(self, service: str) -> Any:
        return boto3.client(service, **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "endpoint_url": self.endpoint,
            "region_name": REGION,
            "aws_access_key_id": self.access_key,
            "aws_secret_access_key": self.secret_key,
            "verify": str(self._authority.certificate) if self._authority else None,
        }

    def start(self) -> None:
        """Start the server; after `stop`, with the same data and ports."""
        (self.folder / "data").mkdir(exist_ok=True)
        self._server.start()
        # Of a file, since its first one takes longer than all others: volumes are made for it.
        client = self.client
        wait_until("SeaweedFS listens", lambda: listens(self._ports["s3.port"]), among=[self._server])
        wait_until("SeaweedFS stores files", lambda: self._takes(client), among=[self._server], ignore=ClientError)

    def stop(self) -> None:
        """Kill the server: an orderly shutdown takes 15 to 25 s."""
        self._server.kill()
        for port in self._ports.values():
            for socket in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                socket.unlink(missing_ok=True)

    def _takes(self, client: Any) -> bool:
        with suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
            client.create_bucket(Bucket=self.bucket)
        client.put_object(Bucket=self.bucket, Key="first", Body=b"1")
        client.delete_object(Bucket=self.bucket, Key="first")
        return True

    def uri(self, path: str = "") -> str:
        """URI of a path in the bucket."""
        return f"s3://{self.bucket}/{path}"

    def environment(self) -> dict[str, str]:
        """Environment variables with the credentials for an S3 client."""
        found = {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": REGION,
            "AWS_ENDPOINT_URL": self.endpoint,
        }
        if self._authority:
            return {**found, "SSL_CERT_FILE": str(self._authority.certificate)}
        return {**found, "AWS_ALLOW_HTTP": "true"}
