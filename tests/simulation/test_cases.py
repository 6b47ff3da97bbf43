"""Directed schedules, with the outcome that the server shows; each broke a promise before this protocol."""

from __future__ import annotations

import pytest
from tests.fakes.kube.objects import is_active, is_suspended
from tests.simulation.schedules import Outcome, replay
from tests.simulation.scripts import SCRIPTS, Script, script
from tests.simulation.settings import short_name

from trainjob import Phase

CASES = [
    pytest.param(each, gaps, id=" ".join([each.name, *gaps])) for each in SCRIPTS.values() for gaps in each.fillings
]


def seen(outcome: Outcome, what: str) -> str:
    """What a script expects, as `tests.simulation.scripts` lists it."""
    jobs, processes = outcome.world.server.jobs(), outcome.world.processes

    def named(name: str) -> str:
        return short_name(name, outcome.world.settings.keys)

    match what.split():
        case ["active"]:
            return " ".join(named(job["metadata"]["name"]) for job in jobs if is_active(job))
        case ["jobs"]:
            names = [(named(job["metadata"]["name"]), is_suspended(job)) for job in jobs]
            return " ".join(f"({name})" if suspended else name for name, suspended in names)
        case ["created"]:
            log = [each for each in outcome.world.server.log if (each.method, each.plural) == ("POST", "trainjobs")]
            return " ".join(named(each.name) for each in log if each.status == 200)
        case ["job", "of", process]:
            ref = processes[int(process[1:]) - 1].ref
            return named(ref.name) if ref else "none"
        case [process, "deletes"]:
            sent = [request[:2] for request in processes[int(process[1:]) - 1].sent]
            return str(sent.count(("DELETE", "trainjobs")))
        case [process]:
            return processes[int(process[1:]) - 1].outcome
    raise ValueError(what)


@pytest.mark.parametrize(("case", "gaps"), CASES)
def test_script(case: Script, gaps: tuple[str, ...]) -> None:
    """Its outcome is the expected one, and it violates no property, also if everything then ends."""
    text = script(case.name, *gaps)
    ended, before = replay(text), replay(text, finish=False)
    assert ended.found == {}
    found = {
        what: seen(ended if what.startswith("end ") else before, what.removeprefix("end ")) for what in case.expected
    }
    assert found == case.expected


@pytest.mark.parametrize("queue", ["False", "True"])
def test_the_verdict_decides_about_the_retry_wherever_the_job_was(queue: str) -> None:
    created = seen(replay(script("verdict", queue), finish=False), "created").split()
    assert created[0] == "nightly/a#1"
    assert "nightly/a#2" not in created


def test_retries_in_a_queue_share_one_attempt() -> None:
    outcome = replay(script("retries_in_a_queue"), finish=False)
    (job,) = outcome.world.server.jobs("nightly/a")
    assert seen(outcome, "jobs") == "(nightly/a#2)"
    assert len({process.ref for process in outcome.world.processes[1:]}) == 1
    assert job["spec"]["trainer"]["resourcesPerNode"]["limits"]["memory"] == "24Gi"


def test_lasting_conflicts_of_a_quota_end_the_launch() -> None:
    outcome = replay(script("quota", "100000"), finish=False)
    refused = [each for each in outcome.world.server.log if each.status == 409]
    assert type(outcome.world.processes[0].error).__name__ == "BackendUnavailable"
    assert len(refused) < 20
    assert 60 <= outcome.world.server.now < 200
    names = {entry.body["metadata"]["name"] for entry in refused if entry.body is not None}
    assert [short_name(name, ("nightly/a",)) for name in names] == ["nightly/a#1"]


def test_the_end_of_an_older_jobset_that_is_gone_is_no_success() -> None:
    outcome = replay(script("jobset_that_is_gone"))
    assert outcome.world.processes[2].ref is not None
    assert outcome.world.processes[2].ref.uid in outcome.world.server.completed


def test_an_attempt_starts_after_the_last_rank_of_the_one_before() -> None:
    log = replay(script("ranks_of_a_failed_attempt")).world.server.log
    times = [each.at for each in log if each.method == "POST" and each.plural == "trainjobs"]
    assert times[1] - times[0] >= 30


def test_a_cancelled_job_that_comes_back_is_not_in_its_queue_any_more() -> None:
    waiter = replay(script("failed_in_a_queue_before_the_cancel"), finish=False).world.processes[0]
    assert waiter.observation is not None
    assert waiter.observation.phase is Phase.SUSPENDED
    assert "was cancelled with trainjob" in waiter.observation.message
