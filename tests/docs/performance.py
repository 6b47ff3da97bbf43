"""Writes the tables of docs/reference/performance.md and docs/comparison.md from what the scripts of tests/bench print.

::

    make bench > figures.jsonl
    python tests/docs/performance.py < figures.jsonl
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS / "reference" / "performance.md", DOCS / "comparison.md")
Line = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def figure(line: Line | None, of: str = "value") -> str:
    if line is None or line[of] is None:
        return ""
    value = line[of]
    if isinstance(value, str):
        return value
    number = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{number} {line['unit'] if of != 'ratio' else ''}".strip()


def waiting(lines: Sequence[Line]) -> dict[str, str]:
    facts = [line for line in lines if " jobs: " not in line["metric"]]
    ours: dict[str, dict[int, Line]] = {}
    peers: dict[tuple[str, int], dict[str, Line]] = {}
    for line in lines:
        if found := re.fullmatch(r"(\d+) jobs: (.+?)(?:, beside (\S+))?", line["metric"]):
            number, metric, peer = int(found[1]), found[2], found[3]
            if peer:
                peers.setdefault((metric, number), {})[peer] = line
            else:
                ours.setdefault(metric, {})[number] = line
    numbers = sorted({number for values in ours.values() for number in values})
    names = sorted({name for values in peers.values() for name in values}, reverse=True)
    own_rows = [[metric, *(figure(values.get(number)) for number in numbers)] for metric, values in ours.items()]
    peer_rows = [
        [
            f"{metric}, {number:,} jobs",
            figure(ours[metric][number]),
            *(figure(values.get(name), "peer") for name in names),
        ]
        for (metric, number), values in sorted(peers.items(), key=lambda item: item[0][1])
    ]
    return {
        "machine": "\n".join(f"* {line['metric']}: {line['value']}" for line in facts),
        "waiting": table(["", *(f"{number:,} jobs" for number in numbers)], own_rows),
        "peers": table(["", "trainjob", *names], peer_rows),
    }


def plain(lines: Iterable[Line], head: Sequence[str] = ("", "trainjob adds", "beside", "ratio")) -> str:
    """As many columns as `head` has; without single runs."""
    rows = [
        [line["metric"], figure(line), figure(line, "peer"), figure(line, "ratio")][: len(head)]
        for line in lines
        if not line["metric"].startswith("run ")
    ]
    return table(head, rows)


def stores(lines: Sequence[Line]) -> dict[str, str]:
    """A row for each figure and how ours compares, a column for each client; from a hub and what is said once apart."""
    cells: dict[str, dict[str, Line]] = {}
    for line in lines:
        cells.setdefault(line["metric"], {})[line["client"]] = line
    once = [metric for metric in cells if "" in cells[metric]]
    parts = {"stores": [*once, *(metric for metric in cells if metric not in once and "hub" not in metric)]}
    parts["hub"] = [metric for metric in cells if metric not in once and "hub" in metric]
    tables = {}
    for part, metrics in parts.items():
        most_first = sorted(metrics, key=lambda metric: -len(cells[metric]))
        names = list(dict.fromkeys(name for metric in most_first for name in cells[metric] if name))
        rows = []
        for metric in metrics:
            of = cells[metric]
            rows.append(
                [metric, *(figure(of.get(name) or (of.get("") if name == "trainjob" else None)) for name in names)]
            )
            if metric.endswith(": time"):
                ratios = (figure(of.get(name), "ratio") for name in names)
                rows.append([f"{metric.removesuffix(': time')}: times that of trainjob", *ratios])
        tables[part] = table(["", *names], rows)
    return tables


HEADS = {
    "oci": ("", "trainjob", "oras-py", "ratio"),
    "diagnosis": ("", "trainjob"),
    "live": ("", "trainjob"),
    "first_crash": ("", "trainjob", "Kubeflow SDK", "ratio"),
    "progress": ("", "trainjob", "Kubeflow SDK", "ratio"),
    "tuning": ("", "trainjob", "beside", "ratio"),
    "triggerer": ("", "TrainJobTrigger", "KubernetesJobTrigger", "ratio"),
}


def main() -> None:
    lines = [json.loads(line) for line in sys.stdin]
    of: dict[str, list[Line]] = {}
    for line in lines:
        of.setdefault(line["bench"], []).append(line)
    parts = waiting(of.pop("waiting")) if "waiting" in of else {}
    parts |= stores(of.pop("stores")) if "stores" in of else {}
    parts |= {name: plain(found, HEADS[name]) if name in HEADS else plain(found) for name, found in of.items()}
    for page in PAGES:
        text = page.read_text()
        for name, part in parts.items():
            text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", rf"\g<1>{part}\n\g<2>", text, flags=re.DOTALL)
        page.write_text(text)


if __name__ == "__main__":
    main()
