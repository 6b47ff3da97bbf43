"""Posts of `trainjob.progress` to Trainer's status API."""

from __future__ import annotations

import json
import math
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.certificates import Authority
from tests.fakes.scripted import Answer, Asked, ScriptedServer, as_json
from tests.serving import serving
from tests.unit.progress.reports import API, written

from trainjob import progress
from trainjob.progress import report, reporter, trainer_api

SOURCE = Path(progress.__file__).parent


PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ns/trainjobs/digits/status"


class Trainer(ScriptedServer):
    """A fake of Trainer's status server: it answers with `statuses`, then with 200."""

    def __init__(self, authority: Authority) -> None:
        super().__init__(self.accept, authority.issue("status", addresses=["localhost"]))
        self.statuses: list[int] = []
        self.accepted: Callable[[], None] = lambda: None

    def accept(self, asked: Asked) -> Answer:
        self.accepted()
        status = self.statuses.pop(0) if self.statuses else 200
        return as_json(json.loads(asked.body) if status == 200 else {"message": f"no: {status}"}, status)

    @property
    def progress(self) -> list[int]:
        """The percentages of all posts."""
        return [json.loads(each.body)["trainerStatus"]["progressPercentage"] for each in self.asked]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "ca")


@pytest.fixture
def server(authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    with serving(Trainer(authority)) as server:
        (tmp_path / "token").write_text("secret-1\n")
        url = f"https://localhost:{server.server_port}{PATH}"
        for name, value in zip(API, (url, authority.certificate, tmp_path / "token"), strict=True):
            monkeypatch.setenv(name, str(value))
        yield server


def test_post_has_trainers_format(
    server: Trainer, log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # is not used
    report(progress=99.9, metrics={"loss": math.nan}, remaining_seconds=1e12, outputs={"model": "file:///m"})
    assert server.arrived(1)
    (asked,) = server.asked
    assert (asked.path, asked.headers["Content-Type"]) == (PATH, "application/json")
    assert asked.headers["Authorization"] == "Bearer secret-1"
    body = json.loads(asked.body)
    assert datetime.fromisoformat(body["trainerStatus"].pop("lastUpdatedTime"))
    assert body == {
        "trainerStatus": {
            "progressPercentage": 99,
            "estimatedRemainingSeconds": 2**31 - 1,
            "metrics": [{"name": "loss", "value": "nan"}],
        }
    }
    assert written(log).progress == 99, "the termination message has it, too"
    assert capsys.readouterr().err == ""


def test_posts_are_limited_and_have_the_latest_values(
    server: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_api, "_POST_INTERVAL", 3600)
    report(progress=0)
    assert server.arrived(1)
    (tmp_path / "token").write_text("secret-2")  # the kubelet renewed the token
    for percent in range(1, 51):
        report(progress=percent)
    progress.flush()
    assert server.progress == [0, 50]
    assert server.asked[1].headers["Authorization"] == "Bearer secret-2"


def test_failed_and_slow_posts_have_longer_pauses(
    server: Trainer, new_reporter: reporter.Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Posts are retried, those of a busy server less often."""
    pauses: queue.Queue[float] = queue.Queue()
    now = [0.0]

    class Recorded(threading.Condition):
        def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
            return super().wait_for(predicate) if timeout is None else pauses.put(timeout)

    def slow() -> None:
        now[0] += 0.3 if len(server.asked) == 4 else 0.0

    monkeypatch.setattr(trainer_api, "time", SimpleNamespace(monotonic=lambda: now[0]))
    new_reporter.poster._changed = Recorded()
    server.statuses, server.accepted = [200, 500, 403, 200], slow
    report(progress=5)
    assert pauses.get(timeout=30) == 1
    report(progress=6)
    assert [pauses.get(timeout=30) for _ in range(3)] == [2, 4, pytest.approx(6)]
    assert server.progress == [5, 6, 6, 6]


@pytest.mark.parametrize(
    ("variable", "value"),
    [*((name, "1") for name in ("RANK", "JAX_PROCESS_ID", "OMPI_COMM_WORLD_RANK")), *((name, "") for name in API)],
)
def test_only_global_rank_0_with_a_complete_configuration_posts(
    server: Trainer, log: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    report(progress=5)
    progress.flush()
    assert server.asked == []
    assert written(log).progress == 5, "the first process of another node writes its message"


def ran(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script that imports a copy of `trainjob.progress`, without site-packages."""
    code = f"import sys\nsys.path.insert(0, {str(SOURCE.parent)!r})\nimport progress\n{script}"
    return subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=30, check=False)


REPORTS = "for percent in range(101): progress.report(progress=percent)\n"


@pytest.mark.parametrize(
    ("script", "statuses", "code"),
    [
        (REPORTS, [], 0),
        (REPORTS, [503, 503], 0),
        (f"{REPORTS}sys.exit(3)", [], 3),
        (f"{REPORTS}raise RuntimeError('of the training')", [], 1),
        (f"{REPORTS}progress.flush(); import os; os._exit(4)", [], 4),
        # Since Python 3.12, no thread can be started in exit handlers.
        ("import atexit; atexit.register(lambda: progress.report(progress=100))", [], 0),
    ],
    ids=["end", "failing posts", "exit", "error", "flush and exit at once", "report in an exit handler"],
)
def test_the_last_state_is_posted_at_exit(server: Trainer, script: str, statuses: list[int], code: int) -> None:
    server.statuses = list(statuses)
    done = ran(script)
    assert done.returncode == code, done.stderr
    assert server.progress[-1] == 100
    assert len(server.asked) <= 3 + len(statuses)
    assert done.stderr.count("trainjob.progress: status API failed, the training continues: HTTP 503") == bool(statuses)
    assert done.stderr.count("trainjob.progress") == bool(statuses)


INTERRUPTED = """
import os, signal
from progress import reporter

def handle(number, frame):
    {handler}

signal.signal(signal.SIGTERM, handle)
write, signals = reporter.write, [signal.SIGTERM]

def interrupted(path, message):
    while signals:
        signal.raise_signal(signals.pop())
    write(path, message)

reporter.write = interrupted
progress.report(progress=10, metrics={{"loss": 0.5}})
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("handler", "code", "percentage"),
    [
        ("progress.flush(); os._exit(143)", 143, 10),
        ("progress.report(progress=20, metrics={'other': 1}); progress.flush(); os._exit(143)", 143, 20),
        ("progress.report(progress=20, metrics={'other': 1})", 3, 20),
        ("sys.exit(143)", 143, 10),
    ],
)
def test_a_signal_handler_may_report_in_the_middle_of_a_report(
    server: Trainer, log: Path, handler: str, code: int, percentage: int
) -> None:
    done = ran(INTERRUPTED.format(handler=handler))
    assert (done.returncode, done.stderr) == (code, "")
    content = json.loads(log.read_text())
    assert content["progressPercentage"] == percentage
    assert {each["name"] for each in content["metrics"]} >= {"loss"} | ({"other"} if percentage == 20 else set())
    assert server.progress[-1] == percentage


IMPORTING = """
import signal

class Interrupting:
    def find_spec(self, name, path, target=None):
        if name.endswith("{module}"):
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGTERM)

def handle(number, frame):
    progress.report(outputs={{"saved": "s3://x"}}, progress=20)
    {end}

signal.signal(signal.SIGTERM, handle)
sys.meta_path.insert(0, Interrupting())
progress.report(progress=10, metrics={{"loss": 0.5}})
sys.exit(3)
"""


@pytest.mark.parametrize("module", ["reporter", "trainer_api"])
@pytest.mark.parametrize(("end", "code"), [("", 3), ("progress.flush()", 3), ("sys.exit(143)", 143)])
def test_a_report_of_a_signal_handler_during_the_first_report_is_kept(
    log: Path, module: str, end: str, code: int
) -> None:
    done = ran(IMPORTING.format(module=module, end=end))
    assert (done.returncode, done.stderr) == (code, "")
    content = json.loads(log.read_text())
    assert content["outputs"] == {"saved": "s3://x"}
    assert content["progressPercentage"] == 20


def test_without_stderr_a_warning_is_not_written_to_stdout() -> None:
    done = ran("sys.stderr = None\nprogress.report(progress=[])")
    assert (done.returncode, done.stdout) == (0, "")


def test_a_rejected_post_is_not_retried(
    server: Trainer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer_api, "_POST_INTERVAL", 0.0)
    server.statuses = [422]
    report(progress=5)
    progress.flush()
    progress.flush()  # a retry would be pending
    assert server.progress == [5]
    error = capsys.readouterr().err
    assert "HTTP 422" in error
    assert "no: 422" in error


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("CA_CERT", "{other}", "CERTIFICATE_VERIFY_FAILED"),
        ("CA_CERT", "/no/such/file", "No such file"),
        ("TOKEN", "/no/such/file", "No such file"),
        ("URL", "http://localhost:1/status", "not an https URL"),
        ("URL", "https://localhost:1/status", "refused"),
        ("URL", "https://127.0.0.1:{port}/status", "certificate is not valid for '127.0.0.1'"),
    ],
)
def test_errors_of_the_api_do_not_fail_the_training(
    server: Trainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    reason: str,
) -> None:
    value = value.format(other=Authority(tmp_path / "other").certificate, port=server.server_port)
    monkeypatch.setenv(f"KUBEFLOW_TRAINER_SERVER_{variable}", value)
    report(progress=5)
    report(progress=6)
    progress.flush()
    assert server.asked == []
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert reason in error


def test_a_name_server_that_does_not_respond_blocks_neither_reports_nor_the_exit(
    server: Trainer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No socket timeout applies to it."""
    monkeypatch.setattr(trainer_api, "_FLUSH_TIMEOUT", 0.3)
    asked, released = threading.Event(), threading.Event()

    def silent(*_: object) -> Any:
        asked.set()
        released.wait()
        raise OSError("no answer")

    monkeypatch.setattr("socket.getaddrinfo", silent)
    for percent in range(50):
        report(progress=percent)
    assert asked.wait(30)
    progress.flush()
    progress.flush()
    assert capsys.readouterr().err.count("the training continues: no response within 0.3 s\n") == 1
    assert server.asked == []
    released.set()
