"""The map of the core in CONTRIBUTING.md beside the layers that `make lint` checks."""

from __future__ import annotations

import re
import tomllib
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _layers() -> list[str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [each["layers"] for each in contracts if each.get("exhaustive")]
    return [str(layer) for layer in layers]


def test_contributing_lists_the_layers_in_their_order() -> None:
    layers = _layers()
    _, _, table = (ROOT / "CONTRIBUTING.md").read_text().partition("| layer of `trainjob` | what |\n|---|---|\n")
    rows = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    assert [" | ".join(re.findall(r"`(\w+)`", row)) for row in rows[: len(layers)]] == layers


def test_each_package_says_what_it_may_import() -> None:
    said = {
        "callbacks": "Imports `progress` and the libraries that they serve.",
        "_support": "Imports nothing of `trainjob`.",
    }
    said["progress"] = "Imports the standard library only."
    layers = [layer.split(" | ") for layer in _layers()]
    for upper, lower in pairwise(layers):
        sentence = f"May import {' and '.join(f'`{name}`' for name in lower)}, and the layers below."
        for name in upper:
            package = ROOT / "components" / "trainjob" / name / "__init__.py"
            assert not package.exists() or said.get(name, sentence) in package.read_text(), name


def test_each_package_says_what_it_is_for() -> None:
    packages = sorted((ROOT / "components" / "trainjob").rglob("__init__.py"))
    assert len(packages) > 15
    assert not [str(file) for file in packages if not file.read_text().startswith('"""')]
