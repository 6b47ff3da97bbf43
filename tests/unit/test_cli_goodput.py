"""`trainjob goodput`: its selection, its requests to a cluster, and its text."""

from __future__ import annotations

import json
import random

import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.fakes.kube.server import Refused
from tests.objects import JOBSET, Object
from tests.unit.generated_histories import BEGIN, Run, pods_of, trainjob
from tests.unit.program import Program

from trainjob.job import KEY, MANAGED_BY, key_hash


def job(key: str, attempt: int, begin: float, end: float, *, done: bool, **labels: str) -> Object:
    made = trainjob(BEGIN + begin, attempt, ended=BEGIN + end, done=done)
    made["metadata"]["name"] = f"{key.replace('/', '-')}-{attempt}"
    made["metadata"]["annotations"][KEY] = key
    made["metadata"]["labels"] |= {MANAGED_BY: "trainjob", KEY: key_hash(key)} | labels
    return made


@pytest.fixture(autouse=True)
def jobs(backend: DirectBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pieces of work: one of two attempts, one of one attempt with its pods. Another job is not of trainjob."""
    for each in (
        job("nightly/a", 1, 0, 100, done=False, team="x"),
        job("nightly/a", 2, 150, 350, done=True, team="x"),
        job("nightly/b", 1, 1000, 1100, done=True),
        job("by/hand", 1, 1000, 1100, done=True, **{MANAGED_BY: "a person"}),
    ):
        backend.store.put("trainjobs", each, "ADDED")
    (pod, _) = pods_of([Run(BEGIN + 1040, BEGIN + 1100)], 0, random.Random(0))
    pod["metadata"] |= {"namespace": "ml", "labels": pod["metadata"]["labels"] | {JOBSET: "nightly-b-1"}}
    backend.store.put("pods", pod, "ADDED")
    monkeypatch.setenv("TRAINJOB_NAMESPACE", "ml")


def test_a_namespace_needs_two_lists(program: Program, backend: DirectBackend) -> None:
    code, out, err = program("goodput", "--price-per-gpu-hour", "36")
    assert (code, err) == (0, "")
    assert backend.requests == ["LIST trainjobs", "LIST pods"]
    lines = [line.split("   ") for line in out.splitlines()]
    assert [[cell.strip() for cell in line if cell.strip()] for line in lines] == [
        ["JOB", "PHASE", "ATTEMPTS", "TIME", "GOODPUT", "GPU-HOURS", "COST", "LOST MOST TO", "KEY"],
        ["nightly-b-1", "Complete", "1", "1m40s", "60.0%", "0.22", "8.00", "starting 40.0%", "nightly/b"],
        ["nightly-a-2", "Complete", "2", "5m50s", "85.7%", "0.67", "24.00", "restarting 14.3%", "nightly/a"],
        [],
        ["goodput 80.0% of 7m30s"],
        ["ACTIVITY", "TIME", "SHARE", "GPU-HOURS", "COST", "KNOWN FROM"],
        ["starting", "40s", "8.9%", "███", "0.09", "3.20", "pods"],
        ["training", "6m00s", "80.0%", "█" * 24, "0.80", "28.80", "assumed, pods"],
        ["restarting", "50s", "11.1%", "███", "0.00", "0.00", "conditions"],
    ]


def test_a_label_selects_jobs(program: Program, backend: DirectBackend) -> None:
    code, out, _ = program("goodput", "-l", "team=x", "--json")
    assert (code, [each["name"] for each in json.loads(out)["jobs"]]) == (0, ["nightly-a-2"])
    assert len(backend.requests) == 2


@pytest.mark.parametrize("words", [("--key", "nightly/a"), ("nightly-a-1",), ("ml/nightly-a-2",)])
def test_a_key_or_one_of_its_jobs_shows_all_attempts(program: Program, words: tuple[str]) -> None:
    code, out, _ = program("goodput", *words)
    assert code == 0
    assert out.startswith("ml/nightly-a-2  Complete  2 attempts\nkey nightly/a\n\ngoodput 85.7% of 5m50s\n")


def test_json_has_all_figures(program: Program) -> None:
    answer = json.loads(program("goodput", "nightly-b-1", "--json", "--price-per-gpu-hour", "9")[1])
    (found,) = answer["jobs"]
    assert (found["key"], found["phase"], found["goodput"], found["attempts"]) == ("nightly/b", "Complete", 0.6, 1)
    assert found["sources"] == {"starting": {"pods": 40.0}, "training": {"pods": 60.0}}
    assert [each["activity"] for each in found["segments"]] == ["starting", "training"]
    assert answer["total"]["cost"]["training"] == pytest.approx(60 / 3600 * 8 * 9)
    assert answer["gpus_unknown"] == 0


def test_without_permission_for_pods_less_is_known(program: Program, backend: DirectBackend) -> None:
    def refuse(request: str) -> None:
        if request == "LIST pods":
            raise Refused(403, "Forbidden", "pods is forbidden")

    backend.before = refuse
    code, out, err = program("goodput", "nightly-b-1")
    assert code == 0
    assert "goodput 100.0% of 1m40s" in out
    assert "assumed" in out
    assert err == "less is known without the pods: pods is forbidden\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("nosuch-1",), 5, "there is no TrainJob ml/nosuch-1"),
        (("nightly-a-1", "--key", "nightly/a"), 2, "give either the name of a JOB, or --key and --label"),
        (("--price-per-gpu-hour", "-1"), 2, "'-1' is not a price"),
        (("--price-per-gpu-hour", "nan"), 2, "'nan' is not a price"),
        (("--key", " "), 2, "is blank"),
        (("--key", "other"), 0, "no jobs in namespace ml with key 'other'; list all: trainjob list"),
        (("-l", "team=y"), 0, "no jobs in namespace ml with labels team=y; list all: trainjob list"),
    ],
)
def test_what_does_not_exist_is_reported(program: Program, words: tuple[str, ...], code: int, message: str) -> None:
    got, out, err = program("goodput", *words)
    assert (got, out) == (code, "")
    assert message in err
