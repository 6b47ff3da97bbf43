from __future__ import annotations

import http.server
import itertools
import json
import math
import os
import pickle
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from tests.serving import serving

from trainjob import progress
from trainjob.progress import Report, message, read, report, reporter, reporting, trainer_api
from trainjob.progress.message import RESERVED, history_of, text_of, value_of

SOURCE = Path(progress.__file__).parent
ENVIRONMENT = (
    *(f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN")),
    *("TRAINJOB_TERMINATION_LOG", "KUBERNETES_SERVICE_HOST", "LOCAL_RANK", "RANK", "JAX_PROCESS_ID"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_RANK"),
)


@pytest.fixture(autouse=True)
def _new_reporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    new = reporter.Reporter()
    monkeypatch.setattr(reporting, "_reporter", new)
    yield

    def end() -> bool:
        return threading.Event().wait()

    # A thread that still retries would post to the next test's server. It cannot raise: pytest would report that.
    vars(new.poster).update(_send=end, _warn=lambda *_: None)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "termination-log"
    monkeypatch.setenv("TRAINJOB_TERMINATION_LOG", str(path))
    return path


def written(path: Path) -> Report:
    content = path.read_bytes()
    assert len(content) <= 4096
    json.loads(content)
    answer = read(content.decode())
    assert answer is not None
    return answer


# --- the termination message ---------------------------------------------------------------------------------------


def test_message_has_all_fields(log: Path) -> None:
    report(progress=40.9, metrics={"loss": 0.25, "step": 7, "phase": "warm-up"}, remaining_seconds=89.2)
    report(outputs={"model": "file:///m"})
    content = json.loads(log.read_text())
    assert datetime.fromisoformat(content.pop("lastUpdatedTime")).tzinfo is not None
    assert list(history_of(content.pop("history"))) == ["loss", "step"]
    assert content == {
        "trainjob": 1,
        "progressPercentage": 40,
        "estimatedRemainingSeconds": 90,
        "metrics": [
            {"name": "loss", "value": "0.25"},
            {"name": "step", "value": "7"},
            {"name": "phase", "value": "warm-up"},
        ],
        "outputs": {"model": "file:///m"},
    }


def test_calls_are_merged_and_later_values_replace_earlier_ones(log: Path) -> None:
    report(progress=10, metrics={"loss": 3, "lr": 1}, outputs={"a": "file:///1"})
    report(progress=20, metrics={"loss": 2}, outputs={"a": "file:///2", "b": "file:///b"})
    report()
    answer = written(log)
    assert answer.progress == 20
    assert answer.metrics == {"lr": 1, "loss": 2}
    assert answer.outputs == {"a": "file:///2", "b": "file:///b"}


def test_unknown_fields_are_omitted(log: Path) -> None:
    report()
    assert set(json.loads(log.read_text())) == {"trainjob", "lastUpdatedTime"}


def test_a_shorter_message_replaces_a_longer_one_completely(log: Path) -> None:
    log.write_text("x" * 9000)
    inode = log.stat().st_ino
    report(progress=1)
    assert written(log).progress == 1
    assert log.stat().st_ino == inode, "a bind mount does not follow a rename"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (0.1, "0.1"),
        (True, "true"),
        (np.bool_(False), "false"),
        (np.array(True), "true"),
        (10**30, "1" + "0" * 30),
        (np.float64(0.5), "0.5"),
        (np.float32(0.5), "0.5"),
        (np.array(0.5), "0.5"),
        (np.int64(3), "3"),
        (np.array(3), "3"),
    ],
)
def test_numbers_keep_type_and_value(log: Path, value: Any, text: str) -> None:
    report(metrics={"m": value})
    assert json.loads(log.read_text())["metrics"] == [{"name": "m", "value": text}]
    read_back = written(log).metrics["m"]
    assert text_of(read_back) == text
    assert type(read_back) is (bool if text in ("true", "false") else int if text.isdecimal() else float)


@pytest.mark.parametrize("text", ["adam", "1_000", "true story", "0x10", "1,5", "s3://b/1"])
def test_text_stays_text(log: Path, text: str) -> None:
    report(metrics={"m": text}, outputs={"o": text})
    assert (written(log).metrics, written(log).outputs) == ({"m": text}, {"o": text})


@pytest.mark.parametrize(
    ("given", "expected"),
    [(True, True), (np.bool_(True), True), (7, 7), (np.int64(7), 7), (0.5, 0.5), (np.float32(0.5), 0.5), ("7", "7")],
)
def test_outputs_keep_their_type(log: Path, given: Any, expected: object) -> None:
    report(outputs={"o": given})
    (read_back,) = written(log).outputs.values()
    assert (type(read_back), read_back) == (type(expected), expected)


NAMES = st.text(min_size=1, max_size=64)
METRIC_NAMES = NAMES.filter(lambda name: not name.startswith(RESERVED))
VALUES = st.one_of(st.floats(), st.integers(-(10**60), 10**60), st.text(min_size=1, max_size=64), st.booleans())
OUTPUTS = st.one_of(st.text(min_size=1, max_size=80), st.booleans(), st.integers(-(10**30), 10**30))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    calls=st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "progress": st.floats(0, 100),
                "metrics": st.dictionaries(METRIC_NAMES, VALUES, max_size=60),
                "outputs": st.dictionaries(NAMES, OUTPUTS, max_size=3),
                "remaining_seconds": st.floats(0, 1e300),
            },
        ),
        min_size=1,
        max_size=5,
    )
)
@example(calls=[{"progress": 0.0}, {"progress": 5e-324}])  # the time left is infinite
def test_any_report_fits_and_reads_back(log: Path, calls: list[dict[str, Any]]) -> None:
    reporting._reporter = reporter.Reporter()
    expected_progress: int | None = None
    outputs: dict[str, Any] = {}
    metrics: dict[str, str] = {}
    for call in calls:
        try:
            report(**call)
        except ValueError as error:
            assert "outputs need" in str(error)  # noqa: PT017 - any other message is a bug
            continue
        if "progress" in call:
            expected_progress = int(call["progress"])
        outputs |= call.get("outputs", {})
        for name, value in call.get("metrics", {}).items():
            metrics[name] = text_of(value)
        answer = written(log)
        assert answer.progress == expected_progress
        assert answer.outputs == outputs
        for name, value in answer.metrics.items():
            assert text_of(value) == text_of(value_of(metrics[name]))
        if len(answer.metrics) < len(metrics):
            worst = min(len(json.dumps({"name": n, "value": v})) for n, v in metrics.items() if n not in answer.metrics)
            assert len(log.read_bytes()) + worst > 3800, "no metric is dropped that would have fitted"


def test_the_oldest_then_the_largest_metrics_are_dropped_first(log: Path) -> None:
    report(metrics={f"old{i}": "o" * 30 for i in range(60)})
    report(metrics={"large": "l" * 64} | {f"new{i}": i for i in range(150)}, outputs={"model": "file:///m"})
    kept = written(log).metrics
    assert {f"new{i}" for i in range(100)} <= set(kept)
    assert "large" not in kept
    assert not [name for name in kept if name.startswith("old")]
    report(metrics={"large": "l" * 64})
    assert "large" in written(log).metrics


def test_number_of_metrics_is_limited_as_in_trainer() -> None:
    for i in range(300):
        report(metrics={f"m{i}": i})
    assert reporting._reporter is not None
    assert list(reporting._reporter._metrics) == [f"m{i}" for i in range(44, 300)]


def test_outputs_that_do_not_fit_are_rejected(log: Path) -> None:
    report(outputs={"a": "file:///a"})
    with pytest.raises(ValueError, match=r"outputs need 5.* bytes.*report the URI of that file"):
        report(progress=50, outputs={"b": "x" * 5000})
    report()
    assert written(log) == Report(outputs={"a": "file:///a"}, updated=written(log).updated)


def test_outputs_are_checked_without_a_termination_log() -> None:
    with pytest.raises(ValueError, match="outputs"):
        report(outputs={"b": "x" * 5000})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"progress": -0.1}, "progress"),
        ({"progress": 100.1}, "progress"),
        ({"progress": math.nan}, "progress"),
        ({"progress": "half"}, "progress"),
        ({"remaining_seconds": -1}, "remaining_seconds"),
        ({"remaining_seconds": math.inf}, "remaining_seconds"),
        ({"remaining_seconds": math.nan}, "remaining_seconds"),
        ({"metrics": {"": 1}}, "metrics"),
        ({"metrics": {"n" * 65: 1}}, "metrics"),
        ({"metrics": {"n": ""}}, "metrics"),
        ({"metrics": {"n": "v" * 65}}, "metrics"),
        ({"metrics": {"n": 10**65}}, "metrics"),
        ({"metrics": {"n": None}}, "metrics"),
        ({"metrics": {"n": [1, 2]}}, "metrics"),
        ({"metrics": {f"n{i}": i for i in range(257)}}, "metrics"),
        ({"outputs": {"": "file:///x"}}, "outputs"),
        ({"outputs": {"model": None}}, "outputs"),
        ({"outputs": {"model": Path("/x")}}, "outputs"),
        ({"outputs": {"model": math.nan}}, "outputs"),
        ({"outputs": {"model": [1, 2]}}, "outputs"),
    ],
)
def test_invalid_arguments_are_named_and_change_nothing(log: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        report(**({"progress": 5} | arguments))
    assert not log.exists()
    report()
    assert written(log).progress is None


@pytest.mark.parametrize(
    ("environment", "writes"),
    [
        ({"LOCAL_RANK": "0"}, True),
        ({"LOCAL_RANK": "1"}, False),
        ({"LOCAL_RANK": "0", "RANK": "4"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, False),
        ({"LOCAL_RANK": ""}, True),
    ],
)
def test_one_process_per_node_writes(
    log: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], writes: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    report(progress=1)
    assert log.exists() is writes


def test_default_termination_log_is_used_in_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "termination-log"
    monkeypatch.setattr(message, "_DEFAULT_LOG", str(path))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    report(progress=1)
    assert not path.exists(), "the kubelet creates the file; without it, nothing reads the message"
    path.touch()
    report(progress=2)
    assert written(path).progress == 2
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    report(progress=3)
    assert written(path).progress == 2


def test_an_unwritable_file_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINJOB_TERMINATION_LOG", str(tmp_path / "no" / "such" / "directory"))
    report(progress=1)
    report(progress=2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "termination message failed, the training continues" in error


def test_concurrent_calls_lose_nothing_and_readers_see_complete_messages(log: Path) -> None:
    report(metrics={"start": 0})
    stop = threading.Event()
    partial = complete = 0

    def watch() -> None:
        nonlocal partial, complete
        while not stop.is_set():
            if read(log.read_text()) is None:
                partial += 1
            else:
                complete += 1

    def work(thread: int) -> None:
        for i in range(100):
            report(metrics={f"t{thread}": i, "shared": "s" * (i % 60 + 1)})

    watcher = threading.Thread(target=watch)
    workers = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in (watcher, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    watcher.join()
    metrics = written(log).metrics
    assert {f"t{n}": 99 for n in range(8)}.items() <= metrics.items()
    assert complete > 0
    assert partial <= complete // 10


def test_a_fork_has_a_new_reporter(log: Path, tmp_path: Path) -> None:
    code = f"""
import os, sys, threading
from trainjob import progress
progress.report(progress=10)
held, go = threading.Event(), threading.Event()
def hold():
    with progress.reporting._reporter._lock:
        held.set(); go.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    os.environ["TRAINJOB_TERMINATION_LOG"] = {str(tmp_path / "child")!r}
    progress.report(metrics={{"m": 1}})
    os._exit(0)
status = os.waitpid(child, 0)[1]
go.set()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=30)
    child = written(tmp_path / "child")
    assert child == Report(metrics={"m": 1}, updated=child.updated, history=child.history)


# --- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  \n",
        "Traceback (most recent call last):",
        "null",
        "[]",
        "12",
        "{}",
        '{"trainjob": 2}',
        '{"trainjob": "1"}',
        '{"trainjob": true}',
        '{"trainjob": 1.0}',
        '{"trainjob": 1, "progressPercentage": 4',
        '{"progressPercentage": 40}',
        "[" * 100_000,
        '{"trainjob": 1' + "0" * 5000 + "}",
    ],
)
def test_other_messages_are_ignored(text: str) -> None:
    assert read(text) is None


def test_unknown_keys_are_ignored() -> None:
    text = """
    {"trainjob": 1, "new": {"a": [1]}, "progressPercentage": 12.7, "estimatedRemainingSeconds": -4, "outputs":
     {"model": "s3://m", "bad": [3], "worse": NaN}, "metrics":
     [{"name": "loss", "value": 0.5, "unit": "nats"}, 5, {"name": "x"},
     {"value": "1"}, {"name": "t", "value": true}, {"name": "n", "value": null}], "lastUpdatedTime": 5}
    """
    assert read(text) == Report(progress=12, metrics={"loss": 0.5, "t": True}, outputs={"model": "s3://m"})


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1", "101", '"5"', "true", "null", "[]", "1e999"])
def test_values_of_wrong_types_count_as_absent(value: str) -> None:
    assert read(f'{{"trainjob": 1, "progressPercentage": {value}, "metrics": {value}, "outputs": {value}}}') == Report()


def test_text_after_the_object_is_ignored() -> None:
    assert read('{"trainjob":1,"progressPercentage":7}"}],"outputs":{}}') == Report(progress=7)


@given(st.text())
def test_reading_never_raises(text: str) -> None:
    assert read(text) is None
    read('{"trainjob": 1, "metrics": ' + text)


def test_report_is_immutable_and_comparable() -> None:
    one = Report(5, 6, {"a": "b"}, {"c": "d"}, "t")
    assert pickle.loads(pickle.dumps(one)) == one
    assert one != Report(5)
    assert one != 5
    assert repr(Report(5)) == (
        "Report(progress=5, remaining_seconds=None, metrics={}, outputs={}, updated='', returned=None, history={}, "
        "details={})"
    )
    with pytest.raises(AttributeError):
        one.progress = 7  # type: ignore[misc, unused-ignore]


# --- a copied folder -----------------------------------------------------------------------------------------------


def test_a_copied_folder_works_without_the_package(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "progress", ignore=shutil.ignore_patterns("__pycache__"))
    code = """
import sys
before = set(sys.modules)
import progress
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
progress.report(progress=50)
progress.report_returned([7])
assert "progress.watchdog" in sys.modules
assert "trainjob" not in sys.modules
assert loaded <= set(sys.stdlib_module_names) | {"progress"}, loaded
heavy = {"json", "typing", "dataclasses", "ssl", "http", "datetime", "inspect"} & loaded
assert not heavy, heavy
"""
    log = tmp_path / "log"
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"],
        check=True,
        env={"TRAINJOB_TERMINATION_LOG": str(log), "TRAINJOB_STALL_TIMEOUT": "60"},
        timeout=30,
    )
    assert (written(log).progress, written(log).returned) == (50, [7])


# --- Trainer's status API ------------------------------------------------------------------------------------------


class Server(http.server.ThreadingHTTPServer):
    """A fake of Trainer's status server."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[float, str, dict[str, str], Any]] = []
        self.answers: list[int] = []
        self.delay = 0.0
        self.url = f"https://localhost:{self.server_address[1]}" + Handler.PATH

    def statuses(self) -> list[Any]:
        return [body["trainerStatus"] for _, _, _, body in self.requests]

    def wait(self, count: int, seconds: float = 10) -> None:
        deadline = time.monotonic() + seconds
        while len(self.requests) < count:
            assert time.monotonic() < deadline, f"{len(self.requests)} of {count} requests"
            time.sleep(0.01)

    def handle_error(self, *_: Any) -> None:
        """Errors of clients that do not trust the certificate."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    PATH: ClassVar[str] = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ns/trainjobs/digits/status"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((time.monotonic(), self.path, dict(self.headers), body))
        time.sleep(self.server.delay)
        status = self.server.answers.pop(0) if self.server.answers else 200
        answer = json.dumps(body if status == 200 else {"kind": "Status", "message": f"no: {status}"}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A temporary authority (ca.crt) and its certificate for localhost (tls.crt, tls.key)."""
    directory = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=30)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    for name in ("ca", "other"):
        openssl("req", "-x509", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.crt", "-subj", f"/CN={name}")
    openssl("req", *new_key, "-keyout", "tls.key", "-out", "tls.csr", "-subj", "/CN=status")
    (directory / "names").write_text("subjectAltName=DNS:localhost\n")
    signed_by_ca = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial")
    openssl("x509", "-req", "-in", "tls.csr", *signed_by_ca, "-out", "tls.crt", "-extfile", "names")
    return directory


@pytest.fixture
def server(certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "tls.crt", certificates / "tls.key")
    server = Server()
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with serving(server):
        token = tmp_path / "token"
        token.write_text("secret-1\n")
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", server.url)
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(certificates / "ca.crt"))
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(token))
        yield server


def test_post_has_trainers_format(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    report(progress=99.9, metrics={"loss": math.nan}, remaining_seconds=1e12, outputs={"model": "file:///m"})
    server.wait(1)
    _, path, headers, body = server.requests[0]
    assert path == Handler.PATH
    assert headers["Authorization"] == "Bearer secret-1"
    assert headers["Content-Type"] == "application/json"
    assert datetime.fromisoformat(body["trainerStatus"].pop("lastUpdatedTime"))
    assert body == {
        "trainerStatus": {
            "progressPercentage": 99,
            "estimatedRemainingSeconds": 2**31 - 1,
            "metrics": [{"name": "loss", "value": "nan"}],
        }
    }
    assert capsys.readouterr().err == ""


def test_posts_are_limited_and_have_the_latest_values(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_api, "_POST_INTERVAL", 0.3)
    report(progress=0)
    server.wait(1)
    (tmp_path / "token").write_text("secret-2")  # the kubelet renewed the token
    for percent in range(1, 51):
        report(progress=percent)
    server.wait(2)
    assert [status["progressPercentage"] for status in server.statuses()] == [0, 50]
    assert server.requests[1][0] - server.requests[0][0] >= 0.29
    assert server.requests[1][2]["Authorization"] == "Bearer secret-2"


def test_reports_go_to_the_server_and_the_termination_log(server: Server, log: Path) -> None:
    report(progress=5)
    server.wait(1)
    assert written(log).progress == 5


@pytest.mark.parametrize("variable", ["RANK", "JAX_PROCESS_ID", "OMPI_COMM_WORLD_RANK"])
def test_only_global_rank_0_posts(server: Server, log: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    report(progress=5)
    progress.flush()
    assert server.requests == []
    assert written(log).progress == 5, "the first process of another node writes its message"


SCRIPT = """
import sys
sys.path.insert(0, {path!r})
import progress
for percent in range(101):
    progress.report(progress=percent)
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise RuntimeError('of the training')", 1),
        ("progress.flush(); import os; os._exit(4)", 4),
    ],
)
def test_the_last_state_is_posted_at_exit(server: Server, end: str, code: int) -> None:
    script = SCRIPT.format(path=str(SOURCE.parent), end=end)
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == code, done.stderr
    assert server.statuses()[-1]["progressPercentage"] == 100
    assert len(server.requests) <= 3
    assert "trainjob.progress" not in done.stderr


INTERRUPTED = """
import os, signal, sys
sys.path.insert(0, {path!r})
import progress
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
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, handler: str, code: int, percentage: int
) -> None:
    monkeypatch.setenv("TRAINJOB_TERMINATION_LOG", str(tmp_path / "message"))
    script = INTERRUPTED.format(path=str(SOURCE.parent), handler=handler)
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    content = json.loads((tmp_path / "message").read_text())
    assert content["progressPercentage"] == percentage
    assert {each["name"] for each in content["metrics"]} >= {"loss"} | ({"other"} if percentage == 20 else set())
    assert server.statuses()[-1]["progressPercentage"] == percentage


def test_a_report_in_an_exit_handler_is_posted(server: Server) -> None:
    # Since Python 3.12, no thread can be started in exit handlers.
    script = f"""
import atexit, sys
sys.path.insert(0, {str(SOURCE.parent)!r})
import progress
atexit.register(lambda: progress.report(progress=100))
"""
    subprocess.run([sys.executable, "-S", "-c", script], timeout=30, check=True)
    assert server.statuses()[-1]["progressPercentage"] == 100


def test_the_last_post_is_retried(server: Server) -> None:
    server.answers = [503, 503]
    script = SCRIPT.format(path=str(SOURCE.parent), end="")
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert server.statuses()[-1]["progressPercentage"] == 100
    assert done.stderr.count("trainjob.progress: status API failed, the training continues: HTTP 503") == 1


def test_a_failed_post_is_retried_during_the_training(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_api, "_POST_INTERVAL", 0.05)
    server.answers = [500, 403]
    report(progress=5)
    server.wait(3)
    assert [status["progressPercentage"] for status in server.statuses()] == [5, 5, 5]


def test_a_rejected_post_is_not_retried(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer_api, "_POST_INTERVAL", 0.05)
    server.answers = [422]
    report(progress=5)
    server.wait(1)
    progress.flush()
    time.sleep(0.3)
    assert len(server.requests) == 1
    error = capsys.readouterr().err
    assert "HTTP 422" in error
    assert "no: 422" in error


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("CA_CERT", "{certificates}/other.crt", "CERTIFICATE_VERIFY_FAILED"),
        ("CA_CERT", "/no/such/file", "No such file"),
        ("TOKEN", "/no/such/file", "No such file"),
        ("URL", "http://localhost:1/status", "not an https URL"),
        ("URL", "https://localhost:1/status", "refused"),
        ("URL", "https://127.0.0.1:{port}/status", "certificate is not valid for '127.0.0.1'"),
    ],
)
def test_errors_of_the_api_do_not_fail_the_training(
    server: Server,
    certificates: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    reason: str,
) -> None:
    value = value.format(certificates=certificates, port=server.server_address[1])
    monkeypatch.setenv(f"KUBEFLOW_TRAINER_SERVER_{variable}", value)
    report(progress=5)
    report(progress=6)
    progress.flush()
    assert server.requests == []
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert reason in error


def test_a_silent_server_does_not_block_report(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr(trainer_api, "_FLUSH_TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"https://localhost:{silent.getsockname()[1]}/status")
        start = time.monotonic()
        for percent in range(50):
            report(progress=percent)
        progress.flush()
        assert time.monotonic() - start < trainer_api._POST_TIMEOUT, "report waited for a post"


def test_the_exit_is_not_delayed(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with a name server that does not respond, to which no socket timeout applies."""
    monkeypatch.setattr(trainer_api, "_FLUSH_TIMEOUT", 0.3)
    released = threading.Event()

    def silent(*_: object) -> Any:
        released.wait(30)
        raise OSError("no answer")

    monkeypatch.setattr("socket.getaddrinfo", silent)
    start = time.monotonic()
    report(progress=5)
    progress.flush()
    progress.flush()
    assert 0.5 < time.monotonic() - start < 25
    assert capsys.readouterr().err.count("the training continues: no response within 0.3 s\n") == 1
    released.set()


def test_a_busy_server_gets_fewer_posts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_api, "_POST_INTERVAL", 0.01)
    server.delay = 0.02
    for percent in range(3):
        report(progress=percent)
        server.wait(percent + 1)
    times = [request[0] for request in server.requests]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(gap > 20 * 0.02 for gap in gaps), gaps


@pytest.mark.parametrize("missing", ENVIRONMENT[:3])
def test_an_incomplete_configuration_is_ignored(server: Server, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.delenv(missing)
    report(progress=5)
    progress.flush()
    assert server.requests == []


def test_proxies_are_not_used(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    report(progress=5)
    server.wait(1)
    assert os.environ["HTTPS_PROXY"]
