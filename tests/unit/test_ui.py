"""`trainjob ui` over a backend in memory: real HTTP, without processes of jobs."""

from __future__ import annotations

import json
import logging
import socket
import threading
import webbrowser
from collections.abc import Iterator
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.processes import eventually
from tests.unit.counting import CountingBackend

from trainjob import JobRef, TrainJobClient
from trainjob._manifest.workflow_labels import STUDY
from trainjob._pages.server import Server
from trainjob.cli import pages
from trainjob.errors import BackendUnavailable, ConfigurationError
from trainjob.job import key_hash
from trainjob.tuning.journal import journal_location, open_journal

SPEC = {"runtime": "torch-distributed", "command": ["python", "train.py"]}
SECONDS = 0.15
"""Age at which these servers read a job again."""
SECURE = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@pytest.fixture
def backend() -> CountingBackend:
    return CountingBackend()


@pytest.fixture
def client(backend: CountingBackend) -> Iterator[TrainJobClient]:
    with TrainJobClient(backend, "ns") as made:
        yield made


@pytest.fixture
def server(client: TrainJobClient) -> Iterator[Server]:
    with Server(client, seconds=SECONDS) as running:
        yield running


@pytest.fixture
def job(client: TrainJobClient, backend: CountingBackend) -> JobRef:
    ref = client.launch(SPEC, "study/train")
    backend.running(ref)
    return ref


def request(server: Server, path: str, method: str = "GET", host: str | None = None) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
        connection.endheaders()
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def get(server: Server, path: str) -> dict[str, Any]:
    response, body = request(server, f"/{server.token}/{path}")
    assert response.status == 200, body
    found: dict[str, Any] = json.loads(body)
    return found


def listed(server: Server, *keys: str) -> dict[str, dict[str, Any]]:
    """The jobs of the list by their keys, once these are among them: the server keeps what it has read for a moment."""

    def read() -> dict[str, dict[str, Any]] | None:
        found = {each["key"]: each for each in get(server, "document.json")["jobs"]}
        return found if found.keys() >= set(keys) else None

    return eventually(read)


def raw(server: Server, text: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
        connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


# --- access


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "",
        "/document.json",
        "/{token}x/",
        "/{short}/",
        "/x/{token}/",
        "/?token={token}",
        "http://127.0.0.1/{token}/",
        "/é/",
        "/" + "x" * 5000,
    ],
)
def test_a_path_without_the_token_is_not_found(server: Server, path: str) -> None:
    path = path.format(token=server.token, short=server.token[:-1])
    answer = raw(server, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    if path:  # without one, the request line is that of HTTP/0.9
        assert head.split(b"\r\n")[0].split()[1] == b"404"
    assert body == b""
    assert server.token.encode() not in answer
    assert b"trainjob" not in answer


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("localhost:{port}", 200),
        ("LOCALHOST:{port}", 200),
        ("127.0.0.1", 404),
        ("localhost:1", 404),
        ("evil.test:{port}", 404),
        ("127.0.0.1:{port}@evil.test", 404),
        ("[::1]:{port}", 404),
        ("", 404),
        (None, 404),
        ("localhost:{port}\r\nHost: evil.test", 404),
    ],
)
def test_only_the_host_of_this_machine_is_served(server: Server, host: str | None, status: int) -> None:
    line = "" if host is None else f"Host: {host.format(port=server.server_port)}\r\n"
    assert raw(server, f"GET /{server.token}/ HTTP/1.1\r\n{line}\r\n".encode()).split()[1] == str(status).encode()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "get"])
def test_only_reads_are_served(server: Server, method: str) -> None:
    response, body = request(server, f"/{server.token}/", method)
    assert (response.status, response.headers["Allow"], body) == (405, "GET, HEAD", b"")


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/{token}/", 200, "text/html"),
        ("/{token}/document.json", 200, "application/json"),
        ("/{token}/jobs/nosuch/", 404, "text/html"),
        ("/nosuch/", 404, "text/plain"),
        ("/{token}", 308, "text/plain"),
    ],
)
def test_every_answer_has_the_headers(server: Server, path: str, status: int, kind: str) -> None:
    for method in ("GET", "HEAD"):
        response, body = request(server, path.format(token=server.token), method)
        assert response.status == status
        assert response.headers["Content-Type"] == f"{kind}; charset=utf-8"
        assert {name: response.headers[name] for name in SECURE} == SECURE
        assert "Server" not in response.headers
        assert not (method == "HEAD" and body)


@pytest.mark.parametrize(
    "path",
    [
        "jobs/../../../etc/passwd/",
        "jobs/%2e%2e/",
        "jobs/UPPER/",
        "jobs/<script>/",
        "jobs/x%00/",
        "jobs//",
        "jobs/x/other",
        "jobs/x/document.json?rank=../../secret",
        "runs/../",
        "runs/ABCDEF0123456789/",
        "runs/0123456789abcdef/",
        "nosuch",
    ],
)
def test_names_are_checked_before_anything_is_read(server: Server, backend: CountingBackend, path: str) -> None:
    eventually(lambda: backend.reads)  # by the server itself
    backend.reads.clear()
    response, body = request(server, f"/{server.token}/{path}".replace("<", "%3C"))
    assert response.status == 404
    assert b"script" not in body
    assert set(backend.reads) <= {"find"}


def test_nothing_is_logged(server: Server, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for path in (f"/{server.token}/", f"/{server.token}/nosuch", "/nosuch"):
        request(server, path)
    raw(server, b"\x16\x03\x01garbage\r\n\r\n")
    with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
        connection.sendall(f"GET /{server.token}/ HTTP/1.1\r\n".encode())
    assert server.token not in "".join([*capfd.readouterr(), caplog.text])


def test_each_server_has_another_token(client: TrainJobClient) -> None:
    servers = [Server(client) for _ in range(5)]
    assert len({each.token for each in servers}) == 5
    assert all(len(each.token) >= 43 for each in servers)
    for each in servers:
        each.server_close()


def test_connections_that_send_nothing_do_not_stop_the_others(server: Server) -> None:
    silent = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(40)]
    assert get(server, "document.json")["kind"] == "list"
    for each in silent:
        each.close()


# --- documents


def test_the_list_links_to_jobs_and_workflows(
    server: Server, client: TrainJobClient, backend: CountingBackend, job: JobRef
) -> None:
    client.launch(SPEC, "study/other")
    client.launch(SPEC, "alone/train")
    client.launch(SPEC, "airflow/a", origin={"dag_id": "digits", "run_id": "manual", "task_id": "train"})
    found = listed(server, "alone/train", "airflow/a")
    assert found["study/train"]["href"] == f"jobs/{job.name}/"
    assert found["study/train"]["workflow"] == "study/"
    assert found["study/train"]["workflow_href"] == found["study/other"]["workflow_href"] != ""
    assert (found["alone/train"]["workflow"], found["alone/train"]["workflow_href"]) == ("", "")
    assert found["airflow/a"]["workflow"] == "DAG digits, run manual"
    backend.report(job, 42, {"loss": 0.5})
    compared = get(server, found["study/train"]["workflow_href"] + "document.json")
    assert (compared["kind"], compared["title"]) == ("workflow", "study/")
    assert [each["key"] for each in compared["trainings"]] == ["study/train", "study/other"]
    assert compared["trainings"][0]["href"] == f"../../jobs/{job.name}/"
    assert [len(each["logs"]) for each in compared["trainings"]] == [0, 0]


def test_the_trials_of_a_study_have_one_page(
    server: Server, client: TrainJobClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRAINJOB_HOME", str(tmp_path))
    labels = {STUDY: key_hash("search/a"), "dag_id": "digits", "run_id": "manual"}
    trials = [client.launch(SPEC, f"search/a/{number}", origin=labels) for number in range(2)]
    found = listed(server, "search/a/0", "search/a/1")
    assert found["search/a/0"]["workflow"] == "search/a"
    page = found["search/a/0"]["workflow_href"] + "document.json"
    assert get(server, page)["kind"] == "workflow", "the journal is not in this workspace"
    with open_journal(journal_location(key_hash("search/a"))) as journal:
        space = {"x": {"type": "float", "low": 0, "high": 1}}
        fields = {"space": space, "metric": "loss", "direction": "minimize"}
        header = {"format": 1, "study": fields, "template": {}, "key": "search/a", "namespace": "ns", "began": 1.0}
        journal.create("study", header)
        journal.create("launches/00000", {"max_trials": 3, "parallel": 1})
        journal.create("asked/00000", {"parameters": {"x": 0.5}})
        journal.create("ended/00000", {"state": "complete", "value": 0.25, "job": trials[0].name})
    document = eventually(lambda: (shown := get(server, page))["kind"] == "study" and shown["best"] == 0 and shown)
    assert document["state"] == "running"
    assert document["trials"][0]["href"] == f"../../jobs/{trials[0].name}/"


def test_an_outage_is_noted_in_what_was_read_last(server: Server, backend: CountingBackend, job: JobRef) -> None:
    path = f"jobs/{job.name}/document.json"
    before = get(server, path)
    assert before["notes"] == []
    backend.broken = BackendUnavailable("the API server is away: <b>")
    during = eventually(lambda: (shown := get(server, path))["notes"] and shown)
    assert during["notes"] == ["The jobs cannot be read now: the API server is away: <b>"]
    assert during["taken"] == before["taken"]
    listed = get(server, "document.json")
    assert listed["notes"] == during["notes"]
    backend.broken = None
    eventually(lambda: get(server, path)["notes"] == [] or None, timeout=5)
    assert get(server, path)["taken"] > before["taken"]


def test_an_outage_from_the_beginning(client: TrainJobClient, backend: CountingBackend, job: JobRef) -> None:
    backend.broken = BackendUnavailable("away")
    with Server(client, seconds=SECONDS) as server:
        assert get(server, "document.json")["jobs"] == []
        response, body = request(server, f"/{server.token}/jobs/{job.name}/")
        assert (response.status, response.headers["Refresh"]) == (503, "5")
        assert b"The jobs cannot be read now: away" in body
        backend.broken = None
        eventually(lambda: get(server, "document.json")["jobs"], timeout=5)


def test_a_backend_that_does_not_answer(
    server: Server, backend: CountingBackend, job: JobRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainjob._pages.shared_documents._ANSWER_SECONDS", 0.2)
    path = f"jobs/{job.name}/document.json"
    get(server, path)
    backend.delay = 1.0
    assert eventually(lambda: get(server, path)["notes"]) == ["The jobs cannot be read now: no answer within 0 s"]


@pytest.mark.parametrize("left", [False, True], ids=["nothing is left of it", "an Event is left"])
def test_a_job_that_was_deleted_keeps_its_last_state(
    server: Server, backend: CountingBackend, job: JobRef, left: bool
) -> None:
    path = f"jobs/{job.name}/document.json"
    backend.report(job, 42, {"loss": 0.5})
    assert get(server, path)["progress"] == 42
    backend.store.delete("trainjobs", job.name, {}, "Background", job.namespace)
    if left:
        backend.event(job, "Killing", "x")
    last = eventually(lambda: (shown := get(server, path))["notes"] and shown)
    assert (last["phase"], last["progress"], last["metrics"]) == ("Deleted", 42, {"loss": 0.5})
    assert last["notes"] == ["The TrainJob was deleted. This is the state that was read last."]


def test_another_job_with_the_name_of_a_deleted_one_has_no_metrics_of_it(
    server: Server, client: TrainJobClient, backend: CountingBackend, job: JobRef
) -> None:
    path = f"jobs/{job.name}/document.json"

    def shows(uid: str) -> bool:
        return list(get(server, path)["history"]) == [uid]

    for uid in ("first", "second"):
        present = backend.jobs[job.namespace, job.name]
        backend.store.put("trainjobs", {**present, "metadata": {**present["metadata"], "uid": uid}})
        backend.report(JobRef(job.namespace, job.name, uid), 42, {uid: 0.5})
        eventually(partial(shows, uid))
        backend.condition(JobRef(job.namespace, job.name, uid), "Suspended", "x")


def test_metrics_are_collected_while_no_page_is_open(
    client: TrainJobClient, backend: CountingBackend, job: JobRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainjob._pages.shared_documents._COLLECT_SECONDS", 0.05)
    with Server(client, seconds=0.05) as server:
        for loss in (3.0, 2.0, 1.0):
            backend.report(job, 10, {"loss": loss})
            backend.reads.clear()
            eventually(lambda: len(backend.reads) > 1)
        history = get(server, f"jobs/{job.name}/document.json")["history"]
        assert list(dict.fromkeys(value for _, _, value in history["loss"])) == [3, 2, 1]


# --- the command


def test_a_port_is_in_use_until_the_end(client: TrainJobClient) -> None:
    with Server(client) as server:
        port = server.server_port
        with pytest.raises(ConfigurationError, match=rf"port {port} on 127\.0\.0\.1 cannot be used: Address"):
            Server(client, port)
    with Server(client, port) as server:
        get(server, "document.json")


def test_the_token_is_in_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    shown = threading.Event()

    def show(address: str) -> bool:
        opened.append(address)
        shown.set()
        return True

    monkeypatch.setattr(webbrowser, "open", show)
    with pages._browser("http://127.0.0.1:1/secret/"):
        assert shown.wait(5)
        path = Path(urlsplit(opened[0]).path)
        assert "secret" not in opened[0]
        assert "http://127.0.0.1:1/secret/" in path.read_text()
        assert path.parent.stat().st_mode & 0o077 == 0
    assert not path.exists()
