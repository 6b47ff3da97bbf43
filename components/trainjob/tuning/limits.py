"""Why a study launches no trial any more: its limits, its metric, and trials that fail."""

from __future__ import annotations

from collections.abc import Sequence

from trainjob.tuning.study import Study
from trainjob.tuning.trials import Trial

REACHED = "reached"
"""The reason once a trial is as good as `stop_at`."""

NO_METRIC = "the trial reported no metric"
"""Start of the reason why a trial without the metric has failed."""

_SILENT = 3  # trials without the metric after which a study is given up


def reason_to_end(study: Study, trials: Sequence[Trial], seconds: float) -> str:
    """Why no trial is launched any more; empty if one may be.

    Args:
        study: The study.
        trials: Its trials.
        seconds: Since it began.
    """
    failed = [each for each in trials if each.state == "failed"]
    silent = [each for each in failed if each.reason.startswith(NO_METRIC)]
    ended = [each for each in trials if each.ended]
    reasons = {
        REACHED: any(_reaches(study, each) for each in trials),
        f"the first {len(silent)} trials reported no metric {study.metric!r}": len(silent) >= _SILENT
        and silent == ended,
        f"{len(failed)} trials have failed, more than max_failed_trials": study.max_failed_trials is not None
        and len(failed) > study.max_failed_trials,
        f"max_trials of {study.max_trials} is reached": len(trials) >= study.max_trials,
        "the grid has no further combination": study.sampler.name == "grid" and len(trials) >= study.combinations(),
        f"max_seconds of {study.max_seconds} have passed": study.max_seconds is not None
        and seconds >= study.max_seconds,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _reaches(study: Study, trial: Trial) -> bool:
    """Whether the trial is as good as `stop_at`."""
    if study.stop_at is None or trial.state != "complete" or trial.value is None:
        return False
    return not study.better(study.stop_at, trial.value)
