"""Crashes of jobs that keep running, since Trainer's runtimes restart ranks: reported at once, fatal on request.

The limits are generous, since the machine can be busy.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from tests.cluster.launchers import launcher_environment
from tests.cluster.waits import until, until_phase
from tests.cluster.wires import Wires
from tests.kfp.conftest import Steps
from tests.processes import wait_until
from tests.testcluster import images
from tests.testcluster.access import RULES, TRAINER, Access
from tests.testcluster.nodes import simulate

from trainjob import JobRef, Phase, TrainJobSpec, WaitOptions
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import Timings
from trainjob._diagnosis import diagnosis_of
from trainjob._jobs.cancellation import cancel, give_up
from trainjob._jobs.launching import launch
from trainjob._jobs.report import diagnose as report_of
from trainjob._jobs.waiting import wait
from trainjob.errors import RankCrashed
from trainjob.status import Observation, observe
from trainjob.verdicts import Evidence

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

SOON = 30  # seconds, on a busy machine
# One crash only: after six more the job would fail, and its pods would be deleted before all listeners see them.
CRASHING = simulate(run="200ms", exit_code=3, ranks="1", failures="1")


def spec(**fields: Any) -> TrainJobSpec:
    return TrainJobSpec.parse({"runtime": "torch-distributed", "num_nodes": 2, **fields})


# ---------------------------------------------------------------- the watch of pods


async def first_crash(backend: KubernetesBackend, ref: JobRef) -> Evidence:
    with anyio.fail_after(60):
        async with aclosing(backend.crashes(ref)) as found:
            return await anext(found)


def first_failure(evidence: Evidence) -> tuple[str, int | None]:
    diagnosis = diagnosis_of(evidence, Observation(Phase.FAILED))
    return diagnosis.rank, diagnosis.exit_code


async def test_all_listeners_of_a_namespace_share_one_watch_of_pods(wires: Wires) -> None:
    async with wires.open(Timings(), shared=True) as (backend, proxy):
        crashing = [await launch(backend, spec(env=CRASHING), key, namespace=wires.namespace) for key in ("a", "b")]
        quiet = await launch(backend, spec(env=simulate(run="never")), "quiet", namespace=wires.namespace)
        looks = len(proxy.seen("GET", "/pods"))  # of launches, for ranks of earlier attempts
        found: dict[int, tuple[str, int | None]] = {}

        async def listen(number: int, ref: JobRef) -> None:
            found[number] = first_failure(await first_crash(backend, ref))

        async with anyio.create_task_group() as tasks:
            for number, ref in enumerate([*crashing, *crashing, quiet]):
                tasks.start_soon(listen, number, ref)
            await until(lambda: len(found) == 4)
            assert found == dict.fromkeys(range(4), ("node-1", 3)), "the fifth listener's job has no crash"
            # A later listener gets the earlier crash without a request: the watch has the pods.
            assert first_failure(await first_crash(backend, crashing[0])) == ("node-1", 3)
            assert len(proxy.seen("WATCH", "/pods")) == 1
            assert len(proxy.seen("GET", "/pods")) == looks + 1
            tasks.cancel_scope.cancel()
        await first_crash(backend, crashing[1])
        assert len(proxy.seen("WATCH", "/pods")) == 2, "the watch was closed when it had no listener"


async def test_a_terminated_rank_has_not_crashed(cluster: Access, namespace: str) -> None:
    """The containers of suspended, preempted and cancelled jobs end by SIGTERM."""
    backend = KubernetesBackend(Credentials(kubeconfig=str(cluster.kubeconfig)))
    ref = await launch(backend, spec(env=simulate(run="never")), "a", namespace=namespace)
    await until_phase(backend, ref, Phase.RUNNING)
    found: list[Evidence] = []

    async def listen() -> None:
        async with aclosing(backend.crashes(ref)) as crashes:
            async for evidence in crashes:
                found.append(evidence)  # noqa: PERF401 - a comprehension would lose the crashes found before the cancellation

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listen)
        await backend.patch(ref, {"spec": {"suspend": True}})
        with anyio.fail_after(60):
            while not await backend.stopped(ref):
                await anyio.sleep(0.1)
        await anyio.sleep(2)  # longer than the interval in which crashes are reported together
        tasks.cancel_scope.cancel()
    assert found == []
    await cancel(backend, ref)
    await backend.aclose()


async def test_without_permission_to_list_pods_a_warning_is_logged(
    cluster: Access, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = KubernetesBackend(Credentials(kubeconfig=str(cluster.kubeconfig_for(RULES[:1], namespace))))
    ref = await launch(backend, spec(env=simulate(run="3s")), "a", namespace=namespace)
    with anyio.fail_after(90):
        assert (await wait(backend, ref, WaitOptions(fail_on_first_crash=True))).uid == ref.uid
    assert f"crashes of ranks of TrainJob {ref} cannot be reported while it runs: 403" in caplog.text
    await backend.aclose()


# ---------------------------------------------------------------- real pods

# Without a handler, the first process of a container ignores SIGTERM and runs 30 s longer.
CRASH = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
if os.environ["PET_NODE_RANK"] == "1":
    time.sleep(1)
    print("ValueError: the data is wrong", flush=True)
    sys.exit(3)
time.sleep(600)
"""
REAL = {"image": images.PYTHON, "command": ["python3", "-c", CRASH]}
MESSAGES = ("node-1 exited with code 3", "  | ValueError: the data is wrong")

# Airflow reads its home at its first import, so it cannot run in this process. No server provides connections here.
TRIGGER = """
import asyncio, json, logging, sys
from trainjob_airflow.hooks.trainjob import Target, TrainJobHook
from trainjob_airflow.triggers.trainjob import TrainJobTrigger

async def none(self):
    return Target()

async def main(job):
    trigger = TrainJobTrigger(trainjob_conn_id="trainjob_default", get_logs=False, **job)
    trigger._log = logging.getLogger("trigger")
    async for event in trigger.run():
        print(json.dumps(event.payload), flush=True)

TrainJobHook._aresolve = none
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s", force=True)
logging.getLogger("httpx").setLevel(logging.WARNING)
asyncio.run(main(json.loads(sys.argv[1])))
"""


class Waiters:
    """The ways to wait for a job on the real node, each in a separate process, all in parallel."""

    def __init__(self, cluster: Access, namespace: str, directory: Path) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.directory = directory
        settings = {"TRAINJOB_BACKEND": "kubernetes", "TRAINJOB_NAMESPACE": namespace, "NO_COLOR": "1"}
        self.settings = {**settings, "KUBECONFIG": str(cluster.kubeconfig), "AIRFLOW_HOME": str(directory)}
        self.environment = {**launcher_environment(), **self.settings}

    async def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        run = partial(subprocess.run, command, capture_output=True, text=True, timeout=300)
        return await anyio.to_thread.run_sync(lambda: run(env=self.environment, cwd=self.directory, check=False))

    async def trainjob(self, *words: str) -> subprocess.CompletedProcess[str]:
        return await self.run(str(Path(sys.executable).parent / "trainjob"), *words)

    def pods(self, name: str) -> list[dict[str, Any]]:
        return self.cluster.api.find("v1", "Pod", self.namespace, labels=f"jobset.sigs.k8s.io/jobset-name={name}")

    def since_crash(self, name: str) -> float:
        """Seconds since a container of the job first ended by itself, by its pods."""
        ends = [
            datetime.fromisoformat(state["terminated"]["finishedAt"])
            for pod in self.pods(name)
            for status in pod["status"].get("containerStatuses") or []
            for state in (status.get("state") or {}, status.get("lastState") or {})
            if (state.get("terminated") or {}).get("exitCode") == 3
        ]
        return (datetime.now(UTC) - min(ends)).total_seconds() if ends else 0.0

    def keeps_running(self, name: str) -> bool:
        phase = observe(self.cluster.api.get(TRAINER, "TrainJob", self.namespace, name)).phase
        return phase in (Phase.STARTING, Phase.RUNNING, Phase.RESTARTING)


async def by_the_core(waiters: Waiters) -> None:
    backend = KubernetesBackend(Credentials(kubeconfig=str(waiters.cluster.kubeconfig)))
    ref = await launch(backend, spec(**REAL), "core", namespace=waiters.namespace)
    with pytest.raises(RankCrashed) as caught:
        await wait(backend, ref, WaitOptions(fail_on_first_crash=True))
    assert waiters.since_crash(ref.name) < SOON
    diagnosis = caught.value.diagnosis
    assert (diagnosis.rank, diagnosis.exit_code) == ("node-1", 3)
    assert diagnosis.log == ("ValueError: the data is wrong",), diagnosis
    assert waiters.keeps_running(ref.name)
    assert await give_up(backend, ref, diagnosis) == f"{ref} was suspended"
    await anyio.to_thread.run_sync(lambda: wait_until("its pods are gone", lambda: not waiters.pods(ref.name), 90))
    report = await report_of(backend, waiters.namespace, ref.name)
    assert report.ranks == [], "the pods are deleted, but the report keeps the diagnosis"
    assert (report.given_up, report.diagnosis.log) == (True, diagnosis.log)
    second = await launch(backend, spec(**REAL), "core", namespace=waiters.namespace)
    assert second.attempt == 2
    await cancel(backend, second)
    await backend.aclose()


async def by_the_command_line(waiters: Waiters) -> None:
    """Keep the job, so that a restarted waiter finds the past crash."""
    words = ["--runtime", "torch-distributed", "--num-nodes", "2", "--image", images.PYTHON]
    options = ["--fail-on-first-crash", "--on-crash-action", "keep", "--no-logs", "--key", "cli"]
    done = await waiters.trainjob("run", *options, *words, "--", *REAL["command"])
    name = next(word for word in done.stderr.split() if word.startswith(f"{waiters.namespace}/")).partition("/")[2]

    def crashed_again() -> bool:
        """The kubelet has removed the container of the first run, but the pod's status still has its end."""
        states = [status for pod in waiters.pods(name) for status in pod["status"]["containerStatuses"]]
        return any("terminated" in each["state"] and "terminated" in each["lastState"] for each in states)

    await anyio.to_thread.run_sync(lambda: wait_until("it has crashed again", crashed_again, 60))
    for again in (done, await waiters.trainjob("wait", name, "--fail-on-first-crash", "--no-logs")):
        assert again.returncode == 1, again.stderr
        assert f"{waiters.namespace}/{name} keeps running" in again.stderr
        for message in MESSAGES:
            assert message in again.stderr, again.stderr
    found = await waiters.trainjob("diagnose", name)
    assert found.returncode == 0, "the job keeps running"
    page = await waiters.trainjob("report", name, "-o", str(waiters.directory / "report.html"))
    assert page.returncode == 0, page.stderr
    for text in (found.stdout, (waiters.directory / "report.html").read_text()):
        assert "exited with code 3" in text
        assert "ValueError: the data is wrong" in text
    assert (await waiters.trainjob("cancel", name)).returncode == 0


async def by_a_pipeline(waiters: Waiters) -> None:
    steps = Steps(waiters.directory, {**waiters.settings, "TRAINJOB_WORKSPACE": "s3://nowhere/at-all"})
    parameters: dict[str, Any] = {**REAL, "runtime": "torch-distributed", "num_nodes": 2, "fail_on_first_crash": True}
    process = steps.start("train", **parameters, on_crash_action="cancel")
    ended = await anyio.to_thread.run_sync(lambda: steps.end("train", process, 300))
    assert ended.code == 1, ended.log
    assert "was deleted" in ended.log
    for message in MESSAGES:
        assert message in ended.termination_message


DAG = """
from airflow.sdk import DAG
from trainjob_airflow.operators.trainjob import TrainJobOperator

with DAG("crashes"):
    runtime = {"runtime": "torch-distributed", "num_nodes": 2}
    TrainJobOperator(task_id="train", deferrable=False, fail_on_first_crash=True, **runtime, **REAL)
"""


async def by_an_airflow_task(waiters: Waiters, home: Path) -> None:
    dags = waiters.directory / "dags"
    dags.mkdir()
    (dags / "crashes.py").write_text(f"REAL = {REAL!r}\n{DAG}")
    connection = {"conn_type": "trainjob", "extra": {"backend": "kubernetes", "namespace": waiters.namespace}}
    waiters.environment |= {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "AIRFLOW_CONN_TRAINJOB_DEFAULT": json.dumps(connection),
    }
    done = await waiters.run("airflow", "dags", "test", "crashes")
    assert done.returncode == 1, done.stdout + done.stderr
    for message in (*MESSAGES, "was suspended"):
        assert message in done.stdout + done.stderr


async def by_a_trigger(waiters: Waiters, *, fatal: bool) -> None:
    key = f"trigger-{fatal}"
    backend = KubernetesBackend(Credentials(kubeconfig=str(waiters.cluster.kubeconfig)))
    ref = await launch(backend, spec(**REAL), key, namespace=waiters.namespace)
    job = {"namespace": ref.namespace, "name": ref.name, "uid": ref.uid, "attempt": 1}
    job |= {"key": key, "tried": 1, "fail_on_first_crash": fatal}
    command = [sys.executable, "-c", TRIGGER, json.dumps(job)]
    log = ""
    async with await anyio.open_process(command, cwd=waiters.directory, env=waiters.environment) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        async for text in process.stderr:
            log += text.decode()
            if MESSAGES[-1] in log:
                await backend.delete(ref)
        event = json.loads(b"".join([text async for text in process.stdout]).splitlines()[-1])
    if fatal:
        assert event["status"] == "crashed", log
        assert event["diagnosis"]["log"] == ["ValueError: the data is wrong"]
        assert waiters.keeps_running(ref.name), "the worker decides what happens to the job"
    else:
        assert (event["status"], event["final"]["phase"]) == ("failed", "Deleted")
        for message in MESSAGES:
            assert message in log, "reported while the job runs"
        assert "ValueError: the data is wrong" in json.dumps(event["crash"]), (
            "the event keeps it after the deletion of the pods"
        )
    await cancel(backend, ref)
    await backend.aclose()


@pytest.mark.timeout(400)
async def test_every_provider_reports_the_first_crash(real_node: Access, airflow_home: Path, tmp_path: Path) -> None:
    with real_node.namespace("real", real=True) as namespace:
        clients: list[Callable[[Waiters], Any]] = [by_the_core, by_the_command_line, by_a_pipeline]
        of_airflow: list[Callable[[Waiters], Any]] = [partial(by_an_airflow_task, home=airflow_home)]
        of_airflow += [partial(by_a_trigger, fatal=True), partial(by_a_trigger, fatal=False)]
        # In two groups: each starts a large program, and the kubelet keeps only the log of the previous run.
        for number, group in enumerate((clients, of_airflow)):
            async with anyio.create_task_group() as tasks:
                for client in group:
                    directory = tmp_path / f"{number}-{group.index(client)}"
                    directory.mkdir()
                    tasks.start_soon(client, Waiters(real_node, namespace, directory))
