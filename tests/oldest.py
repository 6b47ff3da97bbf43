"""Decides which of the oldest supported versions `make test-rest` tests: those whose inputs changed since they passed.

::

    python tests/oldest.py due                       # prints make targets
    python tests/oldest.py passed test-kfp-oldest    # records that a target passed; commit constraints/oldest.json

`make campaign` tests all of them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "constraints" / "oldest.json"
INPUTS = {
    "test-airflow-oldest": ("constraints/airflow-oldest.txt", "airflow_provider/**/*.py"),
    "test-kfp-oldest": ("constraints/kfp-oldest.txt", "kfp_components/**/*.py"),
    "test-trainer-oldest": (
        "components/trainjob/_backends/*.py",
        "components/trainjob/_backends/kubernetes/*.py",
        "components/trainjob/_doctor/*.py",
        "components/trainjob/_install/*.*",
        "components/trainjob/_manifest/render.py",
        "components/trainjob/_spec/*.py",
        "tests/testcluster/modules/*/go.mod",
        "tests/cluster/test_trainer_versions.py",
    ),
}
"""Target -> the files that depend on the version; the rest of the core behaves the same on all versions."""


def inputs(target: str) -> str:
    """A hash of the files that a target depends on."""
    digest = hashlib.sha256()
    for pattern in INPUTS[target]:
        for file in sorted(ROOT.glob(pattern)):
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def main(command: str, *targets: str) -> None:
    """Run the command line."""
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if command == "due":
        print(*(target for target in INPUTS if recorded.get(target) != inputs(target)))
    else:
        recorded |= {target: inputs(target) for target in targets}
        RECORD.write_text(json.dumps(recorded, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
