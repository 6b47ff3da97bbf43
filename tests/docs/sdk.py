"""Writes the tables of docs/how-to/kubeflow-sdk.md from tests/conformance.

::

    python -m tests.docs.sdk
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.conformance.names import PLACES
from tests.conformance.table import TABLE, recorded

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "kubeflow-sdk.md"
_ELSEWHERE = {
    "name": "is the key of the launch",
    "trainer": "is `func` …, `image` … or `torchtune`",
    "options": "are fields",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def arguments() -> str:
    """Class by class: which part of a spec has its arguments."""
    rows = []
    for owner, names in recorded()["arguments"].items():
        part, others = PLACES[owner]
        if part.startswith("runtime_patches."):
            part = "runtime_patches"
        places = {name: "of the spec itself" if path == name else f"is {code(path)}" for name, path in others.items()}
        moved = [f"{code(name)} {places[name] if path else _ELSEWHERE[name]}" for name, path in others.items()]
        same = [code(part) if part else "the spec itself"] if set(names) - set(others) else []
        rows.append([code(owner), ", ".join(code(name) for name in names), "; ".join([*same, *moved])])
    return table(["Kubeflow SDK", "arguments", "where they are in a `TrainJobSpec`"], rows)


def calls() -> str:
    """Row by row: the same pods, but for what is said below."""
    reasons = list(dict.fromkeys(reason for row in TABLE for reason in row.differs.values()))
    rows = []
    for row in TABLE:
        if not row.refused:
            numbers = sorted({reasons.index(reason) + 1 for reason in row.differs.values()})
            rows.append([code(row.sdk), code(row.ours), ", ".join(f"({number})" for number in numbers)])
    listed = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    return table(["`TrainerClient.train(…)`", "`TrainJobSpec.parse({…})`", "differs"], rows) + f"\n\n{listed}"


def refusals() -> str:
    rows = [[code(row.sdk), row.refused, row.sooner or "the same"] for row in TABLE if row.refused]
    return table(["`TrainerClient.train(…)`", "refused by the SDK or Trainer", "refused here"], rows)


def page(text: str) -> str:
    """`text` with its tables as they should be."""
    parts = {"arguments": arguments(), "calls": calls(), "refusals": refusals()}
    for name, part in parts.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        found = re.search(pattern, text, re.DOTALL)
        assert found, f"no place for {name} in {PAGE.name}"
        text = f"{text[: found.start()]}{found[1]}{part}\n{found[2]}{text[found.end() :]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
