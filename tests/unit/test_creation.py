"""Timeouts of a waiter count while its job is created, too: a webhook that hangs must not be waited for without end."""

from __future__ import annotations

import logging
import re
from functools import partial

import anyio
import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.unit.virtually import virtually

from trainjob import TrainJobSpec
from trainjob._backends.base import TrainJob
from trainjob._backends.kubernetes.errors import ServerError
from trainjob._jobs.launching import launch
from trainjob._manifest.render import render
from trainjob.errors import BackendUnavailable, QueueTimeout, RunTimeout, StartTimeout, TimedOut
from trainjob.wait_options import WaitOptions

SPEC = TrainJobSpec.parse({"runtime": "r", "command": ["train"]})


class Hanging(DirectBackend):
    """The reply to a creation never comes, as from a webhook that hangs; with `stored`, the job exists all the same."""

    stored = False

    async def create(self, trainjob: TrainJob, *, dry_run: bool = False) -> TrainJob:
        if self.stored:
            await super().create(trainjob, dry_run=dry_run)
        self.turn = self._hang
        return await super().create(trainjob, dry_run=dry_run)

    async def _hang(self, request: str) -> None:
        if request == "POST trainjobs":
            await anyio.sleep_forever()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"start_timeout": 15, "queue_timeout": 60}, StartTimeout),
        ({"queue_timeout": 15}, QueueTimeout),
        ({"run_timeout": 15, "start_timeout": 60}, RunTimeout),
    ],
)
@virtually
async def test_the_shortest_timeout_ends_a_creation_that_hangs(
    options: dict[str, int], error: type[TimedOut], caplog: pytest.LogCaptureFixture
) -> None:
    backend = Hanging()
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(error, match=r"could not be created within .* of 15s, and it does"),
    ):
        await launch(backend, SPEC, "key", namespace="default", timeouts=WaitOptions.parse(options))
    assert re.search(
        "is not created yet: the API server, or an admission webhook .* has not answered for 8 s", caplog.text
    )
    assert not backend.jobs


@virtually
async def test_without_a_timeout_a_creation_is_not_given_up() -> None:
    backend = Hanging()
    with anyio.move_on_after(3600) as scope:
        await launch(backend, SPEC, "key", namespace="default", timeouts=WaitOptions())
    assert scope.cancelled_caught


@virtually
async def test_a_job_that_was_stored_after_all_is_found() -> None:
    backend = Hanging()
    backend.stored = True
    ref = await launch(backend, SPEC, "key", namespace="default", timeouts=WaitOptions.parse({"start_timeout": 15}))
    assert [name for _, name in backend.jobs] == [ref.name]


@pytest.mark.parametrize(("dry_run", "logged"), [(False, True), (True, False)])
@virtually
async def test_a_refused_creation_is_logged_unless_it_was_only_a_check(
    caplog: pytest.LogCaptureFixture, dry_run: bool, logged: bool
) -> None:
    backend = DirectBackend()
    backend.turn = partial(_fail, ServerError(500, "InternalError", "failed calling webhook"))
    with pytest.raises(BackendUnavailable, match="failed calling webhook"):
        await backend.create(render(SPEC, "key", 1, "default"), dry_run=dry_run)
    assert ("is not created yet, retrying for a minute: " in caplog.text) == logged


async def _fail(error: Exception, _: str) -> None:
    raise error
