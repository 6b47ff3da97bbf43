"""Writes the table of docs/how-to/runtimes.md from `tests.cluster.runtimes`, which tests/cluster/test_runtimes.py runs.

::

    python -m tests.docs.runtimes
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.cluster.runtimes import INITIALIZER_VOLUME, PROVIDERS, SHIPPED

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "runtimes.md"


def code(name: str, value: Any) -> str:
    """A field of a spec, as an argument in Python."""
    written = repr(value) if isinstance(value, int) else json.dumps(value)
    return f"{name}={written.replace(json.dumps(INITIALIZER_VOLUME), 'INITIALIZER_VOLUME')}"


def table() -> str:
    """One row for each runtime."""
    head = ["runtime", "fields of its spec", "pods", "simulated nodes, from", "real node"]
    rows = [head, ["---"] * len(head)]
    for case in SHIPPED:
        fields = ", ".join(code(name, value) for name, value in case.asked.items())
        pods = ", ".join(f"{number} {name}" for name, number in case.pods.items())
        rows.append(
            [f"`{case.runtime}`", f"`{fields}`" if fields else "", pods, ", ".join(PROVIDERS.values()), case.real]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def written(page: str) -> str:
    """The page with the table as it has to be."""
    return re.sub(r"(<!-- runtimes -->\n).*?(<!-- end -->)", rf"\g<1>{table()}\n\g<2>", page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
