"""Jobs of the shipped runtimes where the Pod Security Standard ``restricted`` is enforced; it replaces the runtimes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.cluster.waits import until
from tests.testcluster import step_image as steps
from tests.testcluster.access import TRAINER, Access, condition, trainjob

from trainjob._install import objects

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]


async def test_jobs_of_the_shipped_runtimes_run_where_pods_are_restricted(
    cluster: Access, namespace: str, needs: Callable[[str], None]
) -> None:
    """Includes what Trainer and JobSet add to the pods. A job's environment takes precedence over the runtime's."""
    needs("simulated-nodes")
    cluster.restrict(namespace)
    names = [each["metadata"]["name"] for each in objects("runtimes")]
    for runtime in objects("runtimes", image=steps.IMAGE):
        cluster.add_runtime(runtime)
    for name in names:
        trainer = {"numNodes": 1, "env": [{"name": "HOME", "value": "/data"}]}
        cluster.api.create(trainjob(name, namespace, runtime=name, trainer=trainer))

    def unfinished() -> list[str]:
        jobs = {name: cluster.api.get(TRAINER, "TrainJob", namespace, name) for name in names}
        return [name for name, job in jobs.items() if not condition(job, "Complete")]

    try:
        await until(lambda: not unfinished(), 60)
    except TimeoutError:
        pods = cluster.api.find("v1", "Pod", namespace)
        raise AssertionError({each["metadata"]["name"]: each["status"] for each in pods}) from None
    nodes = cluster.api.find("v1", "Pod", namespace, labels="jobset.sigs.k8s.io/replicatedjob-name=node")
    homes = [env["value"] for pod in nodes for env in pod["spec"]["containers"][0]["env"] if env["name"] == "HOME"]
    assert homes == ["/data"] * len(names)
