"""Credentials by the exec plugin of a kubeconfig, as client-go runs it (v0.37, ``plugin/pkg/client/auth/exec``)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from threading import Lock
from typing import Any

from trainjob._backends.kubeconfig import Exec
from trainjob._support.foreign import LENIENT, Unreadable, json_of
from trainjob._support.masking import public
from trainjob.errors import ConfigurationError

_VERSIONS = tuple(f"client.authentication.k8s.io/{version}" for version in ("v1", "v1beta1"))
_LIMIT = 1 << 20  # bytes of an ExecCredential; a certificate with its chain has 10 KB
_SHOWN = 2000  # characters at the end of stderr
_SECONDS = 60.0
_SECONDS_OF_A_PERSON = 300.0  # who logs in by a browser


@dataclass(frozen=True)
class Issued:
    """Credentials that a plugin has issued; certificate and key are PEM, empty if there are none."""

    token: str = field(repr=False)
    certificate: bytes
    key: bytes = field(repr=False)
    expires: datetime | None

    def is_current(self) -> bool:
        """Whether they have not expired."""
        return self.expires is None or datetime.now(UTC) < self.expires


@dataclass
class _Slot:
    """The latest credentials of one plugin. The lock keeps other threads from asking a person twice."""

    lock: Lock = field(default_factory=Lock)
    issued: Issued | None = None


@lru_cache(maxsize=64)
def _slot(_: str) -> _Slot:
    return _Slot()


def forget() -> None:
    """Run all plugins again when their credentials are needed next."""
    _slot.cache_clear()


def issue(plugin: Exec, cluster: Mapping[str, Any], refused: Issued | None = None) -> Issued:
    """The credentials that the plugin has issued to this process, or new ones. Blocks.

    Args:
        plugin: The plugin.
        cluster: What a plugin with ``provideClusterInfo`` gets to know.
        refused: Credentials that the server has refused, which are not returned again.

    Raises:
        ConfigurationError: The plugin failed, is missing, hangs, or printed no credentials.
    """
    spec = {"cluster": _with_names(cluster)} if plugin.provide_cluster_info else {}
    slot = _slot(json.dumps([asdict(plugin), spec], sort_keys=True))
    with slot.lock:
        if slot.issued is None or slot.issued is refused or not slot.issued.is_current():
            slot.issued = None
            slot.issued = _run(plugin, spec)
        return slot.issued


def _with_names(value: Any) -> Any:
    """A value of YAML as JSON has it: all keys are text, which can be sorted."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else json.dumps(key): _with_names(part) for key, part in value.items()}
    return [_with_names(part) for part in value] if isinstance(value, list) else value


def _run(plugin: Exec, spec: dict[str, Any]) -> Issued:
    if not (plugin.command and all(each.name for each in plugin.env)):
        raise _error(plugin, "has no command, or a variable without a name in env")
    if plugin.api_version not in _VERSIONS:
        raise _error(plugin, f"has apiVersion {plugin.api_version!r}; supported: {', '.join(_VERSIONS)}")
    if plugin.interactive_mode not in ("Never", "IfAvailable", "Always"):
        raise _error(plugin, f"has interactiveMode {plugin.interactive_mode!r}; set Never, IfAvailable or Always")
    terminal = os.isatty(0)
    if plugin.interactive_mode == "Always" and not terminal:
        raise _error(plugin, "has interactiveMode Always, and standard input is not a terminal: log in on a terminal")
    interactive = terminal and plugin.interactive_mode != "Never"
    request = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": {**spec, "interactive": interactive}}
    environment = {**os.environ, **{each.name: each.value for each in plugin.env}}
    environment["KUBERNETES_EXEC_INFO"] = json.dumps(request)
    program = plugin.command if os.sep in plugin.command else shutil.which(plugin.command)
    # Go refuses a program that PATH finds in the working directory, which may belong to another user, as well.
    if program is None or not Path(program).exists() or (program != plugin.command and not Path(program).is_absolute()):
        raise _error(plugin, "is not installed" + _hint(plugin))
    try:
        process = subprocess.Popen(
            [program, *plugin.args],
            env=environment,
            stdin=None if interactive else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if os.isatty(2) else subprocess.PIPE,  # a person reads what to do, as with kubectl
        )
    except (OSError, ValueError) as error:
        raise _error(plugin, f"cannot be started: {error}{_hint(plugin)}") from error
    return _issued(plugin, _output(plugin, process, _SECONDS_OF_A_PERSON if interactive else _SECONDS))


def _output(plugin: Exec, process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """What the plugin printed, after it has ended with code 0."""
    until = time.monotonic() + seconds
    out, err, problem = bytearray(), bytearray(), ""
    with process, DefaultSelector() as selector:
        for stream, buffer in ((process.stdout, out), (process.stderr, err)):
            if stream is not None:
                selector.register(stream, EVENT_READ, buffer)
        try:
            while selector.get_map() and not problem:
                ready = selector.select(until - time.monotonic())
                if not ready or time.monotonic() > until:
                    raise subprocess.TimeoutExpired(plugin.command, seconds)
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    key.data.extend(data)
                    if not data:
                        selector.unregister(key.fileobj)
                problem = "prints more than 1 MiB" if len(out) > _LIMIT else ""
                del err[:-_LIMIT]
            process.wait(max(0.0, until - time.monotonic()) if not problem else 0.0)
        except subprocess.TimeoutExpired:
            problem = problem or f"has not finished after {seconds:g} s"
            _kill(process)
    if not problem and process.returncode:
        code = process.returncode
        problem = f"failed with exit code {code}" if code > 0 else f"was killed by signal {-code}"
    if problem:
        shown = public(err.decode("utf-8", "replace").strip())[-_SHOWN:]
        raise _error(plugin, problem + (f": {shown}" if shown else "") + _hint(plugin))
    return bytes(out)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the plugin and what it has started, such as the command that a shell script waits for."""
    for pid in (*_started_by(process.pid), process.pid):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _started_by(pid: int) -> list[int]:
    """The descendants of a process; none where there is no /proc.

    Not a process group, which would have neither the terminal nor its Ctrl-C.
    """
    children: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += map(int, listed.read_text().split())
    return [*children, *(each for child in children for each in _started_by(child))]


def _issued(plugin: Exec, printed: bytes) -> Issued:
    """The credentials in the output, which an error never quotes."""
    try:
        found = json_of(printed, "the output", LENIENT)
    except Unreadable:
        raise _error(plugin, f"printed no ExecCredential, but {len(printed)} bytes that are not JSON") from None
    if not isinstance(found, dict) or found.get("kind") != "ExecCredential":
        raise _error(plugin, "printed JSON that is not an ExecCredential")
    if found.get("apiVersion") != plugin.api_version:
        raise _error(plugin, f"printed an ExecCredential whose apiVersion is not {plugin.api_version}, as configured")
    status = found.get("status")
    names = ("token", "clientCertificateData", "clientKeyData", "expirationTimestamp")
    values = [(status.get(name) or "") if isinstance(status, dict) else "" for name in names]
    if not all(isinstance(value, str) for value in values):
        raise _error(plugin, "printed an ExecCredential with a status that is not text")
    token, certificate, key, expiration = values
    if not (token or certificate or key):
        raise _error(plugin, "printed an ExecCredential without a token or certificate")
    if bool(certificate) != bool(key):
        raise _error(plugin, "printed an ExecCredential with only one of clientCertificateData and clientKeyData")
    try:
        expires = datetime.fromisoformat(expiration) if expiration else None
        if expires is not None and expires.tzinfo is None:
            raise ValueError
    except ValueError:
        raise _error(plugin, "printed an ExecCredential whose expirationTimestamp is not RFC 3339") from None
    return Issued(token, certificate.encode(), key.encode(), expires)


def _error(plugin: Exec, problem: str) -> ConfigurationError:
    return ConfigurationError(f"the kubeconfig's exec plugin {plugin.command} {problem}")


def _hint(plugin: Exec) -> str:
    return f". Its installHint: {public(plugin.install_hint.strip())}" if plugin.install_hint else ""
