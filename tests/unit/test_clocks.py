"""The clock of a worker is compared with no time that a server wrote; every other reading of it has a reason."""

from __future__ import annotations

import pytest
from tests.unit.clocks import ALLOWED, clocks_in, found


def test_readings_of_the_clock_are_named_with_a_reason() -> None:
    """Use `Backend.now`, or `time.monotonic`, or add the module to `ALLOWED` with the reason why it need not."""
    assert found() == {file: names for file, (_, names) in ALLOWED.items()}


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.time()",
        "import time\nclock = time.time_ns",
        "from time import time",
        "import time\ntime.gmtime()",
        "import time\ntime.strftime('%Y')",
        "from datetime import UTC, datetime\ndatetime.now(UTC)",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import date\ndate.today()",
        "import pendulum\npendulum.now('UTC')",
        "path.stat().st_mtime",
    ],
)
def test_a_new_reading_is_found(source: str) -> None:
    assert [*clocks_in(source)]


@pytest.mark.parametrize(
    "source",
    ["time.monotonic()", "backend.now()", "time.gmtime(7)", "time.strftime('%Y', at)", "datetime.fromisoformat(text)"],
)
def test_what_reads_no_clock_is_allowed(source: str) -> None:
    assert not [*clocks_in(f"import time\n{source}")]
