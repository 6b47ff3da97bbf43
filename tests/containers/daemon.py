"""A separate Docker daemon for the tests, which ends with them and leaves nothing behind.

It changes no bridge, no firewall rule and no kernel setting. Containers reach each other on the networks that compose
creates, this machine reaches them by Docker's proxy, and builds use this machine's network.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import docker
from tests.testcluster import images
from tests.testcluster.build import cache_directory
from tests.testcluster.real_node import remove_cgroups

_CGROUP = "trainjob-docker"
_PROGRAMS = ("dockerd", "containerd", "runc", "docker-compose", "setpriv")


def why_unsupported() -> str:
    """Why this machine cannot run a daemon, as text; empty if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "no Docker daemon answers, and a separate one for the tests needs Linux and root"
    wanted = _PROGRAMS if (images.directory() / "python.tar").exists() else (*_PROGRAMS, "debootstrap")
    missing = [each for each in wanted if shutil.which(each) is None]
    return f"{', '.join(missing)} missing: apt-get install the packages of apt-packages.txt" if missing else ""


def answers() -> bool:
    """Whether a daemon answers at the address of the environment, or at the default address."""
    try:
        client = docker.from_env()
    except docker.errors.DockerException:
        return False
    try:
        return bool(client.ping())
    except (docker.errors.DockerException, OSError):
        return False
    finally:
        client.close()


class Daemon:
    """Context manager that runs the daemon.

    Images and build caches are kept in a directory that only one daemon uses at a time.

    Attributes:
        host: The value for ``DOCKER_HOST``.
    """

    def __init__(self) -> None:
        self._data = cache_directory().with_name("docker")
        self._directory = Path(tempfile.mkdtemp(prefix="trainjob-docker-"))  # short, because socket paths are limited
        self.host = f"unix://{self._directory}/docker.sock"

    def __enter__(self) -> Daemon:
        self._data.mkdir(parents=True, exist_ok=True)
        self._lock = (self._data.parent / "docker.lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._others = _cgroups()
        settings = {"builder": {"gc": {"enabled": True, "defaultKeepStorage": "6GB"}}}
        (self._directory / "daemon.json").write_text(json.dumps(settings))
        command = [
            # It ends when this process ends, and first ends its containers and containerd.
            *("setpriv", "--pdeathsig", "TERM", "--"),
            *("dockerd", f"--host={self.host}", f"--config-file={self._directory}/daemon.json"),
            *(f"--pidfile={self._directory}/docker.pid", f"--exec-root={self._directory}/exec"),
            *(f"--data-root={self._data}", "--bridge=none"),
            # It does not remove cgroups of containers and builds, so they are below one parent, which is removed.
            *("--exec-opt=native.cgroupdriver=cgroupfs", f"--cgroup-parent=/{_CGROUP}"),
            *("--iptables=false", "--ip-forward=false", "--ip-masq=false"),
        ]
        with (self._directory / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            self._wait_for_answer()
            self._clean()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._clean()
        finally:
            self._end()

    def left(self) -> list[str]:
        """Remaining mounts, processes and cgroups of this daemon."""
        places = (str(self._directory), str(self._data))
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        found = [mount for mount in mounts if mount.startswith(places)]
        found += sorted(_cgroups() - self._others)
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if str(self._directory) in command:
                    found.append(f"{entry.name}: {command}")
        return found

    def _wait_for_answer(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            ended = self._process.poll() is not None
            with suppress(docker.errors.DockerException, OSError):
                client = docker.DockerClient(self.host)
                try:
                    client.ping()
                    return
                finally:
                    client.close()
            if ended or time.monotonic() > deadline:
                raise OSError(f"dockerd does not answer: {self._log()}")
            time.sleep(0.1)

    def _clean(self) -> None:
        """Remove the containers, networks and volumes of a killed session, and images without a tag."""
        client = docker.DockerClient(self.host)
        try:
            for container in client.containers.list(all=True):
                container.remove(force=True, v=True)
            client.networks.prune()
            client.volumes.prune()
            client.images.prune()
        finally:
            client.close()

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(40)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        with suppress(OSError):  # remaining cgroups are reported below
            remove_cgroups(_CGROUP)
        left = self.left()
        self._lock.close()
        assert not left, f"the Docker daemon has left {left}; its log: {self._log()}"
        shutil.rmtree(self._directory)

    def _log(self) -> str:
        return (self._directory / "log").read_text(errors="replace")[-4000:]


def _cgroups() -> set[str]:
    """Cgroups that a Docker daemon can have created: in each hierarchy of cgroups v1, or at the top of v2."""
    return {str(each) for pattern in ("*docker*", "*/*docker*") for each in Path("/sys/fs/cgroup").glob(pattern)}
