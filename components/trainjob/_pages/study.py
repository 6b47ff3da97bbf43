"""The document of a study, for its page: from its journal, also while its launcher runs elsewhere or was killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainjob._pages.documents.study import study_document
from trainjob.errors import ConfigurationError, TrainJobError
from trainjob.settings import Settings
from trainjob.tuning.journal import journal_location, open_journal
from trainjob.tuning.sampling import Sampling
from trainjob.tuning.study import Study
from trainjob.tuning.trials import StudyState, Trial, read_study


def find_study(key_hash: str, workspace: str | None = None) -> StudyState | None:
    """The study of a key in a workspace, by the hash of the key; None if the workspace has none.

    Blocks: call it in a thread.

    Raises:
        TrainJobError: The workspace cannot be read, or the journal is damaged.
    """
    settings = Settings()
    if not (workspace or settings.workspace) and not (settings.home / "studies" / key_hash).is_dir():
        return None
    with open_journal(journal_location(key_hash, workspace)) as journal:
        return read_study(journal)


def document_of_study(
    state: StudyState, *, importances: bool = True, href: Callable[[Trial], str] = lambda _: ""
) -> dict[str, Any]:
    """The document of a study.

    Args:
        state: The study.
        importances: Whether to compute the importance of the parameters, which takes a second for 1,000 trials.
        href: Address of the page of a trial.
    """
    notes = []
    found: dict[str, float] = {}
    if importances:
        try:
            found = importances_of(state)
        except ConfigurationError as error:
            notes.append(f"The importance of the parameters is missing: {error}")
    return study_document(
        state.key,
        state.namespace,
        state.key,
        state.fields,
        [{**each.as_dict(), "href": href(each)} for each in state.trials],
        importances=found,
        ended=state.ended,
        reason=state.reason,
        notes=notes,
    )


def importances_of(state: StudyState) -> dict[str, float]:
    """The importance of each parameter, 0 to 1; empty with fewer than two complete trials.

    Raises:
        ConfigurationError: Optuna is not installed.
    """
    try:
        sampling = Sampling(Study.read({**state.fields, "sampler": {"name": "random"}, "pruner": {"name": "none"}}))
    except ConfigurationError:
        raise
    except TrainJobError:  # of another version
        return {}
    for trial in state.trials:
        sampling.resume(trial.number, trial.parameters)
        if trial.ended:
            sampling.end(trial, {})
    return sampling.importances()
