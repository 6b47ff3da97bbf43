"""Documents of trainings, a list, a workflow and studies, as the pages show them, one for each state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from trainjob._pages.documents.evaluation import with_evaluation
from trainjob._pages.documents.study import study_document

Document = dict[str, Any]
TAKEN = datetime(2026, 11, 26, 2, 0, tzinfo=UTC)
STARTED = TAKEN - timedelta(hours=2)
HOSTILE = (
    "<script>window.__pwned = 1</script>",
    "</script><script>window.__pwned = 2</script><!--",
    '"><img src=x onerror="window.__pwned = 3">',
    "javascript:window.__pwned=4",
    "\u202egnp.exe\u202c \u2066isolated",
    "line \u2028 separator \u2029 paragraph",
    "{{document}} ${x} &lt;b&gt; ' \" `",
    "n" * 10_000,
    "long words " * 900,
    "__proto__",
    "constructor",
)
"""Texts that try to leave the place where they are shown. They have no control characters."""


def iso(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def ago(seconds: float) -> str:
    return iso(TAKEN - timedelta(seconds=seconds))


def training(phase: str = "Running", **changes: Any) -> Document:
    """A document with all keys and no content but the phase, with `changes`."""
    return {
        "version": 1,
        "kind": "training",
        "taken": iso(TAKEN),
        "source": "live",
        "notes": [],
        "namespace": "team-a",
        "name": "digits-ab12cd",
        "uid": "0d9f2c54-6f43-4b43-a8d3-2f7d5e0f3c11",
        "attempt": 1,
        "key": "airflow/retrain_digits/scheduled__2026-11-26/train",
        "task": "train",
        "href": "",
        "phase": phase,
        "reason": "",
        "message": "",
        "since": ago(3600),
        "created": iso(STARTED),
        "admitted": None,
        "running": None,
        "finished": None,
        "seconds": {"age": 7200.0},
        "blocker": None,
        "progress": None,
        "remaining_seconds": None,
        "estimate": "",
        "step": None,
        "metrics": {},
        "outputs": {},
        "history": {},
        "method": "min-max decimation",
        "attempts": [],
        "goodput": None,
        "stragglers": [],
        "ranks": [],
        "logs": [],
        "diagnosis": None,
        "spec": {
            "runtime": "torch-distributed",
            "nodes": "2",
            "image": "registry.example/train:2026.11",
            "command": "torchrun train.py --epochs 10",
            "args": "--dataset $DATASET_DIR",
            "resources": "cpu 4, memory 16Gi, nvidia.com/gpu 8",
            "env": "HF_TOKEN, NCCL_DEBUG",
            "queue": "gpu",
        },
        "events": [],
        "resources": {
            "requested": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "8"},
            "nodes": 2,
            "used": None,
        },
        "compare": [],
        "evaluation": None,
        "lineage": {
            "datasets": [],
            "base_model": None,
            "outputs": [],
            "registered": None,
            "evaluation": None,
        },
        "unseen": [],
        **changes,
    }


def curve(
    count: int, *, first: int = 0, start: datetime = STARTED, every: float = 2.0, end: float = 0.2, seed: int = 1
) -> list[list[float]]:
    """A noisy, falling curve; the noise is the same in each run."""
    points = []
    for index in range(count):
        step = first + index * 10
        noise = math.sin(index * 12.9898 * seed) * 43758.5453
        value = end + 2.2 * math.exp(-step / 900) + 0.06 * (noise - math.floor(noise) - 0.5)
        points.append([step, start.timestamp() + index * every, value])
    return points


def rising(points: list[list[float]]) -> list[list[float]]:
    return [[step, time, max(0.0, 1 - value / 2.6)] for step, time, value in points]


def metrics(points: list[list[float]]) -> dict[str, list[list[float]]]:
    return {
        "loss": points,
        "accuracy": rising(points),
        "learning_rate": [[step, time, 3e-4 * math.exp(-step / 1500)] for step, time, _ in points],
        "tokens_per_second": [
            [step, time, 152_000 + 9000 * math.sin(index / 9)] for index, (step, time, _) in enumerate(points)
        ],
    }


def rank(index: int, state: str = "Running", **changes: Any) -> Document:
    return {
        "rank": f"node-{index}",
        "pod": f"digits-ab12cd-node-0-{index}-x7k2p",
        "node": f"gpu-{index % 16:02}.cluster.example",
        "state": state,
        "exit_code": None,
        "restarts": 0,
        "started": ago(6600),
        "finished": None,
        "step": 2400,
        "step_seconds": 0.42 + 0.01 * (index % 3),
        "culprit": False,
        "bad": False,
        **changes,
    }


def log(count: int, ranks: int = 2, end: float = 0) -> list[Document]:
    return [
        {
            "rank": f"node-{index % ranks}",
            "time": ago(end + (count - index) * 2),
            "text": f"epoch {index // 40} step {index * 10} loss={2 * math.exp(-index / 90):.4f} lr=3.0e-04",
        }
        for index in range(count)
    ]


def attempt(
    number: int,
    phase: str,
    begin: float,
    end: float | None,
    queued: float = 200,
    starting: float = 320,
    **changes: Any,
) -> Document:
    """An attempt from `begin` to `end` seconds before the document, with the seconds of its first phases."""
    admitted, running = begin - queued, begin - queued - starting
    return {
        "attempt": number,
        "name": f"digits-{number}",
        "uid": f"uid-{number}",
        "phase": phase,
        "created": ago(begin),
        "admitted": ago(admitted),
        "running": ago(running),
        "finished": ago(end) if end is not None else None,
        "restarts": 0,
        "spans": [
            {"phase": "queued", "start": ago(begin), "end": ago(admitted)},
            {"phase": "starting", "start": ago(admitted), "end": ago(running)},
            {"phase": "running", "start": ago(running), "end": ago(end or 0)},
        ],
        "checkpoints": [],
        "history": {},
        "goodput": None,
        "summary": "",
        **changes,
    }


def activities(*spans: tuple[str, float], end: float, gpus: float | None = 16.0) -> Document:
    """The goodput of an attempt that ended `end` seconds before the document, with activities and their seconds."""
    at, segments = end + sum(seconds for _, seconds in spans), []
    seconds = dict.fromkeys(ACTIVITIES, 0.0)
    for activity, lasted in spans:
        source = "conditions" if activity == "queued" else "steps"
        segments.append({"activity": activity, "start": ago(at), "end": ago(at - lasted), "source": source})
        seconds[activity] = seconds.get(activity, 0.0) + lasted
        at -= lasted
    return {
        **goodput(seconds, gpus),
        "start": segments[0]["start"],
        "end": segments[-1]["end"],
        "segments": segments,
    }


def goodput(seconds: Mapping[str, float], gpus: float | None = 16.0, assumed: float = 0.0) -> Document:
    held = {name: 0.0 if name in ("queued", "stopped") else (gpus or 0) * each / 3600 for name, each in seconds.items()}
    return {
        "ratio": seconds["training"] / sum(seconds.values()),
        "seconds": dict(seconds),
        "gpu_hours": held if gpus is not None else None,
        "assumed": assumed,
    }


ACTIVITIES = (
    *("queued", "starting", "training", "evaluating", "checkpointing"),
    *("repeated", "stalled", "restarting", "stopped"),
)
FIRST = activities(
    *(("queued", 200), ("starting", 320), ("training", 800), ("evaluating", 160), ("checkpointing", 60)),
    *(("training", 640), ("restarting", 180), ("training", 540)),
    end=4300,
)
SECOND = activities(
    *(("queued", 540), ("starting", 180), ("repeated", 420), ("training", 900), ("checkpointing", 60)),
    *(("training", 500), ("stalled", 800), ("stopped", 200)),
    end=600,
)


NO_QUOTA = (
    "couldn't assign flavors to pod set node: insufficient unused quota for nvidia.com/gpu in flavor h100, "
    "8 more needed"
)


def queued() -> Document:
    return training(
        "Queued",
        since=ago(1500),
        created=ago(1500),
        seconds={"age": 1500.0, "queued": 1500.0},
        reason="Pending",
        message=NO_QUOTA,
        blocker={
            "reason": "Pending",
            "message": NO_QUOTA,
            "permanent": False,
            "advice": "wait for quota, or ask the owner of queue gpu for more",
            "queue": "gpu",
            "position": 3,
        },
        attempts=[
            attempt(
                1,
                "Queued",
                1500,
                None,
                name="digits-ab12cd",
                spans=[{"phase": "queued", "start": ago(1500), "end": ago(0)}],
            )
        ],
    )


def running() -> Document:
    points = curve(240, every=27)
    return training(
        "Running",
        since=ago(6680),
        admitted=ago(7000),
        running=ago(6680),
        seconds={"age": 7200.0, "queued": 200.0, "active": 7000.0},
        progress=42,
        remaining_seconds=9400,
        estimate="the training script",
        step=2390,
        metrics={name: values[-1][2] for name, values in metrics(points).items()}
        | {"note": "warm-up is over", "mixed_precision": True, "epoch": 5},
        history=metrics(points),
        attempts=[
            attempt(
                1,
                "Running",
                7200,
                None,
                name="digits-ab12cd",
                checkpoints=[
                    {"time": ago(4800), "step": 800, "uri": "pvc://checkpoints/digits/step-800"},
                    {"time": ago(2400), "step": 1600, "uri": "pvc://checkpoints/digits/step-1600"},
                ],
            )
        ],
        ranks=[rank(0), rank(1)],
        logs=log(200),
        resources={
            "requested": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "8"},
            "nodes": 2,
            "used": [
                {"rank": "node-0", "cpu": 3.21, "memory": 11.4 * 2**30},
                {"rank": "node-1", "cpu": 2.87, "memory": 10.9 * 2**30},
            ],
        },
        compare=[
            {
                "label": "previous run",
                "name": "digits-zz98aa",
                "href": "/trainings/digits-zz98aa",
                "metrics": {"loss": 0.27, "accuracy": 0.93},
                "history": metrics(curve(320, every=25, end=0.27, seed=3)),
            }
        ],
    )


def restarting() -> Document:
    document = running()
    return document | {
        "phase": "Restarting",
        "since": ago(95),
        "reason": "CrashLoopBackOff",
        "message": "node-1 exited with code 137; its container is restarted",
        "progress": 40,
        "remaining_seconds": 4200,
        "estimate": "the speed of the latest half of the progress",
        "ranks": [
            rank(0, restarts=2),
            rank(1, "CrashLoopBackOff", exit_code=137, restarts=3, culprit=True, bad=True, step=2380, finished=ago(95)),
        ],
        "diagnosis": diagnosis(
            "out of memory",
            "node-1 was killed: out of memory (exit code 137)",
            "lower the batch size, or request more memory",
            exit_code=137,
        ),
        "compare": [],
    }


def diagnosis(category: str, summary: str, advice: str, **changes: Any) -> Document:
    return {
        "category": category,
        "summary": summary,
        "advice": advice,
        "rank": "node-1",
        "exit_code": 3,
        "retry": "after a change",
        "outlook": "a retry fails again until the code is fixed",
        "log": [
            "Traceback (most recent call last):",
            '  File "/workspace/train.py", line 212, in <module>',
            "    main()",
            '  File "/workspace/train.py", line 187, in main',
            "    loss = step(batch)",
            "ValueError: expected 64 features, got 63: check the preprocessing of data set digits",
        ],
        **changes,
    }


def failed() -> Document:
    """Two attempts: the second began at a checkpoint of the first."""
    first = curve(150, every=16, start=TAKEN - timedelta(seconds=6900))
    second = curve(130, first=1200, every=20, start=TAKEN - timedelta(seconds=3300))
    return training(
        "Failed",
        attempt=2,
        name="digits-2",
        since=ago(600),
        created=ago(4200),
        admitted=ago(3660),
        running=ago(3480),
        finished=ago(600),
        seconds={"age": 4200.0, "queued": 540.0, "active": 3060.0},
        reason="FailedJobs",
        message="jobset failed due to one or more job failures",
        progress=61,
        step=2490,
        metrics={name: values[-1][2] for name, values in metrics(second).items()},
        history=metrics(second),
        attempts=[
            attempt(
                1,
                "Failed",
                7200,
                4300,
                restarts=1,
                history=metrics(first),
                summary="node-0: the node was lost (NodeShutdown)",
                goodput=FIRST,
                checkpoints=[{"time": ago(5000), "step": 1200, "uri": "s3://models/digits/checkpoints/step-1200"}],
            ),
            attempt(
                2,
                "Failed",
                4200,
                600,
                queued=540,
                starting=180,
                restarts=2,
                summary="node-1 exited with code 3",
                goodput=SECOND,
                checkpoints=[{"time": ago(1900), "step": 2000, "uri": "s3://models/digits/checkpoints/step-2000"}],
            ),
        ],
        stragglers=[
            {
                "rank": "node-2",
                "number": 2,
                "name": "node-2",
                "node": "gpu-3",
                "seconds": 1.84,
                "median": 1.02,
                "step_seconds": 1.9,
                "loading": 1.1,
                "summary": "node-2 on gpu-3 is slower than the other ranks: 1.84 s of work per step, the median is "
                "1.02 s. Ranks that wait for it lose 43% of each step. It loads data for most of that.",
            }
        ],
        goodput=goodput(
            {
                name: FIRST["seconds"][name] + SECOND["seconds"][name] + 100 * (name == "restarting")
                for name in ACTIVITIES
            },
            assumed=540,
        ),
        ranks=[
            rank(0, "Error", exit_code=143, bad=True, finished=ago(598)),
            rank(1, "Error", exit_code=3, culprit=True, bad=True, finished=ago(600), restarts=2),
        ],
        logs=[
            *log(80, end=602),
            *({"rank": "node-1", "time": ago(601), "text": line} for line in diagnosis("", "", "")["log"]),
        ],
        diagnosis=diagnosis(
            "user code", "node-1 exited with code 3", "fix the training code or its arguments, then retry"
        ),
        events=[
            event("Normal", "Created", "TrainJob digits-2", "JobSet digits-2 was created", 4190),
            event(
                "Warning",
                "BackOff",
                "Pod digits-2-node-0-1-x7k2p",
                "Back-off restarting failed container node",
                700,
                count=4,
            ),
            event("Warning", "FailedJobs", "JobSet digits-2", "jobset failed due to one or more job failures", 600),
        ],
        unseen=["Events of the pods of attempt 1: forbidden", "logs of node-0: the pod was deleted"],
    )


def event(kind: str, reason: str, about: str, message: str, seconds: float, count: int = 1) -> Document:
    return {
        "time": ago(seconds),
        "kind": kind,
        "reason": reason,
        "about": about,
        "message": message,
        "count": count,
    }


def complete() -> Document:
    points = curve(300, every=20)
    return training(
        "Complete",
        source="kept",
        since=ago(300),
        admitted=ago(7000),
        running=ago(6680),
        finished=ago(300),
        seconds={"age": 7200.0, "queued": 200.0, "active": 6700.0},
        progress=100,
        step=2990,
        metrics={name: values[-1][2] for name, values in metrics(points).items()} | {"eval/f1": 0.941, "passed": True},
        outputs={
            "model": "s3://models/digits/ab12cd/",
            "report": "s3://models/digits/ab12cd/report.json",
            "classes": 10,
        },
        history=metrics(points),
        attempts=[
            attempt(
                1,
                "Complete",
                7200,
                300,
                name="digits-ab12cd",
                checkpoints=[
                    {"time": ago(6000 - 900 * index), "step": 400 * index, "uri": ""} for index in range(1, 6)
                ],
            )
        ],
        ranks=[rank(index, "Completed", exit_code=0, finished=ago(300), step=2990) for index in range(2)],
        logs=log(60),
        compare=[
            {
                "label": "previous run",
                "name": "digits-zz98aa",
                "href": "/trainings/digits-zz98aa",
                "metrics": {"loss": 0.27, "accuracy": 0.93, "eval/f1": 0.92},
                "history": metrics(curve(320, every=25, end=0.27, seed=3)),
            },
            {
                "label": "champion",
                "name": "digits-w4k7mm",
                "href": "/trainings/digits-w4k7mm",
                "metrics": {"loss": 0.24, "accuracy": 0.938, "eval/f1": 0.933},
                "history": metrics(curve(280, every=25, end=0.24, seed=5)),
            },
        ],
        lineage={
            "datasets": [
                {"name": "digits", "uri": "s3://data/digits/2026-11-25/", "digest": "sha256:" + "9f2c41d0" * 8},
                {
                    "name": "augmentations",
                    "uri": "https://data.example/?file=augmentations.tar",
                    "digest": "sha256:" + "51aa07bc" * 8,
                },
            ],
            "base_model": {"name": "tiny-vit", "uri": "hf://team/tiny-vit@main", "digest": "sha256:" + "77de10aa" * 8},
            "outputs": [
                {"name": "model", "uri": "s3://models/digits/ab12cd/", "digest": "sha256:" + "c0ffee12" * 8},
            ],
            "registered": {
                "registry": "mlflow",
                "model": "digits",
                "version": "15",
                "alias": "challenger",
                "uri": "models:/digits/15",
            },
            "evaluation": {"passed": True, "summary": "eval/f1 0.941 is above 0.93, and above the champion's 0.933"},
        },
        events=[event("Normal", "Created", "TrainJob digits-ab12cd", "JobSet digits-ab12cd was created", 7190)],
    )


def many_ranks(count: int = 64) -> Document:
    ranks = [rank(index, step=2400 - index % 5) for index in range(count)]
    ranks[17] = rank(17, step=2391, step_seconds=0.97)
    ranks[41] = rank(41, "CrashLoopBackOff", exit_code=1, restarts=4, culprit=True, bad=True, step=2100)
    ranks[42] = rank(42, "Unschedulable", bad=True, step=None, step_seconds=None, node="", started=None)
    return running() | {
        "name": "llama-finetune-64",
        "spec": running()["spec"] | {"nodes": str(count)},
        "ranks": ranks,
        "logs": log(400, count),
        "resources": {"requested": {"nvidia.com/gpu": "8"}, "nodes": count, "used": None},
        "diagnosis": diagnosis("user code", "node-41 exited with code 1", "fix the training code", rank="node-41"),
    }


def no_metrics() -> Document:
    return training(
        "Running",
        since=ago(40),
        created=ago(100),
        admitted=ago(90),
        running=ago(40),
        seconds={"age": 100.0, "queued": 10.0, "active": 90.0},
        attempts=[attempt(1, "Running", 100, None, queued=10, starting=50, name="digits-ab12cd")],
        ranks=[rank(0, step=None, step_seconds=None), rank(1, "ContainerCreating", step=None, step_seconds=None)],
        notes=["the history of the metrics cannot be read: the pods do not serve it"],
    )


def hostile() -> Document:
    """Each text is hostile, also as a name of a metric, of an output and of a field of the spec."""
    script, closing, image, scheme, rtl, separators, braces, word, words, proto, constructor = HOSTILE
    document = failed()
    item = {"name": closing, "uri": scheme, "digest": word}
    hrefs = [
        (script, scheme),
        ("data", "data:text/html,<script>window.__pwned = 5</script>"),
        ("hidden scheme", " java\nscript:window.__pwned=6"),
        ("vbscript", "vbscript:x"),
        ("file", "file:///etc/passwd"),
        ("fine", "https://airflow.example/"),
        ("relative", "trainings/x?y=1"),
    ]
    return document | {
        "namespace": rtl,
        "name": script + word,
        "uid": image,
        "key": braces + words,
        "task": closing,
        "href": scheme,
        "reason": image,
        "message": words,
        "notes": [script, rtl, word],
        "metrics": {name: name for name in HOSTILE} | {"number": 1.5},
        "outputs": {name: name for name in HOSTILE},
        "history": {name: curve(40, seed=index + 1) for index, name in enumerate(HOSTILE)},
        "attempts": [
            each | {"summary": text, "name": text, "goodput": hostile_segments(each["goodput"])}
            for each, text in zip(document["attempts"], (closing, word), strict=True)
        ],
        "goodput": goodput({"training": 60.0} | dict.fromkeys(HOSTILE, 120.0)) | {"gpu_hours": {script: 1.0}},
        "ranks": [
            rank(0, image, node=script, pod=word),
            rank(1, word, node=rtl, pod=closing, culprit=True, bad=True),
            *(rank(index + 2) | {"rank": text} for index, text in enumerate(HOSTILE)),
        ],
        "logs": [{"rank": text, "time": ago(9), "text": text} for text in HOSTILE],
        "diagnosis": diagnosis(rtl, script, word, rank=closing, outlook=braces, log=list(HOSTILE)),
        "blocker": {
            "reason": image,
            "message": closing,
            "permanent": True,
            "advice": scheme,
            "queue": rtl,
            "position": 1,
        },
        "spec": {name: name for name in HOSTILE},
        "events": [event("Warning", text, text, text, 5, count=2) for text in HOSTILE],
        "resources": {
            "requested": {name: name for name in HOSTILE},
            "nodes": 2,
            "used": [{"rank": script, "cpu": 1.0, "memory": 2.0}],
        },
        "compare": [
            {
                "label": closing,
                "name": word,
                "href": scheme,
                "metrics": {proto: image},
                "history": {proto: curve(9), constructor: curve(9)},
            },
            *(
                {"label": label, "name": "", "href": href, "metrics": {proto: 1.0}, "history": {}}
                for label, href in hrefs
            ),
        ],
        "lineage": {
            "datasets": [item, {"name": rtl, "uri": separators, "digest": script}],
            "base_model": item,
            "outputs": [item],
            "registered": {"registry": script, "model": word, "version": image, "alias": rtl, "uri": scheme},
            "evaluation": {"passed": False, "summary": closing},
        },
        "unseen": [script, rtl],
    }


def job(index: int, phase: str, **changes: Any) -> Document:
    return {
        "namespace": "team-a",
        "name": f"digits-{index:04x}",
        "uid": f"uid-{index}",
        "attempt": 1 + index % 2,
        "key": f"airflow/retrain_digits/run-{index}/train",
        "phase": phase,
        "message": "",
        "created": ago(600 * (index + 1)),
        "finished": None,
        "progress": None,
        "remaining_seconds": None,
        "metrics": {},
        "workflow": f"dag retrain_digits, run-{index}",
        "workflow_href": "workflows/1" if index == 4 else "",
        "href": f"trainings/{index}",
        **changes,
    }


def listed() -> Document:
    jobs = [
        job(0, "Running", progress=42, remaining_seconds=1200, metrics={"loss": 0.3121, "accuracy": 0.91}),
        job(1, "Queued", message="8 more needed for nvidia.com/gpu in flavor h100"),
        job(2, "Restarting", progress=12, message="node-1 exited with code 137; its container is restarted"),
        job(3, "Failed", finished=ago(900), message="node-1 exited with code 3", metrics={"loss": 0.98}),
        job(
            4, "Complete", finished=ago(600), progress=100, metrics={"loss": 0.2214, "accuracy": 0.942, "note": "fine"}
        ),
        job(5, "Cancelled", finished=ago(1200)),
        job(6, "Running", name="a-study-with-a-very-long-name-" + "x" * 60, progress=71, remaining_seconds=60),
        job(7, "Complete", key="", workflow="", finished=ago(2000), progress=100),
        job(8, "Complete", name=HOSTILE[0], href=HOSTILE[3], message=HOSTILE[4], finished=ago(1500)),
    ]
    return {
        "version": 1,
        "kind": "list",
        "taken": iso(TAKEN),
        "notes": [],
        "namespace": "team-a",
        "jobs": jobs,
    }


def workflow() -> Document:
    trainings = []
    for index, rate in enumerate(("3e-4", "1e-3", "3e-3", "1e-2")):
        points = curve(200, every=25, end=0.2 + 0.05 * abs(index - 1), seed=index + 2)
        last = {name: values[-1][2] for name, values in metrics(points).items()}
        trainings.append(
            complete()
            | {
                "task": f"train[lr={rate}]",
                "name": f"digits-lr-{index}",
                "uid": f"uid-{index}",
                "href": f"tasks/{index}",
                "history": metrics(points),
                "metrics": last,
                "logs": [],
                "events": [],
                "compare": [],
            }
        )
    trainings[3] |= {
        "phase": "Failed",
        "diagnosis": diagnosis("user code", "node-1 exited with code 3", "fix the code"),
    }
    trainings[2] |= {"phase": "Running", "finished": None, "progress": 66, "source": "live"}
    return {
        "version": 1,
        "kind": "workflow",
        "taken": iso(TAKEN),
        "notes": ["task evaluate: its training was deleted before its metrics were stored"],
        "title": "dag retrain_digits, run scheduled__2026-11-26",
        "trainings": trainings,
    }


def compared(candidate: float, champion: float | None, half: float | None = None) -> Document:
    """One metric of an evaluation, with an interval of `half` on each side of the difference."""
    difference = None if champion is None else candidate - champion
    interval = None if half is None or difference is None else [difference - half, difference + half]
    return {
        "candidate": candidate,
        "champion": champion,
        "difference": difference,
        "interval": interval,
        "method": "paired bootstrap, 2000 resamples" if interval else "",
    }


def evaluation_report(*, champion: bool = True, labels: int = 10, change: float = 0.012) -> Document:
    def of(value: float, change: float, half: float | None = None) -> Document:
        return compared(value, value - change if champion else None, half)

    counts = [[max(0, 40 - 37 * min(1, abs(i - j)) - (i * j) % 5) for j in range(labels)] for i in range(labels)]
    rates = [index / 40 for index in range(41)]
    return {
        "version": 1,
        "level": 0.95,
        "candidate": {"uri": "s3://models/digits/ab12cd/", "digest": "sha256:" + "c0ffee12" * 8},
        "champion": {
            "uri": "models:/digits/14",
            "digest": "sha256:" + "beef0014" * 8,
            "name": "digits",
            "version": "14",
        }
        if champion
        else None,
        "dataset": {"uri": "s3://data/digits-held-out/2026-11/", "digest": "sha256:" + "da7a5e70" * 8},
        "code": {"uri": "git+https://git.example/team/digits", "revision": "8d3f0a1c" * 5, "digest": ""},
        "examples": 360,
        "metrics": {
            "accuracy": of(0.953, change, 0.009),
            "loss": of(0.182, -0.02, 0.011),
            "latency_ms": of(3.4, 0.2),
        },
        "slices": {
            f"digit={index}": {
                "examples": 36 - index % 3,
                "metrics": {"accuracy": of(0.95 - index / 200, 0.03 - index / 120, 0.02 + index / 500)},
            }
            for index in range(10)
        }
        | {"digit=rare": {"examples": 0, "metrics": {}}},
        "confusion": {"labels": [str(index) for index in range(labels)], "counts": counts},
        "roc": {"false_positive_rate": rates, "true_positive_rate": [rate**0.25 for rate in rates]},
    }


def decision(*, passed: bool = True) -> Document:
    def check(rule: str, reason: str, passed: bool = True) -> Document:
        return {"rule": rule, "passed": passed, "reason": reason}

    improvement = "accuracy: candidate 0.953, champion 0.941; an improvement of 0.005 is required"
    slice_9 = f"accuracy of digit=9: candidate 0.905, champion 0.95; {0.05 if passed else 0.02} worse is allowed"
    checks = [
        check("required.champion", "the evaluation has champion"),
        check("min_examples", "360 examples; 300 are required"),
        check("metrics.accuracy.min_improvement", improvement),
        check("metrics.accuracy.interval_above_zero", "accuracy: the improvement is between 0.003 and 0.021 (95 %)"),
        check("slices.digit=9.accuracy.max_regression", slice_9, passed),
    ]
    return {"passed": passed, "rule": checks[-1]["rule"], "reason": checks[-1]["reason"], "checks": checks}


def evaluated(*, passed: bool = True) -> Document:
    """A training whose model has passed the gate."""
    evaluation = {
        "report": evaluation_report(),
        "decision": decision(passed=passed),
        "uri": "s3://models/digits/evaluation.json",
    }
    return with_evaluation(complete(), evaluation)


def evaluation_failed() -> Document:
    return evaluated(passed=False)


def first_evaluation() -> Document:
    """Without a champion, and without a gate."""
    report = evaluation_report(champion=False, labels=60)
    return with_evaluation(complete(), {"report": report, "decision": None, "uri": ""})


def hostile_segments(spent: Document) -> Document:
    segments = [
        each | {"activity": text, "source": text} for each, text in zip(spent["segments"], HOSTILE, strict=False)
    ]
    return spent | {"segments": segments}


def hostile_evaluation() -> Document:
    report = evaluation_report()
    report |= {
        "metrics": {name: compared(0.5, 0.4, 0.01) for name in HOSTILE},
        "slices": {name: {"examples": 3, "metrics": {each: compared(1, 2, 3) for each in HOSTILE}} for name in HOSTILE},
        "confusion": {"labels": list(HOSTILE), "counts": [[1] * len(HOSTILE)] * len(HOSTILE)},
        "code": {name: name for name in ("uri", "digest", "revision")} | {"uri": HOSTILE[3]},
        "dataset": {"uri": HOSTILE[0], "digest": HOSTILE[7]},
        "champion": {"name": HOSTILE[1], "version": HOSTILE[4], "uri": HOSTILE[2]},
    }
    checks = [{"rule": text, "passed": False, "reason": text} for text in HOSTILE]
    judged = {"passed": False, "rule": HOSTILE[0], "reason": HOSTILE[8], "checks": checks}
    return with_evaluation(hostile(), {"report": report, "decision": judged, "uri": HOSTILE[3]})


def trial(number: int, state: str = "complete", **changes: Any) -> Document:
    """A trial whose value depends on its parameters, which are the same in each run."""
    noise = [abs(math.sin((number + 1) * factor) * 43758.5453) % 1 for factor in (12.9898, 78.233, 37.719, 4.581)]
    optimizer = ("adam", "sgd", "adamw")[int(noise[1] * 3)]
    parameters: Document = {
        "lr": 10 ** (-5 + 4 * noise[0]),
        "batch_size": 2 ** int(4 + 4 * noise[2]),
        "optimizer": optimizer,
        "dropout": round(noise[3] * 0.5, 3),
        "nesterov": noise[2] > 0.5,
    }
    if optimizer == "sgd":
        parameters["momentum"] = 0.8 + 0.19 * noise[3]
    value = 0.08 + 0.25 * abs(math.log10(parameters["lr"]) + 2.6) + 0.15 * noise[3] + (0.1 if optimizer == "sgd" else 0)
    steps = {"complete": 20, "pruned": 4 + number % 4, "running": 9, "failed": number % 3, "stopped": 6}[state]
    values = [
        [10 * step, value + 1.6 * math.exp(-step / 5) + 0.02 * math.sin(step * noise[0] * 9)]
        for step in range(1, steps + 1)
    ]
    last = values[-1][1] if values else None
    reasons = {
        "pruned": f"pruned at step {10 * steps}: worse than the median of the other trials",
        "failed": "node-0 exited with code 1",
        "stopped": "the study ended",
    }
    return {
        "number": number,
        "parameters": parameters,
        "state": state,
        "value": {"complete": value, "pruned": last}.get(state),
        "reason": reasons.get(state, ""),
        "job": f"digits-study-{number:03}",
        "href": f"trainings/{number}",
        "metrics": {"loss": value, "accuracy": 1 - value / 3} if state == "complete" else {},
        "outputs": {"model": f"s3://models/digits/{number}/"} if state == "complete" else {},
        "values": values,
        "seconds": 11.0 * steps,
        **changes,
    }


SPACE: Document = {
    "lr": {"type": "float", "low": 1e-5, "high": 0.1, "log": True},
    "batch_size": {"type": "int", "low": 16, "high": 128, "log": True},
    "optimizer": {"type": "categorical", "choices": ["adam", "sgd", "adamw"]},
    "momentum": {"type": "float", "low": 0.8, "high": 0.99, "when": {"optimizer": "sgd"}},
}


def study(trials: list[Document], title: str = "digits", limit: int = 50, **changes: Any) -> Document:
    fields = {"metric": "loss", "direction": "minimize", "max_trials": limit, "parallel": 4, "space": SPACE}
    made = study_document(
        title,
        "team-a",
        "airflow/tune_digits/manual__2026-11-26/tune",
        fields | changes.pop("study", {}),
        trials,
        **changes,
    )
    return made | {"taken": iso(TAKEN)}


def study_running() -> Document:
    states = ["complete"] * 14 + ["running"] * 4
    states[3] = states[9] = states[11] = "pruned"
    states[6] = "failed"
    return study([trial(number, state) for number, state in enumerate(states)])


def trials(count: int) -> list[Document]:
    """Trials of an ended study: two fifths are pruned, some have failed."""
    states = [
        "pruned" if number % 5 in (2, 4) else "failed" if number % 17 == 6 else "complete" for number in range(count)
    ]
    return [trial(number, state) for number, state in enumerate(states)]


IMPORTANCES = {
    "lr": 0.7213,
    "optimizer": 0.1402,
    "dropout": 0.0911,
    "batch_size": 0.0352,
    "nesterov": 0.0101,
    "momentum": 0.0021,
}


def study_ended(count: int = 100) -> Document:
    return study(trials(count), limit=count, importances=IMPORTANCES, ended=True, reason=f"{count} trials have ended")


def study_failed() -> Document:
    """All trials have failed."""
    failed = [trial(number, "failed", values=[]) for number in range(5)]
    return study(failed, ended=True, reason="5 trials have failed; max_failed_trials is 4")


def study_empty() -> Document:
    return study([])


def study_hostile() -> Document:
    """Names, values, states and reasons are hostile."""
    made = [
        trial(
            number,
            parameters={name: [HOSTILE[number], 10.0**number, True][index % 3] for index, name in enumerate(HOSTILE)},
            value=10.0 ** (number - 4) if number != 4 else math.nan,
            reason=HOSTILE[number],
            job=HOSTILE[number],
            href=HOSTILE[3] if number % 2 else HOSTILE[0],
            metrics=dict.fromkeys(HOSTILE, HOSTILE[number]),
            outputs=dict.fromkeys(HOSTILE, math.inf),
            values=[[step, 10.0 ** (number - step)] for step in range(5)] + [[6, math.inf]],
        )
        | ({"state": HOSTILE[number]} if number % 3 == 2 else {})
        for number in range(len(HOSTILE))
    ]
    fields = {"metric": HOSTILE[1], "direction": "maximize", "space": {name: {} for name in HOSTILE}}
    return study(
        made, HOSTILE[4], study=fields, importances=dict.fromkeys(HOSTILE, 0.1), reason=HOSTILE[8], notes=HOSTILE
    )


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
    "study": study_running,
    "study-ended": study_ended,
    "study-failed": study_failed,
    "study-empty": study_empty,
    "study-hostile": study_hostile,
}
"""Name -> function that makes the document."""
