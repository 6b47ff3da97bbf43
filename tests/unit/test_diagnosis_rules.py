"""Known errors: outages are retried, permanent failures are not, the orchestrator decides about all others.

And diagnoses of recorded evidence of real failed jobs, which `tests.cluster.corpus` records.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.cluster import corpus
from tests.cluster.failures import FAILURES, Failure
from tests.objects import ended, pod, trainjob
from tests.recordings import by_line

from trainjob import errors
from trainjob._diagnosis import blockers, diagnosis_of, termination_messages
from trainjob._diagnosis.evidence import Evidence
from trainjob._jobs import report
from trainjob._support import retrying
from trainjob.data.__main__ import TRY_AGAIN, main
from trainjob.errors import Category, Diagnosis, RetryVerdict, TrainJobError
from trainjob.status import Observation, Phase, observe


def diagnosed(code: int, log: str = "", message: str = "", container: str = "node") -> Diagnosis:
    crashed = pod(0, ended(code, message=message), spec={"containers": [{"name": "node"}, {"name": "sidecar"}]})
    crashed["status"]["containerStatuses"][0]["name"] = container
    logs = {"x-node-0-0-abcde": log.split("\n")}
    return diagnosis_of(Evidence(trainjob(), [crashed], logs), Observation(Phase.FAILED))


def raised(exception: str) -> Diagnosis:
    return diagnosed(1, f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n{exception}')


@pytest.mark.parametrize(
    "exception",
    [
        'botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL: "http://minio:9000/models"',
        "requests.exceptions.ReadTimeout: HTTPConnectionPool(host='x', port=80): Read timed out. (read timeout=10)",
        "urllib.error.HTTPError: HTTP Error 503: Service Unavailable",
        "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/x",
        "OSError: [Errno 116] Stale file handle: '/mnt/nfs/data/part-0'",
        "grpc._channel._InactiveRpcError: <_InactiveRpcError of RPC: status = StatusCode.UNAVAILABLE>",
    ],
)
def test_each_wording_of_an_outage_is_infrastructure(exception: str) -> None:
    """Wordings of the rows `busy`, `unreachable` and `disk` that their examples do not have."""
    found = raised(exception)
    assert (found.category, found.retry) == (Category.OUTAGE, RetryVerdict.INFRASTRUCTURE), found.text()


def test_a_permanent_failure_is_not_retried() -> None:
    found = raised("ModuleNotFoundError: No module named 'apex'")
    assert not found.retry.retryable
    assert found.outlook.startswith("not retried: the ")
    assert found.outlook in found.text()


@pytest.mark.parametrize("code", [1, 2, 3, 126, 127, 134, 139, 255])
def test_an_exit_code_alone_is_never_permanent(code: int) -> None:
    for log in ("", "epoch 3", "a word that explains nothing"):
        assert diagnosed(code, log).retry is RetryVerdict.UNKNOWN


def test_an_error_of_another_container_does_not_count() -> None:
    assert diagnosed(3, "ModuleNotFoundError: No module named 'x'", container="sidecar").retry is RetryVerdict.UNKNOWN


# ---------------------------------------------------------------- programs of this package

ERRORS = [
    each
    for each in vars(errors).values()
    if isinstance(each, type)
    and issubclass(each, TrainJobError)
    and each.__init__ in (Exception.__init__, TrainJobError.__init__)
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_the_diagnosis_has_the_verdict_of_the_error(error: type[TrainJobError]) -> None:
    assert len(ERRORS) > 15
    found = diagnosed(75, "error: it failed", termination_messages.message_of(error("it failed")).decode())
    assert (found.retry, found.summary) == (error.retry, "node-0 exited with code 75: it failed")


def test_a_message_beyond_the_limits_is_named() -> None:
    found = diagnosed(3, "hello", '{"trainjob":' + "[" * 4000)
    assert found.summary.startswith("node-0 exited with code 3")
    assert "not seen: the termination message of node-0 is not readable: it is nested 65 lists" in found.text()
    assert diagnosed(3, "hello", '{"trainjob": 1, "met').unseen == ()


def test_an_unexpected_error_of_a_step_is_unknown() -> None:
    found = diagnosed(1, "KeyError: 'size'", termination_messages.message_of(KeyError("size")).decode())
    assert found.summary == "node-0 exited with code 1: KeyError: 'size'"
    assert (found.category, found.retry) == (Category.UNKNOWN, RetryVerdict.UNKNOWN)
    assert "training" not in found.text()


@pytest.mark.parametrize(
    "text",
    ["x" * 5000, '"' * 5000, "漢" * 5000, "a\nb", "", "\u0001" * 3000],
    ids=["long", "quoted", "wide", "lines", "empty", "control"],
)
def test_a_verdict_of_any_text_fits(text: str) -> None:
    message = termination_messages.message_of(errors.StoreUnavailable(text)).decode()
    assert len(message.encode()) <= 4096
    read = termination_messages.verdict_of(message)
    assert read is not None
    assert read.meaning.retry is RetryVerdict.INFRASTRUCTURE


@pytest.mark.parametrize(
    "message",
    [
        "",
        "words",
        '{"trainjob":1}',
        '{"trainjob":1,"error":{}}',
        '{"trainjob":1,"error":{"retry":"x"}}',
        '{"trainjob":',
        '{"trainjob":2,"error":{"retry":"user"}}',
    ],
)
def test_invalid_verdicts_are_ignored(message: str) -> None:
    assert termination_messages.verdict_of(message) is None


@pytest.mark.parametrize(
    ("source", "code", "retry"),
    [("http://127.0.0.1:1/m", TRY_AGAIN, "infrastructure"), ("file:///no/such/place", 2, "configuration")],
)
def test_a_step_reports_its_verdict(
    source: str, code: int, retry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "termination-log"
    monkeypatch.setenv("TRAINJOB_TERMINATION_LOG", str(log))
    monkeypatch.setattr(retrying, "TRANSFER", partial(retrying.TRANSFER, failures=1))
    assert main(["initialize-model", "--source", source, "--target", str(tmp_path / "m")]) == code
    assert json.loads(log.read_text())["error"]["retry"] == retry
    assert diagnosed(code, message=log.read_text()).retry == retry


# ---------------------------------------------------------------- recorded failures


# Paths and hosts of this machine, of a person's machine, or of build services.
FOREIGN = re.compile(
    r"/work/|/root/|/home/|/tmp/trainjob|/tmp/pytest|/opt/venv|proxy\.|mirror|artifactory|\.internal\b"
)


def test_every_failure_is_recorded() -> None:
    assert corpus.recorded() == sorted(failure.name for failure in FAILURES)
    assert len(FAILURES) >= 25
    # A hang is found while the job runs, from several readings of its logs: tests/local/test_hangs.py.
    assert {failure.category for failure in FAILURES} == set(Category) - {Category.HANG}


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
def test_recorded_failures_are_diagnosed(failure: Failure) -> None:
    evidence = corpus.read(failure.name)
    found = diagnosis_of(evidence)
    assert corpus.differences(failure, found, evidence) == [], found.text()


@pytest.mark.parametrize("failure", [failure for failure in FAILURES if failure.victim], ids=lambda each: each.name)
def test_a_rank_that_lost_a_peer_is_not_the_root_cause_despite_clock_skew(failure: Failure) -> None:
    evidence = corpus.read(failure.name)
    second = '"finishedAt": "2026-11-21T10:00:00Z"'
    pods = json.loads(re.sub(r'"finishedAt": "[^"]*"', second, json.dumps(list(evidence.pods))))
    for order in (pods, pods[::-1]):
        same = replace(evidence, pods=order)
        found = diagnosis_of(same)
        assert corpus.differences(failure, found, same) == [], found.text()


@pytest.mark.parametrize("name", corpus.recorded())
def test_the_corpus_has_no_data_of_this_machine(name: str) -> None:
    text = (corpus.DIRECTORY / f"{name}.json").read_text()
    assert FOREIGN.findall(text) == []
    assert "managedFields" not in text
    assert len(text) < 200_000
    assert by_line(json.loads(text)) == text, "the format of the recorder"


def test_documentation_has_the_current_table() -> None:
    assert f"{corpus.BEGIN}{corpus.table()}{corpus.END}" in corpus.PAGE.read_text(), "run make record-diagnosis"


@pytest.mark.parametrize("name", corpus.recorded())
def test_a_waiter_and_diagnose_agree_on_what_blocks_a_job(name: str) -> None:
    """A waiter lists pending pods and warnings only. `wait --fail-fast` and `diagnose` exit with the same code."""
    evidence = corpus.read(name)
    phase = observe(evidence.trainjob).phase
    if phase.terminal or phase is Phase.RUNNING or evidence.missing:
        return
    if phase is Phase.QUEUED:
        blocker = blockers.in_workload(evidence.workload or {})
    else:
        pending = [pod for pod in evidence.pods if pod["status"].get("phase") == "Pending"]
        warnings = [event for event in evidence.events if event.get("type") == "Warning"]
        finding = blockers.first(blockers.around(pending, warnings))
        blocker = finding.blocker if finding else None
    shown = report._blocker(evidence, phase)
    assert (shown is not None and shown.permanent) is (blocker is not None and blocker.permanent)
