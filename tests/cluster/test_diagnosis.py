"""Every failure of `failures` is produced with real controllers and a real kubelet, and diagnosed.

With ``TRAINJOB_RECORD`` in the environment the evidence is written to the corpus of the unit tests.
"""

from __future__ import annotations

import anyio
import pytest
from tests.cluster import corpus, failing as make
from tests.cluster.backends import backend_of
from tests.cluster.corpus import Made
from tests.cluster.failures import FAILURES, Failure
from tests.testcluster.access import RULES, TRAINER, Access
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import simulate

from trainjob import TrainJobSpec
from trainjob._diagnosis import diagnosis_of
from trainjob._install import objects
from trainjob._jobs.launching import launch
from trainjob.errors import Category

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def made(
    real_node: Access, own_cluster: Cluster, step_image: str, request: pytest.FixtureRequest
) -> dict[str, Made | Exception]:
    """All failures of the selected tests, produced in parallel."""
    asked = [item.callspec.params.get("failure") for item in request.session.items if hasattr(item, "callspec")]
    return corpus.make_all([failure for failure in FAILURES if failure in asked and not failure.alone], own_cluster)


@pytest.mark.parametrize("failure", [each for each in FAILURES if not each.alone], ids=lambda failure: failure.name)
def test_each_failure_is_diagnosed(failure: Failure, made: dict[str, Made | Exception]) -> None:
    if failure.node == "torch" and failure.name not in made:
        pytest.skip("TRAINJOB_TORCH_PYTHON does not name the Python 3.11 of an environment with PyTorch")
    found = made[failure.name]
    if isinstance(found, Exception):
        raise found
    assert corpus.differences(failure, found.diagnosis, found.evidence) == [], found.diagnosis.text()
    assert ("cannot proceed" in found.stuck) == failure.blocks, found.stuck


@pytest.mark.anyio
@pytest.mark.parametrize("hidden", ["pods", "pods/log", "events"])
async def test_diagnosis_without_a_permission_uses_the_rest(hidden: str, cluster: Access, namespace: str) -> None:
    """The diagnosis uses the other evidence, and reports the evidence that could not be read."""
    rules = [{**rule, "resources": [each for each in rule["resources"] if each != hidden]} for rule in RULES]
    narrow = cluster.kubeconfig_for([rule for rule in rules if rule["resources"]], namespace)
    backend = backend_of(narrow)
    jobs = {Category.SCHEDULING: make.simulated(gpus=1000)}
    if hidden != "pods":
        # On a runtime that keeps ended pods: with Trainer's runtime they are deleted after the seventh crash.
        jobs[Category.USER_CODE] = make.OWN | {"env": simulate(run="100ms", exit_code=3)}
    with make.own(make.stages("node"))(cluster, namespace):
        refs = {
            category: await launch(backend, TrainJobSpec.parse(asked), category, namespace=namespace)
            for category, asked in jobs.items()
        }
    for category, ref in refs.items():
        with anyio.fail_after(240):
            while True:
                found = diagnosis_of(await backend.evidence(ref))
                if found.category is category:
                    break
                await anyio.sleep(0.5)
    assert sum(f'resource "{hidden}"' in line for line in found.unseen) == 1, found.unseen
    await backend.aclose()


@pytest.mark.anyio
async def test_with_the_shipped_role_a_removed_runtime_is_reported(cluster: Access, namespace: str) -> None:
    (role,) = [each for each in objects("rbac") if each["kind"] == "Role"]
    narrow = cluster.kubeconfig_for(role["rules"], namespace)
    backend = backend_of(narrow)
    with make.own(make.stages("node"))(cluster, namespace):
        waits = TrainJobSpec.parse(make.OWN | {"suspend": True})
        ref = await launch(backend, waits, "a", namespace=namespace)
        with anyio.fail_after(60):  # on a busy machine Kueue's webhook may not know the job yet, which is reported
            while diagnosis_of(await backend.evidence(ref)).category is not Category.NONE:
                await anyio.sleep(0.2)
        cluster.api.delete(TRAINER, "TrainingRuntime", namespace, "own")
    gone = diagnosis_of(await backend.evidence(ref))
    assert gone.summary == "the job cannot start: its TrainingRuntime own does not exist anymore"
    assert gone.unseen == ()
    other = await launch(backend, TrainJobSpec.parse(make.simulated(suspend=True)), "b", namespace=namespace)
    (hidden,) = diagnosis_of(await backend.evidence(other)).unseen
    assert 'resource "clustertrainingruntimes"' in hidden, "no Role can grant access to cluster-scoped objects"
    await backend.aclose()
