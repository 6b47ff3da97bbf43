"""docs/how-to/runtimes.md has the specs that the tests of the cluster run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.cluster.runtimes import INITIALIZER_VOLUME, PROVIDERS, SHIPPED, Shipped

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "runtimes.md").read_text()


def code(name: str, value: object) -> str:
    """A field of a spec, as an argument in Python."""
    written = repr(value) if isinstance(value, int) else json.dumps(value)
    return f"{name}={written.replace(json.dumps(INITIALIZER_VOLUME), 'INITIALIZER_VOLUME')}"


@pytest.mark.parametrize("case", SHIPPED, ids=lambda case: case.runtime)
def test_the_table_has_what_runs(case: Shipped) -> None:
    fields = ", ".join(code(name, value) for name, value in case.asked.items())
    pods = ", ".join(f"{number} {name}" for name, number in case.pods.items())
    cells = (f"`{case.runtime}`", f"`{fields}`" if fields else "", pods, ", ".join(PROVIDERS.values()), case.real)
    assert f"| {' | '.join(cells)} |\n" in PAGE


def test_the_table_has_no_other_runtime() -> None:
    rows = re.findall(r"^\| `([\w.-]+)` \|.*\| Python, Airflow, KFP \|", PAGE, re.MULTILINE)
    assert rows == [case.runtime for case in SHIPPED]


def test_the_patch_is_the_one_that_runs() -> None:
    (snippet,) = re.findall(r"```python\n(INITIALIZER_VOLUME = .*?)```", PAGE, re.DOTALL)
    defined: dict[str, object] = {}
    exec(snippet, defined)
    assert defined["INITIALIZER_VOLUME"] == INITIALIZER_VOLUME
