"""Reports and pages of jobs in any state, also of jobs that were not created by this package, with real controllers."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import anyio
import click
import pytest
from tests.testcluster import kueue
from tests.testcluster.access import TRAINER, Access, trainjob
from tests.testcluster.nodes import simulate

from trainjob import Phase
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.report import Report, diagnose
from trainjob._pages.documents.training import training_document
from trainjob._pages.page import page_html
from trainjob.cli import texts
from trainjob.errors import Category, NotFound

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


async def test_any_job_can_be_diagnosed(
    cluster: Access, backend: KubernetesBackend, namespace: str, small_queue: str
) -> None:
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
