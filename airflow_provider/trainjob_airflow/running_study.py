"""The study that a task handles in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Event
from typing import TYPE_CHECKING

from trainjob_airflow.running import REPLY_SECONDS, RunningJob, stored_when_due
from trainjob_airflow.tasklog import StudyLog

if TYPE_CHECKING:
    from trainjob import TrainJobClient, TrainJobSpec, WaitOptions
    from trainjob._jobs.steps import Stopped
    from trainjob._manifest.attempts import CancelAction
    from trainjob.tuning import Study, StudyResult, Trial
    from trainjob_airflow.study import TaskStudy
    from trainjob_airflow.tasklog import Log


class RunningStudy(RunningJob):
    """The study of one key.

    Attributes:
        page: What the task stores about the study; None if it stores nothing.
    """

    def __init__(self, client: TrainJobClient, key: str) -> None:
        super().__init__(client, key)
        self.page: TaskStudy | None = None
        self._launching_trials: frozenset[int] = frozenset()
        self._ended = Event()
        self._ended.set()

    def __str__(self) -> str:
        return f"study {self.key}"

    @property
    def advice(self) -> str:
        """What to do if the trials could not be stopped in time."""
        where = f"-n {self.client.namespace}"
        return (
            f"; trials may keep running: `trainjob list {where}` lists them, `trainjob cancel NAME {where}` stops one"
        )

    def tune(
        self,
        study: Study,
        template: TrainJobSpec,
        journal: str,
        options: WaitOptions,
        log: Log,
        *,
        origin: Mapping[str, str],
        seconds: float | None,
    ) -> StudyResult:
        """Run the study for at most `seconds`; log each trial.

        Raises:
            TimedOut: `seconds` have passed; trials keep running.
            concurrent.futures.CancelledError: `stop_waiting` was called.
        """
        from trainjob._jobs.waiting import within
        from trainjob.tuning import tune
        from trainjob.tuning.journal import open_journal

        lines, client = StudyLog(log, study.metric), self.client

        def on_change(trials: Sequence[Trial]) -> None:
            lines.change(trials)
            self._launching_trials = launching(trials)
            if self.page is not None:
                self.page.observe(trials)
                self._changes.put(None)

        async def run() -> StudyResult:
            try:
                async with within(seconds, lambda: str(self)):
                    return await tune(
                        client.backend,
                        study,
                        template,
                        self.key,
                        opened,
                        namespace=client.namespace,
                        origin=origin,
                        options=options,
                        on_change=on_change,
                    )
            finally:
                self._ended.set()

        with open_journal(journal) as opened:
            self._ended.clear()
            return self.result_of(run, lambda: stored_when_due(self.page))

    def stop(self, action: CancelAction, seconds: float) -> Stopped:
        """Cancel the running trials, which may then still be terminating."""
        from trainjob._jobs.steps import Stopped
        from trainjob.tuning import cancel_trials

        del action
        self._ended.wait(min(REPLY_SECONDS, seconds / 2))  # a launch in progress creates a trial to cancel
        client = self.client
        late = self._launching_trials
        client.start(
            lambda: cancel_trials(client.backend, self.key, namespace=client.namespace, launching=late)
        ).result(seconds)
        return Stopped(ended=False)


def launching(trials: Sequence[Trial]) -> frozenset[int]:
    """Numbers of the trials whose launch is on its way."""
    return frozenset(trial.number for trial in trials if not trial.job and not trial.ended)
