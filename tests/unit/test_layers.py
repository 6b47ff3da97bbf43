"""The map of the core in CONTRIBUTING.md beside the layers that `make lint` checks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_contributing_lists_the_layers_in_their_order() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [each["layers"] for each in contracts if each.get("exhaustive")]
    _, _, table = (ROOT / "CONTRIBUTING.md").read_text().partition("| layer of `trainjob` | what |\n|---|---|\n")
    rows = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    assert [" | ".join(re.findall(r"`(\w+)`", row)) for row in rows[: len(layers)]] == layers


def test_each_package_says_what_it_is_for() -> None:
    packages = sorted((ROOT / "components" / "trainjob").rglob("__init__.py"))
    assert len(packages) > 15
    assert not [str(file) for file in packages if not file.read_text().startswith('"""')]
