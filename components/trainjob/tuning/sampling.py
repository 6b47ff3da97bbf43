"""The sampler and the pruner: Optuna's, over the trials in the journal.

The parameters of a trial follow from the seed, its number and the trials before it: so a launcher that starts again
would ask for the same ones. Blocks for milliseconds: call it in a thread.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

from trainjob.errors import InvalidStudy, Problem, missing
from trainjob.tuning.study import CategoricalParameter, FloatParameter, IntParameter, Scalar, Study

if TYPE_CHECKING:
    import optuna

_SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "grid": "GridSampler", "qmc": "QMCSampler"}
_PRUNERS = {
    "none": "NopPruner",
    "median": "MedianPruner",
    "percentile": "PercentilePruner",
    "successive_halving": "SuccessiveHalvingPruner",
    "hyperband": "HyperbandPruner",
    "threshold": "ThresholdPruner",
}


class Sampling:
    """The sampler and the pruner of one study.

    Args:
        study: The study.

    Raises:
        ConfigurationError: Optuna is not installed.
        InvalidStudy: Optuna refuses an option of the sampler or pruner.
    """

    def __init__(self, study: Study) -> None:
        try:
            import optuna  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise missing("a hyperparameter search", "Optuna", "tune") from error
        self._optuna = optuna
        self._study = study
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._order = study.order() or []
        pruner = _made(optuna.pruners, _PRUNERS[study.pruner.name], study.pruner.options, "pruner")
        self._inner = optuna.create_study(
            direction=study.direction,
            sampler=self._sampler(0),
            pruner=pruner,
            storage=optuna.storages.InMemoryStorage(),
        )
        self._trials: dict[int, Any] = {}

    def _sampler(self, number: int) -> Any:
        """The sampler of one trial: it keeps no state, since a launcher may start again before each trial."""
        seed = int.from_bytes(hashlib.sha256(f"{self._study.sampler.seed}/{number}".encode()).digest()[:4])
        fixed: dict[str, Any] = {"seed": seed}
        if self._study.sampler.name == "grid":
            fixed = {"seed": self._study.sampler.seed, "search_space": self._study.grid()}
        if self._study.sampler.name == "qmc":
            fixed = {"seed": self._study.sampler.seed, "warn_independent_sampling": False}
        if self._study.sampler.name == "tpe":
            fixed |= {"constant_liar": True, "group": True, "multivariate": True}  # running trials count as bad ones
        name = _SAMPLERS[self._study.sampler.name]
        return _made(self._optuna.samplers, name, {**fixed, **self._study.sampler.options}, "sampler")

    def ask(self, number: int) -> dict[str, Scalar]:
        """The parameters of the next trial, which has this number."""
        self._inner.sampler = self._sampler(number)
        return self._begin(number)

    def resume(self, number: int, parameters: Mapping[str, Scalar]) -> None:
        """Add a trial that was asked before and has not ended."""
        self._inner.enqueue_trial(dict(parameters))
        self._begin(number)

    def add(self, number: int, parameters: Mapping[str, Scalar], ended: Mapping[str, Any]) -> None:
        """Add a trial that has ended."""
        self.resume(number, parameters)
        for step, value in ended.get("values") or ():
            self._trials[number].report(value, step)
        self.tell(number, ended["state"], ended.get("value"))

    def _begin(self, number: int) -> dict[str, Scalar]:
        trial = self._inner.ask()
        if trial.number != number:
            raise AssertionError(f"trial {number} is the trial {trial.number} of Optuna")
        self._trials[number] = trial
        parameters: dict[str, Scalar] = {}
        for name in self._order:
            parameter = self._study.space[name]
            if parameter.applies(parameters):
                parameters[name] = _suggested(trial, name, parameter)
        return {name: parameters[name] for name in self._study.space if name in parameters}

    def report(self, number: int, step: int, value: float) -> bool:
        """Add a value of a running trial; returns whether to prune it."""
        trial = self._trials[number]
        trial.report(value, step)
        return bool(trial.should_prune())

    def tell(self, number: int, state: str, value: float | None) -> None:
        """Record the outcome of a trial: ``complete``, ``pruned``, ``failed`` or ``stopped``."""
        states = self._optuna.trial.TrialState
        trial = self._trials[number]
        # The grid sampler stops `Study.optimize` with the last trial; here `exhausted` does.
        with suppress(RuntimeError) if self._study.sampler.name == "grid" else nullcontext():
            if state == "complete" and value is not None:
                self._inner.tell(trial, value)
            elif state == "pruned" and trial._cached_frozen_trial.intermediate_values:
                self._inner.tell(trial, state=states.PRUNED)
            else:
                self._inner.tell(trial, state=states.FAIL)

    def exhausted(self, number: int) -> bool:
        """Whether a grid has no further trial."""
        return self._study.sampler.name == "grid" and number >= math.prod(len(e) for e in self._study.grid().values())

    def importances(self) -> dict[str, float]:
        """Importance of each parameter, 0 to 1; empty with fewer than two complete trials."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the evaluator is experimental, or has few trials
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


def _made(module: Any, name: str, options: Mapping[str, Any], field: str) -> Any:
    """An object of Optuna; its options are checked by name, and by Optuna."""
    make: Callable[..., Any] = getattr(module, name)
    known = inspect.signature(make).parameters
    if unknown := sorted(set(options) - set(known)):
        names: Iterable[str] = sorted(each for each in known if each not in ("seed", "search_space"))
        raise InvalidStudy(
            [Problem(f"{field}.options.{unknown[0]}", f"is no option of {name}", f"use {', '.join(names)}")]
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that an argument is experimental
            return make(**options)
    except (TypeError, ValueError) as error:
        raise InvalidStudy([Problem(f"{field}.options", f"is refused by {name}: {error}")]) from None
