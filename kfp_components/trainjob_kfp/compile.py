"""``python -m trainjob_kfp.compile``: write ``compiled/*.yaml``, the components for those who load them from YAML.

Into another directory with ``python -m trainjob_kfp.compile DIRECTORY``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kfp import compiler

import trainjob_kfp

COMPONENTS = ("export_model", "initialize_dataset", "initialize_model", "train")
COMPILED = Path(__file__).parent / "compiled"


def main(arguments: Sequence[str]) -> int:
    """Compile all components; the exit code."""
    directory = Path(arguments[0]) if arguments else COMPILED
    directory.mkdir(parents=True, exist_ok=True)
    for name in COMPONENTS:
        compiler.Compiler().compile(getattr(trainjob_kfp, name), str(directory / f"{name}.yaml"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
