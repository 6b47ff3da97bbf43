"""`trainjob goodput`: its selection, its requests to a cluster, and its text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.serving import serving
from tests.unit.generated_histories import BEGIN, Run, pods_of, trainjob
from tests.unit.program import exit_of

from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob.job import key_hash

TRAINJOBS, PODS = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ml/trainjobs", "/api/v1/namespaces/ml/pods"


def job(key: str, attempt: int, begin: float, end: float, *, done: bool, **labels: str) -> dict[str, Any]:
    made = trainjob(BEGIN + begin, attempt, queue=False, admitted=None, ended=BEGIN + end, done=done)
    made["metadata"]["name"] = f"{key.replace('/', '-')}-{attempt}"
    made["metadata"]["annotations"]["trainjob.dev/key"] = key
    own = {"app.kubernetes.io/managed-by": "trainjob", "trainjob.dev/key": key_hash(key)}
    made["metadata"]["labels"] |= own | labels
    return made


class Server(BaseHTTPRequestHandler):
    """An API server with two pieces of work: one of two attempts, one of one attempt with its pods."""

    jobs = (
        job("nightly/a", 1, 0, 100, done=False, team="x"),
        job("nightly/a", 2, 150, 350, done=True, team="x"),
        job("nightly/b", 1, 1000, 1100, done=True),
    )
    requests: list[str] = []  # noqa: RUF012 - emptied by each test
    forbidden = False

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        selector = parse_qs(address.query).get("labelSelector", [""])[0]
        self.requests.append(f"{address.path}?{selector}")
        wanted = dict(each.split("=") for each in selector.split(",") if "=" in each)
        items = [each for each in self.jobs if wanted.items() <= each["metadata"]["labels"].items()]
        body: dict[str, Any] = {"metadata": {"resourceVersion": "1"}, "items": items}
        if address.path == PODS:
            (pod, _) = pods_of([Run(BEGIN + 1040, BEGIN + 1100)], 0, random.Random(0))
            pod["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"] = "nightly-b-1"
            body["items"] = [pod]
        elif address.path != TRAINJOBS:
            found = [each for each in self.jobs if address.path == f"{TRAINJOBS}/{each['metadata']['name']}"]
            body = found[0] if found else {"kind": "Status", "code": 404, "reason": "NotFound", "message": "not found"}
        code = int(body.get("code", 200))
        if address.path == PODS and self.forbidden:
            code, body = 403, {"kind": "Status", "code": 403, "reason": "Forbidden", "message": "pods is forbidden"}
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Server.requests.clear()
    monkeypatch.setattr(Server, "forbidden", False)
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Server)) as running:
        credentials = Credentials(host=f"http://127.0.0.1:{running.server_port}", token="t")
        monkeypatch.setattr("trainjob.cli.session.connect", lambda *_, **__: KubernetesBackend(credentials))
        monkeypatch.setenv("TRAINJOB_NAMESPACE", "ml")
        yield


def test_a_namespace_needs_two_lists(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = exit_of(capsys, "goodput", "--price-per-gpu-hour", "36")
    assert (code, err) == (0, "")
    assert Server.requests == [
        f"{TRAINJOBS}?app.kubernetes.io/managed-by=trainjob",
        f"{PODS}?jobset.sigs.k8s.io/jobset-name",
    ]
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


def test_a_label_selects_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = exit_of(capsys, "goodput", "-l", "team=x", "--json")
    answer = json.loads(out)
    assert code == 0
    assert [each["name"] for each in answer["jobs"]] == ["nightly-a-2"]
    assert len(Server.requests) == 2


@pytest.mark.parametrize("words", [("--key", "nightly/a"), ("nightly-a-1",), ("ml/nightly-a-2",)])
def test_a_key_or_one_of_its_jobs_shows_all_attempts(capsys: pytest.CaptureFixture[str], words: tuple[str]) -> None:
    code, out, _ = exit_of(capsys, "goodput", *words)
    assert code == 0
    assert out.startswith("ml/nightly-a-2  Complete  2 attempts\nkey nightly/a\n\ngoodput 85.7% of 5m50s\n")


def test_json_has_all_figures(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(exit_of(capsys, "goodput", "nightly-b-1", "--json", "--price-per-gpu-hour", "9")[1])
    (found,) = answer["jobs"]
    assert (found["key"], found["phase"], found["goodput"], found["attempts"]) == ("nightly/b", "Complete", 0.6, 1)
    assert found["sources"] == {"starting": {"pods": 40.0}, "training": {"pods": 60.0}}
    assert [each["activity"] for each in found["segments"]] == ["starting", "training"]
    assert answer["total"]["cost"]["training"] == pytest.approx(60 / 3600 * 8 * 9)
    assert answer["gpus_unknown"] == 0


def test_without_permission_for_pods_less_is_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "forbidden", True)
    code, out, err = exit_of(capsys, "goodput", "nightly-b-1")
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
        (("-l", "team"), 2, "'team' is not NAME=VALUE"),
        (("--key", " "), 2, "is blank"),
        (("--key", "other"), 0, "no jobs in namespace ml with key 'other'; list all: trainjob list"),
        (("-l", "team=y"), 0, "no jobs in namespace ml with labels team=y; list all: trainjob list"),
    ],
)
def test_what_does_not_exist_is_reported(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, message: str
) -> None:
    got, out, err = exit_of(capsys, "goodput", *words)
    assert (got, out) == (code, "")
    assert message in err
