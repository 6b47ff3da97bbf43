"""Planted secrets are stored only where Airflow encrypts them."""

from __future__ import annotations

import base64
import json
import re
import secrets
import subprocess
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from cryptography.fernet import Fernet, InvalidToken
from tests.airflow.system.airflow import Airflow
from tests.postgresql import PROGRAMS
from tests.processes import wait_until
from tests.testcluster import build
from tests.testcluster.access import TRAINER
from tests.testcluster.api import ApiError
from tests.testcluster.control_plane import Cluster

HERE, THERE = "planted_here", "planted_there"
FERNET = re.compile(rb"gAAAA[A-Za-z0-9_=-]{60,}")
BYTEA = re.compile(rb"\\\\x([0-9a-f]{8,})")
CONNECTIONS, VARIABLES = "table connection, decrypted", "table variable, decrypted"


def secret(what: str) -> str:
    return f"planted-{what}-{secrets.token_hex(12)}"


@dataclass
class Planted:
    """Planted secrets, and a search for them.

    Attributes:
        secrets: Kind of secret -> value.
        airflow: The Airflow that is searched.
    """

    airflow: Airflow
    trainings: Path
    secrets: dict[str, str] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)

    def clean(self) -> None:
        """Remove the connections and variables."""
        for path in self.made:
            self.airflow.http.delete(f"/api/v2/{path}").raise_for_status()

    def plant(self, what: str, value: str = "") -> str:
        self.secrets[what] = value or secret(what)
        return self.secrets[what]

    def connection(self, name: str, host: str = "", password: str = "", **extra: Any) -> None:
        self.made.append(f"connections/{name}")
        body = {"connection_id": name, "conn_type": "trainjob", "host": host, "password": password}
        answer = self.airflow.http.post("/api/v2/connections", json={**body, "extra": json.dumps(extra)})
        answer.raise_for_status()

    def variable(self, key: str, value: str) -> None:
        self.made.append(f"variables/{key}")
        self.airflow.http.post("/api/v2/variables", json={"key": key, "value": value}).raise_for_status()

    def seen(self, dag: str, run: str) -> dict[str, set[str]]:
        """Secret -> places where it can be read at this moment."""
        return self.search([*self._files(), *self.tables(), *self._answers(dag, run)])

    def search(self, texts: Iterable[tuple[str, bytes]]) -> dict[str, set[str]]:
        """Secret -> places of the texts that contain it."""
        found: dict[str, set[str]] = defaultdict(set)
        for place, text in texts:
            for what, value in self.secrets.items():
                if value.encode() in text:
                    found[what].add(place)
        return found

    def _files(self) -> Iterator[tuple[str, bytes]]:
        """Logs of all processes and tasks, and files of the local backend; `tables` searches the database."""
        ours = self.trainings / "secrets"
        for folder in (self.airflow.directory, self.trainings):
            for path in folder.rglob("*"):
                if path.is_file() and ours not in path.parents:
                    with suppress(FileNotFoundError):  # the file of a job that was cancelled meanwhile
                        yield f"file {path.relative_to(folder)}", path.read_bytes()

    def tables(self) -> Iterator[tuple[str, bytes]]:
        """All rows of all tables: raw, decompressed and decrypted."""
        fernet = Fernet(self.airflow.environment["AIRFLOW__CORE__FERNET_KEY"])
        url = self.airflow.environment["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"].replace("+psycopg2", "")
        command = [str(PROGRAMS[-1] / "pg_dump"), "--data-only", "--dbname", url]
        table = ""
        for line in subprocess.run(command, capture_output=True, check=True, timeout=60).stdout.splitlines():
            if line.startswith(b"COPY "):
                table = line.split()[1].decode().removeprefix("public.")
            yield f"table {table}", line
            for packed in BYTEA.findall(line):
                value = bytes.fromhex(packed.decode())
                yield f"table {table}", value
                try:
                    yield f"table {table}", zlib.decompress(value)
                except zlib.error:
                    continue
            for token in FERNET.findall(line):
                try:
                    yield f"table {table}, decrypted", fernet.decrypt(token)
                except InvalidToken:  # not encrypted with the key of this Airflow
                    continue

    def _answers(self, dag: str, run: str) -> Iterator[tuple[str, bytes]]:
        """Responses of Airflow's API to an administrator; the user interface shows the same."""
        paths = ["connections", "variables", "eventLogs", "assets/events", "importErrors", "jobs", "plugins"]
        paths += [f"connections/{each['connection_id']}" for each in self.airflow.get("connections")["connections"]]
        paths += [f"variables/{each['key']}" for each in self.airflow.get("variables")["variables"]]
        one = f"dags/{dag}/dagRuns/{run}"
        paths += [f"dags/{dag}/details", f"dagSources/{dag}", one, f"{one}/taskInstances"]
        for task in self.airflow.get(f"{one}/taskInstances")["task_instances"]:
            mine = f"{one}/taskInstances/{task['task_id']}"
            paths += [mine, f"{mine}/links", f"{mine}/tries", f"{mine}/xcomEntries", f"{mine}/state-store"]
            paths += [
                f"{mine}/xcomEntries/{each['key']}" for each in self.airflow.get(f"{mine}/xcomEntries")["xcom_entries"]
            ]
            paths += [f"{mine}/logs/{attempt}" for attempt in range(1, task["try_number"] + 1)]
        for path in paths:
            answer = self.airflow.http.get(f"/api/v2/{path}", params={"limit": 1000})
            assert answer.status_code == 200, (path, answer.text)
            yield f"answer {re.sub(r'/dagRuns/[^/]+', '', path)}", answer.content

    def over(self, dag: str, run: str) -> dict[str, str]:
        """Wait for the end of a run; return the states of its tasks."""
        self.airflow.over(dag, run, 500)
        found = self.airflow.get(f"dags/{dag}/dagRuns/{run}/taskInstances")["task_instances"]
        return {each["task_id"]: each["state"] for each in found}


@pytest.fixture
def planted(airflow: Airflow, trainings: Path) -> Iterator[Planted]:
    planted = Planted(airflow, trainings)
    yield planted
    planted.clean()


def kubeconfig(server: str, authority: str, user: dict[str, Any]) -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "it",
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            "clusters": [{"name": "it", "cluster": {"server": server, "certificate-authority-data": authority}}],
            "users": [{"name": "it", "user": user}],
        }
    )


def plugin(token: str) -> dict[str, Any]:
    """A user with an exec plugin, which reads the token from its environment."""
    version = "client.authentication.k8s.io/v1"
    code = (
        "import json, os; print(json.dumps({'apiVersion': '" + version + "', 'kind': 'ExecCredential', "
        "'status': {'token': os.environ['PLUGIN_TOKEN']}}))"
    )
    environment = [{"name": "PLUGIN_TOKEN", "value": token}]
    command = {"command": sys.executable, "args": ["-c", code], "env": environment, "interactiveMode": "Never"}
    return {"exec": {"apiVersion": version, **command}}


@dataclass
class ClusterRun:
    """A run whose jobs never start, since the cluster has no controllers; they time out.

    Attributes:
        jobs: All created jobs.
        while_deferred: Secret -> places while tasks were deferred.
    """

    planted: Planted
    cluster: Cluster
    run: str
    jobs: dict[str, Any]
    while_deferred: dict[str, set[str]]

    def check(self, found: dict[str, set[str]]) -> None:
        """Each secret is in a connection and nowhere else, except for files that TLS needs."""
        # TLS reads keys from files only: the kubernetes package keeps one while its process runs.
        keys = [self.planted.airflow.directory / place.removeprefix("file ") for place in found.pop("pem", ())]
        assert {path.parent.name for path in keys} <= {"tmp"}
        assert [path for path in keys if path.exists() and path.stat().st_mode & 0o077] == []
        assert found == {what: {CONNECTIONS} for what in self.planted.secrets if what != "pem"}


@pytest.fixture(scope="module")
def cluster_run(airflow: Airflow, trainings: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterRun]:
    """A real API server, with valid and invalid tokens and a client key."""
    if missing := build.missing("control-plane"):  # building takes a quarter of an hour, too long for this tier
        pytest.fail(f"not built here: {', '.join(each.name for each in missing)} (make cluster-programs)")
    planted, folder = Planted(airflow, trainings), tmp_path_factory.mktemp("cluster_run")
    with Cluster(folder / "cluster", controllers=False) as cluster:
        files = {"ca_file": str(folder / "ca.crt"), "backend": "kubernetes"}
        (folder / "ca.crt").write_bytes(cluster.layout.authority.certificate.read_bytes())
        server = cluster.layout.server
        limited = yaml.safe_load(cluster.kubeconfig_for().read_text())
        planted.plant("token", limited["users"][0]["user"]["token"])
        planted.connection("planted_cluster_token", server, planted.secrets["token"], **files)
        admin = cluster.kubeconfig.read_text()
        key = planted.plant("key", yaml.safe_load(admin)["users"][0]["user"]["client-key-data"])
        planted.plant("pem", base64.b64decode(key).decode().splitlines()[1])
        planted.connection("planted_cluster_key", secret_kube_config=admin, backend="kubernetes")
        planted.connection("planted_wrong_token", server, planted.plant("wrong"), **files)
        authority = yaml.safe_load(admin)["clusters"][0]["cluster"]["certificate-authority-data"]
        text = kubeconfig(server, authority, plugin(planted.plant("plugin")))
        planted.connection("planted_wrong_plugin", secret_kube_config=text, backend="kubernetes")
        text = f"users: [{{token: {planted.plant('broken')}\n : :"
        planted.connection("planted_wrong_text", secret_kube_config=text, backend="kubernetes")
        run = airflow.run(THERE)

        jobs: dict[str, Any] = {}
        deferred: set[str] = set()

        def all_exist() -> bool:
            jobs.update({each["metadata"]["uid"]: each for each in cluster.api.find(TRAINER, "TrainJob", "default")})
            for task in ("token_deferred", "key_deferred"):
                if airflow.task(THERE, run, task)["state"] == "deferred":
                    deferred.add(task)
            return len(jobs) == 3 and len(deferred) == 2

        wait_until("three jobs, two deferred tasks", all_exist, 240, ignore=(ApiError, httpx.HTTPError))
        yield ClusterRun(planted, cluster, run, jobs, planted.seen(THERE, run))
    planted.clean()


def test_on_a_cluster_while_tasks_are_deferred(cluster_run: ClusterRun) -> None:
    cluster_run.check(cluster_run.while_deferred)
    objects = json.dumps([*cluster_run.jobs.values()])
    assert [what for what, value in cluster_run.planted.secrets.items() if value in objects] == []


def test_on_this_machine(planted: Planted) -> None:
    token = planted.trainings / "secrets" / "planted" / "token"
    token.parent.mkdir(parents=True, exist_ok=True)
    token.write_text(planted.plant("reference"))
    planted.connection("planted_token", "https://nowhere.test", planted.plant("password"), backend="local")
    text = kubeconfig("https://nowhere.test", planted.plant("authority"), plugin(planted.plant("plugin")))
    planted.connection("planted_kubeconfig", backend="local", secret_kube_config=text)
    planted.variable("planted_api_key", planted.plant("variable"))
    planted.variable("planted_settings", json.dumps({"host": "h", "password": planted.plant("json")}))
    planted.variable("planted_note", planted.plant("public"))
    run = planted.airflow.run(HERE)

    def meanwhile() -> dict[str, set[str]] | None:
        """Secret -> places while the table of triggers has rows."""
        rows = [*planted.tables()]
        waits = any(place == "table trigger" and b"planted_token" in text for place, text in rows)
        return planted.search(rows) if waits else None

    while_deferred = wait_until("a task is deferred", meanwhile, 240, poll=0.5)
    states = planted.over(HERE, run)
    assert states == {
        **dict.fromkeys(("succeeds_worker", "succeeds_deferred", "public"), "success"),
        **dict.fromkeys(("fails_worker", "fails_deferred", "late_worker", "late_deferred"), "failed"),
        **dict.fromkeys(("literal", "argument", "option", "url", "variable", "json"), "failed"),
    }
    refused = "everyone who can see the job can read"
    for task, where in {"argument": "command[1]", "variable": "env.SETTING", "json": "env.SETTING"}.items():
        log = planted.airflow.log(HERE, run, task)
        assert refused in log
        assert where in log

    found = planted.seen(HERE, run)
    public = found.pop("public")
    assert found == {
        **{what: {CONNECTIONS} for what in ("password", "authority", "plugin")},
        **{what: {VARIABLES} for what in ("variable", "json")},
    }, "found where Airflow stores them, and nowhere else"
    while_deferred.pop("public")
    assert while_deferred == found
    tables = {place for place in public if place.startswith("table ")}
    assert {"table rendered_task_instance_fields", "table xcom", VARIABLES} <= tables
    task = f"answer dags/{HERE}/taskInstances/public"
    assert {task, f"{task}/xcomEntries/return_value", f"{task}/logs/1"} <= public
    files = {place for place in public if place.startswith("file ")}
    assert any(place.startswith("file jobs/planted/") for place in files), "the job's object"
    assert any(place.startswith("file logs/") and "task_id=public" in place for place in files)


def test_on_a_cluster_after_the_end(cluster_run: ClusterRun) -> None:
    planted, run = cluster_run.planted, cluster_run.run
    assert planted.over(THERE, run) == dict.fromkeys(
        ("token_worker", "token_deferred", "key_deferred", "wrong_token", "wrong_plugin", "wrong_text"), "failed"
    )
    assert cluster_run.cluster.api.find(TRAINER, "TrainJob", "default") == [], "timed out, and so cancelled"
    for task in ("wrong_token", "wrong_plugin"):
        assert "the credentials are refused" in planted.airflow.log(THERE, run, task)
    assert "neither YAML nor JSON" in planted.airflow.log(THERE, run, "wrong_text")
    cluster_run.check(planted.seen(THERE, run))
