"""The loop of a study, with simulated trials: kills, two launchers, errors, limits."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from tests.unit.simulated_trials import SPACE, STEPS, TEMPLATE, Launcher, MemoryJournal, Trainings, World, once, study

from trainjob import JobRef, Phase, WaitOptions, cancel_key
from trainjob._jobs.records import mark_delivered
from trainjob._manifest.render import render
from trainjob.errors import (
    BackendUnavailable,
    Category,
    Diagnosis,
    InvalidStudy,
    RankCrashed,
    Rejected,
    RetryVerdict,
    StoreUnavailable,
    StudyFailed,
)
from trainjob.job import ATTEMPT
from trainjob.status import observe
from trainjob.tuning import Trial, cancel_trials, read_study, search
from trainjob.tuning.sampling import Sampling
from trainjob.tuning.trial_jobs import TRIAL

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300), pytest.mark.usefixtures("prompt")]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    async with made.trainings.training():
        yield made


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials do not end by themselves."""
    monkeypatch.setattr("tests.unit.simulated_trials.STEPS", 10**6)


# ---------------------------------------------------------------- kills


@pytest.mark.full
async def test_a_kill_at_any_request_loses_and_doubles_no_trial() -> None:
    """The launcher dies before and after each of its requests to the cluster and to the journal."""
    fields: dict[str, Any] = {
        "max_trials": 3,
        "parallel": 1,
        "sampler": {"seed": 5, "options": {"n_startup_trials": 1}},
    }
    world = World()
    async with world.trainings.training():
        undisturbed = await world.tune(**fields)
    kills = 0
    for dies_at in range(1, 200):
        each = World()
        async with each.trainings.training():
            if not await each.killed(dies_at, **fields):
                break
            kills += 1
            result = await each.tune(**fields)
        assert [trial.parameters for trial in result.trials] == [trial.parameters for trial in undisturbed.trials]
        assert [trial.value for trial in result.trials] == [trial.value for trial in undisturbed.trials]
        assert sorted(each.trainings.started) == once(3), f"killed at request {dies_at}"
    assert kills > 30


@pytest.mark.usefixtures("endless")
async def test_a_kill_while_pruning_leaves_no_job_running() -> None:
    pruner = {"name": "threshold", "options": {"upper": 0.0, "n_warmup_steps": 0}}
    fields: dict[str, Any] = {"max_trials": 2, "parallel": 1, "pruner": pruner}
    kills = 0
    for dies_at in range(1, 200):
        each = World()
        each.trainings.metric = lambda values, step: 1.0
        async with each.trainings.training():
            try:
                await each.killed(dies_at, **fields)
            except StudyFailed:
                break
            kills += 1
            with pytest.raises(StudyFailed):
                await each.tune(**fields)
        state = each.state()
        assert {trial.state for trial in state.trials} == {"pruned"}
        assert each.trainings.started == once(2), f"killed at request {dies_at}"
        assert not [job for job in each.backend.jobs.values() if not observe(job).phase.terminal], dies_at
    assert kills > 20


async def test_a_result_that_a_person_fetched_is_not_trained_again(world: World) -> None:
    """The launcher dies while the trial runs; somebody waits for the trial's job, which marks it as delivered."""
    await world.interrupted(lambda: len(world.trainings.started) > 0, max_trials=1)
    await world.until(lambda: len(world.trainings.ended) > 0)
    (job,) = world.jobs(0)
    await mark_delivered(world.backend, JobRef.of(job))
    result = await world.tune(max_trials=1)
    assert result.best.state == "complete"
    assert world.trainings.started == once(1)


# ---------------------------------------------------------------- two launchers


async def test_two_launchers_at_once_are_one_study(world: World) -> None:
    first, second = await asyncio.gather(*(world.tune(max_trials=8, parallel=3) for _ in range(2)))
    assert [trial.parameters for trial in first.trials] == [trial.parameters for trial in second.trials]
    assert [trial.value for trial in first.trials] == [trial.value for trial in second.trials]
    assert {trial.state for trial in (*first.trials, *second.trials)} == {"complete"}
    assert sorted(world.trainings.started) == once(8)


def pruned_by_another(world: World) -> None:
    pruned = Trial(0, {}, "pruned", 1.0, "worse than other trials").as_dict()
    MemoryJournal(world.files).create("ended/00000", pruned)


@pytest.mark.usefixtures("endless")
async def test_an_outcome_of_another_launcher_ends_the_wait(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other launcher recorded that a trial is pruned, and was killed before it cancelled the job."""
    monkeypatch.setattr(search, "_POLL_SECONDS", 0.05)
    world.trainings.metric = lambda values, step: 1.0
    task = asyncio.create_task(world.tune(max_trials=1))
    await world.until(lambda: len(world.trainings.started) > 0)
    pruned_by_another(world)
    with pytest.raises(StudyFailed):
        await asyncio.wait_for(task, 5)
    assert world.jobs(0) == []


async def test_a_trial_that_another_launcher_pruned_meanwhile_is_not_launched_again(world: World) -> None:
    """The other launcher prunes the trial and cancels its job just before this one would adopt the job."""
    launcher = world.launcher()
    launcher.before = World.at("POST trainjobs", lambda: pruned_by_another(world))
    with pytest.raises(StudyFailed):
        await world.tune(launcher, max_trials=1)
    assert world.jobs(0) == []


async def test_the_sampler_takes_the_parameters_of_another_launcher(world: World) -> None:
    launcher, theirs = world.launcher(), '{"parameters": {"x": -1.5, "n": 3}}'
    launcher.journal.before = World.at("create asked/00001", lambda: world.files.setdefault("asked/00001", theirs))
    fields: dict[str, Any] = {"parallel": 1, "sampler": {"seed": 5, "options": {"n_startup_trials": 1}}}
    result = await world.tune(launcher, **fields)
    assert result.trials[1].parameters == {"x": -1.5, "n": 3}
    sampling = Sampling(study(**fields))
    for trial in result.trials[:3]:
        sampling.resume(trial.number, trial.parameters)
        sampling.end(trial, {})
    assert sampling.ask(3) == result.trials[3].parameters


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("other", "1", "the trial reported no metric 'loss'; it reported: other"),
        ("loss", "nan", "loss is nan, which is not a finite number"),
        ("loss", "low", "loss is 'low', which is not a finite number"),
    ],
)
async def test_trials_without_a_usable_metric_fail(world: World, name: str, value: str, reason: str) -> None:
    world.trainings.name, world.trainings.metric = name, lambda values, step: value
    with pytest.raises(StudyFailed, match="no trial of study study has completed") as caught:
        await world.tune(max_trials=8)
    assert reason in str(caught.value)
    if name == "other":
        assert re.search(r"the first [34] trials reported no metric 'loss'", str(caught.value)), "it is given up early"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"space": {"x": {"type": "float", "low": -2, "high": 3}, "n": SPACE["n"]}}, "space.x.high: 2.0 -> 3.0"),
        ({"metric": "accuracy"}, 'metric: "loss" -> "accuracy"'),
        ({"env": {"A": "1"}}, 'template.env: (nothing) -> {"A"'),
    ],
)
async def test_a_changed_study_is_refused_with_a_diff(world: World, change: dict[str, Any], problem: str) -> None:
    await world.tune(max_trials=1)
    template = TEMPLATE.model_copy(update={"env": change.pop("env", {})})
    with pytest.raises(InvalidStudy) as caught:
        await world.tune(template=template, max_trials=1, **change)
    assert problem in str(caught.value).replace("study.", "")
    assert "use another key" in str(caught.value)


@pytest.mark.parametrize(
    ("failing", "number", "error"),
    [
        ("POST trainjobs", 3, Rejected("exceeded quota")),
        ("POST trainjobs", 3, BackendUnavailable("no route")),
        ("create ended/00001", 1, StoreUnavailable("no answer")),
    ],
)
async def test_an_error_of_a_request_loses_no_trial(world: World, failing: str, number: int, error: Exception) -> None:
    def fail() -> None:
        raise error

    launcher = world.launcher()
    launcher.before = launcher.journal.before = World.at(failing, fail, number)
    with pytest.raises(type(error)):
        await world.tune(launcher, max_trials=6)
    state = world.state()
    states = [trial.state for trial in state.trials]
    assert len(states) <= 4, "no trial is asked for after the error"
    assert sorted(states) == ["complete"] * (len(states) - 1) + ["running"]
    assert not state.ended
    result = await world.tune(max_trials=6)
    assert [trial.state for trial in result.trials] == ["complete"] * 6
    assert sorted(world.trainings.started) == once(6)


@pytest.mark.full
async def test_an_interrupted_trial_has_new_attempts_also_over_launchers() -> None:
    """143: SIGTERM, for which the training code is not to blame. The launcher dies at each of its requests."""
    for dies_at in range(1, 200):
        over, each = False, World()
        each.trainings.exits = lambda values, ref: 143
        async with each.trainings.training():
            try:
                await each.killed(dies_at, max_trials=1, retries=1)
            except StudyFailed:
                over = True
            with pytest.raises(StudyFailed, match="SIGTERM"):
                await each.tune(max_trials=1, retries=1)
        assert each.trainings.started == [("0", 1), ("0", 2)], dies_at
        if over:
            return


@pytest.mark.usefixtures("endless")
async def test_no_attempt_follows_the_last_one_that_fails_while_a_launcher_starts(world: World) -> None:
    """The second launcher has seen the last attempt running; it fails before the launcher adopts it."""
    first = asyncio.create_task(world.tune(max_trials=1, retries=1))
    await world.until(lambda: world.trainings.started == [("0", 1)])
    world.backend.end(JobRef.of(world.jobs(0)[0]), 143)
    await world.until(lambda: world.trainings.started == [("0", 1), ("0", 2)])
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    last = max(map(JobRef.of, world.jobs(0)), key=lambda ref: ref.attempt)
    launcher = world.launcher()
    launcher.before = World.at("LIST leases", lambda: world.backend.end(last, 143))
    async with asyncio.timeout(10):  # a third attempt would train for hours
        with pytest.raises(StudyFailed, match=rf"trial 0 of job {last.name}: .*SIGTERM"):
            await world.tune(launcher, max_trials=1, retries=1)
    assert world.trainings.started == [("0", 1), ("0", 2)]


@pytest.mark.usefixtures("endless")
async def test_a_trial_that_is_stuck_is_given_up(world: World) -> None:
    options = WaitOptions(run_timeout=timedelta(seconds=0.1))
    with pytest.raises(StudyFailed, match="run_timeout"):
        await world.tune(max_trials=1, options=options)
    assert world.backend.jobs == {}


@pytest.mark.usefixtures("endless")
async def test_a_trial_whose_rank_crashed_is_cancelled(world: World, monkeypatch: pytest.MonkeyPatch) -> None:

    async def crashed(*_: object, **__: object) -> None:
        raise RankCrashed(Diagnosis(Category.NONE, RetryVerdict.INFRASTRUCTURE, "node-0 exited with code 1"))

    monkeypatch.setattr(search, "wait", crashed)
    with pytest.raises(StudyFailed, match="node-0 exited with code 1"):
        await world.tune(max_trials=1, options=WaitOptions(fail_on_first_crash=True))
    assert world.backend.jobs == {}, "the job would keep running"


# ---------------------------------------------------------------- cancellation


async def test_cancelled_trials_run_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("tests.unit.simulated_trials.STEPS", 10**6)
        await world.interrupted(lambda: len(world.trainings.started) >= 2, max_trials=3)
        assert len(world.backend.jobs) == 2, "a cancelled call leaves the trials running"
        assert await cancel_trials(world.backend, "study", namespace="ns") == 2
    assert world.backend.jobs == {}
    result = await world.tune(max_trials=3)
    assert [trial.state for trial in result.trials] == ["complete"] * 3


async def test_a_launch_that_was_under_way_at_the_end_leaves_no_job(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second trial's request is on its way while the first trial reaches the value."""
    create, train = Launcher.create, Trainings._train

    async def slow(self: Launcher, job: Any, *, dry_run: bool = False) -> Any:
        stored = await create(self, job, dry_run=dry_run)
        if stored["metadata"]["labels"][TRIAL] == "1":
            await asyncio.sleep(0.3)
        return stored

    def only_the_first(self: Trainings, job: dict[str, Any]) -> None:
        if job["metadata"]["labels"][TRIAL] == "0":
            train(self, job)

    monkeypatch.setattr(Launcher, "create", slow)
    monkeypatch.setattr(Trainings, "_train", only_the_first)
    result = await world.tune(max_trials=2, stop_at=1000.0)
    assert [trial.state for trial in result.trials] == ["complete", "stopped"]
    assert [observe(job).phase.terminal for job in world.backend.jobs.values()] == [True]


@pytest.mark.usefixtures("endless")
async def test_the_job_of_a_launch_that_was_on_its_way_is_cancelled_too(world: World) -> None:
    async def create_later() -> None:
        await asyncio.sleep(0.2)
        await world.backend.create(render(TEMPLATE, "study/3", 1, "ns"))

    created = asyncio.create_task(create_later())
    assert await cancel_trials(world.backend, "study", namespace="ns", launching=[3]) == 1
    await created
    assert world.backend.jobs == {}


async def test_a_trial_whose_key_is_cancelled_during_its_launch_fails(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = world.launcher()

    async def cancelled(job: Any, *, dry_run: bool = False) -> Any:
        await cancel_key(world.backend, "study/0", namespace="ns", timeout_seconds=0)
        return await Launcher.create(launcher, job, dry_run=dry_run)

    monkeypatch.setattr(launcher, "create", cancelled)
    monkeypatch.setattr(Trainings, "_train", lambda *_: None)
    with pytest.raises(StudyFailed, match="its key was cancelled while it was launched"):
        await world.tune(launcher, max_trials=1)
    (job,) = world.jobs(0)
    assert observe(job).phase is Phase.SUSPENDED


async def test_a_trial_that_is_launched_again_has_no_job_meanwhile(world: World) -> None:
    """Whoever stops the study then looks for a job that is being created."""
    world.trainings.exits = lambda values, ref: 143 if ref.attempt == 1 else 0
    seen: list[str] = []
    await world.tune(max_trials=1, retries=1, on_change=lambda trials: seen.extend(each.job for each in trials))
    changes = [job for job, before in zip(seen, ["", *seen], strict=False) if job != before]
    assert [job[-2:] for job in changes] == ["-1", "", "-2"]


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("failures", [[], [BackendUnavailable("no route")]], ids=["at once", "after an error"])
async def test_pruned_trials_leave_neither_jobs_nor_records(world: World, failures: list[Exception]) -> None:
    """On a cluster the record of a cancel is a Lease, which is kept for an hour."""

    def fail() -> None:
        if left:
            raise left.pop()

    world.trainings.metric = lambda values, step: 1.0
    launcher, left = world.launcher(), list(failures)
    launcher.before = World.at("GET trainjobs", fail)
    with pytest.raises(StudyFailed):
        await world.tune(launcher, max_trials=4, pruner={"name": "threshold", "options": {"upper": 0.0}})
    assert not left
    assert world.backend.jobs == {}
    assert world.backend.cancelled == []


@pytest.mark.usefixtures("endless")
async def test_a_pruned_trial_that_another_attempt_has_replaced_leaves_nothing(world: World) -> None:
    values = [2.0]
    world.trainings.metric = lambda *_: values[0]
    pruner = {"name": "threshold", "options": {"lower": 1.0}}
    task = asyncio.create_task(world.tune(max_trials=1, pruner=pruner, direction="maximize"))
    await world.until(lambda: world.trainings.started == [("0", 1)])
    first = world.jobs(0)[0]
    second = copy.deepcopy(first)
    second["metadata"] |= {"name": f"{first['metadata']['name'][:-1]}2", "uid": "second"}
    second["metadata"]["labels"][ATTEMPT] = "2"
    world.backend.store.put("trainjobs", second, "ADDED")
    world.backend.store.delete("trainjobs", first["metadata"]["name"], {}, "Background", "ns")
    await world.until(lambda: len(world.trainings.started) == 2)
    values[0] = 0.0
    with pytest.raises(StudyFailed):
        await task
    assert world.backend.jobs == {}
    state = world.state()
    assert [(trial.state, trial.job) for trial in state.trials] == [("pruned", second["metadata"]["name"])]


# ---------------------------------------------------------------- journals


async def test_the_journal_of_another_study_is_refused(world: World) -> None:
    await world.tune(max_trials=1)
    with pytest.raises(InvalidStudy, match="the journal is that of another study, with key study"):
        await world.tune(max_trials=1, key="other")
    with pytest.raises(InvalidStudy, match="namespace ns"):
        await world.tune(max_trials=1, namespace="elsewhere")


async def test_a_study_runs_and_is_read_without_its_launcher(world: World) -> None:
    assert read_study(MemoryJournal(world.files)) is None
    seen: list[Any] = []

    def look(_: Any) -> None:
        seen.append(read_study(MemoryJournal(world.files)))

    def exits(values: dict[str, str], ref: JobRef) -> int:
        world.backend.store.ahead += timedelta(seconds=2)  # times of objects are whole seconds
        return 0

    world.trainings.exits = exits
    result = await world.tune(on_change=look)
    assert [trial.state for trial in result.trials] == ["complete"] * 4
    assert all(0 < trial.seconds < 30 and trial.values[-1][0] == STEPS for trial in result.trials)
    assert (seen[1].key, seen[1].namespace, seen[1].ended) == ("study", "ns", False)
    assert seen[1].fields["metric"] == "loss"
    assert seen[1].fields["max_trials"] == 4
    state = world.state()
    assert state.trials == result.trials
    assert (state.ended, state.reason) == (True, "max_trials of 4 is reached")
    await world.tune(max_trials=5)
    state = world.state()
    assert state.fields["max_trials"] == 5
