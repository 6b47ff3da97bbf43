"""The functions for pipeline authors besides the components: load, retry, distributed, and the warnings of tasks."""

# No `from __future__ import annotations`: KFP reads those of components as objects.
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kfp import components as kfp_components, dsl
from tests.kfp.pipelines import compiled

import trainjob_kfp
from trainjob_kfp import STEP_IMAGE, LostByKfp, UnseenByCache, cleanup, distributed, load, retry, train
from trainjob_kfp.compile import COMPILED
from trainjob_kfp.distributed import _names_of_module

FIELDS = {"RESOURCES", "ENV", "KUBERNETES_AFFINITY", "KUBERNETES_TOLERATIONS", "KUBERNETES_NODE_SELECTOR"}


def fields(definition: dict[str, Any]) -> set[str]:
    return {each["field"] for each in definition.get("taskConfigPassthroughs", [])}


# ---------------------------------------------------------------- load


def test_kfps_loader_drops_passthroughs_that_load_keeps(tmp_path: Path) -> None:
    """If this fails because KFP's loader keeps them, `load` can be removed."""
    path = COMPILED / "train.yaml"

    def passed_on(component: Any) -> set[str]:
        @dsl.pipeline(name="loaded")  # type: ignore[untyped-decorator]  # KFP has no types
        def pipeline() -> None:
            component(runtime="torch-distributed").set_cpu_limit("4")

        spec, _ = compiled(pipeline, tmp_path / "loaded.yaml")
        return fields(spec["components"]["comp-train"])

    found = {
        "kfp": passed_on(kfp_components.load_component_from_file(str(path))),
        "path": passed_on(load(path)),
        "text": passed_on(load(path.read_text())),
    }
    assert found["kfp"] == set()
    assert found["path"] == found["text"] >= FIELDS
    for name in ("cleanup", "wait"):  # have no job
        for component in (load(COMPILED / f"{name}.yaml"), getattr(trainjob_kfp, name)):
            assert component.component_spec.task_config_passthroughs is None


# ---------------------------------------------------------------- retry


def test_retries_have_a_time_limit_of_a_month(tmp_path: Path) -> None:
    @dsl.pipeline(name="retried")  # type: ignore[untyped-decorator]  # KFP has no types
    def pipeline() -> None:
        retry(train(runtime="torch-distributed"), 3, pause=30)

    spec, _ = compiled(pipeline, tmp_path / "retried.yaml")
    assert spec["root"]["dag"]["tasks"]["train"]["retryPolicy"] == {
        "maxRetryCount": 3,
        "backoffDuration": "30s",
        "backoffFactor": 2.0,
        "backoffMaxDuration": "2592000s",
    }


@pytest.mark.parametrize("wrong", [{"times": -1}, {"times": 1, "pause": -1}, {"times": 1, "pause": 60, "seconds": 60}])
def test_invalid_retry_policies_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="seconds greater than pause"):
        retry(None, **wrong)


# ---------------------------------------------------------------- the cache


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("set_env_variable", ("SEED", "1")), ("set_accelerator_limit", (2,)), ("set_accelerator_type", ("x",))],
)
@pytest.mark.parametrize("component", [train, load(COMPILED / "train.yaml")], ids=["imported", "loaded"])
def test_tasks_warn_about_settings_that_the_cache_ignores(
    component: Any, name: str, arguments: tuple[Any, ...]
) -> None:
    def build() -> None:
        with pytest.warns(UnseenByCache, match=rf"train\.{name}\(…\) is not part of the key of KFP's cache"):
            getattr(component(runtime="torch-distributed").set_caching_options(True), name)(*arguments)
        assert_silent(lambda: getattr(component(runtime="torch-distributed"), name)(*arguments))

    in_a_pipeline(build)


@pytest.mark.parametrize(
    "name", ["set_accelerator_limit", "set_cpu_limit", "set_cpu_request", "set_memory_limit", "set_memory_request"]
)
def test_tasks_warn_about_resources_from_parameters_other_than_str(name: str) -> None:
    def limit(value: Any) -> None:
        getattr(train(runtime="x"), name)(value)

    def build(number: int, text: str) -> None:
        with pytest.warns(LostByKfp, match=rf"train\.{name}\(number\): KFP passes on only .* declare number as str"):
            limit(number)
        for value in (text, "2"):
            assert_silent(partial(limit, value))

    in_a_pipeline(build)


def in_a_pipeline(build: Callable[..., None]) -> None:
    """Build a pipeline of tasks; KFP calls the function."""
    assert dsl.pipeline(build, name="built").component_spec.implementation.graph is not None


def assert_silent(act: Callable[[], object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        act()


@pytest.mark.parametrize("origin", ["imported", "loaded"])
def test_the_cache_is_off_unless_a_task_turns_it_on(origin: str, tmp_path: Path) -> None:
    """Otherwise a second retraining would reuse all cached steps and train nothing."""
    names = ("initialize_dataset", "initialize_model", "train", "export_model", "wait", "cleanup")
    given = {name: getattr(trainjob_kfp, name) for name in names}
    if origin == "loaded":
        given = {name: load(COMPILED / f"{name}.yaml") for name in names}

    @dsl.pipeline(name="retrain")  # type: ignore[untyped-decorator]  # KFP has no types
    def pipeline() -> None:
        given["initialize_dataset"](source="s3://b/d")
        given["initialize_model"](source="models:/m@champion", if_missing="fresh")
        trained = given["train"](runtime="torch-distributed")
        given["export_model"](source=trained.outputs["model_uri"], name="m")
        given["wait"](job="x", run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER)
        given["cleanup"](run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER)
        given["train"](runtime="torch-distributed").set_caching_options(True)

    spec, _ = compiled(pipeline, tmp_path / "retrain.yaml")
    options = {name: task.get("cachingOptions") for name, task in spec["root"]["dag"]["tasks"].items()}
    assert {name for name, each in options.items() if each and each.get("enableCache")} == {"train-2"}
    assert len(options) == 7


# ---------------------------------------------------------------- distributed


@dsl.component(base_image="trainer:1", packages_to_install=["numpy==2.0.0"])  # type: ignore[untyped-decorator]  # KFP has no types
def fit(epochs: int, data: dsl.Input[dsl.Dataset], model: dsl.Output[dsl.Model]) -> float:
    return float(epochs)


def test_a_distributed_component_keeps_its_interface_and_runs_in_the_step_image(tmp_path: Path) -> None:
    made = distributed(fit, runtime="torch-distributed", num_nodes=2, resources_per_node={"gpu": 4})

    @dsl.pipeline(name="wrapper")  # type: ignore[untyped-decorator]  # KFP has no types
    def pipeline() -> None:
        data = dsl.importer(artifact_uri="s3://data", artifact_class=dsl.Dataset)
        retry(made(epochs=3, data=data.output), 2)
        fit(epochs=3, data=data.output)

    spec, _ = compiled(pipeline, tmp_path / "wrapper.yaml")
    step, plain = spec["components"]["comp-fit"], spec["components"]["comp-fit-2"]
    assert step["outputDefinitions"] == plain["outputDefinitions"]
    assert set(step["inputDefinitions"]["parameters"]) == {"epochs", "task_config"}
    assert step["inputDefinitions"]["artifacts"] == plain["inputDefinitions"]["artifacts"]
    assert fields(step) >= FIELDS
    container = spec["deploymentSpec"]["executors"]["exec-fit"]["container"]
    assert container["image"] == STEP_IMAGE
    assert not [word for word in container["command"] if "pip install" in word], "the nodes install it, not the step"
    assert "numpy==2.0.0" in container["args"][-1]
    assert fit.component_spec.implementation.container.image == "trainer:1", "the original component is not changed"


def test_only_lightweight_components_can_be_distributed() -> None:
    @dsl.container_component  # type: ignore[untyped-decorator]  # KFP has no types
    def container() -> dsl.ContainerSpec:
        return dsl.ContainerSpec(image="x", command=["y"])

    @dsl.component(base_image="x")  # type: ignore[untyped-decorator]  # KFP has no types
    def configured(task_config: dsl.TaskConfig = None) -> None: ...

    for what in (container, lambda: None):
        with pytest.raises(TypeError, match="takes a lightweight component"):
            distributed(what, runtime="torch-distributed")
    with pytest.raises(ValueError, match="has an input task_config, which distributed"):
        distributed(configured, runtime="torch-distributed")


def test_a_function_that_uses_names_of_its_module_cannot_be_distributed() -> None:
    @dsl.component(base_image="x")  # type: ignore[untyped-decorator]  # KFP has no types
    def outside() -> None:
        class Net:
            size = FIELDS

    @dsl.component(base_image="x")  # type: ignore[untyped-decorator]  # KFP has no types
    def inside(data: dsl.Input[dsl.Dataset], model: dsl.Output[dsl.Model]) -> None:
        print(dsl.Dataset, Optional[int], Artifact)  # type: ignore[name-defined]  # noqa: F821 - imported by KFP

    with pytest.raises(ValueError, match=r"outside\(\) uses FIELDS \(line \d+\) from outside itself"):
        distributed(outside, runtime="torch-distributed")
    distributed(inside, runtime="torch-distributed")
    assert {"helper", "LIMIT", "c", "Optional"} <= _names_of_module("def helper(): pass\nLIMIT = 1\nimport a.b as c")


def test_cleanup_has_a_run_id_and_so_is_never_cached(tmp_path: Path) -> None:
    @dsl.pipeline(name="exits")  # type: ignore[untyped-decorator]  # KFP has no types
    def pipeline() -> None:
        with dsl.ExitHandler(cleanup(run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER)):
            train(runtime="torch-distributed")

    spec, _ = compiled(pipeline, tmp_path / "exits.yaml")
    given = spec["root"]["dag"]["tasks"]["cleanup"]["inputs"]["parameters"]["run_id"]
    assert given == {"runtimeValue": {"constant": "{{$.pipeline_job_uuid}}"}}
    with pytest.raises(TypeError, match="missing 1 required argument: run_id"):
        cleanup()
