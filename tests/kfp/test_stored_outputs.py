"""Whatever a training reports or returns, KFP's executor writes outputs that its launcher can read and store."""

# No `from __future__ import annotations`: KFP reads those of components as objects.
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from google.protobuf import json_format
from kfp import compiler, dsl
from kfp.pipeline_spec import pipeline_spec_pb2
from tests.kfp.conftest import script
from tests.unstorable import CLEANED, LOST, VALUES, unstorable

from trainjob_kfp import STEP_IMAGE, distributed

if TYPE_CHECKING:
    from tests.kfp.conftest import Ended, Steps

REPORTING = """
import sys
from trainjob.progress import report
for number, expression in enumerate(sys.argv[1:]):
    report(outputs={f"o{number}": eval(expression)}, metrics={f"m{number}": eval(expression)})
    if isinstance(text := eval(expression), str):
        report(outputs={f"o{number} {text}": 1}, metrics={f"m{number} {text}": 1})
report(outputs={"last": "s3://m"}, metrics={"loss": 0.5})
"""


def check_stored(ended: "Ended") -> None:
    """Read the outputs as KFP's launcher does."""
    output = json_format.ParseDict(ended.output, pipeline_spec_pb2.ExecutorOutput())
    output.SerializeToString()
    found = {name: unstorable(value) for name, value in ended.output["parameterValues"].items()}
    artifacts = ended.output["artifacts"].items()
    found |= {name: unstorable([each["metadata"] for each in value["artifacts"]]) for name, value in artifacts}
    bad = {name: each for name, each in found.items() if each}
    if bad:
        raise ValueError(f"cannot be stored: {bad}")


@pytest.mark.full
def test_what_a_training_reports_is_stored(steps: "Steps") -> None:
    ended = steps.run("train", **script(REPORTING, *VALUES))
    assert ended.code == 0, ended.log
    check_stored(ended)
    result = ended.output["parameterValues"]["result"]
    assert result["outputs"]["last"] == "s3://m"
    assert result["metrics"]["loss"] == 0.5
    (metrics,) = ended.output["artifacts"]["metrics"]["artifacts"]
    assert metrics["metadata"]["loss"] == 0.5


@dsl.component(base_image=STEP_IMAGE, install_kfp_package=False)  # type: ignore[untyped-decorator]  # KFP's has no types
def give(
    cleaned: dict,  # type: ignore[type-arg]  # as KFP has it
    lost: list,  # type: ignore[type-arg]  # as KFP has it
    model: dsl.Output[dsl.Model],
    note: dsl.OutputPath(str),  # type: ignore[valid-type]  # a call, as KFP wants it
) -> NamedTuple("Outputs", [("kept", dict), ("nan", float), ("lr", list), ("huge", int), ("deep", list)]):  # type: ignore[valid-type]  # as KFP has it
    from pathlib import Path

    kept = {name: eval(expression) for name, expression in cleaned.items()}
    values: Any = [eval(expression) for expression in lost]
    model.metadata.update({**kept, **{str(number): value for number, value in enumerate(values)}})
    Path(note).parent.mkdir(parents=True, exist_ok=True)
    Path(note).write_bytes(b"caf\xe9 x\0y")
    outputs: Any = (kept, *values)
    return outputs


@pytest.mark.full
def test_what_a_function_on_all_ranks_returns_is_stored(steps: "Steps", tmp_path: Path) -> None:
    compiler.Compiler().compile(distributed(give, runtime="jax-distributed"), str(tmp_path / "give.yaml"))
    cleaned = {name: expression for name, (expression, _) in CLEANED.items()}
    lost = [LOST[name] for name in ("NaN", "infinity", "a huge int", "a deep list")]
    ended = steps.end("give", steps.start("give", compiled=tmp_path / "give.yaml", cleaned=cleaned, lost=lost))
    assert ended.code == 0, ended.log
    check_stored(ended)
    kept = {name: value for name, (_, value) in CLEANED.items()}
    assert ended.output["parameterValues"] == {"kept": kept}
    (model,) = ended.output["artifacts"]["model"]["artifacts"]
    assert model["metadata"] == kept
    assert (steps.artifact_root("give") / "note").read_text() == "caf\ufffd x\ufffdy"
    for name in ("output nan", "output lr", "output huge", "output deep", "metadata of model: 0"):
        assert f"{name} is lost: it has " in ended.log
