"""KFP components in pods of the real node, with the rights that `trainjob install` gives: killed, retried, terminated.

The trials of Terminate print their seed: ``TRAINJOB_CHAOS_SEED`` repeats when each one is terminated and how long its
Python lives on, ``TRAINJOB_CHAOS_RUNS`` sets how many there are. tests/bench/kfp_step.py prints how soon a step has
created its job.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest
from tests.cluster import step_image as images
from tests.cluster.access import TRAINER, Access, condition
from tests.cluster.api import ApiError
from tests.cluster.control_plane import Cluster
from tests.cluster.kfp_steps import ACCOUNT, PASSED_ON, Execution, Steps, Try, admit, kill_python, time_left
from tests.cluster.nodes import variable
from tests.cluster.processes import wait_until

from trainjob.manifest import CANCELLED

pytestmark = pytest.mark.timeout(400)

SEED = os.environ.get("TRAINJOB_CHAOS_SEED") or secrets.token_hex(4)
RUNS = int(os.environ.get("TRAINJOB_CHAOS_RUNS", "100"))
STARTING = 4  # steps that start at the same time: a second of Python each
AT_ONCE = 20  # that wait at the same time, and are terminated one soon after the other
LATE = 61  # seconds that some of them wait first: a connection that nobody uses is closed after 60 s
ASKED = "SIGTERM: the TrainJob was asked to stop (suspend)"


@pytest.fixture(scope="module")
def steps(own_cluster: Cluster, step_image: str) -> Iterator[Steps]:
    """In a namespace whose pods are real, those of the jobs as well."""
    own_cluster.add_runtime(images.runtime(images.STEP_RUNTIME, step_image))
    with own_cluster.namespace("pipeline", real=True) as namespace:
        admit(own_cluster, namespace)
        yield Steps(own_cluster, namespace, step_image)


# The first process of a container has to ask for SIGTERM; otherwise it lives on for 30 s.
TRAINING = """
import os, signal, sys, time
from trainjob import progress
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("training on rank", os.environ["JOB_COMPLETION_INDEX"], flush=True)
progress.report(progress=50, metrics={"loss": 0.5})
time.sleep(float(sys.argv[1]))
"""
FAILING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
if os.environ["JOB_COMPLETION_INDEX"] == "1":
    raise ValueError("the data is wrong")
time.sleep(600)
"""


def training(seconds: float) -> Execution:
    """A real job that takes so long."""
    command = ["python", "-c", TRAINING, str(seconds)]
    return Execution("train", {"runtime": "trainjob-step", "command": command})


def pods(cluster: Access, namespace: str, job: str) -> list[str]:
    """Phases of a job's pods."""
    found = cluster.api.find("v1", "Pod", namespace, labels=f"jobset.sigs.k8s.io/jobset-name={job}")
    return [pod["status"]["phase"] for pod in found]


def suspended(trainjob: dict[str, Any] | None) -> bool:
    """Whether a step has told its job to stop, so that the next try goes on with it."""
    if trainjob is None:
        return False
    return CANCELLED in (trainjob["metadata"].get("annotations") or {}) and trainjob["spec"].get("suspend") is True


def until_training(steps: Steps, execution: Execution) -> dict[str, Any]:
    running = lambda: "Running" in pods(steps.cluster, steps.namespace, execution.job)  # noqa: E731
    wait_until("the training runs", running, 90, poll=0.2)
    job = steps.job(execution)
    assert job is not None
    return job


def only_job(steps: Steps, execution: Execution) -> dict[str, Any]:
    """The one job that all tries of an execution have made together."""
    found = steps.cluster.api.find(TRAINER, "TrainJob", steps.namespace)
    (job,) = [each for each in found if execution.run in each["metadata"]["annotations"]["trainjob.dev/key"]]
    return job


def test_a_step_is_killed_and_retried_and_returns_the_result_of_one_job(steps: Steps) -> None:
    execution = training(20)
    first = steps.start(execution)
    wait_until("its job is there", lambda: steps.job(execution), 60, poll=0.2)
    steps.vanish(first)  # its process lives on for a while; KFP runs the step again, without a word of a retry

    second = steps.start(execution)
    known = f"TrainJob {steps.namespace}/{execution.job} (attempt 1"
    wait_until("the second try has found it", lambda: known in steps.log(second), 60, poll=0.2)
    kill_python(second)
    killed = steps.end(second)
    assert (killed.code, killed.output) == (137, {}), killed.log

    third = steps.run(execution, retry=1)
    assert third.code == 0, third.log
    assert known in third.log
    assert "[node-0] training on rank 0" in third.log
    job = only_job(steps, execution)
    assert condition(job, "Complete")
    result = third.output["parameterValues"]["result"]
    assert (result["name"], result["uid"]) == (execution.job, job["metadata"]["uid"])
    assert result["metrics"] == {"loss": 0.5}
    assert third.output["parameterValues"]["model_uri"] == f"s3://{execution.place}/model"
    (model,) = third.output["artifacts"]["model"]["artifacts"]
    assert model["uri"] == f"minio://{execution.place}/model"
    assert model["metadata"]["trainjob"]["uid"] == job["metadata"]["uid"]

    again = steps.run(execution)  # "Retry run", of a run in which another step has failed
    assert again.code == 0, again.log
    assert again.output["parameterValues"] == third.output["parameterValues"]
    assert again.output["artifacts"]["model"] == third.output["artifacts"]["model"]
    only_job(steps, execution)


def test_a_terminated_step_suspends_its_job_and_retry_run_goes_on_with_it(steps: Steps) -> None:
    execution = training(8)
    pod = steps.start(execution, seconds_left=1.0)
    before = until_training(steps, execution)
    steps.signal(pod)
    ended = steps.end(pod)
    assert ended.code == 143
    assert ASKED in ended.log
    assert suspended(steps.job(execution))
    gone = lambda: "Running" not in pods(steps.cluster, steps.namespace, execution.job)  # noqa: E731
    wait_until("its pods are gone", gone, 60, poll=0.2)

    retried = steps.run(execution)
    assert retried.code == 0, retried.log
    job = only_job(steps, execution)
    assert job["metadata"]["uid"] == before["metadata"]["uid"]
    assert CANCELLED not in job["metadata"]["annotations"]
    assert condition(job, "Complete")


def test_a_failed_training_is_explained_in_the_termination_message(steps: Steps) -> None:
    command = ["python", "-c", FAILING]
    execution = Execution("train", {"runtime": "trainjob-step", "command": command, "num_nodes": 2})
    ended = steps.run(execution)
    assert (ended.code, ended.output) == (1, {}), ended.log
    summary, *rest = ended.message.splitlines()
    assert summary.startswith(f"TrainJob {steps.namespace}/{execution.job} failed: node-1 exited with code 1"), summary
    assert "  | ValueError: the data is wrong" in rest
    assert any(line.startswith("what to do: ") for line in rest), ended.message
    assert "category: user code; retry: user" in rest
    assert ended.log.rstrip().endswith(ended.message.rstrip()), "what everybody sees ends with it"
    assert "Traceback" not in ended.log.replace("  | Traceback", "").replace("[node-1] Traceback", "")


def test_without_rights_the_message_says_which_and_how_to_grant_them(own_cluster: Cluster, step_image: str) -> None:
    with own_cluster.namespace("pipeline", real=True) as namespace:
        admit(own_cluster, namespace, grant=False)
        ended = Steps(own_cluster, namespace, step_image).run(training(0))
    assert ended.code == 1, ended.log
    assert 'cannot create resource "trainjobs"' in ended.message
    assert f"trainjob install --only rbac -n {namespace} --service-account {namespace}:{ACCOUNT}" in ended.message
    assert "kubectl apply" in ended.message
    assert "Traceback" not in ended.log


def test_the_exit_component_stops_what_a_killed_step_has_left(steps: Steps) -> None:
    execution = training(600)
    pod = steps.start(execution)
    until_training(steps, execution)
    steps.signal(pod, signal.SIGKILL)
    assert steps.end(pod).code == 137
    assert not suspended(steps.job(execution))
    assert "Running" in pods(steps.cluster, steps.namespace, execution.job)

    cleaned = steps.run(Execution("cleanup", {"run_id": execution.run}, run=execution.run))
    assert cleaned.code == 0, cleaned.log
    assert suspended(steps.job(execution))
    assert "Running" not in pods(steps.cluster, steps.namespace, execution.job)


# ---------------------------------------------------------------- Terminate, a hundred times


@dataclass
class Trial:
    """A step that is terminated.

    Attributes:
        execution: What it runs.
        left: Seconds that Python lives on then.
        late: Whether that is more than a minute after its job's creation: idle connections are closed by then.
        tried: Its pod.
        answered: Whether Python had the answer to its request before it died.
        took: Seconds from SIGTERM to that.
        said: How it ended, by its log.
    """

    execution: Execution
    left: float
    late: bool
    tried: Try | None = None
    answered: bool = False
    took: float | None = None
    said: str = ""


def draw(number: int, jobs: str) -> list[Trial]:
    """As many trials; the times that are left are spread as the measured ones are, so that chance decides little."""
    chance = random.Random(SEED)
    shares = [(i + chance.random()) / number for i in range(number)]
    chance.shuffle(shares)
    parameters = {"runtime": "trainjob-step", "namespace": jobs, "env": {variable("run"): "never"}}
    parameters["command"] = ["train"]
    return [
        Trial(Execution("train", parameters), time_left(share), late=i < number / 5) for i, share in enumerate(shares)
    ]


def begin(steps: Steps, jobs: str, trials: Sequence[Trial]) -> None:
    """Start the steps, and wait until all of them wait for their jobs."""

    def one(trial: Trial) -> None:
        trial.tried = tried = steps.start(trial.execution, seconds_left=trial.left)
        known = f"TrainJob {jobs}/{trial.execution.job} (attempt 1"
        wait_until("its job is there", lambda: known in steps.log(tried), 120, poll=0.3, ignore=ApiError)

    with ThreadPoolExecutor(STARTING) as pool:
        list(pool.map(one, trials))


def terminate(steps: Steps, jobs: str, trials: Sequence[Trial]) -> None:
    """Terminate them, one soon after the other, and look at once what has become of their jobs."""
    chance = random.Random(SEED)
    time.sleep(5)  # not beside the last one's start and what the controllers do then, which take a core each
    for trial in trials:
        assert trial.tried
        steps.signal(trial.tried)
        time.sleep(chance.uniform(0.3, 0.8))
    for trial in trials:
        assert trial.tried
        ended = steps.end(trial.tried)
        assert ended.code == 143, ended.log
        trial.said = ended.log.splitlines()[-1]
        trial.answered = ASKED in ended.log and suspended(steps.job(trial.execution, jobs))
        if trial.answered:
            trial.took = seconds_between(PASSED_ON, ASKED, steps.log(trial.tried, timestamps="true"))
        steps.vanish(trial.tried)  # the kubelet looks after all that are there


def seconds_between(first: str, second: str, log: str) -> float:
    """What is between two messages in a log with containerd's times; something else may stand in the same line."""
    began, ended = (
        datetime.fromisoformat(next(line for line in log.splitlines() if text in line).partition(" ")[0])
        for text in (first, second)
    )
    return (ended - began).total_seconds()


def exits(steps: Steps, jobs: str, trial: Trial) -> None:
    """What the run's exit handler does, which comes after Terminate as well."""
    cleanup = {"run_id": trial.execution.run, "namespace": jobs}
    ended = steps.run(Execution("cleanup", cleanup, run=trial.execution.run))
    assert ended.code == 0, ended.log


def test_the_time_left_is_spread_as_it_was_measured() -> None:
    found = [time_left((i + 0.5) / 24) for i in range(24)]
    assert found[:5] == pytest.approx([0.027, 0.09, 0.12, 0.12, 0.17])
    assert statistics.median(found) == pytest.approx(0.44, abs=0.02)
    assert (found[-1], time_left(0), time_left(1)) == pytest.approx((1.72, 0.027, 1.72))


@pytest.mark.timeout(600)
def test_terminate_is_answered_in_time_and_the_exit_component_does_the_rest(steps: Steps) -> None:
    print(f"TRAINJOB_CHAOS_SEED={SEED}")
    cluster = steps.cluster
    with cluster.namespace("jobs") as jobs:  # on simulated nodes: what runs there is not what is terminated
        admit(cluster, steps.namespace, jobs)
        trials = draw(RUNS, jobs)
        late, soon = [each for each in trials if each.late], [each for each in trials if not each.late]
        began = time.monotonic()
        begin(steps, jobs, late)
        waiting = time.monotonic()
        for some in (soon[i : i + AT_ONCE] for i in range(0, len(soon), AT_ONCE)):
            begin(steps, jobs, some)
            terminate(steps, jobs, some)
        time.sleep(max(0.0, waiting + LATE - time.monotonic()))
        terminate(steps, jobs, late)
        tell(trials, time.monotonic() - began)
        left = [trial for trial in trials if not suspended(steps.job(trial.execution, jobs))]
        with ThreadPoolExecutor(STARTING) as pool:
            for _ in pool.map(lambda trial: exits(steps, jobs, trial), left):
                pass
        print(f"stopped by the exit component: {len(left)}")

        def still_there() -> list[str]:
            found = cluster.api.find(TRAINER, "TrainJob", jobs)
            assert len(found) == RUNS, "one job a step"
            ended = ("Succeeded", "Failed")
            running = [pod for pod in cluster.api.find("v1", "Pod", jobs) if pod["status"]["phase"] not in ended]
            return [each["metadata"]["name"] for each in (*running, *(job for job in found if not suspended(job)))]

        wait_until("no job runs", lambda: not still_there(), 60, poll=0.5)
        answered = sum(trial.answered for trial in trials)
        assert answered >= 0.95 * RUNS, f"{answered} of {RUNS}"


def tell(trials: list[Trial], seconds: float) -> None:
    """Print what was drawn, and what became of it."""
    left = sorted(trial.left for trial in trials)
    took = sorted(trial.took for trial in trials if trial.took is not None)
    print(f"{len(trials)} trials in {seconds:.0f} s, load average {os.getloadavg()[0]:.1f}")
    print(f"Python lives on for {left[0]:.3f} to {left[-1]:.2f} s, median {statistics.median(left):.2f}")
    print(f"SIGTERM to answer: {spread(took)}")
    for name, late in (("soon", False), ("late", True)):
        some = sorted(each.took for each in trials if each.took is not None and each.late is late)
        print(f"  terminated {name} after the launch: {spread(some)}")
    print(f"answered: {len(took)} of {len(trials)}; not:")
    for trial in trials:
        if not trial.answered:
            print(f"  {trial.left:.3f} s left, {'late' if trial.late else 'soon'} after the launch: {trial.said}")


def spread(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    p95 = seconds[int(0.95 * (len(seconds) - 1))]
    shown = (statistics.median(seconds), p95, seconds[-1])
    return f"{len(seconds)}: median, p95, longest " + ", ".join(f"{1000 * each:.0f} ms" for each in shown)
