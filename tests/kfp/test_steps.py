"""Each component in a separate process, as KFP's launcher runs it, with real jobs on the local backend."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.model_registry import FakeRegistry
from tests.kfp.conftest import RUN, Ended, Steps, document_of, nested, script
from tests.local.hanging import SLOW_RANK
from tests.processes import eventually, read_until

from trainjob import Phase
from trainjob.registry.mlflow import MlflowRegistry
from trainjob.status import observe
from trainjob_kfp.jobs import address_of

TRAINING = """
import os, sys, time
from trainjob import progress
rank = os.environ["JAX_PROCESS_ID"]
print("rank", rank, "of", os.environ["JAX_NUM_PROCESSES"], *sys.argv[1:], flush=True)
if rank == "0":
    progress.report(progress=50, metrics={"loss": 0.5, "epoch": 2, "gap": float("nan")}, remaining_seconds=5)
time.sleep(1)
"""
# The sleep at the end: waiting reads the current state, not its history, so the reported state has to last.
SLEEPING = [
    "sh",
    "-c",
    "echo started; n=0; while [ ! -e done ]; do sleep 0.05; n=$((n+1)); [ $n -lt 1200 ] || exit 9; done",
]


def phases(steps: Steps) -> list[Phase]:
    return [observe(job).phase for job in steps.jobs()]


def test_train_outputs_model_metrics_and_result(steps: Steps) -> None:
    """Its log shows where to see the job: KFP shows artifacts only after the end of their step."""
    steps.environment["TRAINJOB_JOB_URL"] = "https://dashboard.example/{namespace}/trainjobs/{name}?uid={uid}"
    # A real KFP passes numbers inside lists and dicts as floats.
    ended = steps.run(
        "train",
        **script(TRAINING, "$(TRAINJOB_INPUT_DATASET)", "$(TRAINJOB_OUTPUT_MODEL)", "--epochs"),
        num_nodes=2,
        inputs={"dataset": "minio://bucket/digits"},
        labels={"team": "vision"},
        checkpoints="minio://bucket/checkpoints",
        stall_timeout=3600,
        spec={"activeDeadlineSeconds": 600.0},
    )
    assert ended.code == 0, ended.log
    own = steps.artifact_root("train") / "model"
    (job,) = steps.jobs()
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    address = f"https://dashboard.example/default/trainjobs/{name}?uid={uid}"

    watch = f"watch it: trainjob --backend local ui -n default (job {name})\n"
    assert 0 < ended.log.index(f"TrainJob default/{name}: {address}\n") < ended.log.index(watch)
    for rank in (0, 1):
        line = f"[node-{rank}] rank {rank} of 2 s3://bucket/digits {own.as_uri()} --epochs"
        assert ended.log.index(watch) < ended.log.index(line)
    for text in ("is Running", "50 %, about 5s left, loss 0.5", "is Complete"):
        assert text in ended.log

    assert job["spec"]["activeDeadlineSeconds"] == 600
    assert job["metadata"]["labels"]["team"] == "vision"
    env = {each["name"]: each.get("value", "") for each in job["spec"]["trainer"]["env"]}
    assert env["TRAINJOB_CHECKPOINT"].startswith("s3://bucket/checkpoints/")
    assert env["TRAINJOB_STALL_TIMEOUT"] == "3600"
    result = ended.output["parameterValues"]["result"]
    assert ended.output["parameterValues"]["model_uri"] == own.as_uri()
    assert (result["name"], result["uid"]) == (name, uid)
    assert result["metrics"] == {"loss": 0.5, "epoch": 2.0, "gap": "nan"}
    assert "NaN" not in json.dumps(ended.output), "KFP's launcher cannot parse NaN"

    (model,) = ended.output["artifacts"]["model"]["artifacts"]
    (metrics,) = ended.output["artifacts"]["metrics"]["artifacts"]
    assert model["uri"] == str(own), "KFP's URI is kept"
    assert model["metadata"] == {
        "uri": own.as_uri(),
        "trainjob": name,
        "trainjob_uid": uid,
        "trainjob_url": address,
        "metric.loss": 0.5,
        "metric.epoch": 2.0,
        "metric.gap": "nan",
    }
    assert metrics["metadata"] == {"loss": 0.5, "epoch": 2.0} | goodput_of(result)


def goodput_of(result: dict[str, Any]) -> dict[str, float]:
    """The metrics of the goodput in a result: activities that occurred."""
    spent = result["goodput"]
    known = {f"seconds.{name}": seconds for name, seconds in spent["seconds"].items() if seconds}
    assert "seconds.training" in known
    assert sum(known.values()) == pytest.approx(result["seconds"]["total"], abs=0.1)
    return {"goodput": spent["ratio"], **known}


def test_a_model_at_another_location_leaves_a_reference_in_the_artifact(steps: Steps) -> None:
    ended = steps.run("train", **script("pass"), outputs={"model": "s3://models/digits"})
    assert ended.output["parameterValues"]["model_uri"] == "s3://models/digits"
    (model,) = ended.output["artifacts"]["model"]["artifacts"]
    assert model["uri"] == str(steps.artifact_root("train") / "model")
    assert json.loads(Path(model["uri"]).read_text())["uri"] == "s3://models/digits"


def sleeping(steps: Steps, **parameters: Any) -> subprocess.Popen[str]:
    """A step whose job runs."""
    step = steps.start("train", runtime="trainjob-step", command=SLEEPING, **parameters)
    read_until(step, "[node-0] started")
    return step


@pytest.mark.parametrize(
    ("action", "line", "left", "after"),
    [
        ("suspend", "was asked to stop (suspend)", Phase.SUSPENDED, [Phase.COMPLETE]),
        ("cancel", "was asked to stop (cancel)", Phase.CANCELLED, [Phase.CANCELLED, Phase.COMPLETE]),
        ("keep", "keeps running", Phase.RUNNING, [Phase.COMPLETE]),
    ],
)
def test_on_kill_action_decides_what_a_terminated_step_does(
    steps: Steps, action: str, line: str, left: Phase, after: list[Phase]
) -> None:
    step = sleeping(steps, on_kill_action=action)
    steps.signal(step, signal.SIGTERM)
    stopped = steps.end("train", step, 20)
    assert f"SIGTERM: the TrainJob {line}" in stopped.log
    assert stopped.termination_message == f"SIGTERM: the TrainJob {line}"
    eventually(lambda: phases(steps) == [left])
    (steps.directory / "done").touch()
    again = steps.run("train", runtime="trainjob-step", command=SLEEPING)  # the next try
    assert again.code == 0, again.log
    assert sorted(phases(steps)) == sorted(after)


@pytest.mark.parametrize("writable", [True, False])
def test_a_process_ends_if_its_stdout_is_closed(tmp_path: Path, writable: bool) -> None:
    program = "from trainjob_kfp.steplog import end_process\nend_process('the end', 143)"
    file = tmp_path / "message" if writable else tmp_path  # a directory cannot be written to
    environment = {**os.environ, "TRAINJOB_TERMINATION_LOG": str(file)}
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run([sys.executable, "-c", program], stdout=writer, env=environment, check=False)
    finally:
        os.close(writer)
    assert ended.returncode == 143
    assert not writable or file.read_text() == "the end"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"spec": nested(200)}, "spec is nested 65 lists and mappings deep, or more; a spec has at most 64"),
        ({"spec": {"numNodes": 2.0}}, "spec.num_nodes: is a parameter of the component"),
        ({"spec": {"kind": "TrainJob"}}, "spec: is a complete TrainJob object"),
        ({"run_timeout": -1}, "run_timeout: is -1 seconds"),
        ({"inputs": {"dataset": "nowhere"}}, "inputs.dataset"),
        ({"spec": {"annotations": 5.0}}, "annotations: must be a mapping, not 5"),
        ({"on_kill_action": "stop"}, "on_kill_action: must be 'suspend', 'cancel' or 'keep', not 'stop'"),
        ({"backend": "kubernetes"}, "TRAINJOB_BACKEND=local"),
        ({"owned_by_run": True}, "owned_by_run needs a step on a KFP backend"),
    ],
)
def test_invalid_parameters_are_explained(steps: Steps, parameters: dict[str, Any], message: str) -> None:
    ended = steps.run("train", **{**script("pass"), **parameters})
    assert ended.code == 1
    assert message in ended.log
    assert "Traceback" not in ended.log
    assert ended.termination_message.startswith("error: ")
    assert steps.jobs() == []


def test_a_dataset_as_a_job_and_in_the_pod(steps: Steps) -> None:
    source = steps.directory / "data $(HOME)"
    source.mkdir()
    (source / "a.csv").write_text("1,2\n")
    as_job = steps.run("initialize_dataset", source=str(source))
    assert as_job.code == 0, as_job.log
    own = steps.artifact_root("initialize_dataset") / "dataset"
    assert as_job.output["parameterValues"]["uri"] == own.as_uri()
    assert (own / "a.csv").read_text() == "1,2\n"
    (job,) = steps.jobs()
    assert job["spec"]["runtimeRef"]["name"] == "trainjob-step"

    in_pod = steps.run("initialize_dataset", source=str(source), in_pod=True)
    assert in_pod.code == 0, in_pod.log
    assert in_pod.output["parameterValues"] == as_job.output["parameterValues"]
    (dataset,) = in_pod.output["artifacts"]["dataset"]["artifacts"]
    assert dataset["metadata"]["digest"] == in_pod.output["parameterValues"]["digest"]
    assert dataset["metadata"]["files"] == 1
    assert len(steps.jobs()) == 1


def exported(steps: Steps, registry: str, **more: Any) -> Ended:
    """Export the model of a training in the pod."""
    steps.environment["TRAINJOB_REGISTRY"] = registry
    model = steps.directory / "trained"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    trained = {"metrics": {"accuracy": 0.9, "gap": "nan"}, "name": "j", "uid": "u", "namespace": "n", "attempt": 1.0}
    trained["history"] = {"accuracy": [[1.0, 1769860800.0, 0.8], [2.0, 1769860801.0, 0.9]]}
    given = {"alias": "champion", "metric": "accuracy", "metrics": trained, "in_pod": True, **more}
    ended = steps.run("export_model", source=str(model), name="m", target=str(steps.directory / "models"), **given)
    assert ended.code == 0, ended.log
    return ended


@pytest.mark.parametrize(
    ("base_model", "noted"),
    [
        ({"uri": "models:/m@champion", "digest": ""}, []),
        ({"uri": "hf://team/base"}, [{"name": "base model", "uri": "hf://team/base"}]),
    ],
    ids=["fresh start", "base model"],
)
def test_repeated_exports_register_one_version(
    steps: Steps, base_model: dict[str, str], noted: list[dict[str, str]]
) -> None:
    with FakeRegistry() as fake:
        first, second = (exported(steps, f"kubeflow+{fake.url}", base_model=base_model) for _ in range(2))
    outputs = second.output["parameterValues"]
    assert first.output["parameterValues"] | {"reason": outputs["reason"]} == outputs
    assert (outputs["version"], outputs["promoted"]) == ("1", True)
    (artifact,) = second.output["artifacts"]["exported"]["artifacts"]
    assert json.loads(Path(artifact["uri"]).read_text())["uri"] == outputs["uri"]
    (record,) = (steps.directory / "models").rglob("provenance.json")
    predicate = json.loads(record.read_text())["predicate"]
    assert predicate["buildDefinition"]["resolvedDependencies"] == noted
    assert predicate["buildDefinition"]["internalParameters"]["trainjob"]["name"] == "j"
    assert predicate["runDetails"]["metadata"]["invocationId"] == f"kfp/{RUN}"


@pytest.mark.full
def test_an_export_records_the_curves_of_the_training(steps: Steps) -> None:
    uri = f"sqlite:///{steps.directory / 'registry.db'}"
    steps.environment["TRAINJOB_REGISTRY"] = f"mlflow+{uri}"
    fresh = steps.run("initialize_model", source="models:/m@champion", if_missing="fresh", in_pod=True)
    assert fresh.output["parameterValues"] == {"uri": "", "digest": "", "version": "", "fresh": True}, fresh.log
    exported(steps, f"mlflow+{uri}")
    registry = MlflowRegistry(uri)
    curve = registry._client.get_metric_history(registry.resolve("m", "1").run_id, "accuracy")
    assert [(point.step, point.value) for point in curve] == [(1, 0.8), (2, 0.9)]


# ---------------------------------------------------------------- wait, cleanup


def test_wait_outputs_the_result_of_a_job_launched_elsewhere(steps: Steps) -> None:
    with steps.client() as client:
        ref = client.launch({"runtime": "jax-distributed", "command": ["python", "-c", TRAINING]}, "mine")
    ended = steps.run("wait", job=ref.name, run_id=RUN)
    assert ended.code == 0, ended.log
    result = ended.output["parameterValues"]["result"]
    assert "[node-0] rank 0 of 1" in ended.log
    (report,) = ended.output["artifacts"]["report"]["artifacts"]
    assert ref.name in Path(report["uri"]).read_text()
    (metrics,) = ended.output["artifacts"]["metrics"]["artifacts"]
    assert metrics["metadata"] == {"loss": 0.5, "epoch": 2.0} | goodput_of(result)


def test_wait_never_changes_the_job(steps: Steps) -> None:
    with steps.client() as client:
        ref = client.launch({"runtime": "trainjob-step", "command": SLEEPING}, "mine")
        step = steps.start("wait", job=ref.name, run_id=RUN)
        read_until(step, "[node-0] started")
        steps.signal(step, signal.SIGTERM)
        assert step.wait(60) != 0
        assert phases(steps) == [Phase.RUNNING]


def test_cleanup_stops_only_the_jobs_of_its_run(steps: Steps) -> None:
    step = sleeping(steps, on_kill_action="keep")
    steps.signal(step, signal.SIGKILL)
    step.wait(60)
    with steps.client() as client:
        other = client.launch({"runtime": "trainjob-step", "command": SLEEPING}, "of another run")
    (mine,) = [job for job in steps.jobs() if job["metadata"]["name"] != other.name]
    assert "trainjob.dev/unattended" not in mine["metadata"]["labels"], "the reaper must not stop it"
    labels = {"pipeline/runid": RUN, "trainjob.dev/kfp-pipeline": "pipeline", "trainjob.dev/kfp-task": "train"}
    assert labels.items() <= mine["metadata"]["labels"].items()

    ended = steps.run("cleanup", run_id=RUN)
    assert ended.code == 0, ended.log
    name = mine["metadata"]["name"]
    assert ended.output["parameterValues"]["stopped"] == [name]
    assert f"run {RUN}: stopped {name}" in ended.log
    left = {job["metadata"]["name"]: observe(job).phase for job in steps.jobs()}
    assert left == {name: Phase.SUSPENDED, other.name: Phase.RUNNING}

    again = steps.run("cleanup", run_id=RUN)
    assert again.output["parameterValues"]["stopped"] == []
    (steps.directory / "done").touch()
    assert steps.run("train", runtime="trainjob-step", command=SLEEPING).code == 0, '"Retry run" resumes the job'


# ---------------------------------------------------------------- report, links


@pytest.mark.full
def test_a_straggler_is_in_the_log_the_result_and_the_metrics(steps: Steps) -> None:
    ended = steps.run("train", **script(SLOW_RANK), num_nodes=2, stall_timeout=2)
    assert ended.code == 0, ended.log
    (slow,) = ended.output["parameterValues"]["result"]["stragglers"]
    assert slow["summary"] in ended.log
    (metrics,) = ended.output["artifacts"]["metrics"]["artifacts"]
    assert metrics["metadata"]["stragglers"] == 1


CURVE = """
import time
from trainjob import progress
for step in range(5):
    progress.report(progress=20 * step, metrics={"loss": 1 / (1 + step), "display_name": 7.0, "a/b <c>": 1.0})
    time.sleep(0.6)
progress.report(metrics={"goodput": -1.0})
"""


def test_the_report_has_the_curves_that_the_step_has_seen(steps: Steps) -> None:
    ended = steps.run("train", **script(CURVE))
    assert ended.code == 0, ended.log
    (report,) = ended.output["artifacts"]["report"]["artifacts"]
    document = document_of(Path(report["uri"]).read_text())
    assert (document["kind"], document["phase"], document["task"]) == ("training", "Complete", "train")
    assert [value for _, _, value in document["history"]["loss"]][-1] == 0.2
    assert len(document["history"]["loss"]) >= 3
    (metrics,) = ended.output["artifacts"]["metrics"]["artifacts"]
    spent = goodput_of(ended.output["parameterValues"]["result"])
    own = {"loss": 0.2, "metric.display_name": 7.0, "a/b <c>": 1.0, "goodput": -1.0}
    assert metrics["metadata"] == spent | own, "KFP uses display_name; goodput of the training keeps its name"


@pytest.mark.parametrize("template", ["https://x/{nmae}", "https://x/{", "https://x/{}", "https://x/{name.x}"])
def test_an_invalid_link_template_is_reported(
    template: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINJOB_JOB_URL", template)
    assert address_of("n", "j", "u") == ""
    assert "TRAINJOB_JOB_URL is invalid" in capsys.readouterr().out
