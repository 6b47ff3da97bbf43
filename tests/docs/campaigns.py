"""Writes the tables of docs/development/campaigns.md from what `make campaign` has left in `.test-output`."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from tests.lanes import OUTPUT, Test, read

PAGE = Path(__file__).parents[2] / "docs" / "development" / "campaigns.md"
FILES = sorted(OUTPUT.glob("campaign-*.xml"))


def subject(test: Test) -> str:
    """What a row is about: a function that draws schedules, else a file."""
    return re.sub(r"\[.*", "", test.name) if "schedules" in test.properties else test.name.partition("::")[0]


def row(name: str, tests: list[Test]) -> str:
    """The table's row for some tests."""
    schedules = sum(int(test.properties.get("schedules", 0)) for test in tests)
    seeds = ", ".join(sorted({test.properties["seed"] for test in tests if "seed" in test.properties}))
    failed = sum(bool(test.failed) for test in tests)
    result = f"{failed} of {len(tests)} tests failed" if failed else "passed"
    return f"| `{name}` | {schedules or ''} | {result} | {sum(test.seconds for test in tests):.0f} s | {seeds} |"


def main() -> None:
    """Write the tables."""
    of: dict[str, list[Test]] = {}
    for file in FILES:
        for test in read(file):
            of.setdefault(subject(test), []).append(test)
    when = time.strftime("%Y-%m-%d", time.gmtime(max(file.stat().st_mtime for file in FILES)))
    minutes = sum(test.seconds for tests in of.values() for test in tests) / 60
    lines = [
        f"{when}, {os.cpu_count()} cores, {minutes:.0f} minutes:",
        "",
        "| test | schedules | result | time | seed |",
        "|---|---:|---|---:|---|",
        *(row(name, tests) for name, tests in sorted(of.items())),
    ]
    replace("result", lines)
    measured = [test.properties["result"] for tests in of.values() for test in tests if "result" in test.properties]
    if measured:
        replace("terminate", [f"{when}, {os.cpu_count()} cores:", "", *(f"* {each}" for each in measured)])


def replace(what: str, lines: list[str]) -> None:
    """Put `lines` in the place of a part of the page."""
    text, result = PAGE.read_text(), "\n".join(lines)
    parts = rf"(<!-- {what} -->\n).*?(<!-- end -->)"
    PAGE.write_text(re.sub(parts, rf"\g<1>{result}\n\g<2>", text, flags=re.DOTALL))


if __name__ == "__main__":
    main()
