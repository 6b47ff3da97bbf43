"""Directed schedules, with the outcome that the server shows; each broke a promise before this protocol."""

from __future__ import annotations

import pytest
from tests.fakes.kube.objects import is_active, is_suspended
from tests.simulation import scripts
from tests.simulation.schedules import Outcome, replay
from tests.simulation.settings import short_name

from trainjob import Phase


def played(script: str, *, finish: bool = False) -> Outcome:
    """The outcome of a script that violates no property, also if everything then ends."""
    ended = replay(script)
    assert ended.found == {}, ended.script
    return ended if finish else replay(script, finish=False)


def active(outcome: Outcome) -> list[str]:
    """The active jobs, as scripts name them."""
    names = [job["metadata"]["name"] for job in outcome.world.server.jobs() if is_active(job)]
    return [short_name(name, outcome.world.settings.keys) for name in names]


def created(outcome: Outcome) -> list[str]:
    """The jobs that were created, in their order."""
    log = outcome.world.server.log
    names = [each.name for each in log if each.method == "POST" and each.plural == "trainjobs" and each.status == 200]
    return [short_name(name, outcome.world.settings.keys) for name in names]


def outcomes(outcome: Outcome) -> list[str]:
    """What became of each process."""
    return [process.outcome for process in outcome.world.processes]


def test_a_frozen_try_adopts_the_job_of_the_next_one() -> None:
    outcome = played(scripts.TWO_TRIES)
    assert active(outcome) == created(outcome) == ["nightly/a#1"]
    first, second = outcome.world.processes
    assert first.ref == second.ref


def test_a_launch_obeys_a_stop_that_saw_only_a_given_up_attempt() -> None:
    outcome = played(scripts.STOP_AFTER_GIVE_UP)
    assert created(outcome) == ["nightly/a#1", "nightly/a#2"]
    assert active(outcome) == []
    assert outcomes(outcome)[1] == "failed"


def test_an_attempt_that_a_later_launch_has_adopted_is_not_replaced() -> None:
    outcome = played(scripts.ADOPTED_BEFORE_IT_IS_REPLACED)
    assert active(outcome) == ["nightly/a#1"]
    finished = outcomes(played(scripts.ADOPTED_BEFORE_IT_IS_REPLACED, finish=True))
    assert (finished[0], finished[4]) == ("success", "success")


def test_a_launch_that_obeys_stops_its_job_although_another_launch_has_adopted_it() -> None:
    assert active(played(scripts.ADOPTED_BEFORE_THE_SECOND_LOOK)) == []


def test_the_reaper_leaves_a_cancelled_job_that_a_person_has_resumed() -> None:
    assert active(played(scripts.RESUMED_AFTER_A_CANCEL)) == ["nightly/a#1"]


def test_a_job_that_was_given_up_and_resumed_is_continued_after_a_cancel() -> None:
    outcome = played(scripts.GIVEN_UP_RESUMED_AND_CANCELLED)
    assert created(outcome) == active(outcome) == ["nightly/a#1"]


def test_a_launch_waits_for_ranks_of_many_attempts_whose_objects_are_gone() -> None:
    assert active(played(scripts.ALL_OBJECTS_ARE_GONE)) == ["nightly/a#11"]


def test_a_cancel_stops_a_job_that_is_resumed_before_the_cancel_is_recorded() -> None:
    assert active(played(scripts.RESUMED_DURING_A_CANCEL)) == []


def test_a_webhook_that_hangs_delays_no_deletion_of_the_reaper() -> None:
    assert (
        len([name for name in active(replay(scripts.A_WEBHOOK_HANGS_BEFORE_A_DELETION, finish=False)) if "/b#" in name])
        == 1
    )


def test_a_kill_deletes_beside_the_record_of_the_reason() -> None:
    assert active(replay(scripts.KILL_WITH_A_RECORDED_REASON, finish=False)) == []


def test_the_reaper_obeys_a_stop_for_a_killed_launch() -> None:
    assert active(replay(scripts.STOP_OF_A_KILLED_LAUNCH, finish=False)) == ["nightly/a#2"]
    assert active(played(scripts.STOP_OF_A_KILLED_LAUNCH, finish=True)) == []


def test_every_waiter_of_a_job_gets_the_diagnosis_with_which_it_is_given_up() -> None:
    outcome = played(scripts.WAIT_FOR_GIVEN_UP, finish=True)
    assert outcomes(outcome)[:2] == ["crashed", "failed"]


def test_a_failed_attempt_that_trainer_takes_back_stays_suspended() -> None:
    outcome = played(scripts.TAKEN_BACK)
    assert active(outcome) == ["nightly/a#2"]


def test_a_job_that_is_deleted_before_its_resume_is_launched_again() -> None:
    outcome = played(scripts.DELETED_BEFORE_THE_RESUME, finish=True)
    assert outcome.world.processes[2].error is None
    assert outcomes(outcome)[2] == "success"


def test_a_late_kill_stops_the_latest_attempt_although_earlier_ones_are_kept() -> None:
    outcome = played(scripts.KILL_TOO_LATE)
    assert created(outcome) == ["nightly/a#1", "nightly/a#2", "nightly/a#3"]
    assert active(outcome) == []


def test_the_reaper_keeps_a_job_that_was_adopted_since_it_was_observed() -> None:
    outcome = played(scripts.ADOPTED_BEFORE_THE_REAPER)
    assert active(outcome) == ["nightly/a#1"]


def test_a_job_of_an_account_without_leases_does_not_stay_suspended() -> None:
    outcome = played(scripts.SUSPENDED_BEFORE_THE_OPT_OUT, finish=True)
    assert outcomes(outcome)[2] == "success"


@pytest.mark.parametrize("script", [scripts.LATE_SUSPEND, scripts.LATE_SIGTERM, scripts.SUSPEND_AFTER_THE_NEXT_LAUNCH])
def test_the_waiter_of_a_later_try_resumes_what_a_late_kill_has_suspended(script: str) -> None:
    outcome = played(script, finish=True)
    assert outcomes(outcome)[2] == "success"


def test_the_late_suspend_of_an_older_cancel_does_not_undo_a_newer_one() -> None:
    assert active(played(scripts.LATE_SUSPEND_OF_AN_OLDER_CANCEL)) == []


def test_a_second_cancel_without_permission_for_leases_stops_a_launch_that_resumes() -> None:
    assert active(played(scripts.CANCELLED_TWICE_WITHOUT_LEASES)) == []


def test_the_suspend_of_an_older_cancel_keeps_the_mark_of_a_newer_one() -> None:
    """By which the reaper knows that a person has resumed the job since."""
    assert active(played(scripts.OLDER_CANCEL_SUSPENDS_LAST)) == ["nightly/a#1"]


@pytest.mark.parametrize("webhooks", ["refuse", "hang"])
@pytest.mark.parametrize("stop", ["airflowstop", "cancel"])
def test_a_cancel_needs_no_webhook(stop: str, webhooks: str) -> None:
    outcome = played(scripts.CANCEL_WITHOUT_WEBHOOKS.format(stop, webhooks))
    assert ("DELETE", "trainjobs") in [request[:2] for request in outcome.world.processes[1].sent]
    assert active(outcome) == []


@pytest.mark.parametrize("queue", [False, True])
def test_the_verdict_decides_about_the_retry_wherever_the_job_was(queue: bool) -> None:
    outcome = played(scripts.VERDICT.format(queue))
    assert created(outcome)[0] == "nightly/a#1"
    assert "nightly/a#2" not in created(outcome)
    assert outcomes(outcome)[1] == "failed"


def test_a_launch_adopts_an_attempt_although_an_earlier_one_is_gone() -> None:
    outcome = played(scripts.LAUNCH_AFTER_A_DELETION)
    assert active(outcome) == ["nightly/a#2"]
    assert created(outcome) == ["nightly/a#1", "nightly/a#2"]


def test_a_frozen_create_is_taken_back() -> None:
    outcome = played(scripts.FROZEN_CREATE)
    assert active(outcome) == ["nightly/a#2"]
    assert outcome.world.processes[0].ref == outcome.world.processes[2].ref


def test_the_reaper_ends_what_a_killed_launch_has_created_beside_another_attempt() -> None:
    assert active(replay(scripts.KILLED_AFTER_A_FROZEN_CREATE, finish=False)) == ["nightly/a#2", "nightly/a#1"]
    outcome = played(scripts.KILLED_AFTER_A_FROZEN_CREATE, finish=True)
    assert outcomes(outcome)[2] == "success"


def test_a_launch_ends_what_a_killed_launch_has_created_beside_another_attempt() -> None:
    assert active(played(scripts.LAUNCH_AFTER_A_KILLED_CREATE)) == ["nightly/a#2"]


def test_retries_in_a_queue_share_one_attempt() -> None:
    outcome = played(scripts.RETRIES_IN_A_QUEUE)
    (job,) = outcome.world.server.jobs("nightly/a")
    assert short_name(job["metadata"]["name"], ("nightly/a",)) == "nightly/a#2"
    assert len({process.ref for process in outcome.world.processes[1:]}) == 1
    assert job["spec"]["trainer"]["resourcesPerNode"]["limits"]["memory"] == "24Gi"


def test_a_conflict_of_a_quota_is_repeated_with_the_same_name() -> None:
    outcome = played(scripts.QUOTA.format(3))
    assert created(outcome) == active(outcome) == ["nightly/a#1"]


def test_lasting_conflicts_of_a_quota_end_the_launch() -> None:
    outcome = replay(scripts.QUOTA.format(100_000), finish=False)
    refused = [each for each in outcome.world.server.log if each.status == 409]
    assert type(outcome.world.processes[0].error).__name__ == "BackendUnavailable"
    assert len(refused) < 20
    assert 60 <= outcome.world.server.now < 200
    names = {entry.body["metadata"]["name"] for entry in refused if entry.body is not None}
    assert [short_name(name, ("nightly/a",)) for name in names] == ["nightly/a#1"]


def test_a_conflict_of_a_quota_does_not_lose_a_suspend() -> None:
    outcome = played(scripts.SUSPEND_WITH_A_QUOTA)
    (job,) = outcome.world.server.jobs("nightly/a")
    assert is_suspended(job)


def test_the_reaper_ends_the_replaced_attempt_that_a_person_resumes() -> None:
    assert active(replay(scripts.RESUMED_BY_A_PERSON, finish=False)) == ["nightly/a#1", "nightly/a#2"]
    assert outcomes(played(scripts.RESUMED_BY_A_PERSON, finish=True))[1] == "success"


def test_a_waiter_follows_the_attempt_that_counts() -> None:
    outcome = played(scripts.LOSER_HAS_A_WAITER, finish=True)
    assert outcomes(outcome)[0] == outcomes(outcome)[2] == "success"
    assert outcome.world.processes[0].ref == outcome.world.processes[2].ref


def test_a_launch_that_was_frozen_while_the_work_was_done_does_not_train_again() -> None:
    outcome = played(scripts.DELIVERED_WHILE_FROZEN, finish=True)
    assert created(outcome) == ["nightly/a#1"]
    assert outcomes(outcome)[0] == "success"


def test_a_name_is_not_used_while_its_jobset_is_left() -> None:
    outcome = played(scripts.NAME_OF_A_DELETED_JOB)
    assert created(outcome) == ["nightly/a#1", "nightly/a#2"]


def test_the_end_of_an_older_jobset_is_no_success() -> None:
    outcome = played(scripts.JOBSET_OF_A_DELETED_JOB, finish=True)
    assert outcomes(outcome)[0] == "failed"
    assert outcome.world.server.jobs("nightly/a") == []


def test_the_end_of_an_older_jobset_that_is_gone_is_no_success() -> None:
    outcome = played(scripts.JOBSET_THAT_IS_GONE, finish=True)
    assert outcome.world.processes[2].ref is not None
    assert outcome.world.processes[2].ref.uid in outcome.world.server.completed


def test_an_attempt_starts_after_the_last_rank_of_the_one_before() -> None:
    outcome = played(scripts.RANKS_OF_A_FAILED_ATTEMPT, finish=True)
    times = [each.at for each in outcome.world.server.log if each.method == "POST" and each.plural == "trainjobs"]
    assert times[1] - times[0] >= 30


def test_the_ranks_of_each_attempt_are_waited_for() -> None:
    played(scripts.RANKS_OF_TWO_ATTEMPTS)


def test_a_complete_attempt_counts_although_earlier_names_are_free() -> None:
    outcome = played(scripts.COMPLETE_BEYOND_A_GAP)
    assert created(outcome) == ["nightly/a#1", "nightly/a#2"]


def test_a_wait_ends_although_the_node_of_a_job_that_is_deleted_does_not_answer() -> None:
    outcome = played(scripts.FOREGROUND_ON_A_LOST_NODE, finish=True)
    assert outcomes(outcome)[0] == "failed"


def test_a_cancel_suspends_failed_attempts() -> None:
    assert active(played(scripts.FAILED_BEFORE_THE_CANCEL)) == []


def test_a_cancelled_job_that_comes_back_is_not_in_its_queue_any_more() -> None:
    waiter = played(scripts.FAILED_IN_A_QUEUE_BEFORE_THE_CANCEL).world.processes[0]
    assert waiter.observation is not None
    assert waiter.observation.phase is Phase.SUSPENDED
    assert "was cancelled with trainjob" in waiter.observation.message


def test_a_waiter_does_not_follow_to_a_job_of_a_queue_that_was_given_up() -> None:
    assert outcomes(played(scripts.GIVEN_UP_IN_A_QUEUE, finish=True))[1] == "failed"


def test_a_cancelled_launch_stops_a_job_of_its_own_late_create() -> None:
    assert active(played(scripts.LATE_CREATE_OF_A_CANCELLED_LAUNCH)) == []


def test_of_a_late_create_and_the_next_attempt_one_counts() -> None:
    outcome = played(scripts.LATE_CREATE_BESIDE_THE_NEXT_ATTEMPT)
    assert created(outcome) == ["nightly/a#1", "nightly/a#2", "nightly/a#1"]
    finished = played(scripts.LATE_CREATE_BESIDE_THE_NEXT_ATTEMPT, finish=True)
    assert outcomes(finished)[0] == "success"


def test_a_person_may_resume_what_a_stop_without_leases_has_suspended() -> None:
    assert active(played(scripts.RESUMED_WITHOUT_LEASES)) == ["nightly/a#1"]


def test_the_reaper_repeats_a_stop_that_had_not_suspended_the_job() -> None:
    assert active(played(scripts.RESUMED_BEFORE_THE_REAPER)) == ["nightly/a#1"]
    assert active(played(scripts.RESUMED_BEFORE_THE_REAPER, finish=True)) == []


def test_an_hour_after_a_cancel_what_it_has_not_seen_runs() -> None:
    assert active(played(scripts.FROZEN_FOR_LONGER_THAN_A_RECORD)) == ["nightly/a#1"]


def test_the_reaper_suspends_a_failed_job_that_a_stop_could_not_suspend() -> None:
    assert active(played(scripts.FAILED_BEFORE_A_REFUSED_SUSPEND)) == ["nightly/a#1"]
    assert active(played(scripts.FAILED_BEFORE_A_REFUSED_SUSPEND, finish=True)) == []


def test_the_reaper_obeys_a_process_that_gives_up() -> None:
    assert active(played(scripts.REAPED_DURING_A_TIMEOUT)) == []


def test_a_cancel_may_stop_a_job_that_refuses_to_be_adopted() -> None:
    played(scripts.ADOPTED_WHILE_CHANGES_ARE_REFUSED, finish=True)


def test_a_job_that_a_person_suspends_after_its_end_may_wait() -> None:
    assert active(played(scripts.SUSPENDED_IN_A_QUEUE_AFTER_ITS_END, finish=True)) == []


def test_a_cancelled_launch_keeps_the_name_of_its_job() -> None:
    outcome = played(scripts.CREATE_WITHOUT_REPLY)
    assert active(outcome) == []
    assert outcomes(outcome)[0] == "failed"


def test_the_reaper_stops_a_late_create_whose_name_a_cancelled_launch_has_freed_in_a_queue() -> None:
    assert active(played(scripts.LATE_CREATE_IN_A_QUEUE)) == ["nightly/a#1"]
    assert active(played(scripts.LATE_CREATE_IN_A_QUEUE, finish=True)) == []


def test_the_reaper_leaves_the_attempt_after_one_whose_result_was_delivered() -> None:
    finished = played(scripts.DELIVERED_BEFORE_THE_NEXT, finish=True)
    assert outcomes(finished)[:2] == ["success", "success"]


@pytest.mark.parametrize("stop", ["cancel", "cancelref"])
def test_a_stop_deletes_a_job_that_cannot_be_suspended(stop: str) -> None:
    outcome = played(scripts.RUNTIME_GONE_BEFORE_A_STOP.format(stop))
    assert outcome.world.server.jobs() == []


def test_the_reaper_obeys_a_record_for_an_hour() -> None:
    assert active(played(scripts.REAPED_LATE_AFTER_A_STOP, finish=True)) == []


def test_a_launch_that_was_frozen_waits_for_ranks_that_it_has_not_seen() -> None:
    played(scripts.RANKS_OF_A_NEW_JOB_AFTER_A_PAUSE)


def test_the_reaper_leaves_a_job_that_a_person_has_resumed_after_a_kill() -> None:
    """Although the record of a cancel before that kill applies to it."""
    assert active(played(scripts.RESUMED_AFTER_A_KILL)) == ["nightly/a#1"]


@pytest.mark.parametrize("queue", [False, True])
@pytest.mark.parametrize("stop", ["suspend", "delete"])
@pytest.mark.parametrize("script", [scripts.FAILED_BEFORE_ITS_LAUNCH_OBEYS, scripts.FAILED_BEFORE_THE_REAPER])
def test_a_cancelled_job_that_had_failed_does_not_come_back(script: str, stop: str, queue: bool) -> None:
    outcome = played(script.format(queue, stop))
    assert created(outcome) == ["nightly/a#1"]
    assert active(outcome) == []


@pytest.mark.parametrize("script", [scripts.FAILED_BEFORE_IT_WAS_REPLACED, scripts.READ_AS_FAILED_BY_A_LIST])
def test_a_waiter_that_has_read_a_failure_reports_it_although_trainer_takes_it_back(script: str) -> None:
    outcome = played(script, finish=True)
    assert created(outcome) == ["nightly/a#1", "nightly/a#2"]
    assert outcomes(outcome)[0] == "failed"


def test_a_waiter_whose_job_takes_over_an_older_jobset_follows_the_attempt_that_counts() -> None:
    outcome = played(scripts.TAKEN_OVER_BESIDE_ANOTHER, finish=True)
    assert created(outcome) == ["nightly/a#1", "nightly/a#1", "nightly/a#2"]
    first, _, third = outcomes(outcome)[:3]
    assert first == third == "success"


def test_a_launch_with_another_spec_takes_the_place_of_a_stopped_job() -> None:
    outcome = played(scripts.EDITED_AFTER_A_CANCEL)
    assert created(outcome) == ["nightly/a#1", "nightly/a#2"]
    assert active(outcome) == ["nightly/a#2"]
    assert [short_name(job["metadata"]["name"], ("nightly/a",)) for job in outcome.world.server.jobs()] == active(
        outcome
    )


def test_a_launch_with_another_spec_obeys_a_cancel_that_has_just_suspended_the_job() -> None:
    outcome = played(scripts.EDITED_BESIDE_A_CANCEL)
    assert created(outcome) == ["nightly/a#1"]
    assert [is_suspended(job) for job in outcome.world.server.jobs()] == [True]
    assert outcomes(outcome)[1] == "failed"


@pytest.mark.parametrize(
    "script",
    [
        scripts.RESUMED_AFTER_THE_NEXT_ONE_WAS_GIVEN_UP,
        scripts.RESUMED_BESIDE_A_CANCELLED_ONE,
        scripts.RESUMED_BEFORE_THE_REAPER,
    ],
)
def test_a_job_that_a_person_resumed_is_left_while_a_process_waits_for_it(script: str) -> None:
    assert "nightly/a#1" in active(played(script))


@pytest.mark.parametrize(
    "script",
    [
        scripts.RESUMED_BY_A_LAUNCH_WITHOUT_LEASES,
        scripts.LATE_RENEWAL_OF_A_LEASE,
        scripts.LATE_CREATE_DURING_A_LOOK,
        scripts.LATE_CREATE_OF_AN_EARLIER_LAUNCH,
        scripts.LATE_CREATE_OF_A_LOSER,
        scripts.TAKEN_OVER_AND_DELETED,
        scripts.TAKEN_OVER_BESIDE_A_COMPLETE_ONE,
    ],
    ids=[
        "without leases",
        "late renewal",
        "during a look",
        "earlier launch",
        "of a loser",
        "taken over",
        "beside a complete one",
    ],
)
def test_a_bound_is_no_violation(script: str) -> None:
    """Each violated a property that forgot a bound."""
    played(script)
