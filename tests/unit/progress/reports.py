"""What a reporter has written, and the variables that it reads."""

from __future__ import annotations

import json
from pathlib import Path

from trainjob.progress import Report, flush, read

API = tuple(f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
ENVIRONMENT = (
    *(*API, "TRAINJOB_TERMINATION_LOG", "KUBERNETES_SERVICE_HOST", "LOCAL_RANK", "RANK", "JAX_PROCESS_ID"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_RANK"),
)


def written(path: Path) -> Report:
    """The report in a message, which fits and is JSON."""
    flush()
    content = path.read_bytes()
    assert len(content) <= 4096
    json.loads(content)
    answer = read(content.decode())
    assert answer is not None
    return answer
