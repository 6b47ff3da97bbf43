"""The cluster for tests: started once per session, or whichever one ``TRAINJOB_TEST_KUBECONFIG`` names."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from tests.cluster import build, images, kueue
from tests.cluster import step_image as steps
from tests.cluster.access import RULES, Access
from tests.cluster.certificates import Authority
from tests.cluster.control_plane import Cluster
from tests.cluster.kfp_steps import Steps, admit
from tests.cluster.launchers import launcher_environment, run
from tests.cluster.real_node import unfit

from trainjob.backends.kubernetes.backend import KubernetesBackend
from trainjob.backends.kubernetes.credentials import Credentials

KUBECONFIG = "TRAINJOB_TEST_KUBECONFIG"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the tests of this directory only: hooks of a conftest see all tests of the session.

    httpcore leaves the socket of a TLS handshake that was cancelled to the garbage collector (its `start_tls` closes it
    after an `Exception` only), which shows in whichever test runs then.
    """
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))
    # Clusters of a module's own come and go before that of the session starts.
    items.sort(key=lambda item: "older" not in getattr(item, "fixturenames", ()))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build now what the collected tests need: a quarter of an hour the first time, for which no test has the time."""
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if not wanted & {"cluster", "older"} or KUBECONFIG in os.environ or session.config.option.collectonly:
        return
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled(), suppress(build.BuildError):  # the fixture will meet it again
        build.ensure("control-plane")
        if "older" in wanted:
            build.ensure(*build.OLDER)
        if "gangs" in wanted:
            build.ensure("gangs")
        if "real_node" in wanted and not unfit():
            build.ensure("node")
            images.ensure()
            if "step_image" in wanted:
                steps.dependencies()
            if "mpi_image" in wanted:
                images.mpi()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Access]:
    """Any cluster that has Trainer. A test that wants more of it asks `needs`, `own_cluster` or `real_node`."""
    if given := os.environ.get(KUBECONFIG):
        foreign = Access(Path(given), tmp_path_factory.mktemp("cluster"))
        if why := foreign.lacks("trainer"):
            pytest.skip(why)
        yield foreign
        foreign.close()
        return
    with Cluster() as own:
        yield own


@pytest.fixture(scope="session")
def own_cluster(cluster: Access) -> Cluster:
    """The cluster that was started here: its components can be killed and started again."""
    if not isinstance(cluster, Cluster):
        pytest.skip(cluster.lacks("processes"))
    return cluster


@pytest.fixture(scope="session")
def real_node(cluster: Access) -> Access:
    """The cluster, with a node that runs real pods; ``namespace(real=True)`` is a namespace whose pods run there."""
    if isinstance(cluster, Cluster) and cluster.real_node is None:
        if why := unfit():
            pytest.skip(f"NO REAL NODE: {why}")
        cluster.start_real_node()
    elif why := cluster.lacks("real-node"):
        pytest.skip(why)
    return cluster


@pytest.fixture(scope="session")
def step_image(real_node: Access, own_cluster: Cluster) -> str:
    """The step image on the real node, with this checkout's source; its reference."""
    assert own_cluster.real_node
    archive = steps.build(own_cluster.directory)
    own_cluster.real_node.load(archive)
    archive.unlink()
    return steps.IMAGE


@pytest.fixture(scope="module")
def kfp_steps(own_cluster: Cluster, step_image: str) -> Iterator[Steps]:
    """Steps of pipelines, in a namespace of their own whose pods are real, those of their jobs as well."""
    own_cluster.add_runtime(steps.runtime(steps.STEP_RUNTIME, step_image))
    with own_cluster.namespace("pipeline", real=True) as namespace:
        admit(own_cluster, namespace)
        yield Steps(own_cluster, namespace, step_image)


@pytest.fixture(scope="session")
def mpi_image(real_node: Access, own_cluster: Cluster) -> str:
    """An image with Open MPI on the real node; its reference."""
    assert own_cluster.real_node
    own_cluster.real_node.load(images.mpi())
    return images.MPI


@pytest.fixture(scope="session")
def gangs(own_cluster: Cluster) -> Cluster:
    """The cluster with definitions of PodGroups, which Trainer then makes, and with the coscheduling scheduler."""
    own_cluster.start_gang_scheduling()
    return own_cluster


@pytest.fixture(scope="session")
def airflow_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a migrated database. The process of the tests has another Airflow: it reads its home when it is imported."""
    home = tmp_path_factory.mktemp("airflow")
    settings = {"AIRFLOW_HOME": str(home), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    run({**launcher_environment(), **settings}, home, "airflow", "db", "migrate")
    return home


@pytest.fixture
def needs(cluster: Access) -> Callable[[str], None]:
    """``needs("kueue")`` skips the test, with the reason, where the cluster has no Kueue; see `Access.lacks`."""

    def check(feature: str) -> None:
        if why := cluster.lacks(feature):
            pytest.skip(why)

    return check


@pytest.fixture
def namespace(cluster: Access) -> Iterator[str]:
    """A namespace of the test's own, for pods on simulated nodes; with the LocalQueue ``gpus``."""
    with cluster.namespace() as name:
        yield name


@pytest.fixture
def small_queue(cluster: Access, namespace: str, needs: Callable[[str], None]) -> Iterator[str]:
    """A LocalQueue with room for one job of 8 GPUs."""
    needs("kueue")
    needs("simulated-nodes")
    cluster.api.apply(kueue.cluster_queue(namespace, gpu=8))
    cluster.api.create(kueue.local_queue(namespace, "small", namespace))
    yield "small"
    cluster.api.delete(kueue.API, "ClusterQueue", "", namespace)


@pytest.fixture(params=[False, True], ids=["alone", "shared"])
async def backend(request: pytest.FixtureRequest, cluster: Access) -> AsyncIterator[KubernetesBackend]:
    """The administrator's, by both kinds of watch."""
    opened = KubernetesBackend(Credentials(kubeconfig=str(cluster.kubeconfig)), shared=request.param)
    yield opened
    await opened.aclose()


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """For certificates of proxies."""
    return Authority(tmp_path_factory.mktemp("proxies") / "authority")


@pytest.fixture(scope="session")
def token(cluster: Access) -> str:
    """Of a service account with the rights of Trainer's editor role in all namespaces."""
    clean_up = {"apiGroups": ["trainer.kubeflow.org"], "resources": ["trainjobs"], "verbs": ["deletecollection"]}
    kubeconfig = cluster.kubeconfig_for([*RULES, clean_up], cluster_wide=True)
    return str(yaml.safe_load(kubeconfig.read_text())["users"][0]["user"]["token"])
