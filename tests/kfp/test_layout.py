"""The directory of each component has the layout of kubeflow/pipelines-components, except for the list of owners."""

from __future__ import annotations

import tomllib
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from tests.kfp.pipelines import compiled

import trainjob_kfp
from trainjob.cli.cluster import install
from trainjob_kfp.compile import COMPILED, COMPONENTS, PACKAGE
from trainjob_kfp.readme import readme

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"

each_component = pytest.mark.parametrize("name", COMPONENTS)


def metadata(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((PACKAGE / name / "metadata.yaml").read_text()))


def oldest_version(extra: str, package: str) -> str:
    """The oldest version of a package that an extra of this project allows, in three parts."""
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    (wanted,) = [r for r in map(Requirement, extras[extra]) if r.name == package]
    (version,) = [each.version for each in wanted.specifier if each.operator == ">="]
    return ".".join([*version.split("."), "0", "0"][:3])


def test_every_component_has_a_directory() -> None:
    assert {file.parent.name for file in PACKAGE.glob("*/component.py")} == set(COMPONENTS)


@each_component
def test_the_readme_matches_the_source(name: str) -> None:
    written = (PACKAGE / name / "README.md").read_text()
    component = getattr(trainjob_kfp, name)
    assert written == readme(component, PACKAGE / name, COMPILED / f"{name}.yaml"), (
        "run: python -m trainjob_kfp.compile"
    )
    declared = [*component.component_spec.inputs, *component.component_spec.outputs]
    assert [n for n in declared if f"\n| `{n}` |" not in written] == []


@each_component
def test_the_metadata_follow_the_schema(name: str) -> None:
    """The schema is scripts/validate_metadata of kubeflow/pipelines-components, including the order of fields."""
    given = metadata(name)
    assert list(given) == ["name", "stability", "dependencies", "tags", "lastVerified", "ci", "links"]
    assert given["name"] == name
    assert given["stability"] in {"experimental", "alpha", "beta", "stable"}
    assert set(given["dependencies"]) == {"kubeflow", "external_services"}
    assert given["tags"]
    assert all(isinstance(tag, str) for tag in given["tags"])
    assert isinstance(given["lastVerified"], datetime)
    assert given["ci"] == {"skip_dependency_probe": False}
    assert all(link.startswith("https://") for link in given["links"].values())


@each_component
def test_the_metadata_name_the_oldest_supported_versions(name: str) -> None:
    given = metadata(name)["dependencies"]
    wanted = {each["name"]: each["version"] for each in [*given["kubeflow"], *given["external_services"]]}
    (trainer,) = [option for option in install.params if option.name == "trainer"]
    supported = {
        "Pipelines": f">={oldest_version('kfp', 'kfp')}",
        "Trainer": f">={min(trainer.type.choices)}.0",  # type: ignore[attr-defined]
        "MLflow": f">={oldest_version('mlflow', 'mlflow-skinny')}",
    }
    assert {"Pipelines", "Trainer"} <= set(wanted)
    assert wanted == {service: supported[service] for service in wanted}


@each_component
@pytest.mark.filterwarnings("error")
def test_the_example_compiles(name: str, tmp_path: Path) -> None:
    pipeline = import_module(f"trainjob_kfp.{name}.example_pipelines").example_pipeline
    spec, _ = compiled(pipeline, tmp_path / "pipeline.yaml")
    assert f"comp-{name.replace('_', '-')}" in spec["components"]
