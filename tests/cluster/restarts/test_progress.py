"""`trainjob.progress` and Trainer's status server: reports of running pods, and their effects."""

from __future__ import annotations

import re
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from tests.cluster.backends import backend_of
from tests.cluster.launchers import launcher_environment, run
from tests.cluster.pods import pods_of
from tests.processes import wait_until
from tests.testcluster.access import TRAINER, Access, trainjob
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import simulate
from tests.testcluster.real_node import why_unsupported

from trainjob import JobRef, Observation, Phase, TrainJobClient
from trainjob._jobs.waiting import wait
from trainjob.progress import trainer_api

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def reporting(own_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with Trainer's feature gate on."""
    if why := why_unsupported():
        pytest.skip(f"NO STATUS SERVER OF TRAINER: {why}")
    with own_cluster.status_api():
        yield own_cluster


def status(cluster: Access, namespace: str, name: str) -> dict[str, Any]:
    found = cluster.api.get(TRAINER, "TrainJob", namespace, name) or {}
    return dict(found.get("status", {}).get("trainerStatus") or {})


def metrics(reported: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in reported.get("metrics") or []}


# ---------------------------------------------------------------- reports from this machine, as from a pod


@dataclass
class Line:
    """Access to the status server: the settings that Trainer gives to a pod."""

    cluster: Cluster
    namespace: str
    job: str
    directory: Path

    @property
    def audience(self) -> str:
        return f"trainer.kubeflow.org/v1alpha1/namespaces/{self.namespace}/trainjobs/{self.job}/status"

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.cluster.layout.ports['trainer-status']}/apis/{self.audience}"

    @property
    def token(self) -> Path:
        return self.directory / "token"

    def environment(self, **others: str) -> dict[str, str]:
        return {
            **launcher_environment(),
            "KUBEFLOW_TRAINER_SERVER_URL": self.url,
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(self.cluster.layout.authority.certificate),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(self.token),
            **others,
        }

    def sign(self, **claims: Any) -> str:
        """A token like that of the API server for a pod of the job, except for `claims`."""
        now = int(time.time())
        usual = {
            "iss": self.cluster.layout.server,
            "aud": [self.audience],
            "iat": now,
            "nbf": now,
            "exp": now + 3600,
            "sub": f"system:serviceaccount:{self.namespace}:default",
            "kubernetes.io": {"namespace": self.namespace},
        }
        key = self.cluster.layout.service_accounts.key.read_text()
        return jwt.encode(usual | claims, key, algorithm="ES256")


@pytest.fixture
def line(reporting: Cluster, namespace: str, tmp_path: Path) -> Line:
    """Access for a job whose simulated pods run."""
    reporting.api.create(trainjob("job", namespace, trainer={"numNodes": 1, "env": simulate(run="never")}))
    opened = Line(reporting, namespace, "job", tmp_path)
    opened.token.write_text(opened.sign())
    return opened


def script(body: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, time\nfrom trainjob import progress\n{body}"]


def test_trainer_accepts_reports(line: Line, tmp_path: Path) -> None:
    body = """
progress.report(progress=12.9, metrics={"loss": float("nan"), "step": 3}, remaining_seconds=60)
progress.report(metrics={f"m{i}": i for i in range(200)})
"""
    run(line.environment(), tmp_path, *script(body))
    reported = status(line.cluster, line.namespace, "job")
    assert (reported["progressPercentage"], reported["estimatedRemainingSeconds"]) == (12, 60)
    assert metrics(reported) == {"loss": "nan", "step": "3"} | {f"m{i}": str(i) for i in range(200)}


def test_an_expired_token_is_reloaded(line: Line, tmp_path: Path) -> None:
    """The kubelet renews the file while the training runs; no report is lost."""
    line.token.write_text(line.sign(exp=int(time.time()) - 60))
    body = """
progress.report(progress=1)
while "HTTP 403" not in open(sys.argv[1]).read():
    time.sleep(0.05)
progress.report(progress=2)
print("continues", flush=True)
sys.stdin.read()
"""
    with (tmp_path / "errors").open("w") as errors:
        command = [*script(body), str(tmp_path / "errors")]
        with subprocess.Popen(
            command, env=line.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        ) as process:
            assert process.stdout
            assert process.stdin
            assert process.stdout.readline() == b"continues\n"
            assert status(line.cluster, line.namespace, "job") == {}
            line.token.write_text(line.sign())
            process.stdin.close()
            assert process.wait(30) == 0
    assert status(line.cluster, line.namespace, "job")["progressPercentage"] == 2
    assert (tmp_path / "errors").read_text().count("trainjob.progress: status API failed, the training continues") == 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another job's token": ({"aud": ["trainer.kubeflow.org/v1alpha1/namespaces/x/trainjobs/x/status"]}, "HTTP 403"),
    "another namespace's token": ({"kubernetes.io": {"namespace": "default"}}, "HTTP 403"),
    "another authority": ({}, "CERTIFICATE_VERIFY_FAILED"),
    "no such job": ({}, "HTTP 404"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_report_does_not_fail_the_training(line: Line, tmp_path: Path, what: str) -> None:
    claims, message = REFUSED[what]
    others = {}
    if what == "another authority":
        others["KUBEFLOW_TRAINER_SERVER_CA_CERT"] = str(line.cluster.layout.client.certificate)
    if what == "no such job":
        line.job = "nosuch"
    line.token.write_text(line.sign(**claims))
    environment = line.environment(**others)
    output = run(environment, tmp_path, *script("progress.report(progress=5)\nprint('trained')"), timeout=60)
    assert "trained" in output
    assert output.count("status API failed, the training continues") == 1
    assert message in output
    assert status(line.cluster, line.namespace, "job") == {}


# The reports of Hugging Face's KubeflowCallback (transformers 5, integrations/integration_utils.py): the names, the
# format of the time, and complete states, each of which replaces the previous one.
HUGGING_FACE: list[tuple[int, dict[str, str]]] = [
    (0, {"total_steps": "10"}),
    (50, {"loss": "0.5", "learning_rate": "5e-05", "current_step": "5", "total_steps": "10"}),
    (100, {"loss": "0.25", "learning_rate": "0.0", "train_runtime": "14.2"}),
]


def test_reports_of_hugging_face_are_read(reporting: Cluster, namespace: str, tmp_path: Path) -> None:
    backend = backend_of(reporting.kubeconfig)
    with TrainJobClient(backend, namespace) as client:
        spec = {"runtime": "torch-distributed", "env": simulate(run="10s")}
        ref = client.launch(spec, "hugging-face")
        line = Line(reporting, namespace, ref.name, tmp_path)
        seen: list[Observation] = []
        waiting = client.start(lambda: wait(backend, ref, on_change=lambda latest, _: seen.append(latest)))
        wait_until("the job runs", lambda: any(each.phase is Phase.RUNNING for each in seen), 60)
        tls = ssl.create_default_context(cafile=reporting.layout.authority.certificate)
        with httpx.Client(verify=tls, headers={"Authorization": f"Bearer {line.sign()}"}) as http:
            for percent, named in HUGGING_FACE:
                state: dict[str, Any] = {"estimatedRemainingSeconds": (100 - percent) // 7}
                state |= {"progressPercentage": percent, "lastUpdatedTime": "2026-11-21T10:00:00.123456+00:00"}
                state["metrics"] = [{"name": name, "value": value} for name, value in named.items()]
                assert http.post(line.url, json={"trainerStatus": state}).status_code == 200
                wait_until(f"the waiter sees {percent} %", lambda: percent in [each.progress for each in seen], 30)  # noqa: B023
        result = waiting.result(60)
    half = next(each for each in seen if each.progress == 50)
    assert (half.phase, half.remaining_seconds, half.metrics["current_step"]) == (Phase.RUNNING, 7, 5)
    assert result.metrics == {"loss": 0.25, "learning_rate": 0.0, "train_runtime": 14.2}


# ---------------------------------------------------------------- reports from real pods

# Prints the duration of the longest update. The last ten updates are sent in a burst, then the program ends. If AWAY is
# set, it reports until connections to the status server fail with that error; only then it counts its STEPS.
REPORTS = """
import atexit, os, socket, ssl, time
from urllib.parse import urlsplit
def server():
    url = urlsplit(os.environ["KUBEFLOW_TRAINER_SERVER_URL"])
    try:
        with socket.create_connection((url.hostname, url.port), 1) as line:
            with ssl._create_unverified_context().wrap_socket(line):
                return "answers"
    except OSError as error:
        return type(error).__name__
ended = []
atexit.register(lambda: print(f"left after {time.monotonic() - ended[0]:.2f} s", flush=True))
from trainjob import progress
costs = []
step, left = 0, STEPS
while left:
    step += 1
    began = time.perf_counter()
    progress.report(progress=90 - 90 * left / (STEPS + 1), metrics={"loss": 1 / step, "step": step})
    costs.append(time.perf_counter() - began)
    time.sleep(0.1)
    if AWAY and step % 10 == 0 and server() == AWAY:
        AWAY = ""
    left -= not AWAY
for number in range(10):
    progress.report(progress=100, metrics={"loss": 0.001, "last_report": number}, outputs={"model": "s3://m"})
print(f"the longest update took {1000 * max(costs):.1f} ms")
ended.append(time.monotonic())
"""
FINAL = {"loss": 0.001, "last_report": 9.0}
POST_TIMEOUT = 1000 * trainer_api._POST_TIMEOUT  # ms


def reports(steps: int, away: str = "") -> str:
    """The program; `away` is the expected error of a connection to the unavailable server."""
    return f"STEPS, AWAY = {steps}, {away!r}\n{REPORTS}"


def numbers(text: str, before: str) -> float:
    found = re.search(f"{before} ([0-9.]+)", text)
    assert found, text
    return float(found[1])


def test_progress_is_shown_while_a_job_runs_and_the_last_report_is_kept(
    reporting: Cluster, real_namespace: str, step_image: str, tmp_path: Path
) -> None:
    settings = {"TRAINJOB_BACKEND": "kubernetes", "TRAINJOB_NAMESPACE": real_namespace}
    environment = {**launcher_environment(), **settings, "KUBECONFIG": str(reporting.kubeconfig)}
    spec = ["--runtime", "torch-distributed", "--image", step_image, "--key", "cli"]
    output = run(environment, tmp_path, "trainjob", "run", *spec, "--", "python", "-c", reports(80))
    shown = [float(percent) for percent in re.findall(r" progress ([0-9]+)%", output)]
    assert [percent for percent in shown if 0 < percent < 90], output
    assert shown == sorted(shown)
    assert numbers(output, "the longest update took") < POST_TIMEOUT, "an update waited for a request"
    (job,) = reporting.api.find(TRAINER, "TrainJob", real_namespace)
    with TrainJobClient(backend_of(reporting.kubeconfig), real_namespace) as client:
        assert client.wait(JobRef.of(job)).metrics == {**FINAL, "step": 80.0}
    if "status API failed" not in output:  # a server that is busy for the last 5 s has only earlier reports
        last = status(reporting, real_namespace, job["metadata"]["name"])
        assert last["progressPercentage"] == 100
        named = metrics(last)
        assert named.pop("trainjob.estimate") == "speed"
        assert {name: float(value) for name, value in named.items()} == {**FINAL, "step": 80.0}


def test_an_unavailable_server_does_not_delay_the_training(
    reporting: Cluster, real_namespace: str, step_image: str
) -> None:
    """The result has the reports that the server did not get: it is read from the termination message."""
    namespace = real_namespace
    with TrainJobClient(backend_of(reporting.kubeconfig), namespace) as client:

        def launched(key: str, away: str) -> JobRef:
            command = ["python", "-c", reports(20, away)]
            return client.launch({"runtime": "torch-resilient", "image": step_image, "command": command}, key)

        def ended(ref: JobRef) -> dict[str, Any] | None:
            (pod,) = pods_of(reporting, ref)
            return pod if pod["status"]["phase"] == "Succeeded" else None

        hanging, refused = launched("hanging", "TimeoutError"), launched("refused", "ConnectionRefusedError")
        try:
            for ref in (hanging, refused):
                wait_until("the job reports", lambda: status(reporting, namespace, ref.name), 60, poll=0.2)  # noqa: B023
            reporting.pause("trainer")
            pods = [wait_until("the pod ends", lambda: ended(hanging), 60, poll=0.2)]
            reporting.kill("trainer")
            pods.append(wait_until("the pod ends", lambda: ended(refused), 60, poll=0.2))
        finally:
            reporting.kill("trainer")
            reporting.start_component("trainer")
        for ref, pod in zip((hanging, refused), pods, strict=True):
            log = reporting.pod_log(namespace, pod["metadata"]["name"])
            assert numbers(log, "the longest update took") < POST_TIMEOUT
            assert numbers(log, "left after") < 10
            assert log.count("status API failed, the training continues") == 1
            result = client.wait(ref)
            last = status(reporting, namespace, ref.name)
            assert last["progressPercentage"] < 100, "the server was unavailable for the last report"
            assert float(metrics(last)["loss"]) > 0.001
            assert {name: result.metrics[name] for name in FINAL} == FINAL
            assert result.outputs == {"model": "s3://m"}
