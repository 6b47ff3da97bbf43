"""Files of the repository that must agree: layers and their map, lists of constraints, the dataset of the examples."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# ---------------------------------------------------------------- layers


def _layers() -> list[str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [each["layers"] for each in contracts if each.get("exhaustive")]
    return [str(layer) for layer in layers]


def test_contributing_lists_the_layers_in_their_order() -> None:
    layers = _layers()
    _, _, table = (ROOT / "CONTRIBUTING.md").read_text().partition("| layer of `trainjob` | what |\n|---|---|\n")
    rows = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    assert [" | ".join(re.findall(r"`(\w+)`", row)) for row in rows[: len(layers)]] == layers


def test_each_package_says_what_it_is_for() -> None:
    packages = sorted((ROOT / "components" / "trainjob").rglob("__init__.py"))
    assert len(packages) > 15
    assert not [str(file) for file in packages if not file.read_text().startswith('"""')]


# ---------------------------------------------------------------- constraints/ (`make hashes` derives lists)

STEP_EXTRAS = ["hf", "kubernetes", "mlflow", "storage"]
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


# ---------------------------------------------------------------- the dataset of the examples

DATA = ROOT / "dags_examples" / "data"


def test_file_matches_its_checksum_and_is_reproducible() -> None:
    packed = (DATA / "digits.csv.gz").read_bytes()
    digest, name = (DATA / "SHA256SUMS").read_text().split()
    assert name == "digits.csv.gz"
    assert hashlib.sha256(packed).hexdigest() == digest
    assert len(packed) < 100_000
    assert packed[:2] == b"\x1f\x8b"
    assert packed[3:8] == bytes(5), "no file name and no time in the gzip header"
