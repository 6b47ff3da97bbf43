"""Provider metadata, and what an import of the provider costs."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from tests.airflow.versions import dag_serialization, older_than, since

from trainjob import ConfigurationError
from trainjob_airflow.get_provider_info import get_provider_info
from trainjob_airflow.operators.data import ModelExportOperator, ModelInitializerOperator
from trainjob_airflow.operators.trainjob import TrainJobOperator

INFO = get_provider_info()
MODULES = [module for kind in ("operators", "sensors", "hooks", "triggers") for entry in INFO[kind] for module in entry["python-modules"]]  # fmt: skip # noqa: E501


def test_the_metadata_matches_the_schema_of_airflow() -> None:
    import airflow
    import jsonschema

    schema = json.loads((Path(airflow.__path__[0]) / "provider_info.schema.json").read_text())
    jsonschema.validate(INFO, schema)


def test_the_connection_form_and_the_hook(airflow_home: Path) -> None:
    from airflow.providers_manager import ProvidersManager

    manager = ProvidersManager()  # type: ignore[no-untyped-call]
    hook = manager.hooks["trainjob"]
    assert hook is not None
    assert hook.hook_class_name == "trainjob_airflow.hooks.trainjob.TrainJobHook"
    fields = INFO["connection-types"][0]["conn-fields"]
    ours = set(fields) - {"backend", "secret_kube_config", "ca_file", "job_url", "logs_url", "model_url"}
    theirs = ["in_cluster", "kube_config_path", "namespace", "cluster_context", "disable_verify_ssl"]
    assert ours == set(theirs), "fields have the names of kubernetes connections"


@since("3.2", "form fields that need neither Flask nor WTForms; before, they are the JSON of Extra")
def test_the_ui_gets_the_form(airflow_home: Path) -> None:
    from airflow.api_fastapi.core_api.services.ui.connections import HookMetaService
    from airflow.sdk._shared.secrets_masker import should_hide_value_for_key as hides

    (form,) = [form for form in HookMetaService.hook_meta_data() if form.connection_type == "trainjob"]
    assert form.hook_name == "Kubeflow TrainJob"
    standard, fields = form.standard_fields, INFO["connection-types"][0]["conn-fields"]
    assert standard is not None
    assert standard.host is not None
    assert standard.password is not None
    assert (standard.host.title, standard.password.title) == ("API server", "Bearer token")
    hidden = {name for name, each in standard.model_dump().items() if each and each["hidden"]}
    assert hidden == {"port", "login", "url_schema"}
    assert form.extra_fields is not None
    labels = {name: each["schema"]["title"] for name, each in form.extra_fields.items()}
    assert labels == {name: each["label"] for name, each in fields.items()}
    assert all(each["description"] for each in form.extra_fields.values()), "each field has a description"
    masked = [name for name in labels if hides(name)]  # type: ignore[no-untyped-call]  # Airflow has no types here
    assert masked == ["secret_kube_config"], "stored masked"


def test_all_that_is_listed_exists() -> None:
    for module in MODULES:
        import_module(module)
    for listed in [*INFO["extra-links"], *INFO["task-decorators"]]:
        path = listed if isinstance(listed, str) else listed["class-name"]
        module, _, name = path.rpartition(".")
        assert hasattr(import_module(module), name)


def new_modules(*modules: str, after: tuple[str, ...]) -> set[str]:
    """Modules that a new interpreter imports with `modules`, after it has imported those of `after`."""
    before, own = ", ".join(after), ", ".join(modules)
    code = f"import sys, {before}; before = set(sys.modules); import {own}; print(*set(sys.modules) - before)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@since("3.2", "a Task SDK that can be imported without the rest of Airflow")
def test_a_dag_file_imports_only_these_modules(airflow_home: Path) -> None:
    """Every parse of a DAG file imports them; the core is imported only when a task runs."""
    ours = [module for module in MODULES if ".triggers." not in module]
    base = "airflow.sdk", "airflow.sdk.bases.sensor", "airflow.sdk.bases.hook", "airflow.sdk.configuration"
    extra = new_modules(*ours, after=base)
    assert set(ours) <= extra
    third_party = {name for name in extra if name.split(".")[0] not in ("airflow", "trainjob_airflow")}
    assert third_party == set()
    allowed = {"airflow.providers", "airflow.providers.common", "airflow.providers.common.compat"}
    assert {name for name in extra if name.startswith("airflow.") and name not in allowed} <= {
        "airflow.providers.common.compat._compat_utils",
        "airflow.providers.common.compat.sdk",
        "airflow.providers.common.compat.version_compat",
        "airflow.sdk.bases.operatorlink",
        *("airflow.sdk.bases.branch", "airflow.sdk.bases.skipmixin"),  # of ModelGateOperator
    }


def test_triggers_do_not_import_the_core_either(airflow_home: Path) -> None:
    extra = new_modules("trainjob_airflow.triggers.trainjob", after=("airflow.triggers.base",))
    assert "trainjob_airflow.triggers.trainjob" in extra
    assert not {name for name in extra if name.split(".")[0] == "trainjob"}


def test_the_plugin_imports_nothing_heavy(airflow_home: Path) -> None:
    """Every Airflow process imports it."""
    sdk = () if older_than("3.2") else ("airflow.sdk.plugins_manager",)
    new = new_modules("trainjob_airflow.plugin", after=("airflow.plugins_manager", *sdk))
    assert {name.split(".")[0] for name in new} <= {"airflow", "trainjob_airflow", "packaging"}, new
    ours = {name for name in new if name.startswith("trainjob_airflow")}
    assert ours <= {"trainjob_airflow", "trainjob_airflow.addresses", "trainjob_airflow.plugin"}


def test_a_spec_object_survives_serialization() -> None:
    from trainjob import TrainJobSpec

    with DAG("object") as dag:
        TrainJobOperator(task_id="train", spec=TrainJobSpec.parse({"runtime": "jax-distributed", "command": ["x"]}))
    json.dumps(dag_serialization().to_dict(dag))


def test_every_field_of_a_spec_is_a_template_of_the_operator() -> None:
    from trainjob import TrainJobSpec

    functions = {"func", "func_args", "packages_to_install", "pip_index_urls"}  # for functions there is @task.trainjob
    others = {"manifest", "owner_reference"}  # a task is not a cluster object that could own the job
    assert set(TrainJobSpec.model_fields) - functions - others <= set(TrainJobOperator.template_fields)


KEY = "airflow/x/dag/run/-1/export"
TRAINED: dict[str, Any] = {
    "namespace": "ns", "name": "train-1", "uid": "u-1", "attempt": 1, "seconds": {},
    "metrics": {"accuracy": 0.9, "kind": "text", "epoch": 3}, "outputs": {"model": "file:///m"},
}  # fmt: skip
FRESH = {**TRAINED, "outputs": {"uri": "", "digest": "", "version": "", "source": "models:/d@champion"}}
DATA = {**TRAINED, "outputs": {"uri": "file:///w/d", "digest": "sha256:00", "version": "", "source": "s3://data/d"}}


def options(**arguments: Any) -> dict[str, Any]:
    return ModelExportOperator(task_id="export", source="s", target="t", name="n", **arguments).options(KEY)


def test_an_export_takes_the_numbers_of_a_trainings_xcom() -> None:
    made = options(metrics=TRAINED, datasets=[DATA], base_model=FRESH, provenance={"ticket": 7})
    assert made["metrics"] == {"accuracy": 0.9, "epoch": 3}
    provenance = made["provenance"]
    assert provenance == {
        "run": KEY,
        "trainjob": {"namespace": "ns", "name": "train-1", "uid": "u-1", "attempt": 1},
        "datasets": [{"uri": "s3://data/d", "digest": "sha256:00"}],
        "ticket": 7,
    }
    assert made["export_id"] == f"{KEY}/u-1", "another training is another export"
    assert options(metrics={"accuracy": 1})["export_id"] == KEY
    assert options(metrics=TRAINED, export_id="mine")["export_id"] == "mine"
    assert options()["metrics"] == {}
    assert made["history"] is None
    history = {"accuracy": [[1, 1769860800.0, 0.9]]}
    assert options(metrics=TRAINED | {"history": history})["history"] == history
    assert options(metrics={"history": 1.0})["history"] is None, "a metric of this name"


def test_an_export_leaves_out_metrics_that_registries_refuse() -> None:
    trained = {**TRAINED, "metrics": {"top@5": 0.5, "accuracy": 0.9, "a:b": "text"}}
    assert options(metrics=trained)["metrics"] == {"accuracy": 0.9}
    with pytest.raises(ConfigurationError, match="'top@5' is not a valid name of a metric"):  # the author's own
        options(metrics={"top@5": 0.5})


def test_options_become_words_in_which_kubernetes_expands_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINJOB_REGISTRY", "mlflow+https://registry")
    export = ModelExportOperator(task_id="export", source="file:///$(HOME)", target="t", name="-n", allow_pickle=True)
    command = export.spec_fields(KEY)["command"]
    assert command[:4] == ["python", "-m", "trainjob.data", "export"]
    words = {"--source=file:///$$(HOME)", "--name=-n", "--allow-pickle", "--registry=mlflow+https://registry"}
    assert words <= set(command)
    assert not [argument for argument in command if "None" in argument]
    initialize = ModelInitializerOperator(
        task_id="model", source="models:/m@a", target="t", include="*.csv", exclude=["a", "$b"], if_missing="fresh"
    )
    given = initialize.spec_fields(KEY)["command"]
    patterns = [word for word in given if word.startswith(("--include", "--exclude"))]
    assert sorted(patterns) == ["--exclude=$$b", "--exclude=a", "--include=*.csv"], "a string is one pattern"


def test_keys_of_signatures_are_passed_as_paths() -> None:
    from trainjob import InvalidSpec, TrainJobSpec

    export = ModelExportOperator(task_id="export", source="s", target="t", name="n", sign="/keys/sign.key")
    assert "--sign=/keys/sign.key" in export.spec_fields(KEY)["command"]
    initialize = ModelInitializerOperator(task_id="model", source="s", target="t", verify_key="/keys/sign.pub")
    assert "--verify-key=/keys/sign.pub" in initialize.spec_fields(KEY)["command"]
    # The key itself is refused before it is in a manifest that others can read.
    export.sign = "-----BEGIN PRIVATE KEY-----\nMIG"
    with pytest.raises(InvalidSpec, match="secret") as raised:
        TrainJobSpec.parse(export.spec_fields(KEY))
    assert "MIG" not in str(raised.value)
