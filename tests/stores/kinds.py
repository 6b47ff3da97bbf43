"""The stores of the contract tests. They are filled and read without trainjob."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from obstore.store import AzureStore
from tests.azurite import CONTAINER, Azurite
from tests.fakes.clouds import Clouds
from tests.fakes.faults import Proxy
from tests.fakes.hub import Hub
from tests.trees import files, tree

from trainjob.data import file_manifest

MANIFEST = file_manifest.NAME


class Store(ABC):
    """A store.

    Attributes:
        proxy: Proxy in front of its server; None if it has no server, or if its traffic cannot be counted.
    """

    def __init__(self, proxy: Proxy | None) -> None:
        self.proxy = proxy

    @abstractmethod
    def uri(self, name: str) -> str:
        """The location of ``name``."""

    @abstractmethod
    def put(self, name: str, given: Mapping[str, bytes]) -> str:
        """Write exactly these files, without trainjob; return the location."""

    def held(self, name: str) -> dict[str, bytes]:
        """All files of ``name``, read without trainjob."""
        raise NotImplementedError(f"{type(self).__name__} is read-only")

    def file(self, name: str, path: str) -> str:
        """The location of one of its files."""
        return f"{self.uri(name)}/{path}"


class Files(Store):
    def __init__(self, folder: Path) -> None:
        super().__init__(None)
        self._folder = folder

    def uri(self, name: str) -> str:
        return (self._folder / name).as_uri()

    def put(self, name: str, given: Mapping[str, bytes]) -> str:
        tree(self._folder / name, given)
        return self.uri(name)

    def held(self, name: str) -> dict[str, bytes]:
        found = self._folder / name
        manifest = found / MANIFEST
        return files(found) | ({MANIFEST: manifest.read_bytes()} if manifest.exists() else {})


class S3(Store):
    def __init__(self, proxy: Proxy, client: Any, bucket: str) -> None:
        super().__init__(proxy)
        self.client, self.bucket = client, bucket

    def uri(self, name: str) -> str:
        return f"s3://{self.bucket}/{name}"

    def put(self, name: str, given: Mapping[str, bytes]) -> str:
        for path, data in given.items():
            self.client.put_object(Bucket=self.bucket, Key=f"{name}/{path}", Body=data)
        return self.uri(name)

    def held(self, name: str) -> dict[str, bytes]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=f"{name}/")
        keys = [each["Key"] for page in pages for each in page.get("Contents", ())]
        return {
            key.removeprefix(f"{name}/"): self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read()
            for key in keys
        }


class Filer(S3):
    """The same files by plain HTTP, with ranges and entity tags, from the filer of SeaweedFS."""

    def uri(self, name: str) -> str:
        assert self.proxy is not None
        return f"http://{self.proxy.host}/buckets/{self.bucket}/{name}"


class Web(Files):
    """A directory that Python's HTTP server serves by HTTPS, without ranges and entity tags."""

    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(folder)
        self._url = url

    def uri(self, name: str) -> str:
        return f"{self._url}/{name}"


class Oci(Store):
    def __init__(self, proxy: Proxy, credentials: str = "") -> None:
        super().__init__(proxy)
        self._credentials = credentials

    def uri(self, name: str) -> str:
        assert self.proxy is not None
        return f"oci://{self.proxy.host}/{name}:1"

    def put(self, name: str, given: Mapping[str, bytes]) -> str:
        """An image with one layer, pushed by skopeo."""
        tar = io.BytesIO()
        with tarfile.open(fileobj=tar, mode="w") as archive:
            for path, data in given.items():
                member = tarfile.TarInfo(f"models/{path}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        layer = tar.getvalue()
        config = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]}}
        kind, blobs = "application/vnd.oci.image", (json.dumps(config).encode(), layer)
        of_config, of_layer = (
            {"mediaType": f"{kind}.{what}", "digest": _digest(blob), "size": len(blob)}
            for what, blob in zip(("config.v1+json", "layer.v1.tar"), blobs, strict=True)
        )
        manifest = {"schemaVersion": 2, "mediaType": f"{kind}.manifest.v1+json", "config": of_config}
        with tempfile.TemporaryDirectory() as folder:
            tree(Path(folder), {_digest(blob).removeprefix("sha256:"): blob for blob in blobs})
            Path(folder, "manifest.json").write_text(json.dumps({**manifest, "layers": [of_layer]}))
            Path(folder, "version").write_text("Directory Transport Version: 1.1\n")
            options = ["--preserve-digests", "--dest-tls-verify=false"]
            credentials = [f"--dest-creds={self._credentials}"] if self._credentials else []
            _run(
                "skopeo",
                "copy",
                *options,
                *credentials,
                f"dir:{folder}",
                f"docker:{self.uri(name).removeprefix('oci:')}",
            )
        return self.uri(name)

    def held(self, name: str) -> dict[str, bytes]:
        """By skopeo and tar, which check the digests."""
        image = f"docker:{self.uri(name).removeprefix('oci:')}"
        with tempfile.TemporaryDirectory() as folder:
            credentials = [f"--src-creds={self._credentials}"] if self._credentials else []
            _run("skopeo", "copy", "--src-tls-verify=false", *credentials, image, f"dir:{folder}/dir")
            for layer in json.loads(Path(folder, "dir/manifest.json").read_bytes())["layers"]:
                _run("tar", "-xf", f"{folder}/dir/{layer['digest'].removeprefix('sha256:')}", "-C", folder)
            shutil.rmtree(f"{folder}/dir")
            manifest = Path(folder, "models", MANIFEST).read_bytes()
            return {**files(Path(folder, "models")), MANIFEST: manifest}


class Cloud(Store):
    """A fake of Google's and Azure's stores.

    fake-gcs-server 1.56.1 cannot replace it: to each write of the XML API, which obstore uses (PUT, POST ?uploads, a
    copy), it answers 400 "invalid uploadType".
    """

    def __init__(self, proxy: Proxy | None, server: Clouds, scheme: str) -> None:
        super().__init__(proxy)
        self._server, self._scheme = server, scheme

    def uri(self, name: str) -> str:
        return f"{self._server.url}/models/{name}" if self._scheme == "http" else f"{self._scheme}://models/{name}"

    def put(self, name: str, given: Mapping[str, bytes]) -> str:
        bucket = self._server.buckets["models"]
        for path in self.held(name):
            del bucket[f"{name}/{path}"]
        bucket |= {f"{name}/{path}": data for path, data in given.items()}
        return self.uri(name)

    def held(self, name: str) -> dict[str, bytes]:
        found = self._server.buckets["models"].items()
        return {key.removeprefix(f"{name}/"): data for key, data in found if key.startswith(f"{name}/")}


class Azure(Store):
    """A container of Azurite; obstore writes and reads the blobs."""

    def __init__(self, proxy: Proxy, server: Azurite) -> None:
        super().__init__(proxy)
        name, key, endpoint, _ = server.environment().values()
        config: Any = {"account_name": name, "account_key": key, "endpoint": endpoint}
        self._store = AzureStore(CONTAINER, config=config, client_options={"allow_http": True})

    def uri(self, name: str) -> str:
        return f"az://{CONTAINER}/{name}"

    def put(self, name: str, given: Mapping[str, bytes]) -> str:
        for path, data in given.items():
            self._store.put(f"{name}/{path}", data)
        return self.uri(name)

    def held(self, name: str) -> dict[str, bytes]:
        paths = [each["path"] for page in self._store.list(f"{name}/") for each in page]
        return {path.removeprefix(f"{name}/"): bytes(self._store.get(path).bytes()) for path in paths}


class FakeHub(Store):
    def __init__(self, proxy: Proxy | None, server: Hub) -> None:
        super().__init__(proxy)
        self._server = server

    def uri(self, name: str) -> str:
        return f"hf://org/{name}"

    def put(self, name: str, given: Mapping[str, bytes]) -> str:
        self._server.repo(f"org/{name}").commit({".gitattributes": b"*.bin filter=lfs\n", **given})
        return self.uri(name)

    def held(self, name: str) -> dict[str, bytes]:
        repo = self._server.repos.get(f"org/{name}")
        found = repo.commits[repo.branches["main"]] if repo else {}
        return {path: data for path, data in found.items() if path != ".gitattributes"}


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
