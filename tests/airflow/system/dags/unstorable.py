"""Trainings that report and return what no database holds."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, task
from tests.unstorable import CLEANED, LOST, VALUES

RETURNED = [
    f"{{{', '.join(f'{name!r}: {expression}' for name, (expression, _) in CLEANED.items())}}}",
    *(LOST[name] for name in ("NaN", "a huge int", "a set", "a generator")),
]

with DAG("unstorable"):
    for mode in ("worker", "deferred"):
        # On a busy machine a worker may fail to start, which proves nothing: retry. A value that cannot be stored fails
        # each retry.
        @task.trainjob(
            task_id=mode,
            runtime="trainjob-step",
            namespace="unstorable",
            deferrable=mode == "deferred",
            retries=2,
            retry_delay=timedelta(0),
        )
        def train(reported: list[str], returned: str) -> Any:
            from trainjob.progress import report

            for number, expression in enumerate(reported):
                report(outputs={f"o{number}": eval(expression)}, metrics={f"m{number}": eval(expression)})
                if isinstance(text := eval(expression), str):
                    report(outputs={f"o{number} {text}": 1}, metrics={f"m{number} {text}": 1})
            report(outputs={"model": "s3://m"}, metrics={"loss": 0.5})
            return eval(returned)

        mapped: Any = train
        mapped.partial(reported=VALUES).expand(returned=RETURNED)

    @task.trainjob(runtime="trainjob-step", namespace="unstorable", retries=2, retry_delay=timedelta(0))
    def written() -> None:
        import os
        from pathlib import Path

        message = r'{"trainjob":1,"returned":{"__id__":"\u0000"},"outputs":{"f\udce9":"\u0000"}}'
        Path(os.environ["TRAINJOB_TERMINATION_LOG"]).write_text(message)

    written()
