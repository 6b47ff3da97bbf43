"""The command line program, called in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.fakes.kube.direct import DirectBackend

from trainjob import JobRef, TrainJobSpec, launch
from trainjob.cli import main

Program = Callable[..., tuple[int, str, str]]
"""Takes the words of a command; returns exit code, stdout and stderr."""


def launched(backend: DirectBackend, key: str = "key") -> JobRef:
    """A running job in the namespace `default`."""
    spec = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"]})
    ref = asyncio.run(launch(backend, spec, key, namespace="default"))
    backend.running(ref)
    return ref


def exit_of(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Call the program; return its exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as left:
        main(words)
    out, err = capsys.readouterr()
    assert isinstance(left.value.code, int)
    assert ("Traceback" in err) == (left.value.code == 70), err  # 70: an internal error
    return left.value.code, out, err


def kubeconfig(path: Path, server: str, **user: Any) -> Path:
    """A kubeconfig with the context `here`, whose namespace is `training`."""
    config = {
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "training"}}],
        "current-context": "here",
    }
    path.write_text(yaml.safe_dump(config))
    return path
