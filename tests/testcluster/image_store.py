"""Stores the images of the real node in containerd's form: unpacked once, hard-linked into each node that starts.

Importing and unpacking takes 45 s of CPU for each node; linking takes two. Containers write to separate layers, so the
files of the store never change.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.processes import Component, wait_until
from tests.testcluster import build, images, step_image as steps
from tests.testcluster.build import BuildError, cached

STEP_BASE = "trainjob.test/step-base:1"
"""The step image without the source of this checkout."""

_NAMESPACE = "k8s.io"  # where the kubelet's images are
_CONFIG = """\
version = 3
root = "{root}"
state = "{scratch}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime"]
[grpc]
address = "{scratch}/containerd.sock"
"""


def ensure() -> Path:
    """The directory of the store; created if missing (a minute, and two for the images)."""
    archives = [*images.ensure().values(), images.mpi()]
    layer = steps.dependencies()
    parts = [build.program("containerd"), *archives, layer]
    key = hashlib.sha256("\\0".join(map(str, parts)).encode()).hexdigest()[:12]

    def make(unfinished: Path) -> None:
        for older in images.directory().glob("store-*"):
            shutil.rmtree(older)
        with tempfile.TemporaryDirectory(dir=images.directory()) as scratch:
            base = Path(scratch) / "step-base.tar"
            layers = [*images.layers_of(images.python(), Path(scratch)), layer]
            described = images.write_image(base, STEP_BASE, layers, {})
            store = Path(scratch) / "store"
            store.mkdir()
            _unpack(store, Path(scratch), [*archives, base])
            (store / "step-base.json").write_text(json.dumps(described))
            store.replace(unfinished)

    return cached(images.directory() / f"store-{key}", "the unpacked images of the real node", make)


def step_layers() -> list[dict[str, Any]]:
    """The layers of `STEP_BASE`, as a manifest describes them."""
    layers: list[dict[str, Any]] = json.loads((ensure() / "step-base.json").read_text())
    return layers


def link(root: Path) -> None:
    """Create containerd's root directory `root`, which must not exist, from the store."""
    store = ensure()
    subprocess.run(["cp", "-al", "--", store, root], check=True, capture_output=True)
    for database in store.rglob("*.db"):  # the only files that containerd changes in place
        target = root / database.relative_to(store)
        target.unlink()
        shutil.copy(database, target)


def _unpack(root: Path, scratch: Path, archives: list[Path]) -> None:
    config = scratch / "containerd.toml"
    config.write_text(_CONFIG.format(root=root, scratch=scratch))
    program = build.program("containerd")
    path = {"PATH": f"{program.parent}:{os.environ.get('PATH', os.defpath)}"}
    containerd = Component("containerd", [str(program), "--config", str(config), "--log-level=warn"], scratch, path)
    ctr = [str(build.program("ctr")), "--address", f"{scratch}/containerd.sock", "--namespace", _NAMESPACE]

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*ctr, *arguments], capture_output=True, text=True, check=False)

    containerd.start()
    try:
        wait_until("containerd answers", lambda: call("version").returncode == 0, 60, among=[containerd])
        for archive in archives:
            done = call("images", "import", str(archive))
            if done.returncode != 0:
                raise BuildError(f"{archive} cannot be imported: {done.stderr.strip()}")
    finally:
        containerd.kill()
