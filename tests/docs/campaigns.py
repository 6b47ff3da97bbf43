"""Writes the table of docs/campaigns.md from what `make campaign` has left in `.test-output`.

::

    python -m tests.docs.campaigns
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from tests.lanes import OUTPUT, Test, read

PAGE = Path(__file__).parents[2] / "docs" / "campaigns.md"
FILES = sorted(OUTPUT.glob("campaign-*.xml"))


def row(tests: list[Test]) -> str:
    """The table's row for the tests of one file and function."""
    name = re.sub(r"\[.*", "", tests[0].name)
    schedules = sum(int(test.properties.get("schedules", 0)) for test in tests)
    seeds = ", ".join(sorted({test.properties["seed"] for test in tests if "seed" in test.properties}))
    failed = sum(bool(test.failed) for test in tests)
    result = f"{failed} of {len(tests)} tests failed" if failed else "passed"
    return f"| `{name}` | {schedules} | {result} | {sum(test.seconds for test in tests):.0f} s | {seeds} |"


def main() -> None:
    """Write the table."""
    of: dict[str, list[Test]] = {}
    for file in FILES:
        for test in read(file):
            if "schedules" in test.properties:
                of.setdefault(re.sub(r"\[.*", "", test.name), []).append(test)
    when = time.strftime("%Y-%m-%d", time.gmtime(max(file.stat().st_mtime for file in FILES)))
    lines = [
        f"{when}, {os.cpu_count()} cores:",
        "",
        "| test | schedules | result | time | seed |",
        "|---|---:|---|---:|---|",
        *(row(tests) for _, tests in sorted(of.items())),
    ]
    text = PAGE.read_text()
    result = "\n".join(lines)
    PAGE.write_text(re.sub(r"(<!-- result -->\n).*?(<!-- end -->)", rf"\g<1>{result}\n\g<2>", text, flags=re.DOTALL))


if __name__ == "__main__":
    main()
