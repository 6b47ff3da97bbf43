"""Which attempt of a key counts, and which cancels apply to which launch: generated attempts, and tables."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tests import objects

from trainjob._diagnosis.serialization import pack_diagnosis
from trainjob._manifest.attempts import (
    LAUNCHED,
    REPLACES,
    Cancel,
    cancel_of,
    cancelled_since,
    decide,
    given_up,
    is_stale,
    may_run,
    recorded_failure,
    work_of,
)
from trainjob.errors import Category, Diagnosis, RetryVerdict
from trainjob.job import ATTEMPT, DELIVERED, FAILURE, FAILURE_OF, TRY, job_name, key_hash
from trainjob.status import CANCELLED, GIVEN_UP, QUEUE_LABEL

WHY = Diagnosis(Category.USER_CODE, RetryVerdict.UNKNOWN, "node-0 exited with code 3")
PACKED = json.dumps(pack_diagnosis(WHY))

ENDED = {kind: [objects.condition(kind, time="2026-11-26T12:00:00Z")] for kind in ("Complete", "Failed", "Cancelled")}
STATES: dict[str, dict[str, Any]] = {
    "fresh": {},
    "running": {"jobsStatus": [objects.counts(active=1, ready=1)]},
    "queued": {"spec": {"suspend": True}, "labels": {QUEUE_LABEL: "main"}},
    "suspended": {"spec": {"suspend": True}},
    "given up": {"spec": {"suspend": True}, "annotations": {GIVEN_UP: PACKED}},
    "resumed after it was given up": {"annotations": {GIVEN_UP: PACKED}},
    "deleting": {"metadata": {"deletionTimestamp": "2026-11-25T12:00:00Z"}},
    "complete": {"conditions": ENDED["Complete"]},
    "delivered": {"conditions": ENDED["Complete"], "annotations": {DELIVERED: "true"}},
    "failed": {"conditions": ENDED["Failed"]},
    "cancelled": {"conditions": ENDED["Cancelled"]},
    "record": {"spec": {"suspend": True}, "annotations": {GIVEN_UP: PACKED}, "labels": {FAILURE_OF: "x"}},
}
MAY_RUN = {"fresh", "running", "queued", "suspended", "resumed after it was given up"}


def attempt(
    state: str = "fresh",
    *,
    uid: str = "a",
    number: int = 1,
    created: int = 0,
    replaces: str = "",
    launched: int | None = None,
    annotations: Mapping[str, str] | None = None,
) -> objects.Object:
    """An attempt in a state, with other annotations."""
    known = {REPLACES: replaces, LAUNCHED: "" if launched is None else str(launched), **(annotations or {})}
    about: dict[str, Any] = {"labels": {}, "annotations": {}, "metadata": {}, **STATES[state]}
    about["labels"] = {ATTEMPT: str(number), **about["labels"]}
    about["annotations"] = {**about["annotations"], **{name: text for name, text in known.items() if text}}
    about["metadata"] = {"uid": uid, "creationTimestamp": f"2026-11-25T12:00:{created:02}Z", **about["metadata"]}
    return objects.trainjob(name=job_name("key", number), **about)


def uid_of(trainjob: Any) -> str | None:
    return None if trainjob is None else str(trainjob["metadata"]["uid"])


@pytest.mark.parametrize("state", STATES)
def test_what_may_run(state: str) -> None:
    assert may_run(attempt(state)) == (state in MAY_RUN)


# ---------------------------------------------------------------- decide

UIDS = "abcdef"


@st.composite
def attempts(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Attempts of one key in any states; each replaces some of the earlier ones, or of the others."""
    count = draw(st.integers(0, 5))
    found = []
    for index in range(count):
        others = [uid for uid in UIDS[:count] if uid != UIDS[index]]
        replaced = draw(st.lists(st.sampled_from([*others, "gone"]), max_size=2, unique=True))
        found.append(
            attempt(
                draw(st.sampled_from(sorted(STATES))),
                uid=UIDS[index],
                number=draw(st.integers(1, 3)),
                created=draw(st.integers(0, 2)),
                replaces=",".join(replaced),
                launched=draw(st.none() | st.integers(0, 2)),
            )
        )
    return found


def replaced_in(jobs: list[dict[str, Any]]) -> set[str]:
    """UIDs of the attempts that were replaced, and not adopted by a launch that began later."""

    replaced = set()
    for old, new in permutations(jobs, 2):
        adopted, began = (job["metadata"]["annotations"].get(LAUNCHED) for job in (old, new))
        is_later = began is not None and adopted is not None and int(adopted) > int(began)
        if old["metadata"]["uid"] in new["metadata"]["annotations"].get(REPLACES, "").split(",") and not is_later:
            replaced.add(old["metadata"]["uid"])
    return replaced


@settings(max_examples=40)
@given(attempts(), st.randoms(use_true_random=False))
def test_all_that_see_the_same_agree(jobs: list[dict[str, Any]], order: random.Random) -> None:
    counts, losers = decide(jobs)
    shuffled = [*jobs]
    order.shuffle(shuffled)
    again, others = decide(shuffled)
    assert uid_of(again) == uid_of(counts)
    assert sorted(map(uid_of, others), key=str) == sorted(map(uid_of, losers), key=str)


@given(attempts())
def test_which_attempt_counts_and_which_ones_end(jobs: list[dict[str, Any]]) -> None:
    counts, losers = decide(jobs)
    active, ended, replaced = {uid_of(job) for job in jobs if may_run(job)}, set(map(uid_of, losers)), replaced_in(jobs)
    assert ended <= active, "an attempt that has ended, was given up or is being deleted is left alone"
    assert active - ended <= {uid_of(counts)}, "at most one attempt that may run is left"
    assert uid_of(counts) not in ended | replaced
    results = {uid_of(job) for job in jobs if is_result(job)} - replaced
    if results:
        assert uid_of(counts) in results, "a complete undelivered attempt comes first"
    elif active - replaced:
        assert uid_of(counts) in active
    else:
        assert counts is None
        assert ended == active, "what came back after another one had followed ends"


def is_result(job: dict[str, Any]) -> bool:
    """Whether the attempt is complete and undelivered."""
    kinds = {each["type"] for each in job["status"].get("conditions", ())}
    return "Complete" in kinds and DELIVERED not in job["metadata"]["annotations"]


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=2, max_size=4))
def test_of_active_attempts_the_oldest_counts_then_the_lowest_number_then_the_uid(ages: list[tuple[int, int]]) -> None:
    jobs = {
        (created, number, uid): attempt("running", uid=uid, created=created, number=number)
        for uid, (created, number) in zip(UIDS, ages, strict=False)
    }
    counts, losers = decide([*jobs.values()])
    assert counts is jobs[min(jobs)]
    assert len(losers) == len(jobs) - 1


# ---------------------------------------------------------------- cancels and launches

NO_TRY = None


@pytest.mark.parametrize(
    ("cancel", "launched", "tried", "uid", "applies"),
    [
        # of a key: newer than the launch
        (Cancel(5), 4, 1, "", True),
        (Cancel(5), 5, 1, "", False),
        (Cancel(5), None, 1, "", False),
        (Cancel(5), 0, 9, "u", True),
        # a kill of a try: of that one and of earlier ones, if they began before
        (Cancel(5, 2), 4, 2, "", True),
        (Cancel(5, 2), 6, 2, "", False),  # the same try of a run that was deleted and created again
        (Cancel(5, 2), 4, 3, "", False),
        (Cancel(5, 2), None, 2, "", True),
        # of one job
        (Cancel(5, NO_TRY, "u"), 4, 1, "u", True),
        (Cancel(5, NO_TRY, "u"), 4, 1, "other", False),
        (Cancel(5, NO_TRY, "u"), 6, 1, "u", False),
        (Cancel(5, 2, "u"), 4, 2, "u", True),
        (Cancel(5, 2, "u"), 4, 3, "u", False),
    ],
)
def test_which_launch_obeys_which_cancel(
    cancel: Cancel, launched: int | None, tried: int, uid: str, applies: bool
) -> None:
    assert cancel.applies(launched, tried, uid) is applies
    if uid == "u":
        job = attempt("running", uid="u", launched=launched, annotations={TRY: str(tried)})
        assert cancel_of([Cancel(0, 0), cancel], job) is (cancel if applies else None)


@pytest.mark.parametrize(
    ("mark", "launched", "tried", "cancelled", "stale"),
    [
        # mark, launch of the job, its try; whether that launch was cancelled; whether a waiter resumes the job
        ("5", "4", 1, True, False),
        ("5", "5", 1, False, True),
        ("5", None, 1, False, False),
        ("try:1@5", "6", 1, False, True),
        ("try:1@7", "6", 1, True, False),
        ("try:1", "4", 2, False, True),
        ("try:2", None, 3, False, True),
        ("unattended", "4", 1, False, True),
        ("true", "4", 1, False, False),
        ("", "4", 1, False, False),
        ("try:x", "4", 1, False, True),
        ("\N{SUPERSCRIPT TWO}", "1", 1, False, False),
    ],
)
def test_marks_of_kills_and_cancels_are_compared_with_the_latest_launch(
    mark: str, launched: str | None, tried: int, cancelled: bool, stale: bool
) -> None:
    job = attempt("suspended", annotations={TRY: str(tried), LAUNCHED: launched or "", CANCELLED: mark})
    version = int(launched) if launched is not None and launched.isdigit() else None
    assert cancelled_since(job, version, tried, None) is cancelled
    assert is_stale(job) is stale


@given(st.integers(1, 9), st.integers(0, 9) | st.none(), st.integers(1, 4), st.integers(1, 4) | st.none())
def test_a_job_that_a_cancel_suspended_is_either_cancelled_or_stale(
    version: int, launched: int | None, tried: int, killed: int | None
) -> None:
    """The mark of a cancel means to a waiter what its record means to a launch."""
    cancel = Cancel(version, killed)
    job = attempt("suspended", launched=launched, annotations={CANCELLED: cancel.mark, TRY: str(tried)})
    assert cancelled_since(job, launched, tried, None) is cancel.applies(launched, tried)
    known = killed is not None or launched is not None
    assert is_stale(job) is (known and not cancel.applies(launched, tried))


def test_the_key_of_a_name() -> None:
    for number in (1, 999, 1000, 123456):
        assert work_of(job_name("a/b", number)) == key_hash("a/b")
    for name in ("digits", "digits-1", "", f"{key_hash('a')}-1", "a-b-c"):
        assert work_of(name) == ""


@pytest.mark.parametrize(
    ("state", "annotations", "category"),
    [
        ("failed", {}, None),
        ("failed", {GIVEN_UP: PACKED}, WHY.category),
        ("failed", {FAILURE: PACKED}, WHY.category),
        ("given up", {}, WHY.category),
        ("given up", {GIVEN_UP: "{"}, Category.UNKNOWN),
        ("complete", {FAILURE: PACKED}, None),
        ("running", {FAILURE: PACKED}, WHY.category),
        ("running", {}, None),
    ],
)
def test_recorded_failures(state: str, annotations: dict[str, str], category: Category | None) -> None:
    job = attempt(state, annotations=annotations)
    why = recorded_failure(job)
    assert (why and why.category) == category
    assert (given_up(job) is not None) is (state == "given up")


def test_a_cancel_knows_when_it_was_written() -> None:
    at = datetime(2026, 11, 25, tzinfo=UTC)
    assert (Cancel(5, at=at).mark, Cancel(5, 2, at=at).mark, Cancel(0, 2).mark) == ("5", "try:2@5", "try:2")
