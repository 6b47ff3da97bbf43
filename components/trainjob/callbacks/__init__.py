"""Callbacks that report the progress and the metrics of a training loop that a library runs.

`trainjob.callbacks.huggingface` needs ``transformers``, `trainjob.callbacks.lightning` needs ``lightning``. Of this
package they need `trainjob.progress`, and none of its dependencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from trainjob.progress import MAX_METRICS, MAX_NAME


def numbers(logged: Mapping[str, Any]) -> dict[str, float]:
    """What `trainjob.progress.report` takes of a library's metrics: no limit of it may end a training."""
    found = {}
    for name, value in islice(logged.items(), MAX_METRICS):
        try:
            found[str(name)[:MAX_NAME] or "_"] = float(value)
        except (TypeError, ValueError):  # text, or a tensor of several numbers
            continue
    return found
