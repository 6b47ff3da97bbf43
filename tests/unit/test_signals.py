"""Handlers of Ctrl-C and SIGTERM."""

import os
import signal

import pytest

from trainjob._support.signals import exiting, handled


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_raises_and_the_earlier_handler_returns(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as left, handled(exiting):
        os.kill(os.getpid(), number)
    assert left.value.code == 128 + number
    assert signal.getsignal(number) is before
