"""Reports and pages of jobs in any state, also of jobs that were not created by this package, with real controllers."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import anyio
import click
import httpx
import pytest
from tests.cluster.launchers import launcher_environment
from tests.testcluster import kueue
from tests.testcluster.access import TRAINER, Access, trainjob
from tests.testcluster.nodes import run_until_finished, simulate

from trainjob import Phase, TrainJobSpec, launch
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.report import Report, diagnose
from trainjob._pages.documents.training import training_document
from trainjob._pages.page import page_html
from trainjob.cli import texts
from trainjob.errors import NotFound
from trainjob.verdicts import Category

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

PULLING = 'Back-off pulling image "nosuch:1": ErrImagePull: failed to resolve reference: nosuch:1: not found'
TOO_LONG = "a-name-that-is-longer-than-what-jobset-takes-of-it"
DELETED = f"{TOO_LONG}-too"


def jobs(queue: str) -> dict[str, dict[str, Any]]:
    """Specs by name, written as by a user without this package."""
    gpus = {"limits": {"nvidia.com/gpu": "100"}}
    secret = [{"name": "WANDB_API_KEY", "value": "0123456789abcdef"}]
    return {
        "runs": {"trainer": {"numNodes": 2, "env": [*simulate(run="never"), *secret]}},
        "ends": {"trainer": {"numNodes": 2, "env": simulate(run="100ms")}},
        "crashes": {"trainer": {"numNodes": 2, "env": simulate(run="5s", exit_code=3, ranks="1")}},
        "image": {"trainer": {"env": simulate(waiting="ImagePullBackOff", message=PULLING)}},
        "queued": {"trainer": {"resourcesPerNode": gpus, "env": simulate(run="never")}, "queue": queue},
        TOO_LONG: {"trainer": {"env": simulate(run="never")}},
        DELETED: {"trainer": {"env": simulate(run="never")}},
    }


EXPECTED: dict[str, Callable[[Report], bool]] = {
    "runs": lambda report: (
        report.observation.phase is Phase.RUNNING
        and not report.troubled
        and [rank.state for rank in report.ranks] == ["Running"] * 2
        and report.running_since is not None
    ),
    "ends": lambda report: report.observation.phase is Phase.COMPLETE and not report.troubled,
    "crashes": lambda report: (
        (report.diagnosis.rank, report.diagnosis.exit_code) == ("node-1", 3)
        and bool(report.diagnosis.log)
        and [rank.bad for rank in report.ranks] == [False, True]
    ),
    "image": lambda report: report.diagnosis.category is Category.IMAGE and report.observation.stuck,
    "queued": lambda report: (
        report.observation.phase is Phase.QUEUED
        and report.diagnosis.category is Category.QUOTA
        and report.observation.stuck
    ),
    TOO_LONG: lambda report: report.observation.reason == "TrainJobResourcesCreationFailed" and report.troubled,
    DELETED: lambda report: report.observation.phase is Phase.DELETED and report.ref.uid == "" and bool(report.events),
}


async def test_any_job_can_be_diagnosed(cluster: Access, namespace: str, small_queue: str) -> None:
    backend = KubernetesBackend(Credentials(kubeconfig=str(cluster.kubeconfig)))
    for name, fields in jobs(small_queue).items():
        queue = fields.pop("queue", "")
        job = trainjob(name, namespace, **fields)
        job["metadata"]["labels"] = {kueue.QUEUE_LABEL: queue} if queue else {}
        cluster.api.create(job)
    deleted = False
    waiting, found = dict(EXPECTED), dict[str, Report]()
    with anyio.move_on_after(120):
        while waiting:
            for name, expected in list(waiting.items()):
                try:
                    found[name] = await diagnose(backend, namespace, name)
                except NotFound:
                    continue
                if name == DELETED and found[name].events and not deleted:
                    cluster.api.delete(TRAINER, "TrainJob", namespace, name)
                    deleted = True
                if expected(found[name]):
                    del waiting[name]
            await anyio.sleep(0.2)
    if waiting:
        pytest.fail("\n\n".join(texts.report_text(found[name]) if name in found else name for name in waiting))
    for name, report in found.items():
        html, text = page_html(training_document(report)), click.unstyle(texts.report_text(report))
        HTMLParser().feed(html)
        for shown in (html, text):
            assert f"{namespace}/{name}" in shown
            assert "0123456789abcdef" not in shown
    assert "WANDB_API_KEY" in found["runs"].spec["env"]
    with pytest.raises(NotFound, match="there is no TrainJob"):
        await diagnose(backend, namespace, "nosuch")
    await backend.aclose()


async def test_pages_and_reports_of_a_namespace(cluster: Access, namespace: str, tmp_path: Path) -> None:
    """`trainjob ui` shows jobs of the namespace as they change, and `trainjob report` writes their pages."""
    backend = KubernetesBackend(Credentials(kubeconfig=str(cluster.kubeconfig)))
    origin = {"dag_id": "digits", "run_id": "manual", "task_id": "train"}
    fields = {"runtime": "torch-distributed", "num_nodes": 2, "runtime_patches": [run_until_finished()]}
    asked = TrainJobSpec.parse(fields)
    ref = await launch(backend, asked, "study/train", namespace=namespace, origin=origin)
    environment = {**launcher_environment(), "KUBECONFIG": str(cluster.kubeconfig)}
    program = str(Path(sys.executable).parent / "trainjob")

    async def pages(path: str) -> dict[str, Any]:
        async with httpx.AsyncClient(timeout=20) as client:
            response = await client.get(f"{url}{path}document.json")
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    async def shows(phase: str) -> dict[str, Any]:
        with anyio.fail_after(240):
            while (document := await pages(f"jobs/{ref.name}/"))["phase"] != phase:
                await anyio.sleep(0.2)
        return document

    process = await anyio.open_process([program, "ui", "-n", namespace], env=environment)
    try:
        assert process.stdout is not None
        url = (await process.stdout.receive()).decode().strip()
        running = await shows("Running")
        assert [rank["state"] for rank in running["ranks"]] == ["Running"] * 2
        assert running["notes"] == []
        (listed,) = (await pages(""))["jobs"]
        assert (listed["name"], listed["workflow"]) == (ref.name, "DAG digits, run manual")
        (compared,) = (await pages(listed["workflow_href"]))["trainings"]
        assert (compared["name"], compared["task"]) == (ref.name, "train")
        cluster.api.delete(TRAINER, "TrainJob", namespace, ref.name)
        deleted = await shows("Deleted")
        assert deleted["notes"] == ["The TrainJob was deleted. This is the state that was read last."]
        assert [rank["rank"] for rank in deleted["ranks"]] == ["node-0", "node-1"]
        ref = await launch(backend, asked, "study/train", namespace=namespace, origin=origin)
        await shows("Running")
        cluster.finish(namespace)
        assert (await shows("Complete"))["finished"] is not None
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.aclose()

    for what in (ref.name, "study/train", "digits/manual", "study"):
        page = tmp_path / "page.html"
        command = [program, "report", "-n", namespace, what, "-o", str(page)]
        done = await anyio.run_process(command, env=environment, check=False)
        assert done.returncode == 0, done.stderr.decode()
        assert ref.name in page.read_text()
    unknown = [program, "report", "-n", namespace, "other/nosuch"]
    done = await anyio.run_process(unknown, env=environment, check=False)
    assert done.returncode == 2
    assert b"TrainJob other/nosuch" in done.stderr
    await backend.aclose()
