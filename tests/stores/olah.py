"""A mirror of the Hugging Face Hub: olah, from PyPI, offline, on plain git repositories."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.processes import Component, free_port, listens, wait_until

_GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.quotePath=false", "-c", "core.autocrlf=false")


class Olah:
    """The server; it runs while the context is open.

    Args:
        python: Interpreter of the environment that contains olah.
        folder: Directory for its data.
    """

    def __init__(self, python: str, folder: Path) -> None:
        self.folder = folder
        port = free_port()
        self.host = f"127.0.0.1:{port}"
        self._port = port
        config = folder / "olah.toml"
        config.write_text(
            f'[basic]\nhost = "127.0.0.1"\nport = {port}\nrepos-path = "{folder}/cache"\n'
            f'mirrors-path = ["{folder}/mirrors"]\n[accessibility]\noffline = true\n'
        )
        command = [python, "-m", "olah.server", "--config", str(config), "--log-path", str(folder / "logs")]
        self._server = Component("olah", command, folder, {"PYTHONWARNINGS": "ignore"})

    def __enter__(self) -> Self:
        self._server.start()
        wait_until("olah answers", lambda: listens(self._port), among=[self._server])
        return self

    def __exit__(self, *_: object) -> None:
        self._server.kill()

    def commit(self, repo: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Commit exactly these files to a ``repo`` such as ``datasets/org/name``; return the hash of the commit."""
        folder = self._folder(repo)
        if branch != "main":
            self._git(folder, "checkout", "--quiet", "-B", branch)
        self._git(folder, "rm", "-r", "-q", "--ignore-unmatch", ".")
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        self._git(folder, "add", "--all", "--force")
        self._git(folder, "commit", "--quiet", "--allow-empty", "--message=files")
        return self._git(folder, "rev-parse", "HEAD").strip()

    def large(self, repo: str, data: bytes) -> bytes:
        """Store a file as Git LFS does; return the pointer to commit."""
        digest = hashlib.sha256(data).hexdigest()
        path = self._folder(repo) / ".git/lfs/objects" / digest[:2] / digest[2:4] / digest
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(data)}\n".encode()

    def _folder(self, repo: str) -> Path:
        """Directory of a repository, created if missing."""
        kind = repo if repo.startswith(("datasets/", "spaces/")) else f"models/{repo}"
        folder = self.folder / "mirrors" / kind
        if not folder.exists():
            folder.mkdir(parents=True)
            self._git(folder, "init", "--quiet", "--initial-branch=main")
        return folder

    def _git(self, folder: Path, *arguments: str) -> str:
        environment = {"HOME": str(self.folder), "PATH": os.environ["PATH"], "GIT_CONFIG_NOSYSTEM": "1"}
        done = subprocess.run(
            [*_GIT, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout
