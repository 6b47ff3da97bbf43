"""The time of the API server, as the header ``Date`` of its replies tells it."""

from __future__ import annotations

import math
from email.utils import formatdate
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given, strategies as st

from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes import client as module
from trainjob._backends.kubernetes.client import ApiClient

EPOCH = 1_796_000_000.0
REPLIES = st.lists(st.tuples(st.floats(0, 300), st.floats(0, 30), st.floats(0, 1)), min_size=1, max_size=20)
"""Of each reply: seconds since the one before, how long it took, and the share of it before the server wrote it."""


class Client(ApiClient):
    """A client in virtual time: `monotonic` is its own clock, and the server's is `ahead` of that."""

    def __init__(self) -> None:
        super().__init__(Credentials(host="https://unused"))
        self.monotonic, self.ahead = 0.0, EPOCH

    def reply(self, after: float, took: float, share: float) -> None:
        """A reply of the server arrives."""
        sent = self.monotonic + after
        self.monotonic = sent + took
        self._hear(formatdate(math.floor(sent + share * took + self.ahead), usegmt=True), sent)

    def late(self) -> float:
        """By how many seconds `now` is behind the server's clock."""
        with mock.patch.object(module, "time", SimpleNamespace(monotonic=lambda: self.monotonic)):
            return self.monotonic + self.ahead - self.now().timestamp()


def heard(client: Client, replies: list[tuple[float, float, float]]) -> list[float]:
    """How late the time is after each reply."""
    late = []
    for reply in replies:
        with mock.patch.object(module, "time", SimpleNamespace(monotonic=lambda: client.monotonic)):
            client.reply(*reply)
        late.append(client.late())
    return late


@given(REPLIES, st.floats(-1e6, 1e6))
def test_the_time_is_behind_the_servers_by_a_second_and_a_reply_at_most(
    replies: list[tuple[float, float, float]], ahead: float
) -> None:
    client = Client()
    client.ahead += ahead
    late = heard(client, replies)
    best = math.inf
    for (_, took, _), each in zip(replies, late, strict=True):
        best = min(best, 1 + took)
        assert -0.001 <= each <= best + 0.001
    assert all(after <= before + 0.001 for before, after in pairwise(late)), "it never goes back"


@given(REPLIES, REPLIES, st.floats(-1e6, 1e6))
def test_a_server_whose_clock_is_set_is_followed_by_the_next_quick_reply(
    before: list[tuple[float, float, float]], after: list[tuple[float, float, float]], step: float
) -> None:
    client = Client()
    heard(client, before)
    client.ahead += step
    heard(client, [(wait, 0.0, share) for wait, _, share in after])
    assert -1.001 <= client.late() <= 1.001


@pytest.mark.parametrize("date", ["", "soon", "Mon, 30 Nov 99999999 10:00:00 GMT", "Mon, 31 Feb 2026 10:00:00 GMT"])
def test_a_date_that_is_none_changes_nothing(date: str) -> None:
    client = Client()
    heard(client, [(1.0, 0.0, 0.0)])
    before = client.late()
    client._hear(date, 1.0)
    assert client.late() == before
