"""Each field of a kubeconfig has an effect, is refused or has none, and the documentation says which."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainjob._backends.kubeconfig import REFUSED, Cluster, Context, Exec, KubeConfig, User, fields_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "kubeconfig.md"

# kubernetes/client-go at 32ce75a7d6bc (2026-07-24), tools/clientcmd/api/v1/types.go: the JSON names of the fields of
# Config, Context, Cluster, AuthInfo and ExecConfig.
CLIENT_GO: dict[str, tuple[type, str]] = {
    "File": (KubeConfig, "kind apiVersion preferences clusters users contexts current-context extensions"),
    "Context": (Context, "cluster user namespace extensions"),
    "Cluster": (
        Cluster,
        "server tls-server-name insecure-skip-tls-verify certificate-authority certificate-authority-data proxy-url"
        " disable-compression extensions",
    ),
    "User": (
        User,
        "client-certificate client-certificate-data client-key client-key-data token tokenFile as as-uid as-groups"
        " as-user-extra username password auth-provider exec extensions",
    ),
    "Exec plugins": (Exec, "command args env apiVersion installHint provideClusterInfo interactiveMode"),
}


def documented(section: str) -> dict[str, str]:
    """Fields and effects in the table of a section."""
    text = PAGE.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", text, re.MULTILINE)
    return {name: effect for names, effect in rows for name in re.findall(r"`([^`]+)`", names)}


@pytest.mark.parametrize(("section", "kind", "fields"), [(name, *each) for name, each in CLIENT_GO.items()])
def test_every_field_of_client_go_is_documented_with_what_the_code_does(section: str, kind: type, fields: str) -> None:
    effects = documented(section)
    refused = {name for name, effect in effects.items() if effect.startswith("Refused:")}
    without = {name for name, effect in effects.items() if effect == "No effect."}
    assert set(effects) == set(fields.split())
    assert refused == (set(REFUSED) if kind is User else set())
    assert set(fields_of(kind)) == set(effects) - refused - without
