"""The output of `trainjob install` on a real API server, used by the service accounts; examples of runtimes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from tests.cluster import pods
from tests.cluster.backends import backend_of
from tests.cluster.commands import applied, printed
from tests.cluster.waits import until
from tests.processes import wait_until
from tests.testcluster import step_image as steps
from tests.testcluster.access import JOBSET, TRAINER, Access, condition
from tests.testcluster.api import Api, write_kubeconfig
from tests.testcluster.nodes import simulate

from trainjob import JobRef, Phase, TrainJobFailed, TrainJobSpec, _install
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._doctor.cluster import examine
from trainjob._jobs.cancellation import cancel
from trainjob._jobs.launching import launch
from trainjob._jobs.records import mark_delivered
from trainjob._jobs.waiting import wait
from trainjob.status import observe

INSTALL = Path(_install.__file__).parent
EXAMPLES = Path(__file__).parents[2] / "dags_examples" / "cluster"
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

RUNTIMES = [
    file
    for file in (*INSTALL.glob("*.yaml"), *EXAMPLES.rglob("*.yaml"))
    if "kind: ClusterTrainingRuntime" in file.read_text()
]
"""Files of the runtimes that `trainjob install` prints, and of the examples."""

ACCOUNT = "launcher"
# Without a handler, the first process of a container ignores SIGTERM and runs 30 s longer.
SLEEPER = TrainJobSpec.parse(
    {"runtime": "trainjob-step", "command": ["sh", "-c", "trap 'exit 143' TERM; sleep 600 & wait"]}
)


def account(cluster: Access, namespace: str, name: str = ACCOUNT) -> Path:
    """The kubeconfig of a service account."""
    token = cluster.token_for(name, namespace)
    target = cluster.directory / f"{namespace}-{name}.kubeconfig"
    return write_kubeconfig(target, cluster.api.server, cluster.api.authority, {"token": token}, namespace)


def permissions(kubeconfig: Path, namespace: str) -> set[tuple[str, str, str]]:
    """All permissions in a namespace: group, resource and verb."""
    api = Api(kubeconfig)
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": namespace}}
    answer = api.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", body)
    api.close()
    return expanded(answer["status"]["resourceRules"])


def expanded(rules: Sequence[Mapping[str, Sequence[str]]]) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


async def test_installing_twice_changes_nothing(cluster: Access, namespace: str) -> None:
    documents = printed("-n", namespace, "--service-account", ACCOUNT, "--image", steps.IMAGE)
    first, second = applied(cluster, documents), applied(cluster, documents)
    assert {each["kind"] for each in first} >= {"Role", "RoleBinding", "ClusterTrainingRuntime"}
    assert [*map(version, second)] == [*map(version, first)]


def version(each: Mapping[str, Any]) -> tuple[str, Any]:
    """The version of an object; of a Deployment, whose controller writes the status meanwhile, that of its spec."""
    return each["kind"], each["metadata"]["generation" if each["kind"] == "Deployment" else "resourceVersion"]


def pods_of(runtime: Mapping[str, Any], namespace: str) -> list[dict[str, Any]]:
    """Pods from the unchanged pod templates of a runtime."""
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    metadata = {"generateName": f"{runtime['metadata']['name']}-", "namespace": namespace}
    templates = [job["template"]["spec"]["template"] for job in jobs]
    return [{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": each["spec"]} for each in templates]


@pytest.mark.parametrize("file", RUNTIMES, ids=lambda file: file.stem)
def test_pods_of_runtimes_meet_the_restricted_standard(cluster: Access, namespace: str, file: Path) -> None:
    cluster.restrict(namespace)
    for runtime in yaml.safe_load_all(file.read_text()):
        for pod in pods_of(runtime, namespace):
            volumes = {mount["name"] for each in pod["spec"]["containers"] for mount in each.get("volumeMounts", ())}
            pod["spec"]["volumes"] = [{"name": name, "emptyDir": {}} for name in sorted(volumes)]
            pod["spec"].pop("priorityClassName", None)
            cluster.api.create(pod, dry_run=True)


async def test_the_reaper_runs_where_pods_are_restricted(real_node: Access, step_image: str) -> None:
    """Run its CronJob once with its service account; `doctor` finds it."""
    with real_node.namespace("reaper", real=True) as namespace:
        real_node.restrict(namespace)
        documents = printed("--only", "reaper", "-n", namespace, "--image", step_image)
        cron = next(each for each in applied(real_node, documents) if each["kind"] == "CronJob")
        run = {**cron["spec"]["jobTemplate"], "apiVersion": "batch/v1", "kind": "Job"}
        # The USER of the Dockerfile; the image of the tests has none.
        run["spec"]["template"]["spec"]["securityContext"]["runAsUser"] = 65532
        real_node.api.create({**run, "metadata": {"name": "run", "namespace": namespace}})

        def ended() -> Any:
            job = real_node.api.get("batch/v1", "Job", namespace, "run")
            return condition(job, "Complete") or condition(job, "Failed")

        await until(ended, 120)
        assert condition(real_node.api.get("batch/v1", "Job", namespace, "run"), "Complete")
        credentials = Credentials(kubeconfig=str(real_node.kubeconfig))
        async with aclosing(examine(credentials, namespace)) as found:
            (finding,) = [each async for each in found if each.check == "reaper"]
        assert finding.message == "CronJob trainjob-reaper ends unattended jobs"


async def test_the_account_has_only_the_needed_permissions(real_node: Access, step_image: str) -> None:
    with real_node.namespace("installed", real=True) as namespace:
        real_node.restrict(namespace)
        words = ("-n", namespace, "--service-account", f"{namespace}:{ACCOUNT}")
        role = next(each for each in applied(real_node, printed("--only", "rbac", *words)) if each["kind"] == "Role")
        kubeconfig = account(real_node, namespace)
        others = permissions(account(real_node, namespace, "nobody"), namespace)
        assert permissions(kubeconfig, namespace) - others == expanded(role["rules"])

        backend = backend_of(kubeconfig)
        assert backend.default_namespace == namespace
        step = TrainJobSpec.parse({"runtime": "trainjob-step", "command": ["sh", "-c", "echo a step ran as $(id -u)"]})
        lines: list[str] = []
        with anyio.fail_after(240):
            ref = await launch(backend, step, "step", namespace=namespace)
            sleeper = await launch(backend, SLEEPER, "sleeper", namespace=namespace)
            result = await wait(backend, ref, on_log=lambda line: lines.append(str(line)))
            assert result.uid == ref.uid
            assert lines == ["[node-0] a step ran as 65532"]
            await mark_delivered(backend, ref)
            assert (await backend.evidence(ref)).unseen == []
            assert await cancel(backend, sleeper)
        assert await backend.get(namespace, sleeper.name) is None
        assert observe(await backend.get(namespace, ref.name)).phase is Phase.COMPLETE
        await backend.aclose()


# ---------------------------------------------------------------- an example of a runtime with a TTL


async def test_a_ttl_of_the_jobs_keeps_the_result(cluster: Access, backend: KubernetesBackend, namespace: str) -> None:
    """A TTL of the JobSet would not: Trainer creates the JobSet again, so a failed job trains again."""
    runtime = yaml.safe_load((EXAMPLES / "torch-ttl.yaml").read_text())
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["ttlSecondsAfterFinished"] == 24 * 60 * 60
    job["template"]["spec"]["ttlSecondsAfterFinished"] = 2
    cluster.add_runtime(runtime)
    for code, result in ((0, "Complete"), (3, "Failed")):
        spec = TrainJobSpec.parse({"env": simulate(run="300ms", exit_code=code), "runtime": "torch-ttl"})
        ref = await launch(backend, spec, result, namespace=namespace)
        jobset = wait_until("the JobSet exists", partial(_jobset, cluster, ref), 60)
        with anyio.fail_after(240):
            if code == 0:
                await wait(backend, ref)
            else:
                with pytest.raises(TrainJobFailed):  # the pods with the reason can be deleted
                    await wait(backend, ref)
        wait_until("no Job and no pod is left", partial(_nothing_left, cluster, ref), 30)
        assert condition(cluster.api.get(TRAINER, "TrainJob", namespace, ref.name), result)
        assert _jobset(cluster, ref) == jobset


def _nothing_left(cluster: Access, ref: JobRef) -> bool:
    jobs = cluster.api.find("batch/v1", "Job", ref.namespace, labels=f"{pods.JOBSET}={ref.name}")
    return not jobs and not pods.pods_of(cluster, ref)


def _jobset(cluster: Access, ref: JobRef) -> str:
    """UID of the job's JobSet; empty if it does not exist."""
    found = cluster.api.get(JOBSET, "JobSet", ref.namespace, ref.name)
    return str(found["metadata"]["uid"]) if found else ""
