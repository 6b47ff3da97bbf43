"""Tokens from a kubeconfig's exec plugin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainjob._backends.credentials import Credentials
from trainjob.errors import ConfigurationError

# The token is empty while the file has lines; each call removes one.
PLUGIN = """
token=second; [ -s "$0" ] && token=
sed -i 1d "$0"
printf '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "%s"}}' "$token"
"""


def credentials(directory: Path, empty: int) -> Credentials:
    (directory / "times").write_text("empty\n" * empty)
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "sh",
        "args": ["-c", PLUGIN, str(directory / "times")],
        "interactiveMode": "Never",
    }
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1", "insecure-skip-tls-verify": True}}],
        "users": [{"name": "u", "user": {"exec": plugin}}],
    }
    (directory / "kubeconfig").write_text(json.dumps(config))
    return Credentials(kubeconfig=str(directory / "kubeconfig"))


def test_an_empty_token_is_requested_again(tmp_path: Path) -> None:
    assert credentials(tmp_path, 2).load().authorization == "Bearer second"


def test_modules_of_the_working_directory_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In /tmp, for example, any user can create modules."""
    (tmp_path / "there").mkdir()
    for module in ("trainjob", "json", "kubernetes"):
        (tmp_path / "there" / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path / "there")
    assert credentials(tmp_path, 0).load().authorization == "Bearer second"
    assert not (tmp_path / "ran").exists()


def test_a_token_that_stays_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="token is empty: check the output of its exec plugin"):
        credentials(tmp_path, 100).load()
