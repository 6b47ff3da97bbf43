"""The Kubernetes backend with real controllers: what is beyond the contract of all backends (test_contract.py)."""

from __future__ import annotations

import subprocess
import sys
from contextlib import aclosing
from importlib import resources
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import yaml
from tests.cluster import failing as make
from tests.cluster.backends import both_watches, opened
from tests.cluster.launchers import launcher_environment
from tests.cluster.pods import pods_of
from tests.cluster.waits import phases_of, until, until_phase
from tests.cluster.wires import Wires
from tests.fakes.faults import Fault, Kind
from tests.processes import read_until
from tests.testcluster import images, kueue
from tests.testcluster.access import RULES, TRAINER, Access
from tests.testcluster.nodes import run_until_finished, simulate

from trainjob import JobRef, Phase, RetryVerdict, TrainJobFailed, TrainJobSpec, WaitOptions
from trainjob._backends.base import TrainJob
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import ApiClient, Request, Timings
from trainjob._diagnosis import diagnosis_of
from trainjob._jobs.cancellation import cancel
from trainjob._jobs.launching import dry_run, launch
from trainjob._jobs.records import mark_delivered
from trainjob._jobs.waiting import wait
from trainjob._manifest.render import render
from trainjob.errors import Category, Diagnosis, RankCrashed, Rejected, SpecMismatch, Stuck
from trainjob.status import Observation

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]


def spec(**fields: Any) -> TrainJobSpec:
    return TrainJobSpec.parse({"runtime": "torch-distributed", "num_nodes": 2, **fields})


# ---------------------------------------------------------------- launches


@both_watches
async def test_launch_wait_and_adopt(backend: KubernetesBackend, namespace: str) -> None:
    """A spec is compared with the stored object, which has the server's defaults."""
    asked = spec(env=simulate(run="1s"))
    ref = await launch(backend, asked, "dag/run/train", namespace=namespace)
    assert (await phases_of(backend, ref))[-1] is Phase.COMPLETE
    assert await launch(backend, asked, "dag/run/train", namespace=namespace) == ref, "complete, not delivered: adopted"
    other = spec(env=simulate(run="1s"), num_nodes=3)
    with pytest.raises(SpecMismatch, match=r"spec\.trainer\.numNodes: 2 -> 3"):
        await launch(backend, other, "dag/run/train", namespace=namespace)
    stored = await dry_run(backend, other, "a", namespace=namespace)
    assert stored["spec"]["managedBy"] == "trainer.kubeflow.org/trainjob-controller", "with the server's defaults"
    await mark_delivered(backend, ref)
    again = await launch(backend, asked, "dag/run/train", namespace=namespace)
    assert (again.attempt, again.name != ref.name) == (2, True)


async def test_refusals_of_the_api_server_are_not_retried(
    cluster: Access, backend: KubernetesBackend, namespace: str
) -> None:
    """Refusals of a real server: forbidden, unknown namespace or field, too large, invalid, exceeded quota."""
    reading = cluster.kubeconfig_for([{**RULES[0], "verbs": ["get", "list", "watch"]}], namespace)
    async with opened(reading) as reader:
        with pytest.raises(Rejected, match='cannot create resource "trainjobs"') as forbidden:
            await launch(reader, spec(), "a", namespace=namespace)
    with pytest.raises(Rejected, match='namespaces "nosuch" not found'):
        await launch(backend, spec(), "a", namespace="nosuch")
    fields = {"runtimeRef": {"name": "torch-distributed"}, "podTemplateOverrides": []}
    unknown = TrainJobSpec.parse({"apiVersion": TRAINER, "kind": "TrainJob", "spec": fields})
    with pytest.raises(Rejected, match=r"spec\.podTemplateOverrides: is not supported.* whose fields here are: active"):
        await launch(backend, unknown, "a", namespace=namespace)
    with pytest.raises(Rejected, match=r"[Tt]oo large") as too_large:  # for etcd
        await backend.create(_with_env(namespace, "BIG", "x" * 2_000_000))
    with pytest.raises(Rejected, match=r"is 3\.3 MiB of JSON, and an API server accepts 3"):
        await backend.create(_with_env(namespace, "BIG", "x" * 3_500_000))
    with pytest.raises(Rejected, match="PET_NNODES") as invalid:
        await backend.create(_with_env(namespace, "PET_NNODES", "1"))
    for refused in (forbidden, too_large, invalid):
        assert refused.value.retry is RetryVerdict.CONFIGURATION
    cluster.forbid_trainjobs(namespace)
    with pytest.raises(Rejected, match="exceeded quota") as over:
        await launch(backend, spec(), "a", namespace=namespace)
    assert over.value.retry is RetryVerdict.QUOTA
    assert await backend.find(namespace, {}) == []


def _with_env(namespace: str, name: str, value: str) -> TrainJob:
    """A manifest with a variable that the spec would refuse."""
    trainjob = render(spec(), "a", 1, namespace)
    trainer = {**trainjob["spec"]["trainer"], "env": [{"name": name, "value": value}]}
    return {**trainjob, "spec": {**trainjob["spec"], "trainer": trainer}}


async def test_warnings_of_the_server_are_shown(
    backend: KubernetesBackend, cluster: Access, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = cluster.api.get(TRAINER, "ClusterTrainingRuntime", "", "jax-distributed") or {}
    labels = {**runtime["metadata"]["labels"], "trainer.kubeflow.org/support": "deprecated"}
    cluster.add_runtime({**runtime, "metadata": {"name": f"old-{namespace}", "labels": labels}})
    await launch(backend, spec(runtime=f"old-{namespace}"), "a", namespace=namespace)
    assert any("API server: " in each.message and "deprecated" in each.message for each in caplog.records)
    cluster.api.delete(TRAINER, "ClusterTrainingRuntime", "", f"old-{namespace}")


async def test_no_pod_is_created_after_a_cancel(backend: KubernetesBackend, namespace: str) -> None:
    """A controller that has just seen a resumed job creates its pods, even if the job is deleted at that moment."""
    for number in range(6):
        ref = await launch(backend, spec(env=simulate(run="never"), suspend=True), f"{number}", namespace=namespace)
        await until_phase(backend, ref, Phase.SUSPENDED)
        await backend.patch(ref, {"spec": {"suspend": False}})
        await anyio.sleep(0.05 * number)
        assert await cancel(backend, ref)
        with anyio.move_on_after(0.7):
            while await backend.stopped(ref):
                await anyio.sleep(0.02)
            pytest.fail(f"a pod of {ref} was created after the cancel ({0.05 * number:.2f} s after it was resumed)")


# ---------------------------------------------------------------- permissions

ROLE = yaml.safe_load((resources.files("trainjob") / "_install" / "role.yaml").read_text())


async def test_the_shipped_role_is_needed_and_suffices(
    cluster: Access, namespace: str, small_queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[tuple[str, str, str]] = set()
    stream = ApiClient.stream

    def recording(self: ApiClient, request: Request) -> Any:
        version, _, path = request.path.partition(f"/namespaces/{namespace}/")
        group = version.split("/")[2] if version.startswith("/apis/") else ""
        collection, _, rest = path.partition("/")
        _, _, subresource = rest.partition("/")
        resource = f"{collection}/{subresource}" if subresource else collection
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}.get(request.method, "get" if rest else "list")
        if resource:  # a waiter also requests the ClusterTrainingRuntime after a second; no Role can allow that
            used.add((group, resource, "watch" if "watch" in request.params else verb))
        return stream(self, request)

    monkeypatch.setattr(ApiClient, "stream", recording)
    async with opened(cluster.kubeconfig_for(ROLE["rules"], namespace), timings=Timings(renew=0.1)) as narrow:
        await _use_everything(narrow, cluster, namespace, small_queue)
    assert used == {
        (group, name, verb)
        for rule in ROLE["rules"]
        for group in rule["apiGroups"]
        for name in rule["resources"]
        for verb in rule["verbs"]
    }


async def _use_everything(narrow: KubernetesBackend, cluster: Access, namespace: str, queue: str) -> None:
    """Complete a job, and cancel one that its queue never admits; check that nothing was hidden."""
    asked = spec(env=simulate(run="1s"), labels={kueue.QUEUE_LABEL: queue}, unattended="suspend")
    ref = await launch(narrow, asked, "a", namespace=namespace)
    assert await launch(narrow, asked, "a", namespace=namespace) == ref
    lines: list[str] = []
    await wait(narrow, ref, on_log=lambda line: lines.append(line.text))
    assert lines
    await mark_delivered(narrow, ref)
    assert (await narrow.evidence(ref)).unseen == []
    with make.own(make.NODE)(cluster, namespace):
        own = spec(**make.OWN, labels={kueue.QUEUE_LABEL: "nosuch"})
        waiting = await launch(narrow, own, "b", namespace=namespace)
    with pytest.raises(Stuck, match="LocalQueue nosuch doesn't exist"):
        await wait(narrow, waiting, WaitOptions(fail_fast=True))
    assert (await narrow.evidence(waiting)).unseen == []
    assert await narrow.usage(waiting) is None
    assert await narrow.queue_position(waiting, queue) is None
    assert await cancel(narrow, waiting)


# ---------------------------------------------------------------- crashes of jobs that keep running

CRASH = make.one_of(2, "time.sleep(1); sys.exit('ValueError: the answer is not 42')", image=images.PYTHON)
"""Trainer's runtime restarts rank 1 again and again."""


async def test_a_crash_of_a_real_pod_is_reported_at_once_and_kept_for_the_diagnosis(
    backend: KubernetesBackend, real_namespace: str
) -> None:
    """At the deadline the JobSet is deleted with its pods and their logs."""
    asked = TrainJobSpec.parse(CRASH | {"active_deadline_seconds": 40})
    ref = await launch(backend, asked, "a", namespace=real_namespace)
    crashes: list[Diagnosis] = []
    with anyio.fail_after(240), pytest.raises(TrainJobFailed) as failed:
        await wait(backend, ref, on_crash=crashes.append)
    assert (crashes[0].rank, crashes[0].exit_code) == ("node-1", 1)
    assert (crashes[0].log, crashes[0].unseen) == (("ValueError: the answer is not 42",), ())
    assert failed.value.diagnosis.category is Category.DEADLINE
    assert failed.value.diagnosis.log == ("ValueError: the answer is not 42",)


async def test_a_restarted_waiter_finds_a_past_crash(
    real_node: Access, backend: KubernetesBackend, real_namespace: str
) -> None:
    """The kubelet has removed the container of the first run, but the pod's status still has its end."""
    ref = await launch(backend, TrainJobSpec.parse(CRASH), "a", namespace=real_namespace)

    def crashed_again() -> bool:
        statuses = [each for pod in pods_of(real_node, ref) for each in pod["status"].get("containerStatuses", [])]
        return any("terminated" in each["state"] and "terminated" in each["lastState"] for each in statuses)

    await until(crashed_again, 90)
    with anyio.fail_after(120), pytest.raises(RankCrashed) as caught:
        await wait(backend, ref, WaitOptions(fail_on_first_crash=True))
    diagnosis = caught.value.diagnosis
    assert (diagnosis.rank, diagnosis.exit_code, diagnosis.log) == ("node-1", 1, ("ValueError: the answer is not 42",))


async def first_crash(backend: KubernetesBackend, ref: JobRef) -> tuple[str, int | None]:
    """Rank and exit code."""
    with anyio.fail_after(60):
        async with aclosing(backend.crashes(ref)) as found:
            diagnosis = diagnosis_of(await anext(found), Observation(Phase.FAILED))
    return diagnosis.rank, diagnosis.exit_code


async def test_all_listeners_of_a_namespace_share_one_watch_of_pods(wires: Wires) -> None:
    # One crash only: after six more the job would fail, and its pods would be deleted before all listeners see them.
    once = spec(env=simulate(run="200ms", exit_code=3, ranks="1", failures="1"))
    async with wires.open(Timings(), shared=True) as (backend, proxy):
        crashing = [await launch(backend, once, key, namespace=wires.namespace) for key in ("a", "b")]
        quiet = await launch(backend, spec(env=simulate(run="never")), "quiet", namespace=wires.namespace)
        looks = len(proxy.seen("GET", "/pods"))  # of launches, for ranks of earlier attempts
        found: dict[int, tuple[str, int | None]] = {}

        async def listen(number: int, ref: JobRef) -> None:
            found[number] = await first_crash(backend, ref)

        async with anyio.create_task_group() as tasks:
            for number, ref in enumerate([*crashing, *crashing, quiet]):
                tasks.start_soon(listen, number, ref)
            await until(lambda: len(found) == 4)
            assert found == dict.fromkeys(range(4), ("node-1", 3)), "the fifth listener's job has no crash"
            # A later listener gets the earlier crash without a request: the watch has the pods.
            assert await first_crash(backend, crashing[0]) == ("node-1", 3)
            assert len(proxy.seen("WATCH", "/pods")) == 1
            assert len(proxy.seen("GET", "/pods")) == looks + 1
            tasks.cancel_scope.cancel()
        await first_crash(backend, crashing[1])
        assert len(proxy.seen("WATCH", "/pods")) == 1, "it stays open for the next listener for a while"


# ---------------------------------------------------------------- logs and lists


async def test_a_delayed_log_is_read(wires: Wires) -> None:
    """The log is read even after the job's end, when nothing else is waited for."""
    async with wires.open(Timings()) as (slow, proxy):
        proxy.plan = lambda seen: Fault(Kind.DELAY, seconds=3) if seen.path.endswith("/log") else None
        ref = await launch(slow, spec(env=simulate(run="100ms")), "a", namespace=wires.namespace)
        await until_phase(slow, ref, Phase.COMPLETE)
        with anyio.fail_after(30):
            lines = [line.rank async for line in slow.logs(ref, follow=True)]
        assert sorted(lines) == ["node-0", "node-1"]
        assert len(proxy.injected) == 2


async def test_logs_of_many_jobs_share_one_watch_of_pods(
    cluster: Access, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A triggerer waits for a thousand jobs: their shared watch provides the list of pods."""
    lists: list[str] = []
    read: dict[str, list[str]] = {}
    async with opened(cluster.kubeconfig, shared=True) as triggers:
        stream = triggers._client.stream

        def counting(request: Request) -> Any:
            lists.extend([request.path] if request.path.endswith("/pods") and "watch" not in request.params else [])
            return stream(request)

        async def follow(ref: JobRef) -> None:
            read[ref.name] = [line.rank async for line in triggers.logs(ref, follow=True)]

        monkeypatch.setattr(triggers._client, "stream", counting)
        asked = spec(env=simulate(run="12s"))
        refs = [await launch(triggers, asked, f"key {n}", namespace=namespace) for n in range(5)]
        with anyio.fail_after(240):
            async with anyio.create_task_group() as tasks:
                for ref in refs:
                    tasks.start_soon(follow, ref)
    assert {name: sorted(ranks) for name, ranks in read.items()} == {ref.name: ["node-0", "node-1"] for ref in refs}
    assert len(lists) <= 1 + 2 * len(refs), "one at the start, at most one for each launch, and one for each end"


@both_watches
async def test_lists_of_several_pages_are_complete(
    cluster: Access, backend: KubernetesBackend, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("client", "reflector"):
        monkeypatch.setattr(f"trainjob._backends.kubernetes.{module}.PAGE", 2)
    refs = [await launch(backend, spec(suspend=True), f"page-{number}", namespace=namespace) for number in range(5)]
    client = ApiClient(Credentials(kubeconfig=str(cluster.kubeconfig)))
    assert len(await client.items(cluster.api.path(TRAINER, "TrainJob", namespace), {})) == 5
    await client.aclose()
    names = {ref.name for ref in refs}
    assert (await backend.refs(namespace, names))[0].keys() == names
    assert {job["metadata"]["name"] for job in await backend.find(namespace, {})} == names


# ---------------------------------------------------------------- a runtime that is deleted


def test_a_job_that_completes_without_its_runtime_is_a_success(cluster: Access, namespace: str, tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text(yaml.safe_dump(make.OWN | {"runtime_patches": [run_until_finished()]}))
    environment = {**launcher_environment(), "KUBECONFIG": str(cluster.kubeconfig)}
    program = str(Path(sys.executable).with_name("trainjob"))
    command = [program, "run", "--no-logs", "--key=a", "-n", namespace, str(spec)]
    with make.own(make.NODE)(cluster, namespace):
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            read_until(process, "Running")
            cluster.api.delete(TRAINER, "TrainingRuntime", namespace, "own")
            cluster.finish(namespace)
            out, _ = process.communicate(timeout=90)
        finally:
            process.kill()
        assert process.returncode == 0, out
        assert "the TrainJob could not be marked as delivered, so the same key returns this result again" in out
