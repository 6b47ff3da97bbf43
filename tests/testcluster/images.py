"""Builds images without a registry and Docker: OCI archives that Python writes and containerd imports.

Every node needs two: the pause container of every pod, a static C program; and one with a shell and Python, from
Debian's packages. A third one has Open MPI. All are stored beside the programs (`build.cache_directory`).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.testcluster.build import cache_directory, cached

PAUSE = "trainjob.test/pause:1"
PYTHON = "trainjob.test/python:3.11"
"""Debian 12 with Python, for the commands of real pods."""

MPI = "trainjob.test/mpi:1"
"""The image of dags_examples/cluster/mpi/Dockerfile."""

PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_MPI_FILES = Path(__file__).parents[2] / "dags_examples" / "cluster" / "mpi"
_MPI_USER = 1000
_RELEASE = "bookworm"
_VERSION = "1"  # of the code below; a new version rebuilds the images

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
    """Directory of the archives."""
    return cache_directory() / f"images-{_RELEASE}-{_VERSION}"


def ensure() -> dict[str, Path]:
    """Reference -> archive of the images of every node; built if missing (about a minute)."""
    return {PAUSE: _made(PAUSE, "pause", _pause), PYTHON: python()}


def python() -> Path:
    """Archive of `PYTHON`; built if missing (about a minute)."""
    return _made(PYTHON, "python", _python)


def mpi() -> Path:
    """Archive of `MPI`; built if missing (a minute and a half)."""
    key = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(_MPI_FILES.iterdir()))).hexdigest()[:12]
    return _made(MPI, f"mpi-{key}", _mpi)


def _made(reference: str, name: str, make: Callable[[Path], None]) -> Path:
    return cached(directory() / f"{name}.tar", f"the image {reference}", make)


def _pause(target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "pause.c").write_text(_PAUSE_SOURCE)
        command = ["gcc", "-static", "-Os", "-s", "-o", "root/pause", "pause.c"]
        root = Path(scratch) / "root"
        root.mkdir()
        _run(command, scratch)
        _write(target, PAUSE, root, {"Entrypoint": ["/pause"]})


def _python(target: Path) -> None:
    with _debian(target.parent, "python3") as root:
        _write(target, PYTHON, root, {"Cmd": ["python3"]})


def _mpi(target: Path) -> None:
    """Do the same as the lines of the Dockerfile."""
    install = re.search(r"--no-install-recommends ([a-z0-9 -]+) \\", (_MPI_FILES / "Dockerfile").read_text())
    assert install, "the Dockerfile installs packages"
    with _debian(target.parent, *install[1].split()) as root:
        for file, line in (("passwd", "mpiuser:x:{0}:{0}::/home/mpiuser:/bin/bash"), ("group", "mpiuser:x:{0}:")):
            with (root / "etc" / file).open("a") as table:
                table.write(line.format(_MPI_USER) + "\n")
        home = root / "home" / "mpiuser"
        home.mkdir()
        shutil.copy(_MPI_FILES / "sshd_config", home / ".sshd_config")
        shutil.copy(_MPI_FILES / "ssh_config", root / "etc" / "ssh" / "ssh_config.d" / "mpi.conf")
        os.chown(home, _MPI_USER, _MPI_USER)
        (root / "usr" / "local" / "bin" / "python").symlink_to("/usr/bin/python3")
        _write(target, MPI, root, {"WorkingDir": "/home/mpiuser"})


@contextmanager
def _debian(scratch: Path, *packages: str) -> Iterator[Path]:
    """A root file system with `packages`, below `scratch`."""
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        root = Path(directory) / "root"
        include = f"--include={','.join(packages)}"
        _run(["debootstrap", "--variant=minbase", include, _RELEASE, str(root), *_mirror()], directory)
        for unused in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
            shutil.rmtree(root / unused, ignore_errors=True)
        yield root


def _write(target: Path, reference: str, root: Path, config: Mapping[str, Any]) -> None:
    layer = root.with_name("layer.tar")
    write_layer(layer, root)
    write_image(target, reference, [layer], config)


def _mirror() -> list[str]:
    """The Debian mirror of this machine's apt, as an argument; empty for the default of debootstrap."""
    command = ["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)", "Created-By: Packages"]
    targets = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
    return [line.partition(" ")[2] for line in targets if line.startswith(f"{_RELEASE} ")][:1]


def _run(command: Sequence[str], where: str) -> None:
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {(done.stderr or done.stdout)[-2000:]}")


# ------------------------------------------------------------------ OCI


def write_layer(target: Path, root: Path, prefix: str = "") -> None:
    """Write a layer with all files under `root`, except device nodes, at `prefix` of the image."""

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if member.isdev() else member

    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(root.iterdir()):
            archive.add(path, arcname=str(Path(prefix) / path.name), filter=kept)


def write_image(
    target: Path,
    reference: str,
    layers: Sequence[Path],
    config: Mapping[str, Any],
    below: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Write an image of uncompressed layers as an OCI archive.

    Args:
        target: The archive.
        reference: Name and tag under which it is imported.
        layers: Layers of `write_layer` or `layers_of`, the lowest first.
        config: Config of the image specification, e.g. ``{"Entrypoint": […], "Env": ["A=b"]}``.
        below: Lower layers that the archive does not contain, because the node has them.

    Returns:
        All layers, as the manifest describes them.
    """
    written = [_describe(layer) for layer in layers]
    blobs = [*map(dict, below), *written]
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
        for layer, blob in zip(layers, written, strict=True):
            archive.add(layer, arcname=_blob(str(blob["digest"]).removeprefix("sha256:")))
    return blobs


def layers_of(archive: Path, scratch: Path) -> list[Path]:
    """Unpack the layers of an archive of `write_image` into `scratch`, as lower layers of another image."""
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


def torch_packages() -> str:
    """Directory of this machine's PyTorch for the image's Python, which pods mount; empty if there is none.

    PyPI's PyTorch for Linux is built for CUDA, 5 GB: an image of it takes minutes to write, to import and to unpack.
    """
    python = os.environ.get("TRAINJOB_TORCH_PYTHON")
    command = [python or "false", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    path = subprocess.run(command, capture_output=True, text=True, check=bool(python)).stdout.strip()
    return path if "python3.11" in path else ""
