"""All wait options are fields of one object, and parameters of the Airflow operators, the CLI and KFP."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import pytest

from trainjob import TrainJobClient, WaitOptions
from trainjob._jobs import following, waiting
from trainjob.cli.program import program
from trainjob.wait_options import InvalidWaitOptions, option_names


@pytest.mark.parametrize("call", [waiting.wait, waiting.attend, following.follow])
def test_python_functions_take_one_options_object(call: Any) -> None:
    names = {*inspect.signature(call).parameters}
    assert "options" in names
    assert not names & {*option_names()}


def test_the_client_takes_options_as_an_object_or_one_by_one() -> None:
    assert {"options", *option_names()} <= {*inspect.signature(TrainJobClient.wait).parameters}


def test_commands_take_one_options_object(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[WaitOptions] = []

    async def waited(_: object, names: object, options: WaitOptions) -> int:
        given.append(options)
        return 0

    monkeypatch.setattr("trainjob.cli.run.wait_for_many", waited)
    monkeypatch.setenv("TRAINJOB_BACKEND", "local")
    words = "wait a b --queue-timeout 1h30m --start-timeout 90 --run-timeout 2d --fail-fast"
    program.main(words.split(), standalone_mode=False)
    assert given == [
        WaitOptions(timedelta(hours=1, minutes=30), timedelta(seconds=90), timedelta(days=2), fail_fast=True)
    ]


# --- values


@pytest.mark.parametrize("value", [timedelta(minutes=15), 900, 900.0, "15m", "900"])
def test_a_timeout_is_a_timedelta_seconds_or_text(value: object) -> None:
    assert WaitOptions.parse({"queue_timeout": value, "runtime": "x"}) == WaitOptions(timedelta(minutes=15))


def test_missing_options_have_defaults() -> None:
    assert WaitOptions.parse({}) == WaitOptions.parse({"run_timeout": None, "fail_fast": False}) == WaitOptions()


@pytest.mark.parametrize(
    "value", [0, -1, True, "", "soon", "0s", [], timedelta(0), timedelta(-1), float("nan"), float("inf"), 1e300]
)
def test_invalid_timeouts_are_rejected(value: object) -> None:
    with pytest.raises(
        InvalidWaitOptions, match=r"^start_timeout must be a timedelta, a number of seconds above 0, or text"
    ):
        WaitOptions.parse({"start_timeout": value})


@pytest.mark.parametrize("value", ["no", 1, 0, None])
def test_invalid_switches_are_rejected(value: object) -> None:
    with pytest.raises(ValueError, match=r"^fail_fast must be True or False, not "):
        WaitOptions.parse({"fail_fast": value})


def test_every_invalid_option_is_named() -> None:
    with pytest.raises(InvalidWaitOptions) as caught:
        WaitOptions.parse({"queue_timeout": -1, "run_timeout": "soon", "fail_fast": "no"})
    assert caught.value.invalid == {"queue_timeout": -1, "run_timeout": "soon", "fail_fast": "no"}
    assert all(name in str(caught.value) for name in caught.value.invalid)


# --- serialization


@pytest.mark.parametrize(
    "options",
    [
        WaitOptions(),
        WaitOptions(timedelta(hours=12), timedelta(seconds=1.5), timedelta(days=2), True, True),
        WaitOptions(fail_on_first_crash=True),
    ],
)
def test_serialized_options_are_read_back(options: WaitOptions) -> None:
    assert WaitOptions.from_json(options.as_json()) == options


def test_the_serialized_form_is_flat_and_has_no_defaults() -> None:
    """A triggerer rejects the options of a newer worker: one that is not used must not be sent to it."""
    assert WaitOptions().as_json() == {}
    assert WaitOptions(timedelta(minutes=1), fail_fast=True).as_json() == {"queue_timeout": 60.0, "fail_fast": True}


def test_unknown_options_are_rejected() -> None:
    with pytest.raises(TypeError, match=r"^unknown options que_timeout; known: queue_timeout, "):
        WaitOptions.from_json({"que_timeout": 1})
