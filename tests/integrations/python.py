"""`TrainJobClient`, as a script uses it."""

from __future__ import annotations

from typing import Any

from tests.integrations.integration import Ended, Fields, Integration

from trainjob import Diagnosis, LogLine, Observation, TrainJobClient, TrainJobError
from trainjob.cli.exits import exit_code

DECIDED_BY_CALLER = ("on_crash_action", "cancel_on_timeout", "retry_user_errors")
"""Options of other integrations: the caller of a client decides this."""


class PythonClient(Integration):
    name = "client"
    decides = False

    def train(self, spec: Fields, tries: int = 1, **options: Any) -> Ended:
        log: list[str] = []

        def change(_: Observation, notice: str) -> None:
            log.append(notice)

        def line(written: LogLine) -> None:
            log.append(f"[{written.rank}] {written.text}")

        def crash(diagnosis: Diagnosis) -> None:
            log.append(diagnosis.text())

        waits = {name: value for name, value in options.items() if name not in DECIDED_BY_CALLER}
        ended = Ended(None)
        with TrainJobClient() as client:
            for number in range(1, tries + 1):
                try:
                    ref = client.launch(spec, "work", tried=number, after_failure="verdict" if number > 1 else "retry")
                    result = client.wait(ref, on_change=change, on_log=line, on_crash=crash, **waits).as_dict()
                    return Ended(0, result=result, log="\n".join(log))
                except TrainJobError as error:
                    ended = Ended(exit_code(error), str(error), log="\n".join([*log, str(error)]))
        return ended

    def outcome(self, code: int) -> int:
        return code
