"""The lists of constraints/ have hashes, and derived lists agree with the main list."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints"
HASHED = sorted(file for file in CONSTRAINTS.glob("*.txt") if file.name != "main.txt")
STEP_EXTRAS = ["hf", "in-cluster", "mlflow", "storage"]
DERIVED = ["main-hashed", "step-image", "step-image-tune", "digits-image"]
HOW = "run `make hashes` after a change of constraints/main.txt or pyproject.toml"


def pins(name: str) -> dict[tuple[str, str], int]:
    """Name and version of each pin -> number of its hashes."""
    found: dict[tuple[str, str], int] = {}
    for line in (CONSTRAINTS / f"{name}.txt").read_text().splitlines():
        if pin := re.match(r"([a-z0-9-]+)==([^ ;]+)", line):
            found[latest := (pin[1], pin[2])] = 0
        else:
            assert re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line), line
            found[latest] += 1
    return found


@pytest.mark.parametrize("name", [file.stem for file in HASHED])
def test_every_pin_has_hashes(name: str) -> None:
    assert [pin for pin, hashes in pins(name).items() if not hashes] == []


def test_the_list_with_hashes_has_the_same_pins() -> None:
    assert pins("main-hashed").keys() == pins("main").keys(), HOW


@pytest.mark.parametrize("name", DERIVED)
def test_derived_lists_have_pins_of_the_main_list(name: str) -> None:
    assert pins(name).keys() - pins("main").keys() == set(), HOW


@pytest.mark.parametrize(
    ("name", "extras"),
    [("step-image", STEP_EXTRAS), ("step-image-tune", [*STEP_EXTRAS, "tune"]), ("digits-image", ["examples"])],
)
def test_images_have_all_requirements_of_their_extras(name: str, extras: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
    required = {re.split(r"[^a-z0-9-]", each)[0] for each in asked}
    assert required - {pinned for pinned, _ in pins(name)} == set(), HOW


def test_images_install_only_hashed_packages() -> None:
    for file in ("components/trainjob/_install/Dockerfile", "dags_examples/cluster/Dockerfile"):
        installs = [line for line in (ROOT / file).read_text().splitlines() if "pip install" in line]
        assert installs
        for line in installs:
            own = "--no-index" in line and "/opt/wheels/" in line  # the wheel that this build created
            assert own or ("--require-hashes" in line and "--only-binary=:all:" in line), line
