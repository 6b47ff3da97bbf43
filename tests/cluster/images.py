"""Images without a registry and without Docker: OCI archives that Python writes and containerd imports.

Two are needed: the pause container of every pod, a static C program; and one that has a shell and Python, from
Debian's own packages. They are kept beside the programs (`build.cache_directory`).
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.build import cache_directory, lock, say

PAUSE = "trainjob.test/pause:1"
PYTHON = "trainjob.test/python:3.11"
"""Debian 12 with Python: what a command of a real pod can use."""

PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_RELEASE = "bookworm"
_VERSION = "1"  # of what is below; another one builds the images anew

_PAUSE_SOURCE = """
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int number) { _exit(0); }
static void reap(int number) { while (waitpid(-1, 0, WNOHANG) > 0) {} }
int main(void) {
    signal(SIGINT, end);
    signal(SIGTERM, end);
    signal(SIGCHLD, reap);
    for (;;) pause();
}
"""


def directory() -> Path:
    """Where the archives are."""
    return cache_directory() / f"images-{_RELEASE}-{_VERSION}"


def ensure() -> dict[str, Path]:
    """Reference -> archive of the images every node has; made if they are not there (about a minute)."""
    makers = {PAUSE: _pause, PYTHON: _python}
    archives = {reference: directory() / f"{name}.tar" for reference, name in ((PAUSE, "pause"), (PYTHON, "python"))}
    if all(archive.exists() for archive in archives.values()):
        return archives
    with lock():
        directory().mkdir(parents=True, exist_ok=True)
        for reference, archive in archives.items():
            if archive.exists():
                continue
            say(f"making the image {reference}")
            unfinished = archive.with_suffix(".unfinished")
            makers[reference](unfinished)
            unfinished.replace(archive)
    return archives


def _pause(target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "pause.c").write_text(_PAUSE_SOURCE)
        command = ["gcc", "-static", "-Os", "-s", "-o", "root/pause", "pause.c"]
        (Path(scratch) / "root").mkdir()
        _run(command, scratch)
        layer = Path(scratch) / "layer.tar"
        write_layer(layer, Path(scratch) / "root")
        write_image(target, PAUSE, [layer], {"Entrypoint": ["/pause"]})


def _python(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        root = Path(scratch) / "root"
        _run(["debootstrap", "--variant=minbase", "--include=python3", _RELEASE, str(root), *_mirror()], scratch)
        for waste in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
            shutil.rmtree(root / waste, ignore_errors=True)
        layer = Path(scratch) / "layer.tar"
        write_layer(layer, root)
        write_image(target, PYTHON, [layer], {"Cmd": ["python3"]})


def _mirror() -> list[str]:
    """Where apt gets Debian from on this machine; debootstrap's own choice if it does not say."""
    command = ["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)", "Created-By: Packages"]
    targets = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
    return [line.partition(" ")[2] for line in targets if line.startswith(f"{_RELEASE} ")][:1]


def _run(command: Sequence[str], where: str) -> None:
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {(done.stderr or done.stdout)[-2000:]}")


# ------------------------------------------------------------------ OCI


def write_layer(target: Path, root: Path, prefix: str = "") -> None:
    """A layer: all files under `root`, placed under `prefix` of the image. Device nodes are left out."""

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if member.isdev() else member

    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(root.iterdir()):
            archive.add(path, arcname=str(Path(prefix) / path.name), filter=kept)


def write_image(target: Path, reference: str, layers: Sequence[Path], config: Mapping[str, Any]) -> None:
    """An image of uncompressed layers as an OCI archive.

    Args:
        target: The archive.
        reference: Name and tag under which it is imported.
        layers: From below; see `write_layer`. A layer of another image is found with `layers_of`.
        config: Of the image specification, e.g. ``{"Entrypoint": […], "Env": ["A=b"]}``.
    """
    blobs = [_describe(layer) for layer in layers]
    image = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": [PATH], **config},
        "rootfs": {"type": "layers", "diff_ids": [blob["digest"] for blob in blobs]},
    }
    small: list[bytes] = [json.dumps(image).encode()]
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": _descriptor(small[0], "application/vnd.oci.image.config.v1+json"),
        "layers": blobs,
    }
    small.append(json.dumps(manifest).encode())
    entry = {
        **_descriptor(small[1], manifest["mediaType"]),
        "annotations": {"io.containerd.image.name": reference},
        "platform": {"architecture": "amd64", "os": "linux"},
    }
    index = {"schemaVersion": 2, "manifests": [entry]}
    with tarfile.open(target, "w") as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        _add(archive, "index.json", json.dumps(index).encode())
        for content in small:
            _add(archive, _blob(hashlib.sha256(content).hexdigest()), content)
        for layer, blob in zip(layers, blobs, strict=True):
            archive.add(layer, arcname=_blob(str(blob["digest"]).removeprefix("sha256:")))


def layers_of(archive: Path, scratch: Path) -> list[Path]:
    """Unpack the layers of an archive of `write_image` into `scratch`, to put others on top."""
    with tarfile.open(archive) as opened:

        def read(name: str) -> Any:
            content = opened.extractfile(name)
            if content is None:
                raise OSError(f"{archive} has no {name}")
            return json.load(content)

        manifest = read(_blob(read("index.json")["manifests"][0]["digest"].removeprefix("sha256:")))
        wanted = [_blob(layer["digest"].removeprefix("sha256:")) for layer in manifest["layers"]]
        opened.extractall(scratch, [opened.getmember(name) for name in wanted], filter="data")
    return [scratch / name for name in wanted]


def _describe(layer: Path) -> dict[str, Any]:
    with layer.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    size = layer.stat().st_size
    return {"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": f"sha256:{digest}", "size": size}


def _descriptor(content: bytes, media_type: object) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": f"sha256:{hashlib.sha256(content).hexdigest()}", "size": len(content)}


def _blob(digest: str) -> str:
    return f"blobs/sha256/{digest}"


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
