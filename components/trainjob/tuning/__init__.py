"""Hyperparameter search whose trials are TrainJobs: the study survives its launcher.

May import `client`, and the layers below.

::

    study         what an author asks for: search space, metric, sampler, pruner, limits
    template      the spec of the trials and the parameters of one trial -> its spec
    journal       the state of a study: small files that are created once
    sampling      the sampler and the pruner, of Optuna
    trials        a trial, the result of a study, and what the journal has of them
    limits        why a study launches no trial any more
    search_state  the trials of a search: in memory, in the journal and in the sampler
    trial_jobs    the jobs of the trials: find and cancel them
    search        the loop: ask, launch, watch, prune, record

A trial is the TrainJob of the key ``<key of the study>/<number>``. Its parameters are in the journal before its job is
created, and its outcome before the job is cancelled: so the next launcher finds the same trials with the same
parameters, whatever instruction the last one was killed at.
"""

from trainjob.tuning.journal import open_journal
from trainjob.tuning.search import tune
from trainjob.tuning.study import Study
from trainjob.tuning.trial_jobs import cancel_trials
from trainjob.tuning.trials import StudyResult, StudyState, Trial, read_study

__all__ = ["Study", "StudyResult", "StudyState", "Trial", "cancel_trials", "open_journal", "read_study", "tune"]
