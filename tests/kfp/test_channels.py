"""Values of other tasks and of the pipeline inside the arguments of a component."""

# No `from __future__ import annotations`: KFP reads those of pipelines as objects.

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import Phase, given, settings, strategies as st
from kfp import dsl, local
from tests.kfp.pipelines import compiled, dangling

from trainjob.errors import TrainJobError
from trainjob_kfp import STEP_IMAGE, train, tune

TRAIN: dict[str, Any] = {"runtime": "trainjob-step", "backend": "local"}
STUDY = {"space": {"x": {"type": "float", "low": 0, "high": 1}}, "metric": "m", "direction": "minimize"}
WORDS = ["python", "-c", "import json, os, sys; json.dump([sys.argv[2:], dict(os.environ)], open(sys.argv[1], 'w'))"]


@dsl.component(base_image=STEP_IMAGE, install_kfp_package=False)  # type: ignore[untyped-decorator]  # KFP has no types
def save(model: dsl.Output[dsl.Model]) -> str:
    return str(model.uri)


@dsl.component(base_image=STEP_IMAGE, install_kfp_package=False)  # type: ignore[untyped-decorator]  # KFP has no types
def echo(value: dict) -> dict:  # type: ignore[type-arg]  # as KFP has it
    return value


URI = "give outputs['model_uri'] of that task"
TASK = "is the task train, not an output of it"
RETURNED = "return its URI from that component as text"
Arguments = Callable[[SimpleNamespace], dict[str, Any]]
REFUSED: dict[str, tuple[Arguments, str, str]] = {
    "word": (lambda of: {"command": ["x", of.base.outputs["model"]]}, "command[1] is the artifact 'model' of", URI),
    "variable": (lambda of: {"env": {"X": of.base.outputs["model"]}}, "env.X is the artifact", URI),
    "part of a word": (lambda of: {"args": [f"--base={of.base.outputs['model']}"]}, "args[0] is the artifact", URI),
    "part of JSON": (lambda of: {"args": [json.dumps({"a": str(of.base.outputs["model"])})]}, "args[0] is", URI),
    "input": (lambda of: {"inputs": {"base": of.base.outputs["model"]}}, "inputs.base is the artifact", URI),
    "checkpoints": (lambda of: {"checkpoints": of.base.outputs["model"]}, "checkpoints is the artifact", URI),
    "spec": (lambda of: {"spec": {"initializer": {"model": of.base.outputs["model"]}}}, "spec.initializer.model", URI),
    "metrics": (lambda of: {"args": [of.base.outputs["metrics"]]}, "args[0] is the artifact 'metrics'", "['result']"),
    "own component": (lambda of: {"args": [of.saved.outputs["model"]]}, "args[0] is the artifact", RETURNED),
    "imported": (lambda of: {"args": [of.imported.output]}, "args[0] is the artifact", "the artifact_uri of the impor"),
    "list of artifacts": (lambda of: {"args": [[of.saved.outputs["model"]]]}, "args[0][0] is the artifact", RETURNED),
    "collected": (lambda of: {"args": [dsl.Collected(of.looped.outputs["model"])]}, "args[0] is the artifact", URI),
    "branches": (lambda of: {"env": {"X": of.branches}}, "env.X is the artifact", RETURNED),
    "task": (lambda of: {"env": {"X": of.base}}, f"env.X {TASK}", "outputs['model_uri'] or outputs['result']"),
    "task in text": (lambda of: {"args": [f"--a={of.base}"]}, "args[0] has the text of a task", "outputs['"),
    "all outputs": (lambda of: {"env": {"X": of.base.outputs}}, "env.X has all outputs of the task train", "model_uri"),
    "all in text": (lambda of: {"args": [f"{of.base.outputs}"]}, "args[0] is the artifact", URI),
    "study": (lambda of: {"study": {**STUDY, "metric": of.base.outputs["model"]}}, "study.metric is the artifact", URI),
    "number": (
        lambda of: {"spec": {"func_args": {"seed": 2**53 + 1}}},
        "spec.func_args.seed is 9007199254740993",
        "text",
    ),
}


@pytest.mark.parametrize("use", REFUSED)
def test_what_kfp_cannot_pass_as_text_is_refused_when_the_pipeline_is_compiled(use: str) -> None:
    arguments, where, advice = REFUSED[use]

    def refused(flag: bool) -> None:
        base = train(command=["true"], **TRAIN)
        imported = dsl.importer(artifact_uri="s3://b/m", artifact_class=dsl.Model)
        with dsl.ParallelFor(items=[1, 2]):
            looped = train(command=["true"], **TRAIN)
        with dsl.If(flag == True):  # noqa: E712 - KFP reads the comparison
            first = save()
        with dsl.Else():
            second = save()
        branches = dsl.OneOf(first.outputs["model"], second.outputs["model"])
        of = SimpleNamespace(base=base, saved=save(), imported=imported, looped=looped, branches=branches)
        fields = {**TRAIN, **arguments(of)}
        (tune if "study" in fields else train)(**fields)

    with pytest.raises(TrainJobError) as raised:
        dsl.pipeline(refused)
    assert where in str(raised.value)
    assert advice in str(raised.value)


def test_items_of_loops_and_values_of_other_tasks_become_parameters_of_the_step(tmp_path: Path) -> None:
    @dsl.pipeline  # type: ignore[untyped-decorator]  # KFP has no types
    def looping(text: str) -> None:
        made = echo(value={}).output
        with dsl.ParallelFor(items=[{"a": "x", "b": 3}]) as item:
            train(command=[item.a, f"--b={item.b}-{text}", made], spec={"suspend": made}, **TRAIN)
        with dsl.ParallelFor(items=["u", "v"]) as word:
            train(command=[word, f"--word={word}"], **TRAIN)

    spec, _ = compiled(looping, tmp_path / "looping.yaml")
    loops = {name: each["dag"]["tasks"] for name, each in spec["components"].items() if "loop" in name}
    given = loops["comp-for-loop-2"]["train"]["inputs"]["parameters"]
    words = loops["comp-for-loop-4"]["train-2"]["inputs"]["parameters"]["command"]["runtimeValue"]["constant"]
    assert words == ["[[trainjob:trainjob--loop-item-param-3]]", "--word=[[trainjob:trainjob--loop-item-param-3]]"]
    names = [f"[[trainjob:trainjob--{name}]]" for name in ("loop-item-param-1-subvar-a", "loop-item-param-1-subvar-b")]
    text, made = "[[trainjob:trainjob--text]]", "[[trainjob:trainjob--echo-Output]]"
    assert given["command"]["runtimeValue"]["constant"] == [names[0], f"--b={names[1]}-{text}", made]
    assert given["spec"]["runtimeValue"]["constant"] == {"suspend": made}
    selectors = {name: each.get("parameterExpressionSelector") for name, each in given.items()}
    assert selectors["trainjob--loop-item-param-1-subvar-b"] == 'parseJson(string_value)["b"]'
    assert dangling(spec) == []


TEXT = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="$") | st.sampled_from("\"\\'\n\t{}[]%")
)
SCALARS = (
    TEXT
    | st.sampled_from(["torch==2.0", "2.0", 'say "hi"\n', "C:\\new", "[[trainjob:x]]"])
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans()
)
NESTED = st.recursive(SCALARS, lambda part: st.lists(part, max_size=4) | st.dictionaries(TEXT, part, max_size=4))
VALUES = st.fixed_dictionaries({"text": TEXT, "nested": NESTED, "whole": st.integers(-(2**53), 2**53)})


def on_a_rank(value: Any) -> Any:
    """A value of a pipeline as a rank has it in a word: text, or JSON without `.0` of whole numbers."""
    if isinstance(value, dict):
        return {name: on_a_rank(part) for name, part in value.items()}
    if isinstance(value, list):
        return [on_a_rank(part) for part in value]
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= 2**53
    return int(value) if is_whole else value


@pytest.mark.full
@settings(max_examples=2, phases=[Phase.generate], deadline=None, derandomize=True, database=None)
@given(drawn=st.lists(VALUES, min_size=8, max_size=8))
def test_a_rank_has_each_value_of_the_pipeline_unchanged(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[Any]
) -> None:
    tmp_path = tmp_path_factory.mktemp("run")
    given = {f"v{i}": {"value": each["nested"]} for i, each in enumerate(drawn)}

    @dsl.pipeline  # type: ignore[untyped-decorator]  # KFP has no types
    def passing(given: dict, text: str, whole: int, file: str) -> None:  # type: ignore[type-arg]  # as KFP has it
        made = echo(value=given).output
        words = [given, made, text, f"--t={text}", whole, f"--n={whole}", "torch==2.0", drawn[0]["text"]]
        train(command=[*WORDS, file, *words], env={"TEXT": text, "GIVEN": given}, **TRAIN)

    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(tmp_path / "root"))
    text, whole = drawn[0]["text"], drawn[0]["whole"]
    passing(given=given, text=text, whole=whole, file=str(tmp_path / "seen.json"))
    words, env = json.loads((tmp_path / "seen.json").read_text())
    meant = json.dumps(on_a_rank(given), sort_keys=True)
    for word in (words[0], words[1], env["GIVEN"]):
        assert json.dumps(json.loads(word), sort_keys=True) == meant
    plain = [text, f"--t={text}", str(whole), f"--n={whole}", "torch==2.0", text]
    assert (words[2:], env["TEXT"]) == (plain, text)
