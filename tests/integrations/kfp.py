"""The components, run by KFP's executor as in the container of a step, but in this process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integrations.integration import Ended, Fields, Integration
from tests.kfp.executor_input import executor_input

RUN = "0d9f8a9e-6c1d-4a53-9f0e-2f1d5b1c7a11"
EXECUTION = "5f7c1a52-58f0-4d0e-8a0e-6c2f4c9b7d33"


class KfpStep(Integration):
    name = "kfp"

    def __init__(self, directory: Path, output: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory, self._output, self._monkeypatch = directory, output, monkeypatch
        self._message = directory / "termination-log"
        monkeypatch.setenv("TRAINJOB_TERMINATION_LOG", str(self._message))

    def train(self, spec: Fields, tries: int = 1, **options: Any) -> Ended:
        from trainjob_kfp.execution import TRAINING_ARGUMENTS

        parameters = {name: value for name, value in spec.items() if name in TRAINING_ARGUMENTS}
        others = {name: value for name, value in spec.items() if name not in TRAINING_ARGUMENTS}
        return self._step("train", tries, **parameters, spec=others, **options)

    def wait(self, job: str) -> Ended:
        return self._step("wait", job=job, run_id=RUN)

    def export(self, trained: Fields, target: str, **options: Any) -> Ended:
        source = trained["outputs"]["model"]
        return self._step("export_model", source=source, target=target, metrics=trained, **options)

    def tune(self, study: Fields, template: Fields) -> Ended:
        return self._step("tune", study=study, **template)

    def _step(self, component: str, tries: int = 1, **parameters: Any) -> Ended:
        """Run a component, again after each failure as KFP does with ``set_retry``."""
        log = ""
        for number in range(tries):
            if number:
                self._monkeypatch.setenv("KFP_RETRY_INDEX", str(number))
            outputs = self._execute(component, parameters)
            log += self._output.readouterr().out
            if outputs is not None:
                return Ended(0, result=outputs.get("result", outputs), log=log)
        return Ended(1, self._message.read_text(), log=log)

    def _execute(self, component: str, parameters: Fields) -> dict[str, Any] | None:
        """Run a component once; return its output parameters, None if it fails."""
        from kfp.dsl.executor import Executor

        import trainjob_kfp
        from trainjob_kfp.compile import COMPILED

        compiled = yaml.safe_load((COMPILED / f"{component}.yaml").read_text())
        definition = compiled["components"][f"comp-{component.replace('_', '-')}"]
        root = self._directory / "artifacts" / "pipeline" / RUN / component / EXECUTION
        given = executor_input(definition, root, parameters, {}, {})
        self._monkeypatch.setattr(sys, "argv", ["executor_main", "--executor_input", json.dumps(given)])
        self._output.readouterr()
        executor = Executor(executor_input=given, function_to_execute=getattr(trainjob_kfp, component))
        try:
            written = Path(executor.execute())
        except SystemExit:
            return None
        outputs: dict[str, Any] = json.loads(written.read_text())["parameterValues"]
        return outputs

    def outcome(self, code: int, *, certain: bool = False) -> int:
        return min(code, 1)
