"""``python -m trainjob_kfp.compile``: generate ``compiled/*.yaml`` and the READMEs of the components.

``python -m trainjob_kfp.compile DIRECTORY`` writes only the YAML, into that directory, for users who load components
from YAML.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kfp import compiler

import trainjob_kfp
from trainjob_kfp.readme import readme

COMPONENTS = (
    "cleanup",
    "evaluate_model",
    "export_model",
    "initialize_dataset",
    "initialize_model",
    "train",
    "tune",
    "wait",
)
PACKAGE = Path(__file__).parent
COMPILED = PACKAGE / "compiled"


def main(arguments: Sequence[str]) -> int:
    """Compile all components; return the exit code."""
    directory = Path(arguments[0]) if arguments else COMPILED
    directory.mkdir(parents=True, exist_ok=True)
    for name in COMPONENTS:
        compiler.Compiler().compile(getattr(trainjob_kfp, name), str(directory / f"{name}.yaml"))
    if not arguments:
        for name in COMPONENTS:
            text = readme(getattr(trainjob_kfp, name), PACKAGE / name, COMPILED / f"{name}.yaml")
            (PACKAGE / name / "README.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
