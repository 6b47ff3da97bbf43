"""`TrainJobClient`, as a script uses it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.integrations.integration import Ended, Fields, Integration

from trainjob import Diagnosis, JobRef, LogLine, Observation, TrainJobClient, TrainJobError, TrainJobSpec
from trainjob._jobs.launching import AfterFailure
from trainjob.cli.exits import exit_code
from trainjob.job import key_hash

DECIDED_BY_CALLER = ("on_crash_action", "cancel_on_timeout", "retry_user_errors")
"""Options of other integrations: the caller of a client decides this."""


class PythonClient(Integration):
    name = "client"

    def train(self, spec: Fields, tries: int = 1, **options: Any) -> Ended:
        log: list[str] = []

        def change(_: Observation, notice: str) -> None:
            log.append(notice)

        def adopted(ref: JobRef) -> None:
            log.append(f"adopted {ref}")

        def line(written: LogLine) -> None:
            log.append(f"[{written.rank}] {written.text}")

        def crash(diagnosis: Diagnosis) -> None:
            log.append(diagnosis.text())

        waits = {name: value for name, value in options.items() if name not in DECIDED_BY_CALLER}
        ended = Ended(None)
        with TrainJobClient() as client:
            for number in range(1, tries + 1):
                try:
                    again: AfterFailure = "verdict" if number > 1 else "retry"
                    ref = client.launch(spec, "work", tried=number, after_failure=again, on_adopt=adopted)
                    result = client.wait(ref, on_change=change, on_log=line, on_crash=crash, **waits).as_dict()
                    return Ended(0, result=result, log="\n".join(log))
                except TrainJobError as error:
                    log.append(str(error))
                    ended = Ended(exit_code(error), str(error), log="\n".join(log))
        return ended

    def wait(self, job: str) -> Ended:
        with TrainJobClient() as client:
            return _ended(lambda: client.wait(job).as_dict())

    def export(self, trained: Fields, target: str, **options: Any) -> Ended:
        with TrainJobClient() as client:
            return _ended(lambda: vars(client.export(trained["name"], target, **options)))

    def tune(self, study: Fields, template: Fields) -> Ended:
        from trainjob.tuning import Study, tune
        from trainjob.tuning.journal import journal_location, open_journal

        asked, spec = Study.read(study), TrainJobSpec.parse(template)
        with TrainJobClient() as client, open_journal(journal_location(key_hash("work"))) as journal:
            search = partial(tune, client.backend, asked, spec, "work", journal, namespace=client.namespace)
            return _ended(lambda: client.call(search).as_dict())

    def outcome(self, code: int, *, certain: bool = False) -> int:
        return code


def _ended(call: Callable[[], dict[str, Any]]) -> Ended:
    try:
        return Ended(0, result=call())
    except TrainJobError as error:
        return Ended(exit_code(error), str(error), log=str(error))
