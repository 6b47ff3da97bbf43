"""Documents of trainings, a list, a workflow and studies, which the product makes of objects: one of each state."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from tests import objects
from tests.objects import Object, condition, ended, pod, trainjob, waiting
from tests.page import studies
from tests.page.series import HOSTILE, TAKEN, Document, Points, ago, curve, iso, log, metrics, reported

from trainjob._backends.base import Usage
from trainjob._diagnosis.evidence import Evidence
from trainjob._diagnosis.stragglers import Straggler, annotation
from trainjob._goodput.history import CHECKPOINT, MetricHistory
from trainjob._jobs.report import examine
from trainjob._pages.documents.additions import with_comparison, with_lineage
from trainjob._pages.documents.evaluation import with_evaluation
from trainjob._pages.documents.jobs import list_document, listed as listed_job, workflow_document
from trainjob._pages.documents.merging import merge_documents
from trainjob._pages.documents.training import observed_document, training_document
from trainjob.job import ATTEMPT, KEY, JobRef
from trainjob.status import QUEUE_LABEL, Observation, Phase

# ---------------------------------------------------------------- objects

RUN = {"dag_id": "retrain_digits", "run_id": "scheduled__2026-11-26", "task_id": "train"}
SPEC = {
    "trainer": {
        "numNodes": 2,
        "image": "registry.example/train:2026.11",
        "command": ["torchrun", "train.py", "--epochs", "10"],
        "args": ["--dataset", "/data"],
        "env": [{"name": "HF_TOKEN"}, {"name": "NCCL_DEBUG", "value": "INFO"}],
        "resourcesPerNode": {"limits": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "8"}},
    }
}


def training_job(
    created: float, *conditions: Object, name: str = "digits-ab12cd", number: int = 1, queue: str = "gpu", **fields: Any
) -> Object:
    """A job that was created so many seconds ago; other fields as of `tests.objects.trainjob`."""
    labels = {**RUN, ATTEMPT: str(number), **({QUEUE_LABEL: queue} if queue else {})}
    annotations = {KEY: "airflow/retrain_digits/scheduled__2026-11-26/train", **fields.pop("annotations", {})}
    about: Document = {"namespace": "team-a", "labels": labels, "annotations": annotations}
    given = {"spec": {**SPEC, **fields.pop("spec", {})}, "metadata": {"creationTimestamp": ago(created)}, **fields}
    return trainjob(*conditions, name=name, **about, **given)


def admitted(seconds: float) -> Object:
    return objects.RESUMED | {"lastTransitionTime": ago(seconds)}


def over(condition: Object, seconds: float) -> Object:
    return condition | {"lastTransitionTime": ago(seconds)}


def rank(index: int, state: Object | None = None, last: Object | None = None, job: str = "digits-ab12cd") -> Object:
    """The pod of a rank; it has been running for 6,680 seconds by default."""
    state = {"running": {"startedAt": ago(6680)}} if state is None else state
    return pod(index, state, last, job=job, node=f"gpu-{index % 16:02}.cluster.example")


def ran(code: int, start: float, end: float, **terminated: Any) -> Object:
    """The state of a container that ran from `start` to `end` seconds ago."""
    return ended(code, startedAt=ago(start), finishedAt=ago(end), **terminated)


def event(reason: str, message: str, seconds: float, about: str, **fields: Any) -> Object:
    kind, _, name = about.partition(" ")
    return objects.event(reason, message, time=ago(seconds), kind=kind, about=name, **fields)


# ---------------------------------------------------------------- trainings


def document(
    job: Object,
    pods: Sequence[Object] = (),
    history: Mapping[str, Points] | None = None,
    *,
    evidence: Mapping[str, Any] | None = None,
    **known: Any,
) -> Document:
    """The document of a job with pods, with what else is known, see `training_document`."""
    seen = Evidence(job, pods, **(evidence or {}))
    report = examine(JobRef.of(job), seen, TAKEN)
    return training_document(report, history=MetricHistory.of(history or {}), **known)


def training(phase: str = "Running", **changes: Any) -> Document:
    """A document with all keys and little content but the phase, with `changes`."""
    return document(training_job(7200, admitted(7000))) | {"phase": phase, **changes}


NO_QUOTA = (
    "couldn't assign flavors to pod set node: insufficient unused quota for nvidia.com/gpu in flavor h100, "
    "8 more needed"
)


def queued() -> Document:
    pending = condition("QuotaReserved", "Pending", value="False", message=NO_QUOTA)
    job = training_job(1500, spec={"suspend": True})
    return document(job, evidence={"workload": {"status": {"conditions": [pending]}}}, position=3)


def running(*pods: Object, points: Points | None = None, percent: int = 42, **known: Any) -> Document:
    points = points or curve(240, every=27)
    told = reported(points, percent, note="warm-up is over", mixed_precision=True, epoch=5)
    job = training_job(
        7200,
        admitted(7000),
        spec={"initializer": {"dataset": {"storageUri": "s3://data/digits/2026-11-25/"}}},
        jobsStatus=[objects.counts(active=1, ready=1)],
        trainerStatus=told | {"estimatedRemainingSeconds": 9400},
    )
    saved = [points[80], points[160]]
    used = [Usage("node-0", 3.21, 114 << 27), Usage("node-1", 2.87, 109 << 27)]
    history = metrics(points) | {CHECKPOINT: [[step, time, step] for step, time, _ in saved]}
    made = document(job, pods or [rank(0), rank(1)], history, **{"logs": log(200), "used": used, **known})
    return with_comparison(made, "previous run", previous(0.27, 3), "/trainings/digits-zz98aa")


def previous(loss: float, seed: int, count: int = 320) -> Document:
    """Another training, to compare with."""
    values = {"loss": loss, "accuracy": 1 - loss / 4, "eval/f1": 0.92 + (loss < 0.25) * 0.013}
    return {
        "name": f"digits-{seed}",
        "metrics": values,
        "history": metrics(curve(count, every=25, end=loss, seed=seed)),
    }


def restarting() -> Document:
    """A rank was killed because memory ran out; what a waiter has seen since completes the document."""
    killed = rank(1, waiting("CrashLoopBackOff"), ran(137, 6680, 95, reason="OOMKilled"))
    made = running(rank(0), killed)
    ref = JobRef(made["namespace"], made["name"], made["uid"])
    message = "node-1 exited with code 137; its container is restarted"
    now = Observation(
        Phase.RESTARTING, "CrashLoopBackOff", message, progress=40, details={"estimate": "speed"},
        remaining_seconds=4200,
    )  # fmt: skip
    return merge_documents(made, observed_document(ref, now, TAKEN)) | {"taken": iso(TAKEN), "seconds": made["seconds"]}


TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/workspace/train.py", line 212, in <module>',
    "    main()",
    '  File "/workspace/train.py", line 187, in main',
    "    loss = step(batch)",
    "ValueError: expected 64 features, got 63: check the preprocessing of data set digits",
)


def failed() -> Document:
    """Two attempts: the second began at a checkpoint of the first, and stalled."""
    first = curve(150, every=11, start=TAKEN - timedelta(seconds=6360), pauses={60: 160, 120: 60, 121: 180})
    second = curve(130, first=1200, every=10, start=TAKEN - timedelta(seconds=3300), pauses={80: 60})
    histories = [
        metrics(first) | {"eval_loss": [first[60]], CHECKPOINT: [[1200, first[120][1], 1200]]},
        metrics(second) | {CHECKPOINT: [[2000, second[80][1], 2000]]},
    ]
    lost = [ran(1, 6680, 4880), ran(137, 4700, 4300)]
    evidence = Evidence(
        training_job(7200, admitted(7000), over(objects.FAILED, 4300), name="digits-1", queue=""),
        [rank(index, lost[1], lost[0], "digits-1") for index in range(2)],
    )
    slow = Straggler("node-2", 2, "node-2", "gpu-3", 1.84, 1.02, 1.9, 1.1)
    job = training_job(
        4200, admitted(3660), over(objects.FAILED, 600), name="digits-2", number=2,
        annotations=annotation([], [slow]), trainerStatus=reported(second, 61),
    )  # fmt: skip
    pods = [rank(0, ran(143, 3480, 798), job="digits-2"), rank(1, ran(3, 3480, 800), ran(3, 3490, 3485), "digits-2")]
    back_off = "Back-off restarting failed container node"
    events = [
        event("Created", "JobSet digits-2 was created", 4190, "TrainJob digits-2", type="Normal"),
        event("BackOff", back_off, 700, "Pod digits-2-node-0-1-abcde", count=4),
        event("FailedJobs", objects.FAILED["message"], 600, "JobSet digits-2"),
    ]
    unseen = ["Events of the pods of attempt 1: forbidden", "logs of node-0: the pod was deleted"]
    lines = [*log(80, end=802), *({"rank": "node-1", "time": ago(801), "text": line} for line in TRACEBACK)]
    earlier = training_document(
        examine(JobRef.of(evidence.trainjob or {}), evidence, TAKEN), history=MetricHistory.of(histories[0])
    )
    made = document(
        job,
        pods,
        histories[1],
        evidence={"logs": {"digits-2-node-0-1-abcde": TRACEBACK}, "events": events, "unseen": unseen},
        attempts=[evidence],
        histories={"uid-digits-1": histories[0]},
        logs=lines,
    )
    return merge_documents(earlier, made)


def complete() -> Document:
    points = curve(300, every=20)
    outputs = {"model": "s3://models/digits/ab12cd/", "report": "s3://models/digits/ab12cd/report.json", "classes": 10}
    message = json.dumps({"trainjob": 1, "metrics": [{"name": "passed", "value": "true"}], "outputs": outputs})
    job = training_job(
        7200,
        admitted(7000),
        over(objects.COMPLETE, 300),
        spec={"initializer": {"dataset": {"storageUri": "s3://data/digits/2026-11-25/"},
                              "model": {"storageUri": "hf://team/tiny-vit@main"}}},
        trainerStatus=reported(points, 100, **{"eval/f1": 0.941}),
    )  # fmt: skip
    extra = {"name": "TRAINJOB_INPUT_AUGMENTATIONS", "value": "https://data.example/?file=augmentations.tar"}
    job["spec"]["trainer"] = {**SPEC["trainer"], "env": [*SPEC["trainer"]["env"], extra]}  # type: ignore[misc]  # a list
    pods = [rank(index, ran(0, 6680, 300, message="" if index else message)) for index in range(2)]
    saved = points[40::40]
    events = [event("Created", "JobSet was created", 7190, "TrainJob digits-ab12cd", type="Normal")]
    history = metrics(points) | {CHECKPOINT: [[step, time, step] for step, time, _ in saved]}
    made = document(job, pods, history, evidence={"events": events}, logs=log(60), source="kept")
    made = with_comparison(made, "previous run", previous(0.27, 3), "/trainings/digits-zz98aa")
    made = with_comparison(made, "champion", previous(0.24, 5, 280), "/trainings/digits-w4k7mm")
    uris = [*(each["uri"] for each in made["lineage"]["datasets"]), "hf://team/tiny-vit@main", outputs["model"]]
    siblings: list[Document] = [
        {"uri": uri, "digest": "sha256:" + f"{index}c0ffee1" * 8} for index, uri in enumerate(uris)
    ]
    siblings.append({"uri": "models:/digits/15", "name": "digits", "version": "15", "promoted": True})
    passed = {"passed": True, "rule": "eval/f1", "reason": "0.941 is above the champion's 0.933"}
    siblings.append({"uri": "s3://e", **passed})
    return with_lineage(made, siblings)


def many_ranks(count: int = 64) -> Document:
    pods = [rank(index) for index in range(count)]
    pods[41] = rank(41, waiting("CrashLoopBackOff"), ran(1, 6680, 95))
    pods[42] = pod(42, {}, job="digits-ab12cd", node="", phase="Pending", conditions=[
        condition("PodScheduled", "Unschedulable", value="False", message="0/64 nodes are available")
    ])  # fmt: skip
    made = running(*pods, logs=log(400, count), used=None)
    for each in made["ranks"]:  # a document knows the step of rank 0 only
        index = int(each["rank"].removeprefix("node-"))
        each |= {"step": 2400 - index % 5, "step_seconds": 0.97 if index == 17 else 0.42 + 0.01 * (index % 3)}
    return made | {"compare": [], "spec": made["spec"] | {"nodes": str(count)}}


def no_metrics() -> Document:
    started = {"running": {"startedAt": ago(40)}}
    job = training_job(100, admitted(90), jobsStatus=[objects.counts(active=1, ready=1)])
    notes = ["the history of the metrics cannot be read: the pods do not serve it"]
    return document(job, [rank(0, started), rank(1, waiting("ContainerCreating"))], notes=notes)


TIMES = ("taken", "time", "start", "end", "created", "admitted", "running", "finished", "since")
SAFE = ("version", "kind", "phase", *TIMES)
"""Names whose values are no texts of a person or a program: times, versions and phases."""
FREE = ("metrics", "outputs", "spec", "requested", "gpu_hours")
"""Names of mappings whose names are free."""


def poisoned(value: Any, name: str = "", number: int = 0) -> Any:
    """Each text is hostile, also the free names of metrics, of outputs and of fields of the spec."""
    if name in FREE and isinstance(value, dict):
        return {text: text if name != "gpu_hours" else 1.0 for text in HOSTILE}
    if name == "history" and isinstance(value, dict):
        return {text: curve(40, seed=index + 1) for index, text in enumerate(HOSTILE)} if value else {}
    if name == "seconds" and isinstance(value, dict):
        return value | dict.fromkeys(HOSTILE, 120.0)
    if isinstance(value, dict):
        return {key: poisoned(each, key, number + index) for index, (key, each) in enumerate(value.items())}
    if isinstance(value, list | tuple):
        return [poisoned(each, name, number + index) for index, each in enumerate(value)]
    text = HOSTILE[3] if name == "href" else HOSTILE[number % len(HOSTILE)]  # others are relative addresses
    return text if isinstance(value, str) and name not in SAFE else value


LINKS = {
    HOSTILE[0]: HOSTILE[3],
    "data": "data:text/html,<script>window.__pwned = 5</script>",
    "hidden scheme": " java\nscript:window.__pwned=6",
    "vbscript": "vbscript:x",
    "file": "file:///etc/passwd",
    "fine": "https://airflow.example/",
    "relative": "trainings/x?y=1",
}


def hostile() -> Document:
    whole = failed() | {name: complete()[name] for name in ("compare", "lineage", "resources")}
    whole |= {"blocker": queued()["blocker"], "resources": running()["resources"]}
    whole["lineage"] |= {"evaluation": {"passed": False, "summary": "x"}}
    ranks = [whole["ranks"][0] | {"rank": f"node-{index}"} for index in range(len(HOSTILE))]
    made: Document = poisoned(whole | {"ranks": [*whole["ranks"], *ranks], "notes": [""] * 3})
    made |= {"namespace": HOSTILE[4], "name": HOSTILE[0] + HOSTILE[7], "href": HOSTILE[3]}
    made["logs"] = [{"rank": text, "time": ago(9), "text": text} for text in HOSTILE]
    made["events"] = [poisoned(whole["events"][1], number=index) for index in range(len(HOSTILE))]
    made["diagnosis"] |= {"log": list(HOSTILE)}
    for label, href in LINKS.items():
        made = with_comparison(made, label, {"metrics": {HOSTILE[9]: 1.0}}, href)
    return made


# ---------------------------------------------------------------- lists and workflows


def job(index: int, phase: str, **changes: Any) -> Document:
    """A job of a list."""
    made = training_job(600 * (index + 1), name=f"digits-{index:04x}", number=1 + index % 2)
    return listed_job(made) | {"phase": phase, "href": f"trainings/{index}"} | changes


def listed() -> Document:
    killed = "node-1 exited with code 137; its container is restarted"
    jobs = [
        job(0, "Running", progress=42, remaining_seconds=1200, metrics={"loss": 0.3121, "accuracy": 0.91}),
        job(1, "Queued", message="8 more needed for nvidia.com/gpu in flavor h100"),
        job(2, "Restarting", progress=12, message=killed),
        job(3, "Failed", finished=ago(900), message="node-1 exited with code 3", metrics={"loss": 0.98}),
        job(4, "Complete", finished=ago(600), progress=100, metrics={"loss": 0.2214}, workflow_href="workflows/1"),
        job(5, "Cancelled", finished=ago(1200)),
        job(6, "Running", name="a-study-with-a-very-long-name-" + "x" * 60, progress=71, remaining_seconds=60),
        job(7, "Complete", key="", workflow="", finished=ago(2000), progress=100),
        job(8, "Complete", name=HOSTILE[0], href=HOSTILE[3], message=HOSTILE[4], finished=ago(1500)),
    ]
    return list_document([], "team-a", TAKEN) | {"taken": iso(TAKEN), "jobs": jobs}


def workflow() -> Document:
    trainings = []
    for index, rate in enumerate(("3e-4", "1e-3", "3e-3", "1e-2")):
        history = metrics(curve(200, every=25, end=0.2 + 0.05 * abs(index - 1), seed=index + 2))
        own = {"task": f"train[lr={rate}]", "name": f"digits-lr-{index}", "uid": f"uid-{index}", "history": history}
        last = {name: values[-1][2] for name, values in history.items()}
        trainings.append(complete() | own | {"href": f"tasks/{index}", "metrics": last})
    trainings[3] |= {"phase": "Failed", "diagnosis": failed()["diagnosis"]}
    trainings[2] |= {"phase": "Running", "finished": None, "progress": 66, "source": "live"}
    notes = ["task evaluate: its training was deleted before its metrics were stored"]
    made = workflow_document("dag retrain_digits, run scheduled__2026-11-26", trainings, notes)
    return made | {"taken": iso(TAKEN)}


# ---------------------------------------------------------------- evaluations


def compared(candidate: float, change: float | None, half: float | None = None) -> Document:
    """One metric of an evaluation: what changed since the champion, with an interval of `half` on each side."""
    interval = None if half is None or change is None else [change - half, change + half]
    return {
        "candidate": candidate,
        "champion": None if change is None else candidate - change,
        "difference": change,
        "interval": interval,
        "method": "paired bootstrap, 2000 resamples" if interval else "",
    }


def evaluation_report(*, champion: bool = True, labels: int = 10) -> Document:
    def of(value: float, change: float, half: float | None = None) -> Document:
        return compared(value, change if champion else None, half)

    slices = {
        f"digit={n}": {
            "examples": 36 - n % 3,
            "metrics": {"accuracy": of(0.95 - n / 200, 0.03 - n / 120, 0.02 + n / 500)},
        }
        for n in range(10)
    }
    counts = [[max(0, 40 - 37 * min(1, abs(i - j)) - (i * j) % 5) for j in range(labels)] for i in range(labels)]
    rates = [index / 40 for index in range(41)]
    held = {"uri": "models:/digits/14", "digest": "sha256:" + "beef0014" * 8, "name": "digits", "version": "14"}
    return {
        "version": 1,
        "level": 0.95,
        "candidate": {"uri": "s3://models/digits/ab12cd/", "digest": "sha256:" + "c0ffee12" * 8},
        "champion": held if champion else None,
        "dataset": {"uri": "s3://data/digits-held-out/2026-11/", "digest": "sha256:" + "da7a5e70" * 8},
        "code": {"uri": "git+https://git.example/team/digits", "revision": "8d3f0a1c" * 5, "digest": ""},
        "examples": 360,
        "metrics": {"accuracy": of(0.953, 0.012, 0.009), "loss": of(0.182, -0.02, 0.011), "latency_ms": of(3.4, 0.2)},
        "slices": slices | {"digit=rare": {"examples": 0, "metrics": {}}},
        "confusion": {"labels": [str(index) for index in range(labels)], "counts": counts},
        "roc": {"false_positive_rate": rates, "true_positive_rate": [rate**0.25 for rate in rates]},
    }


def decision(*, passed: bool) -> Document:
    allowed = 0.05 if passed else 0.02
    reasons = {
        "required.champion": "the evaluation has champion",
        "min_examples": "360 examples; 300 are required",
        "metrics.accuracy.min_improvement": "accuracy: candidate 0.953, champion 0.941; an improvement is required",
        "metrics.accuracy.interval_above_zero": "accuracy: the improvement is between 0.003 and 0.021 (95 %)",
        "slices.digit=9.accuracy.max_regression": f"accuracy of digit=9: candidate 0.905, champion 0.95; {allowed} is",
    }
    checks: list[Document] = [{"rule": rule, "passed": True, "reason": reason} for rule, reason in reasons.items()]
    checks[-1]["passed"] = passed
    return {**checks[-1], "checks": checks}


def evaluated(*, passed: bool = True) -> Document:
    """A training whose model has passed the gate."""
    uri = "s3://models/digits/evaluation.json"
    return with_evaluation(complete(), {"report": evaluation_report(), "decision": decision(passed=passed), "uri": uri})


evaluation_failed = partial(evaluated, passed=False)


def first_evaluation() -> Document:
    """Without a champion, and without a gate."""
    report = evaluation_report(champion=False, labels=60)
    return with_evaluation(complete(), {"report": report, "decision": None, "uri": ""})


def hostile_evaluation() -> Document:
    bad = {name: compared(0.5, 0.1, 0.01) for name in HOSTILE}
    report = poisoned(evaluation_report(), number=1) | {
        "metrics": bad,
        "slices": {name: {"examples": 3, "metrics": bad} for name in HOSTILE},
        "confusion": {"labels": list(HOSTILE), "counts": [[1] * len(HOSTILE)] * len(HOSTILE)},
    }
    checks = [{"rule": text, "passed": False, "reason": text} for text in HOSTILE]
    judged = {**checks[0], "checks": checks}
    return with_evaluation(hostile(), {"report": report, "decision": judged, "uri": HOSTILE[3]})


ALL: Mapping[str, Callable[[], Document]] = {
    "queued": queued,
    "running": running,
    "restarting": restarting,
    "failed": failed,
    "complete": complete,
    "ranks": many_ranks,
    "no-metrics": no_metrics,
    "hostile": hostile,
    "list": listed,
    "workflow": workflow,
    "evaluation": evaluated,
    "evaluation-failed": evaluation_failed,
    "evaluation-first": first_evaluation,
    "evaluation-hostile": hostile_evaluation,
    "study": studies.study_running,
    "study-ended": studies.study_ended,
    "study-failed": studies.study_failed,
    "study-empty": studies.study_empty,
    "study-hostile": studies.study_hostile,
}
"""Name -> function that makes the document."""
