"""The options of a waiter, which Airflow, KFP, the command line and Python code share.

A new option is a field of `WaitOptions`, a parameter of `trainjob_airflow.operators.base.TrainJobTask`, an option in
`trainjob.cli.options` and a parameter of the KFP components; tests/unit/test_wait_options.py names the place that lacks
it. Imports little more than the standard library: DAG files and ``trainjob --help`` read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from trainjob._support.durations import EXAMPLES, parse_duration

_TIMEOUTS = ("queue_timeout", "start_timeout", "run_timeout")


@dataclass(frozen=True)
class WaitOptions:
    """When a waiter stops waiting before the job has ended.

    Timeouts are counted from the job's own timestamps, by the clock that wrote them, on a cluster the API server's. So
    a waiter that is restarted does not begin again, and its own clock does not matter.

    Attributes:
        queue_timeout: Longest time that the job waits for admission (Kueue). It counts from the creation, or from a
            later suspension by Kueue or a person.
        start_timeout: Longest time from admission to the first running rank.
        run_timeout: Longest time from admission to the end. ``activeDeadlineSeconds`` counts in the same way.
        fail_fast: Fail as soon as the job is blocked by something that only a person can remove. Examples are a queue
            that does not exist, more GPUs than the queue will ever have, a missing image, a JobSet that is refused.
        fail_on_first_crash: Fail as soon as a rank crashes. Trainer's own runtimes restart it again and again, and the
            job fails minutes later if at all (one node: after 320 s). A rank that ended because of a preemption or a
            lost node has not crashed. Applies to `wait` and `attend`, which watch the ranks, not to `follow`.
    """

    queue_timeout: timedelta | None = None
    start_timeout: timedelta | None = None
    run_timeout: timedelta | None = None
    fail_fast: bool = False
    fail_on_first_crash: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> WaitOptions:
        """Read the options among the values of `given`, as users write them; other names are ignored.

        Args:
            given: Name -> value. A timeout is a timedelta, a number of seconds, text such as ``1h30m``, or None for no
                limit; the others are True or False.

        Raises:
            InvalidWaitOptions: a value is of another kind, or a timeout is not above 0.
        """
        values: dict[str, Any] = {}
        invalid: dict[str, Any] = {}
        for name in option_names():
            if name in given:
                try:
                    values[name] = _timeout(given[name]) if name in _TIMEOUTS else _switch(given[name])
                except (ValueError, OverflowError):
                    invalid[name] = given[name]
        if invalid:
            raise InvalidWaitOptions(invalid)
        return WaitOptions(**values)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> WaitOptions:
        """Read what `as_json` returned.

        Raises:
            TypeError: a name is unknown, as of an option that a later version added.
            InvalidWaitOptions: see `parse`.
        """
        if unknown := sorted(values.keys() - option_names()):
            raise TypeError(f"unknown options {', '.join(unknown)}; known: {', '.join(option_names())}")
        return cls.parse(values)

    def as_json(self) -> dict[str, Any]:
        """The options that differ from their defaults, as JSON values; timeouts in seconds."""
        values = {name: getattr(self, name) for name in option_names()}
        return {
            name: value.total_seconds() if isinstance(value, timedelta) else value
            for name, value in values.items()
            if value not in (None, False)
        }


class InvalidWaitOptions(ValueError):
    """Options that `WaitOptions.parse` refuses.

    Attributes:
        invalid: Name -> refused value.
    """

    def __init__(self, invalid: Mapping[str, Any]) -> None:
        self.invalid = dict(invalid)
        timeout = f"a timedelta, a number of seconds above 0, or text such as {EXAMPLES}"
        super().__init__(
            "; ".join(
                f"{name} must be {timeout if name in _TIMEOUTS else 'True or False'}, not {value!r}"
                for name, value in self.invalid.items()
            )
        )


def option_names() -> tuple[str, ...]:
    """Names of all options."""
    return tuple(field.name for field in fields(WaitOptions))


def _timeout(value: object) -> timedelta | None:
    if value is None:
        return None
    if isinstance(value, str):
        return parse_duration(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = timedelta(seconds=value)
    if not isinstance(value, timedelta) or value <= timedelta(0):
        raise ValueError
    return value


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value
