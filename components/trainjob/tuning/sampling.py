"""The sampler and the pruner: Optuna's, over the trials in the journal.

The parameters of a trial follow from the seed, its number and the trials before it: so a launcher that starts again
would ask for the same ones. Blocks for milliseconds: call it in a thread.
"""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from threading import Lock
from typing import TYPE_CHECKING, Any

from trainjob.errors import InvalidStudy, Problem, missing
from trainjob.tuning.study import CategoricalParameter, FloatParameter, IntParameter, Scalar, Study

if TYPE_CHECKING:
    import optuna

    from trainjob.tuning.trials import Trial

_SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "grid": "GridSampler", "qmc": "QMCSampler"}
_PRUNERS = {
    "none": "NopPruner",
    "median": "MedianPruner",
    "percentile": "PercentilePruner",
    "successive_halving": "SuccessiveHalvingPruner",
    "hyperband": "HyperbandPruner",
    "threshold": "ThresholdPruner",
}


_RUNG = "completed_rung_"
"""Start of the attributes in which Optuna keeps the values at the rungs of successive halving."""


_WARNINGS = Lock()


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings. The filters are those of the process, and several studies may run in it."""
    with _WARNINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def load_optuna() -> Any:
    """The module of Optuna, which logs errors only.

    Raises:
        ConfigurationError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise missing("a hyperparameter search", "Optuna", "tune") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def distribution_of(parameter: FloatParameter | IntParameter | CategoricalParameter) -> Any:
    """A parameter in Optuna's terms."""
    made = load_optuna().distributions
    if isinstance(parameter, CategoricalParameter):
        return made.CategoricalDistribution(parameter.choices)
    if isinstance(parameter, IntParameter):
        return made.IntDistribution(parameter.low, parameter.high, log=parameter.log, step=parameter.step)
    return made.FloatDistribution(parameter.low, parameter.high, log=parameter.log, step=parameter.step)


class Sampling:
    """The sampler and the pruner of one study.

    Args:
        study: The study.

    Raises:
        ConfigurationError: Optuna is not installed.
        InvalidStudy: Optuna refuses an option of the sampler or pruner.
    """

    def __init__(self, study: Study) -> None:
        self._optuna = optuna = load_optuna()
        self._study = study
        self._order = study.order() or []
        self._grid: Any = None
        if study.sampler.name == "grid":  # the trial's number decides; making it takes long for a large grid
            fixed = {"seed": study.sampler.seed, "search_space": study.grid()}
            self._grid = _made(optuna.samplers, "GridSampler", fixed, study.sampler.options, "sampler")
        pruner = _made(optuna.pruners, _PRUNERS[study.pruner.name], {}, study.pruner.options, "pruner")
        self._storage = optuna.storages.InMemoryStorage()
        self._inner = optuna.create_study(
            study_name="study",  # Hyperband derives its brackets from the name, which is random by default
            direction=study.direction,
            sampler=self._sampler(0),
            pruner=pruner,
            storage=self._storage,
        )
        self._trials: dict[int, Any] = {}
        self._steps: dict[int, set[int]] = {}
        self._ended: set[int] = set()

    def _sampler(self, number: int) -> Any:
        """The sampler of one trial: it keeps no state, since a launcher may start again before each trial."""
        if self._grid is not None:
            return self._grid
        name, options = self._study.sampler.name, self._study.sampler.options
        seed = int.from_bytes(hashlib.sha256(f"{self._study.sampler.seed}/{number}".encode()).digest()[:4])
        fixed: dict[str, Any] = {"seed": seed}
        if name == "qmc":  # of the sequence, which is the same for all trials
            fixed = {"seed": self._study.sampler.seed, "warn_independent_sampling": False}
        if name == "tpe":
            fixed |= {"constant_liar": True, "group": True, "multivariate": True}  # running trials count as bad ones
        sampler = _made(self._optuna.samplers, _SAMPLERS[name], fixed, options, "sampler")
        if name == "qmc":
            self._fix_point(sampler, number)
        return sampler

    def _fix_point(self, sampler: Any, number: int) -> None:
        """Make a trial the point of its number in the sequence.

        Optuna counts the points that this process has drawn, so a launcher that starts again would begin anew.
        """
        space = {name: distribution_of(each) for name, each in self._study.space.items()}
        space = {name: each for name, each in sorted(space.items()) if not each.single()}
        sampler.infer_relative_search_space = lambda *_: space
        sampler._find_sample_id = lambda *_: number

    def ask(self, number: int) -> dict[str, Scalar]:
        """The parameters of the next trial, which has this number."""
        self._inner.sampler = self._sampler(number)
        return self._begin(number)

    def resume(self, number: int, parameters: Mapping[str, Scalar]) -> None:
        """Add a trial that was asked before and has not ended."""
        self._inner.enqueue_trial(dict(parameters))
        self._begin(number)

    def end(self, trial: Trial, rungs: Mapping[str, float]) -> None:
        """Record the outcome of a trial, with the values that were not reported yet.

        Args:
            trial: The trial.
            rungs: `rungs` of the trial when it ended.
        """
        inner, steps = self._trials[trial.number], self._steps[trial.number]
        for step, value in trial.values:
            if step not in steps:
                steps.add(step)
                inner.report(value, step)
        for name, value in rungs.items():
            if name.startswith(_RUNG):
                self._storage.set_trial_system_attr(inner._trial_id, name, value)
        self._ended.add(trial.number)
        self._tell(trial, pruned=bool(steps))

    def rungs(self, number: int) -> dict[str, float]:
        """What successive halving and Hyperband keep of a trial, to compare later ones with it."""
        attributes = self._storage.get_trial_system_attrs(self._trials[number]._trial_id)
        return {name: value for name, value in attributes.items() if name.startswith(_RUNG)}

    def _begin(self, number: int) -> dict[str, Scalar]:
        trial = self._inner.ask()
        if trial.number != number:
            raise AssertionError(f"trial {number} is the trial {trial.number} of Optuna")
        self._trials[number] = trial
        self._steps[number] = set()
        parameters: dict[str, Scalar] = {}
        for name in self._order:
            parameter = self._study.space[name]
            if parameter.applies(parameters):
                parameters[name] = _suggested(trial, name, parameter)
        return {name: parameters[name] for name in self._study.space if name in parameters}

    def report(self, number: int, step: int, value: float) -> bool:
        """Add a value of a running trial; returns whether to prune it."""
        if number in self._ended:  # by another launcher, or since the study has ended
            return False
        trial = self._trials[number]
        self._steps[number].add(step)
        trial.report(value, step)
        return bool(trial.should_prune())

    def _tell(self, trial: Trial, *, pruned: bool) -> None:
        states = self._optuna.trial.TrialState
        inner = self._trials[trial.number]
        # The grid sampler stops `Study.optimize` with the last trial; here the loop of the study counts.
        with suppress(RuntimeError) if self._grid is not None else nullcontext():
            if trial.state == "complete" and trial.value is not None:
                self._inner.tell(inner, trial.value)
            elif trial.state == "pruned" and pruned:
                self._inner.tell(inner, state=states.PRUNED)
            else:
                self._inner.tell(inner, state=states.FAIL)

    def importances(self) -> dict[str, float]:
        """Importance of each parameter, 0 to 1; empty with fewer than two complete trials."""
        complete = self._inner.get_trials(deepcopy=False, states=(self._optuna.trial.TrialState.COMPLETE,))
        if len(complete) < 2:
            return {}
        try:
            with quiet():  # that the evaluator is experimental, or has few trials
                found = self._optuna.importance.get_param_importances(
                    self._inner, evaluator=self._optuna.importance.PedAnovaImportanceEvaluator()
                )
        except (ValueError, RuntimeError):
            return {}
        return {name: float(value) for name, value in found.items()}


def _suggested(
    trial: optuna.Trial, name: str, parameter: FloatParameter | IntParameter | CategoricalParameter
) -> Scalar:
    if isinstance(parameter, CategoricalParameter):
        chosen: Any = trial.suggest_categorical(name, parameter.choices)
        return parameter.choices[parameter.choices.index(chosen)]
    if isinstance(parameter, IntParameter):
        return trial.suggest_int(name, parameter.low, parameter.high, step=parameter.step, log=parameter.log)
    return trial.suggest_float(name, parameter.low, parameter.high, step=parameter.step, log=parameter.log)


def _made(module: Any, name: str, fixed: Mapping[str, Any], options: Mapping[str, Any], field: str) -> Any:
    """An object of Optuna; its options are checked by name, and by Optuna."""
    make: Callable[..., Any] = getattr(module, name)
    # The others are fields of the study, or no scalars.
    known = set(inspect.signature(make).parameters) - {"seed", "search_space", "independent_sampler"}
    if unknown := sorted(set(options) - known):
        names: Iterable[str] = sorted(known)
        raise InvalidStudy(
            [Problem(f"{field}.options.{unknown[0]}", f"is no option of {name}", f"use {', '.join(names)}")]
        )
    try:
        with quiet():  # that an argument is experimental
            return make(**{**fixed, **options})
    except (TypeError, ValueError) as error:
        raise InvalidStudy([Problem(f"{field}.options", f"is refused by {name}: {error}")]) from None
