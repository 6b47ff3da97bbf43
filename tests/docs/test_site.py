"""The site builds without a warning, and its hand-written tables have what the code has."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from trainjob.cli.exits import EXIT_CODES
from trainjob.errors import Category

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CODE = [path for top in ("components", "airflow_provider", "kfp_components") for path in (ROOT / top).rglob("*.py")]
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert MKDOCS.exists(), "the environment of the site is missing: make docs"
    directory = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [MKDOCS, "build", "--strict", "--site-dir", directory],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return directory


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(https?:[^\s\">]+)", page.read_text())
        assert loaded == [], page.relative_to(site)


def test_generated_parts_are_in_the_pages(site: Path) -> None:
    assert [page for page in site.rglob("*.html") if "<!-- generated" in page.read_text()] == []
    for page, text in {
        "reference/spec": "active_deadline_seconds",
        "reference/client": "TrainJobClient",
        "reference/operators": "fail_on_first_crash",
        "reference/components": "cancel_on_timeout",
        "reference/cli": "--queue-timeout",
        "troubleshooting": "resources_per_node",
    }.items():
        assert text in (site / f"{page}.html").read_text(), page


def test_the_search_knows_the_pages(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert {"index.html", "troubleshooting.html"} <= {entry["location"].partition("#")[0] for entry in index["docs"]}


def test_external_links_are_complete_addresses() -> None:
    """They are not requested: tests run without the internet."""
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for link in re.findall(r"\]\((https?:[^)\s]*)\)", page.read_text()):
            assert re.fullmatch(r"https://[a-z0-9-]+(\.[a-z0-9-]+)+(/[\w.@:/~%+-]*)?(#[\w-]+)?", link), (
                f"{page}: {link}"
            )


def test_troubleshooting_has_every_category() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    generated = re.findall(r"^<!-- generated: advice (.+) -->$", text, re.MULTILINE)
    assert headings == generated == [str(category) for category in Category if category is not Category.NONE]


def test_the_page_has_every_exit_code() -> None:
    shown = set(re.findall(r"^\| (\d+) \|", (DOCS / "reference" / "exit-codes.md").read_text(), re.MULTILINE))
    assert shown == set(re.findall(r"^  (\d+) ", EXIT_CODES, re.MULTILINE))


def test_the_page_has_every_label_and_annotation() -> None:
    page = (DOCS / "reference" / "labels.md").read_text()
    sources = "\n".join(path.read_text() for path in CODE)
    named = set(re.findall(r"[\"'](trainjob\.dev/[a-z-]+)[\"']", sources))
    named |= {f"trainjob.dev/{name}" for name in re.findall(r"RESERVED_PREFIX(?: \+ \"|\}|\} ?)([a-z-]+)", sources)}
    assert len(named) >= 15, "the search finds nothing any more"
    assert {name for name in named if f"`{name}`" not in page} == set()


@pytest.mark.parametrize(
    ("row", "file", "pattern"),
    [
        ("Kubernetes", "tests/testcluster/modules/control-plane/go.mod", r"k8s\.io/kubernetes v([\d.]+)"),
        ("Kubeflow Trainer", "tests/testcluster/modules/trainer-2.3/go.mod", r"kubeflow/trainer/v2 v([\d.]+)"),
        ("Kubeflow Trainer", "tests/testcluster/modules/trainer-2.1/go.mod", r"kubeflow/trainer/v2 v([\d.]+)"),
        ("Kubeflow Trainer", "tests/testcluster/modules/trainer-2.2/go.mod", r"kubeflow/trainer/v2 v([\d.]+)"),
        ("JobSet", "tests/testcluster/modules/trainer-2.3/go.mod", r"sigs\.k8s\.io/jobset v([\d.]+)"),
        ("JobSet", "tests/testcluster/modules/jobset-0.10/go.mod", r"sigs\.k8s\.io/jobset v([\d.]+)"),
        ("JobSet", "tests/testcluster/modules/jobset-0.11/go.mod", r"sigs\.k8s\.io/jobset v([\d.]+)"),
        ("Kueue", "tests/testcluster/modules/kueue/go.mod", r"sigs\.k8s\.io/kueue v([\d.]+)"),
        ("Airflow", "constraints/main.txt", r"^apache-airflow==([\d.]+)"),
        ("Airflow", "constraints/airflow-oldest.txt", r"^apache-airflow==([\d.]+)"),
        ("KFP SDK and backend", "constraints/main.txt", r"^kfp==([\d.]+)"),
        ("KFP SDK and backend", "constraints/kfp-oldest.txt", r"^kfp==([\d.]+)"),
        ("MLflow", "constraints/main.txt", r"^mlflow==([\d.]+)"),
        ("Kubeflow Model Registry", "constraints/registry-v1.txt", r"^model-registry==([\d.]+)"),
        ("Kubeflow Model Registry", "constraints/registry-v1alpha3.txt", r"^model-registry==([\d.]+)"),
        ("KServe storage initializer", "constraints/peers.txt", r"^kserve-storage==([\d.]+)"),
    ],
)
def test_the_support_matrix_has_the_pinned_versions(row: str, file: str, pattern: str) -> None:
    line = next(line for line in (DOCS / "support.md").read_text().splitlines() if line.startswith(f"| {row} "))
    found = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    assert found, file
    assert re.search(rf"(?<![\d.]){re.escape(found[1])}(?![\d.])", line), f"{line} lacks {found[1]} of {file}"


def test_nothing_is_said_on_two_pages() -> None:
    """No long sentence appears twice; a snippet may."""
    seen: dict[str, Path] = {}
    for page in sorted(DOCS.rglob("*.md")):
        text = re.sub(r"^```.*?^```|<!--.*?-->|^\|.*$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for sentence in re.split(r"(?<=[.:])\s|\n\n|\n\* ", text):
            words = " ".join(sentence.split())
            if len(words) >= 60:
                assert words not in seen, f"{page.name} and {seen[words].name}: {words}"
                seen[words] = page
