"""The compiled components and the compiled example pipeline."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import json_format
from kfp import compiler
from kfp.pipeline_spec import pipeline_spec_pb2
from tests.kfp.pipelines import calling

import trainjob
import trainjob_kfp
from trainjob_kfp.compile import COMPILED, COMPONENTS, main

each_component = pytest.mark.parametrize("name", COMPONENTS)


def load(path: Path) -> dict[str, Any]:
    specs = list(yaml.safe_load_all(path.read_text()))
    assert len(specs) == 1, "a platform spec, which no component needs"
    specs[0].pop("sdkVersion")
    return dict(specs[0])


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("compiled")
    main([str(directory)])
    return directory


@each_component
def test_compiled_components_match_their_source_and_are_valid_specs(name: str, fresh: Path) -> None:
    spec = load(COMPILED / f"{name}.yaml")
    assert spec == load(fresh / f"{name}.yaml"), "run: python -m trainjob_kfp.compile"
    json_format.ParseDict(spec, pipeline_spec_pb2.PipelineSpec())
    component = spec["components"][f"comp-{name.replace('_', '-')}"]
    parameters = component["inputDefinitions"]["parameters"] | component["outputDefinitions"]["parameters"]
    assert [n for n, definition in parameters.items() if not definition.get("description")] == []


@each_component
def test_a_step_runs_no_pip_and_uses_the_image_of_this_version(name: str) -> None:
    executor = load(COMPILED / f"{name}.yaml")["deploymentSpec"]["executors"][f"exec-{name.replace('_', '-')}"]
    container = executor["container"]
    assert container["image"] == trainjob_kfp.STEP_IMAGE
    assert container["image"].endswith(f":{trainjob.__version__}")
    assert not [word for word in container["command"] if "pip install" in word]


@each_component
def test_loaded_and_imported_components_compile_to_the_same(name: str, tmp_path: Path) -> None:
    specs = {}
    for how, component in {
        "loaded": trainjob_kfp.load(COMPILED / f"{name}.yaml"),
        "imported": getattr(trainjob_kfp, name),
    }.items():
        required = [n for n, spec in component.component_spec.inputs.items() if not spec.optional]
        path = tmp_path / f"{how}.yaml"
        compiler.Compiler().compile(calling(component, **dict.fromkeys(required, "x") | MORE.get(name, {})), str(path))
        specs[how] = load(path)
        for compiled in specs[how]["components"].values():
            for definitions in (compiled["inputDefinitions"], compiled["outputDefinitions"]):
                for parameter in definitions["parameters"].values():
                    parameter.pop("description", None)  # lost at loading, kfp 2.17
    assert specs["loaded"] == specs["imported"]


STUDY = {"space": {"x": {"type": "int", "low": 1, "high": 3}}, "metric": "x", "direction": "minimize", "max_trials": 3}
MORE: dict[str, dict[str, Any]] = {
    "evaluate_model": {"command": ["x"]},  # required, unless there is a function
    "tune": {"study": STUDY},
}
