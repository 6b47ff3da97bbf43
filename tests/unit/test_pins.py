"""The lists of constraints/ that `make hashes` derives agree with the main list; images install nothing else."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEP_EXTRAS = ["hf", "in-cluster", "mlflow", "storage"]
IMAGES = {"step-image": STEP_EXTRAS, "step-image-tune": [*STEP_EXTRAS, "tune"], "digits-image": ["examples"]}
HOW = "run `make hashes` after a change of constraints/main.txt or pyproject.toml"


def pins(name: str) -> set[str]:
    """``package==version`` of a list."""
    text = (ROOT / "constraints" / f"{name}.txt").read_text()
    return set(re.findall(r"^[a-z0-9-]+==[^ ;\n]+", text, re.MULTILINE))


LISTS = sorted({*(ROOT / "constraints").glob("*.txt")} - {ROOT / "constraints" / "main.txt"})
HASHED = r"^[a-z0-9-]+==[^\\\n]+\\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+"


@pytest.mark.parametrize("file", LISTS, ids=lambda file: file.stem)
def test_every_pin_has_hashes(file: Path) -> None:
    assert re.sub(HASHED, "", file.read_text(), flags=re.MULTILINE) == ""


def test_derived_lists_have_the_pins_of_the_main_list() -> None:
    assert pins("main-hashed") == pins("main"), HOW


@pytest.mark.parametrize("name", IMAGES)
def test_images_have_all_requirements_of_their_extras(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (each for extra in IMAGES[name] for each in project["optional-dependencies"][extra])
    required = {re.split(r"[^a-z0-9-]", each)[0] for each in (*project["dependencies"], *extras)}
    assert required - {pin.partition("==")[0] for pin in pins(name)} == set(), HOW
    assert pins(name) <= pins("main"), HOW


@pytest.mark.parametrize("file", ["components/trainjob/_install/Dockerfile", "dags_examples/cluster/Dockerfile"])
def test_images_install_only_hashed_packages(file: str) -> None:
    installs = [line for line in (ROOT / file).read_text().splitlines() if "pip install" in line]
    own = [line for line in installs if "--no-index" in line and "/opt/wheels/" in line]  # the wheel of this build
    listed = [line for line in installs if "--require-hashes" in line and "--only-binary=:all:" in line]
    assert listed
    assert len(own) + len(listed) == len(installs)
