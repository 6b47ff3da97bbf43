"""The cluster for tests: started once per session, or the cluster of ``TRAINJOB_TEST_KUBECONFIG``."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Set as AbstractSet
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from tests.certificates import Authority
from tests.cluster.backends import opened
from tests.cluster.failing import queue
from tests.cluster.kfp_steps import Steps, create_account
from tests.cluster.launchers import launcher_environment, run
from tests.cluster.wires import Wires
from tests.testcluster import build, image_store, step_image as steps
from tests.testcluster.access import RULES, Access
from tests.testcluster.control_plane import Cluster
from tests.testcluster.real_node import why_unsupported
from xdist import is_xdist_controller

from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._install import objects

KUBECONFIG = "TRAINJOB_TEST_KUBECONFIG"
SHARED = "TRAINJOB_TEST_CLUSTER"
"""Directory of the cluster that the workers of one test run share (`pytest -n`)."""

OLDER = os.environ.get("TRAINJOB_TEST_OLDER", "")
"""Group of older releases, of Kubernetes for example, with which the cluster starts (`build.OLDER`)."""

LONGEST = (
    "diagnosis",
    "runtimes",
    "faults",
    "workflows",
    "doctor",
    "stores",
    "recovery",
    "credentials",
    "airflow_examples",
    "kfp_terminate",
    "real_runtimes",
)
"""The longest test files, in the order in which they are started."""

_cluster = pytest.StashKey[Cluster]()


# ---------------------------------------------------------------- one cluster for all workers


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the cluster before xdist starts the workers, which find it by `SHARED`."""
    if KUBECONFIG in os.environ or not is_xdist_controller(session):
        return
    real = not why_unsupported()
    ensure_built({"cluster", *(("real_node",) if real else ())})
    session.config.stash[_cluster] = started = Cluster(real_node=real, older=OLDER)
    started.start()
    if real:
        load_step_image(started)
    os.environ[SHARED] = str(started.directory)


def pytest_unconfigure(config: pytest.Config) -> None:
    if started := config.stash.get(_cluster, None):
        started.stop()
        del os.environ[SHARED]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Ignore unclosed sockets: httpcore does not close the socket of a cancelled TLS handshake.

    (Its `start_tls` closes it only after an `Exception`.) The garbage collector reports it in an unrelated test.
    """
    item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_order)


def _order(item: pytest.Item) -> int:
    """The longest files first, so that no long file runs alone at the end."""
    name = item.path.stem.removeprefix("test_")
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


# ---------------------------------------------------------------- what is built


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what the collected tests need: the first build takes 15 minutes, longer than the timeout of a test."""
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if not wanted & {"cluster", "older"} or {KUBECONFIG, SHARED} & set(os.environ) or session.config.option.collectonly:
        return
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled(), suppress(build.BuildError):  # the fixture raises it again
        ensure_built(wanted)


def ensure_built(wanted: AbstractSet[str]) -> None:
    """Build what these fixtures need."""
    build.ensure("control-plane", *filter(None, [OLDER]))
    if "older" in wanted:
        build.ensure("trainer-2.1", "trainer-2.2")
    for group, fixture in {"gangs": "gangs", "metrics": "metrics_server"}.items():
        if fixture in wanted:
            build.ensure(group)
    if "real_node" in wanted and not why_unsupported():
        build.ensure("node")
        image_store.ensure()


# ---------------------------------------------------------------- fixtures


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Access]:
    """Any cluster with Trainer. A test that needs more uses `needs`, `own_cluster` or `real_node`."""
    if given := os.environ.get(KUBECONFIG):
        foreign = Access(Path(given), tmp_path_factory.mktemp("cluster"))
        if why := foreign.lacks("trainer"):
            pytest.skip(why)
        yield foreign
        foreign.close()
        return
    if shared := os.environ.get(SHARED):
        attached = Cluster.attached(Path(shared))
        yield attached
        attached.close()
        return
    with Cluster(older=OLDER) as own:
        add_runtimes(own)
        yield own


@pytest.fixture(scope="session")
def own_cluster(cluster: Access) -> Cluster:
    """The cluster of this test run: its components can be killed and restarted."""
    if not isinstance(cluster, Cluster):
        pytest.skip(cluster.lacks("processes"))
    return cluster


@pytest.fixture(scope="session")
def real_node(cluster: Access) -> Access:
    """The cluster, with a node that runs real pods; ``namespace(real=True)`` is a namespace whose pods run there."""
    if isinstance(cluster, Cluster) and cluster.real_node is None:
        if why := why_unsupported():
            pytest.skip(f"NO REAL NODE: {why}")
        cluster.start_real_node()
    elif why := cluster.lacks("real-node"):
        pytest.skip(why)
    return cluster


def load_step_image(cluster: Cluster) -> None:
    """Load the step image, with the source of this checkout, into the real node, and install its runtimes."""
    assert cluster.real_node
    cluster.real_node.load(steps.build(cluster.directory, image_store.step_layers()))
    add_runtimes(cluster)


def add_runtimes(cluster: Access) -> None:
    """Install the shipped runtimes, with the step image of the tests."""
    for runtime in objects("runtimes", image=steps.IMAGE):
        cluster.add_runtime(runtime)


@pytest.fixture(scope="session")
def step_image(real_node: Access, own_cluster: Cluster) -> str:
    """Load the step image, with the source of this checkout, into the real node; return its reference."""
    if SHARED not in os.environ:
        load_step_image(own_cluster)
    return steps.IMAGE


@pytest.fixture(scope="module")
def kfp_steps(own_cluster: Cluster, step_image: str) -> Iterator[Steps]:
    """Runs steps of pipelines in a separate namespace, where pods of steps and of their jobs are real."""
    with own_cluster.namespace("pipeline", real=True) as namespace:
        create_account(own_cluster, namespace)
        yield Steps(own_cluster, namespace, step_image)


@pytest.fixture(scope="session")
def airflow_home(cluster: Access, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home of Airflow with a migrated database, which is created once for all workers.

    The process of the tests has another Airflow home: Airflow reads it at its import.
    """
    home = tmp_path_factory.mktemp("airflow")
    template = cluster.directory / "airflow"
    template.mkdir(exist_ok=True)
    with (template / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (template / "migrated").exists():
            settings = {"AIRFLOW_HOME": str(template), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
            run({**launcher_environment(), **settings}, template, "airflow", "db", "migrate")
            (template / "migrated").touch()
    shutil.copy(template / "airflow.db", home)
    return home


@pytest.fixture
def needs(cluster: Access) -> Callable[[str], None]:
    """``needs("kueue")`` skips the test, with the reason, if the cluster has no Kueue; see `Access.lacks`."""

    def check(feature: str) -> None:
        if why := cluster.lacks(feature):
            pytest.skip(why)

    return check


@pytest.fixture
def namespace(cluster: Access) -> Iterator[str]:
    """A separate namespace, for pods on simulated nodes; with the LocalQueue ``gpus``."""
    with cluster.namespace() as name:
        yield name


@pytest.fixture
def small_queue(cluster: Access, namespace: str, needs: Callable[[str], None]) -> Iterator[str]:
    """A LocalQueue with room for one job of 8 GPUs."""
    needs("kueue")
    needs("simulated-nodes")
    with queue(cluster, namespace):
        yield "small"


@pytest.fixture
async def backend(request: pytest.FixtureRequest, cluster: Access) -> AsyncIterator[KubernetesBackend]:
    """A backend of the administrator; with `both_watches`, also one that shares its watch."""
    async with opened(cluster.kubeconfig, shared=getattr(request, "param", False)) as found:
        yield found


@pytest.fixture
def real_namespace(real_node: Access) -> Iterator[str]:
    """A separate namespace, for pods on the real node."""
    with real_node.namespace("real", real=True) as name:
        yield name


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Issues the certificates of proxies."""
    return Authority(tmp_path_factory.mktemp("proxies") / "authority")


@pytest.fixture
def wires(cluster: Access, authority: Authority, token: str, namespace: str) -> Iterator[Wires]:
    """Creates backends behind proxies, in a separate namespace."""
    yield Wires(cluster, authority, token, namespace)
    gc.collect()


@pytest.fixture(scope="session")
def token(cluster: Access) -> str:
    """Token of a service account with the permissions of Trainer's editor role in all namespaces."""
    kubeconfig = cluster.kubeconfig_for(RULES, cluster_wide=True)
    return str(yaml.safe_load(kubeconfig.read_text())["users"][0]["user"]["token"])
