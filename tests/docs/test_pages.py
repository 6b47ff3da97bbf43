"""What pages say about settings and installation is what the code reads and pyproject.toml has."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

from trainjob.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
CODE = [path for top in ("components", "airflow_provider", "kfp_components") for path in (ROOT / top).rglob("*.py")]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
INTERNAL = {
    "TRAINJOB_LOCAL_UID": "marks the processes of a job, for this package alone",
    "TRAINJOB_": "the beginning of all",
}


def test_the_page_has_every_variable_that_the_code_reads() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `TRAINJOB_")]
    listed = {name for row in rows for name in re.findall(r"`(TRAINJOB_[A-Z_]+)", row)}
    named = {name for path in CODE for name in re.findall(r"[\"'](TRAINJOB_[A-Z_]*)[\"']", path.read_text())}
    made = {name for path in CODE for name in re.findall(r"f\"(TRAINJOB_[A-Z]+_)\{", path.read_text())}
    settings = {f"TRAINJOB_{setting.name.upper()}" for setting in fields(Settings)}
    assert "TRAINJOB_STEP_IMAGE" in named, "the search finds nothing any more"
    assert listed == (settings | named | made) - INTERNAL.keys()


def test_every_install_line_names_extras_and_files_that_exist() -> None:
    """The package is on no index: an install line is for a checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].keys()
    lines = [
        (path, line)
        for path in [*PAGES, *CODE]
        for line in re.findall(r"pip install (?!'trainjob\[\{extra\}\]' \(in a checkout)[^`\n#]+", path.read_text())
        if "trainjob" in line or re.search(r"-c |['\"]\.", line)
    ]
    assert len(lines) >= 4
    for path, line in lines:
        where = f"{path.relative_to(ROOT)}: {line}"
        assert not re.search(r"['\"\s]trainjob\b(\[|\s|$)", line), f"{where}: it is on no index"
        for names in re.findall(r"\.\[([^\]{}]+)\]", line):
            assert set(names.split(",")) <= extras, where
        for file in re.findall(r"-c (\S+)", line):
            assert (ROOT / file.rstrip("\"'")).is_file(), where
    table = re.findall(r"^\| (`[a-z`, -]+) \|", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    assert {name for row in table for name in re.findall(r"`([a-z-]+)`", row)} == set(extras)
