"""The table: calls of the Kubeflow SDK, and the equivalent `TrainJobSpec`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conformance import builtin, custom, options, refusals

TABLE = (*custom.ROWS, *options.ROWS, *builtin.ROWS, *refusals.ROWS)

RECORDED = Path(__file__).parent / "recorded.json"


def recorded() -> dict[str, Any]:
    """The content that `record` wrote."""
    content: dict[str, Any] = json.loads(RECORDED.read_text())
    return content
