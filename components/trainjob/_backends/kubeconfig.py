"""Kubeconfig files, merged as by kubectl."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trainjob.errors import ConfigurationError

_PATHS = {"clusters": ("certificate-authority",), "users": ("client-certificate", "client-key", "tokenFile")}
"""Fields with a path, relative to the directory of their kubeconfig."""


@dataclass(frozen=True)
class KubeConfig:
    """The merged content of kubeconfig files: of two entries with the same name the first applies.

    Attributes:
        current_context: Name of the current context; empty if no file sets one.
        contexts: Contexts by name.
        clusters: Clusters by name; paths are absolute if the kubeconfig is a file.
        users: Users by name; paths as in `clusters`.
    """

    current_context: str = ""
    contexts: dict[str, dict[str, Any]] = field(default_factory=dict)
    clusters: dict[str, dict[str, Any]] = field(default_factory=dict)
    users: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)

    @classmethod
    def of_text(cls, text: str) -> KubeConfig:
        """Read YAML or JSON.

        Raises:
            ConfigurationError: The text is neither, or not a mapping.
        """
        return cls._parse(text, "the text given as kubeconfig", None)

    @classmethod
    def of_files(cls, paths: Sequence[Path]) -> KubeConfig:
        """Read and merge files; missing ones are skipped, as by kubectl.

        Raises:
            ConfigurationError: No file exists, or one cannot be read.
        """
        merged = None
        for path in paths:
            try:
                read = cls._parse(path.read_text(), str(path), path.absolute().parent)
            except FileNotFoundError:
                continue
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigurationError(f"the kubeconfig {path} cannot be read: {error}") from error
            merged = read if merged is None else merged._merged_with(read)
        if merged is None:
            raise ConfigurationError(f"there is no kubeconfig at {', '.join(map(str, paths))}")
        return merged

    @classmethod
    def _parse(cls, text: str, name: str, directory: Path | None) -> KubeConfig:
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            where = getattr(error, "problem_mark", None)  # the error's text quotes the file, including tokens
            line = f" (line {where.line + 1})" if where is not None else ""
            raise ConfigurationError(f"{name} is neither YAML nor JSON{line}") from None
        if not isinstance(content, dict):
            raise ConfigurationError(f"{name} is neither YAML nor JSON of a kubeconfig")
        entries = {kind: _by_name(content.get(kind), kind[:-1]) for kind in ("contexts", "clusters", "users")}
        for kind, fields in _PATHS.items() if directory is not None else ():
            for entry in entries[kind].values():
                entry.update({each: str(directory / entry[each]) for each in fields if entry.get(each)})
        return cls(str(content.get("current-context") or ""), **entries)

    def _merged_with(self, later: KubeConfig) -> KubeConfig:
        return KubeConfig(
            self.current_context or later.current_context,
            later.contexts | self.contexts,
            later.clusters | self.clusters,
            later.users | self.users,
        )


def _by_name(entries: object, kind: str) -> dict[str, dict[str, Any]]:
    """The entries of a list such as ``users``: name -> value of ``user``."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get(kind) or {}, dict):
            found.setdefault(str(entry.get("name")), dict(entry.get(kind) or {}))
    return found


def paths(given: str | None) -> list[Path]:
    """The files of `given`, of ``KUBECONFIG`` (several, separated as in ``PATH``), or ``~/.kube/config``."""
    listed = [given] if given else [path for path in os.environ.get("KUBECONFIG", "").split(os.pathsep) if path]
    return [Path(path).expanduser() for path in listed or ["~/.kube/config"]]


def data_or_file(entry: dict[str, Any], name: str) -> bytes:
    """The content of ``<name>-data``, else of the file in `name`; empty if neither is set.

    Raises:
        ConfigurationError: The data are not base64.
        OSError: The file cannot be read.
    """
    if data := entry.get(f"{name}-data"):
        try:
            return base64.b64decode("".join(str(data).split()), validate=True)
        except ValueError:
            raise ConfigurationError(f"{name}-data in the kubeconfig is not base64") from None
    return Path(entry[name]).read_bytes() if entry.get(name) else b""
