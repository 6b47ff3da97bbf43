"""`trainjob doctor` on real clusters: healthy ones, and one test for each problem."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from email.utils import format_datetime, parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import yaml
from tests.certificates import Authority
from tests.cluster import failing as make
from tests.cluster.backends import backend_of
from tests.cluster.commands import by_command, examined, failures, of
from tests.cluster.conftest import KUBECONFIG
from tests.cluster.waits import wait_for_queue
from tests.fakes.faults import FaultProxy
from tests.processes import wait_until
from tests.testcluster import kueue, step_image as steps
from tests.testcluster.access import TRAINER, Access, refused, trainjob
from tests.testcluster.api import write_kubeconfig
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import simulate

from trainjob import JobRef, TrainJobSpec
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import Timings
from trainjob._backends.kubernetes.errors import Forbidden
from trainjob._doctor import Level
from trainjob._doctor.permissions import PERMISSIONS, Permission
from trainjob._install import objects
from trainjob._jobs.cancellation import cancel
from trainjob._jobs.launching import launch
from trainjob._jobs.records import mark_delivered
from trainjob._jobs.waiting import wait
from trainjob.errors import Rejected

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

ADMISSION = "admissionregistration.k8s.io/v1"
(ROLE,) = [each for each in objects("rbac") if each["kind"] == "Role"]


# ---------------------------------------------------------------- healthy clusters


async def test_a_healthy_cluster_passes(cluster: Access, namespace: str) -> None:
    for runtime in objects("runtimes", image=steps.IMAGE):  # the image of all other tests
        cluster.add_runtime(runtime)

    for each in objects("reaper", namespace=namespace, image=steps.IMAGE):
        cluster.api.apply(each)
    wait_for_queue(cluster, namespace)
    found = await examined(cluster.kubeconfig, namespace, ["torch-distributed"], kueue.QUEUE)
    assert [finding for finding in found if finding.level is not Level.OK] == []
    assert [finding.check for finding in found if finding.check != "rights"] == [
        *("credentials", "server", "kubernetes", "identity", "trainer", "jobset", "kueue"),
        *("clock", "reaper", "queue", "admission"),
    ]
    accepted = f"a job of ClusterTrainingRuntime torch-distributed for queue {kueue.QUEUE} would be accepted and wait"
    assert of(found, "admission").message.startswith(accepted)
    assert f"LocalQueue {kueue.QUEUE} -> ClusterQueue {kueue.QUEUE}, active" in of(found, "queue").message
    assert cluster.api.find(TRAINER, "TrainJob", namespace) == [], "nothing was created"
    code, text = by_command(cluster.kubeconfig, namespace)
    assert code == 0
    assert text.splitlines()[-1].endswith(" ok")
    assert "a job of ClusterTrainingRuntime trainjob-step would be accepted (dry run" in text


async def test_checks_without_permission_are_reported_as_skipped(cluster: Access, namespace: str) -> None:
    narrow = cluster.kubeconfig_for(ROLE["rules"], namespace)
    found = await examined(narrow, namespace, ["torch-distributed"], kueue.QUEUE)
    assert failures(found) == []
    skipped = [finding.check for finding in found if finding.level is Level.SKIPPED]
    assert skipped == ["controller", "queue"]
    assert of(found, "identity").message.startswith(f"you are system:serviceaccount:{namespace}:limited-")
    assert "would be accepted and wait for its admission" in of(found, "admission").message, "shown by a dry run"
    with make.own(make.NODE)(cluster, namespace):
        found = await examined(narrow, namespace, ["own"])
    assert failures(found) == []
    assert of(found, "admission").message.startswith("a job of TrainingRuntime own would be accepted")
    found = await examined(narrow, namespace, ["nosuch"])
    assert failures(found) == ["runtime"]
    assert of(found, "runtime").message == "ClusterTrainingRuntime nosuch does not exist"


async def test_a_missing_or_failing_reaper_is_reported(cluster: Access, namespace: str) -> None:
    missing = of(await examined(cluster.kubeconfig, namespace), "controller")
    assert missing.level is Level.WARNING
    neither = "there is neither a Deployment trainjob-controller nor a CronJob trainjob-reaper"
    assert missing.message == f"{neither}: unattended jobs are not ended"
    assert missing.advice.startswith(f"trainjob install --only controller -n {namespace} --image ")
    for each in objects("reaper", namespace=namespace, image=steps.IMAGE):
        if each["kind"] == "CronJob":
            each["spec"]["schedule"] = "0 0 1 1 *"  # the controller, which writes its status, starts no Job of it
        cluster.api.apply(each)
    cron_job = cluster.api.get("batch/v1", "CronJob", namespace, "trainjob-reaper") or {}
    first = {"status": {"lastScheduleTime": cron_job["metadata"]["creationTimestamp"]}}  # its run has not ended
    cluster.api.patch("batch/v1", "CronJob", namespace, "trainjob-reaper/status", first)
    assert of(await examined(cluster.kubeconfig, namespace), "reaper").level is Level.OK
    failing = {"lastScheduleTime": "2026-11-25T12:00:00Z", "lastSuccessfulTime": "2026-11-25T11:00:00Z"}
    cluster.api.patch("batch/v1", "CronJob", namespace, "trainjob-reaper/status", {"status": failing})
    found = of(await examined(cluster.kubeconfig, namespace), "reaper")
    assert found.level is Level.WARNING
    assert "the last success was at 2026-11-25T11:00:00Z" in found.message
    cluster.api.patch("batch/v1", "CronJob", namespace, "trainjob-reaper", {"spec": {"suspend": True}})
    assert "is suspended" in of(await examined(cluster.kubeconfig, namespace), "reaper").message


# ---------------------------------------------------------------- permissions


def without(permission: Permission) -> list[dict[str, Any]]:
    """The rules of the Role without one verb."""
    rules = []
    for rule in ROLE["rules"]:
        dropped = {permission.verb} if rule["resources"] == [permission.resource] else set()
        verbs = [verb for verb in rule["verbs"] if verb not in dropped]
        rules += [{**rule, "verbs": verbs}] if verbs else []
    return rules


async def test_each_missing_permission_is_reported(cluster: Access, backend: KubernetesBackend, namespace: str) -> None:
    """The missing permission is named, and the operations fail that depend on it."""

    async def check(permission: Permission, kubeconfig: Path, key: str, ref: JobRef) -> None:
        found = await examined(kubeconfig, namespace)
        (missing,) = [finding for finding in found if finding.check == "rights" and finding.level is not Level.OK]
        what = f"{permission.verb} {permission.resource} in {namespace}"
        assert (missing.level, missing.message) == (permission.level, f"may not {what}: {permission.without}")
        install, _, apply = missing.advice.partition(" | ")
        account = rf"{namespace}:limited-\w+"
        assert re.fullmatch(rf"trainjob install --only rbac -n {namespace} --service-account {account}", install)
        assert apply == "kubectl apply --server-side -f -"
        assert set(failures(found)) <= {"rights"}
        await fails_as_reported(kubeconfig, permission, key, ref)

    kubeconfigs = [cluster.kubeconfig_for(without(permission), namespace) for permission in PERMISSIONS]
    refs = [await launch(backend, spec(), f"{i}", namespace=namespace) for i in range(len(PERMISSIONS))]
    async with anyio.create_task_group() as tasks:
        for i, permission in enumerate(PERMISSIONS):
            tasks.start_soon(check, permission, kubeconfigs[i], f"{i}", refs[i])


def spec(run: str = "2s") -> TrainJobSpec:
    return TrainJobSpec.parse({"runtime": "torch-distributed", "num_nodes": 1, "env": simulate(run=run)})


async def fails_as_reported(kubeconfig: Path, permission: Permission, key: str, ref: JobRef) -> None:
    """Try all operations, and check which ones fail."""
    backend = backend_of(kubeconfig, timings=Timings(poll=(0.2, 0.5)))
    failed = set()

    async def launched() -> None:
        # It must not have ended before its cancel, which then has nothing to do.
        await cancel(backend, await launch(backend, spec("10m"), f"own/{ref.name}", namespace=ref.namespace))

    async def read() -> None:
        assert [line async for line in backend.logs(ref)]

    async def seen() -> None:
        assert (await backend.evidence(ref)).unseen == []

    uses = {
        "wait": lambda: wait(backend, ref),
        "adopt": lambda: launch(backend, spec(), key, namespace=ref.namespace),
        "launch": launched,
        "mark": lambda: mark_delivered(backend, ref),
        "logs": read,
        "evidence": seen,
    }
    for use, call in uses.items():
        try:
            await call()
        except (Forbidden, Rejected, AssertionError):
            failed.add(use)
    await backend.aclose()
    assert failed == FAILS.get((permission.resource, permission.verb), set()), permission


FAILS = {
    ("trainjobs", "create"): {"launch"},
    ("trainjobs", "get"): {"wait", "launch", "evidence"},
    ("trainjobs", "list"): {"adopt", "launch", "wait"},
    ("trainjobs", "patch"): {"mark"},
    ("trainjobs", "delete"): {"launch"},
    ("pods", "list"): {"launch", "logs", "evidence"},
    ("pods/log", "get"): {"logs"},
    ("events", "list"): {"evidence"},
    ("workloads", "list"): {"evidence"},
}


async def test_an_account_without_permissions_fails_only_the_check_of_permissions(
    cluster: Access, namespace: str
) -> None:
    unprivileged = cluster.kubeconfig_for([], namespace)
    found = await examined(unprivileged, namespace, queue=kueue.QUEUE)
    assert set(failures(found)) == {"rights"}
    missing = [finding for finding in found if finding.check == "rights"]
    assert len(missing) == len(PERMISSIONS)
    assert of(found, "admission").level is Level.SKIPPED
    code, text = by_command(unprivileged, namespace)
    assert code == 2
    assert text.count("trainjob install --only rbac") == 1, "the same advice is given once"


# ---------------------------------------------------------------- missing and unusable objects


async def test_a_missing_runtime_and_queue_are_reported(cluster: Access, namespace: str) -> None:
    found = await examined(cluster.kubeconfig, namespace, ["nosuch", "torch-distributed"], "nosuch")
    assert failures(found) == ["queue", "runtime"]
    assert of(found, "runtime").message == "ClusterTrainingRuntime nosuch does not exist"
    runtimes = f"list the runtimes: kubectl get clustertrainingruntimes,trainingruntimes -n {namespace}"
    assert of(found, "runtime").advice == runtimes
    assert of(found, "admission").message.startswith("a job of ClusterTrainingRuntime torch-distributed would be acc")
    assert of(found, "queue").message == f"LocalQueue nosuch does not exist in {namespace}: its jobs would never start"
    listed = f"list the queues: kubectl get localqueues -n {namespace}"
    assert of(found, "queue").advice == f"{listed}, or have this one created"
    code, text = by_command(cluster.kubeconfig, "nosuch", "--json")
    assert code == 2
    answer = json.loads(text)
    failed = {each["check"]: each["advice"] for each in answer["findings"] if each["level"] == "failure"}
    assert failed == {
        "namespace": "kubectl create namespace nosuch, or set another one: --namespace or TRAINJOB_NAMESPACE"
    }


async def test_a_held_queue_is_reported(cluster: Access, namespace: str) -> None:
    narrow = cluster.kubeconfig_for([*ROLE["rules"], READ_QUEUES], namespace)
    with make.queue(cluster, namespace, "held", {"stopPolicy": "Hold"}):
        cluster.api.create(kueue.local_queue(namespace, "dangling", f"{namespace}-nosuch"))
        queues = partial(cluster.api.find, kueue.API, "LocalQueue", namespace)

        def checked() -> bool:
            return all((each.get("status") or {}).get("conditions") for each in queues())

        wait_until("Kueue has checked the queues", checked, 30)
        for kubeconfig in (cluster.kubeconfig, narrow):
            for queue in ("held", "dangling"):
                found = of(await examined(kubeconfig, namespace, queue=queue), "queue")
                assert found.level is Level.FAILURE
                assert f"LocalQueue {queue}" in found.message
                assert "takes no jobs" in found.message
                assert namespace in found.advice, "the ClusterQueue to activate"
            everyone = [each.level for each in await examined(kubeconfig, namespace) if each.check == "queue"]
            assert sorted(everyone) == [Level.OK, Level.WARNING, Level.WARNING], "no queue was requested"


READ_QUEUES = {"apiGroups": ["kueue.x-k8s.io"], "resources": ["localqueues"], "verbs": ["get", "list"]}


# ---------------------------------------------------------------- credentials and connection


async def test_refused_credentials_are_reported(cluster: Access, namespace: str, tmp_path: Path) -> None:
    expired = cluster.token_for("leaver", namespace)
    cluster.api.delete("v1", "ServiceAccount", namespace, "leaver")
    server, authority = cluster.api.server, cluster.api.authority
    old = write_kubeconfig(tmp_path / "old", server, authority, {"token": expired}, namespace)
    code, text = by_command(old, namespace)
    assert code == 2
    assert "the credentials are refused" in text
    assert "-> log in again, or renew the token" in text
    other = Authority(tmp_path / "other").certificate.read_bytes()
    wrong = write_kubeconfig(tmp_path / "wrong", server, other, {"token": expired}, namespace)
    code, text = by_command(wrong, namespace, "--json")
    assert code == 2
    (failure,) = [each for each in json.loads(text)["findings"] if each["level"] == "failure"]
    assert failure["check"] == "server"
    assert "CERTIFICATE_VERIFY_FAILED" in failure["message"]
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["clusters"][0]["cluster"] = {"server": server, "insecure-skip-tls-verify": True}
    (tmp_path / "unverified").write_text(yaml.safe_dump(config))
    found = await examined(tmp_path / "unverified", namespace)
    assert of(found, "server").level is Level.WARNING
    assert failures(found) == []


@pytest.mark.parametrize("seconds", [90, -90])
async def test_clock_skew_is_reported(
    cluster: Access, namespace: str, authority: Authority, tmp_path: Path, seconds: int
) -> None:
    async def late(response: httpx.Response) -> None:
        date = parsedate_to_datetime(response.headers["date"]) + timedelta(seconds=seconds)
        response.headers["date"] = format_datetime(date, usegmt=True)

    pair = authority.issue("proxy", addresses=["127.0.0.1"])
    token = yaml.safe_load(cluster.kubeconfig_for(ROLE["rules"], namespace).read_text())["users"][0]["user"]
    async with FaultProxy(cluster.api.server, cluster.api.authority, pair) as proxy:
        proxy._upstream.event_hooks["response"].append(late)
        kubeconfig = write_kubeconfig(
            tmp_path / "config", proxy.url, authority.certificate.read_bytes(), token, namespace
        )
        clock = of(await examined(kubeconfig, namespace), "clock")
    assert clock.level is Level.WARNING
    assert ("behind the server" if seconds > 0 else "ahead of the server") in clock.message
    assert clock.advice == "synchronize both clocks by NTP (chrony, systemd-timesyncd)"
    assert 85 <= int(clock.message.partition(" is ")[2].partition(" s ")[0]) <= 90


# ---------------------------------------------------------------- failing components


@pytest.fixture(scope="module")
def bare() -> Iterator[Cluster]:
    """A cluster without Kueue, which the test may damage."""
    if KUBECONFIG in os.environ:
        pytest.skip(f"{KUBECONFIG} names a cluster that the tests must not damage")
    with Cluster(kueue=False, simulated_nodes=0) as started:
        yield started


async def test_each_failing_component_is_reported(bare: Cluster) -> None:
    """Remove one component after the other, starting without Kueue, until the API server does not answer."""
    kubeconfig, namespace = bare.kubeconfig, "default"

    found = await examined(kubeconfig, namespace)
    assert failures(found) == []
    assert of(found, "kueue").level is Level.SKIPPED
    assert "not installed: jobs start at once" in of(found, "kueue").message
    assert not any("workloads" in finding.message for finding in found)
    assert of(found, "runtime").level is Level.WARNING
    assert "trainjob install --only runtimes" in of(found, "runtime").advice
    assert of(found, "admission").level is Level.SKIPPED
    assert failures(await examined(kubeconfig, namespace, queue="gpus")) == ["kueue"]

    for runtime in objects("runtimes"):
        bare.add_runtime(runtime)
    found = await examined(kubeconfig, namespace)
    assert failures(found) == []
    assert of(found, "admission").level is Level.OK

    bare.kill("trainer")
    code, text = by_command(kubeconfig, namespace)
    assert code == 3
    assert "webhook defaulter.trainjob.trainer.kubeflow.org does not answer" in text
    assert "kubectl get pods -A | grep trainer" in text

    for kind in ("mutating", "validating"):
        bare.api.delete(ADMISSION, f"{kind.capitalize()}WebhookConfiguration", "", f"trainer-{kind}")
    not_called = lambda: not refused(lambda: bare.api.create(trainjob("probe", namespace), dry_run=True))  # noqa: E731
    wait_until("the API server no longer calls the webhooks", not_called, 20)

    group = "apiextensions.k8s.io/v1"
    bare.api.delete(group, "CustomResourceDefinition", "", "jobsets.jobset.x-k8s.io")
    wait_until("JobSet is gone", lambda: _unserved(bare, "jobset.x-k8s.io/v1alpha2"), 30)
    found = await examined(kubeconfig, namespace)
    assert failures(found) == ["jobset"]
    assert of(found, "jobset").advice == "install JobSet; Kubeflow Trainer's manifests include it"

    for name in ("trainjobs", "trainingruntimes", "clustertrainingruntimes"):
        bare.api.delete(group, "CustomResourceDefinition", "", f"{name}.trainer.kubeflow.org")
    wait_until("Trainer is gone", lambda: _unserved(bare, TRAINER), 30)
    found = await examined(kubeconfig, namespace, ["torch-distributed"])
    assert set(failures(found)) == {"trainer", "jobset"}
    assert "kubectl apply --server-side -k" in of(found, "trainer").advice

    bare.kill("kube-apiserver")
    code, text = by_command(kubeconfig, namespace)
    assert code == 3
    assert "no reply from the API server" in text


def _unserved(cluster: Cluster, group_version: str) -> bool:
    gone = "404" in refused(lambda: cluster.api.request("GET", f"/apis/{group_version}"))
    return gone and "404" in refused(lambda: cluster.api.request("GET", f"/openapi/v3/apis/{group_version}"))
