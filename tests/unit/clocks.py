"""Where the product reads the clock of its machine in place of `Backend.now`, and why."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.unit.decoders import PRODUCT, ROOT

_CLOCKS = {
    *(f"time.{name}" for name in ("time", "time_ns", "ctime", "asctime", "gmtime", "localtime", "strftime")),
    *(f"{name}.{read}" for name in ("datetime", "date") for read in ("now", "utcnow", "today")),
    "pendulum.now",
    "timezone.utcnow",
    "time.clock_gettime",
}
_GIVEN = {"time.gmtime": 0, "time.localtime": 0, "time.ctime": 0, "time.asctime": 0, "time.strftime": 1}
"""Conversions, with the place of the argument without which they read the clock."""
_FILES = {"st_mtime", "st_mtime_ns", "st_ctime", "st_ctime_ns"}

AIRFLOW = "deadlines of Airflow, which counts them by the clocks of its machines"
HERE = "times of jobs of this machine, whose clock writes all of them"
SCRIPT = "a training's own time, in its own report"
SHOWN = "when a page was made; no time is compared with it"
LINE = "the time in a line of this process's own output"
VERSION = "compared with an earlier state of the same file, not with a clock"
PEER = "as every TLS library and client-go compare them; what the server refuses is loaded again"

ALLOWED: dict[str, tuple[str, set[str]]] = {
    "components/trainjob/_backends/credentials.py": (f"{PEER}; {VERSION}", {"datetime.now", "st_mtime_ns"}),
    "components/trainjob/_backends/exec_plugin.py": (PEER, {"datetime.now"}),
    "components/trainjob/_backends/kubernetes/client.py": ("before the first reply of a server", {"datetime.now"}),
    "components/trainjob/_backends/local/backend.py": (HERE, {"datetime.now"}),
    "components/trainjob/_backends/local/cancels.py": (HERE, {"datetime.now"}),
    "components/trainjob/_backends/local/ranks.py": (HERE, {"time.time_ns"}),
    "components/trainjob/_backends/local/store.py": (f"{HERE}; {VERSION}", {"time.time", "st_mtime", "st_mtime_ns"}),
    "components/trainjob/_backends/local/supervision.py": (HERE, {"time.time"}),
    "components/trainjob/_backends/local/supervisor.py": (HERE, {"time.time"}),
    "components/trainjob/_doctor/server.py": ("measures how much the clocks differ", {"time.time"}),
    "components/trainjob/_pages/documents/jobs.py": (SHOWN, {"datetime.now"}),
    "components/trainjob/_pages/documents/study.py": (SHOWN, {"datetime.now"}),
    "components/trainjob/_support/retrying.py": (
        "a date in Retry-After; the pause has an upper bound",
        {"datetime.now"},
    ),
    "components/trainjob/cli/many.py": (LINE, {"time.time"}),
    "components/trainjob/cli/session.py": (LINE, {"time.time"}),
    "components/trainjob/data/stores/files.py": (VERSION, {"st_mtime_ns"}),
    "components/trainjob/data/stores/trust.py": (VERSION, {"st_mtime_ns"}),
    "components/trainjob/progress/message.py": (SCRIPT, {"time.gmtime"}),
    "components/trainjob/progress/reporter.py": (SCRIPT, {"time.time"}),
    "components/trainjob/progress/watchdog.py": (SCRIPT, {"time.time"}),
    "components/trainjob/registry/mlflow_promotions.py": ("orders claims; clocks may differ by 30 s", {"time.time"}),
    "components/trainjob/registry/runs.py": ("the start of a run without points, for people", {"time.time"}),
    "airflow_provider/trainjob_airflow/operators/base.py": (AIRFLOW, {"datetime.now"}),
    "airflow_provider/trainjob_airflow/operators/tuning.py": (AIRFLOW, {"datetime.now"}),
    "airflow_provider/trainjob_airflow/running.py": (AIRFLOW, {"datetime.now"}),
    "airflow_provider/trainjob_airflow/sample.py": (
        "a made-up run, to render the author's templates",
        {"pendulum.now"},
    ),
}
"""Module -> the reason, and how it reads the clock."""


def clocks_in(source: str) -> Iterator[str]:
    """How a module reads the clock of its machine, or the times of files, which may be those of another machine."""
    tree = ast.parse(source)
    given = {id(call.func) for call in ast.walk(tree) if isinstance(call, ast.Call) and _converts(call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from _CLOCKS.intersection(f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Attribute) and id(node) not in given:
            name = f"{getattr(node.value, 'attr', getattr(node.value, 'id', ''))}.{node.attr}"
            if name in _CLOCKS:
                yield name
            elif node.attr in _FILES:
                yield node.attr


def _converts(call: ast.Call) -> bool:
    """Whether the call converts a time that it is given."""
    return len(call.args) > _GIVEN.get(ast.unparse(call.func), 9)


def found() -> dict[str, set[str]]:
    """Module -> how it reads the clock."""
    files = [file for folder in PRODUCT for file in sorted((ROOT / folder).rglob("*.py"))]
    named = {str(file.relative_to(ROOT)): set(clocks_in(Path(file).read_text(encoding="utf-8"))) for file in files}
    return {file: names for file, names in named.items() if names}
