"""Every runtime that Trainer ships, launched from Python, Airflow and KFP on real controllers.

On simulated nodes: the tests check the pods, the order of their creation, and the variables of their containers.
test_real_runtimes.py tests real trainings.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.backends import backend_of
from tests.cluster.launchers import airflow_environment, execution_api, launcher_environment, run
from tests.cluster.recorder import Ran, Recorder
from tests.cluster.runtimes import INITIALIZER_VOLUME, PROVIDERS, SHIPPED, Object, Shipped, for_kfp
from tests.testcluster import build
from tests.testcluster.access import Access, condition
from tests.testcluster.manifests import load
from tests.testcluster.nodes import GPU, simulate, variable

from trainjob import TrainJobClient
from trainjob._backends.local.runtimes import FRAMEWORKS
from trainjob.errors import Rejected

_TIMEOUT = 400  # seconds; 20 on an idle machine
pytestmark = pytest.mark.timeout(_TIMEOUT + 100)

CACHE_ACCOUNT = "kubeflow-trainer-cache-initializer"
REPORT = json.dumps({"trainjob": 1, "metrics": [{"name": "loss", "value": "0.5"}]})

DAG = """
import json, os
from airflow.sdk import DAG
from trainjob_airflow.operators.trainjob import TrainJobOperator

with DAG("shipped"):
    for fields in json.loads(os.environ["ASKED"]):
        TrainJobOperator(task_id=fields["runtime"], **fields)
"""
PIPELINE = """
import json, os
from concurrent.futures import ThreadPoolExecutor
from kfp import local
from trainjob_kfp import train

local.init(local.SubprocessRunner(use_venv=False), pipeline_root="outputs")
asked = json.loads(os.environ["ASKED"])
with ThreadPoolExecutor(len(asked)) as pool:  # a pipeline's tasks run one after the other on one machine
    results = [task.outputs["result"] for task in pool.map(lambda fields: train(**fields), asked)]
with open("results.json", "w") as file:
    json.dump({fields["runtime"]: result for fields, result in zip(asked, results)}, file)
"""


def simulated(case: Shipped) -> Object:
    """The fields of the spec with the settings of simulated pods: how they end, and that sshd keeps running."""
    fields = {"runtime": case.runtime, **case.asked}
    if "launcher" not in case.pods:
        return {**fields, "env": {each["name"]: each["value"] for each in simulate(run="300ms", message=REPORT)}}
    # Variables of a spec reach both launcher and nodes, so the settings are annotations of one of them.
    ends = {"node": {"run": "never"}, "launcher": {"run": "3s", "message": REPORT}}
    jobs = []
    for name, settings in ends.items():
        annotations = {variable(setting): value for setting, value in settings.items()}
        pod = {"metadata": {"annotations": annotations}}
        jobs.append({"name": name, "template": {"spec": {"template": pod}}})
    return {**fields, "runtime_patches": [{"training_runtime_spec": {"template": {"spec": {"replicated_jobs": jobs}}}}]}


@dataclass
class Launched:
    """The job of every runtime from every provider: its objects, and the result that the client got."""

    ran: dict[str, dict[str, Ran]] = field(default_factory=dict)
    results: dict[str, dict[str, Object]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def namespaces(cluster: Access) -> Iterator[dict[str, str]]:
    """Provider -> namespace, with the service account that some runtimes need."""
    if why := cluster.lacks("simulated-nodes"):
        pytest.skip(why)
    with ExitStack() as stack:
        made = {provider: stack.enter_context(cluster.namespace(provider)) for provider in PROVIDERS}
        for namespace in made.values():
            account = {"name": CACHE_ACCOUNT, "namespace": namespace}
            cluster.api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
        yield made


@pytest.fixture(scope="module")
def launched(
    cluster: Access, namespaces: dict[str, str], airflow_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Launched:
    """All providers in parallel, each with the permissions of Trainer's role for users in its namespace."""
    here = tmp_path_factory.mktemp("launchers")
    users = {provider: cluster.kubeconfig_for(namespace=namespace) for provider, namespace in namespaces.items()}
    launched = Launched()

    def environment(provider: str, asked: list[Object]) -> dict[str, str]:
        return {
            **launcher_environment(),
            "KUBECONFIG": str(users[provider]),
            "TRAINJOB_BACKEND": "kubernetes",
            "TRAINJOB_NAMESPACE": namespaces[provider],
            "TRAINJOB_WORKSPACE": "s3://models/work",
            "ASKED": json.dumps(asked),
        }

    def airflow() -> None:
        (here / "dags").mkdir()
        (here / "dags" / "shipped.py").write_text(DAG)
        settings = {
            **environment("airflow", [simulated(case) for case in SHIPPED]),
            **airflow_environment(airflow_home, here / "dags"),
            "AIRFLOW__CORE__PARALLELISM": str(len(SHIPPED)),
        }
        with execution_api(settings, here) as executor:
            command = ("airflow", "dags", "test", "shipped", "--use-executor")
            run({**settings, **executor}, here, *command, timeout=_TIMEOUT)
        with closing(sqlite3.connect(airflow_home / "airflow.db")) as database:
            rows = database.execute("SELECT task_id, value FROM xcom WHERE dag_id = 'shipped' AND key = 'return_value'")
            launched.results["airflow"] = {runtime: json.loads(value) for runtime, value in rows}

    def kfp() -> None:
        (here / "shipped.py").write_text(PIPELINE)
        asked = [for_kfp(simulated(case)) for case in SHIPPED]
        command = (sys.executable, "-W", "ignore", str(here / "shipped.py"))
        run(environment("kfp", asked), here, *command, timeout=_TIMEOUT)
        launched.results["kfp"] = json.loads((here / "results.json").read_text())

    def python() -> None:
        backend = backend_of(users["python"])
        with TrainJobClient(backend, namespaces["python"]) as client:
            refs = {case.runtime: client.launch(simulated(case), case.runtime) for case in SHIPPED}
            launched.results["python"] = {runtime: client.wait(ref).as_dict() for runtime, ref in refs.items()}

    with Recorder(cluster) as recorder, ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(each) for each in (airflow, kfp, python)]:
            done.result()
    launched.ran = {provider: recorder.ran(namespace) for provider, namespace in namespaces.items()}
    return launched


cases = pytest.mark.parametrize("case", SHIPPED, ids=lambda case: case.runtime)
each_provider = pytest.mark.parametrize("provider", PROVIDERS)


def test_all_runtimes_of_trainer_are_tested() -> None:
    shipped = {each["metadata"]["name"] for each in load(build.rendered("trainer"), "runtimes")}
    assert {case.runtime for case in SHIPPED} == shipped
    needs_initializers = {case.runtime for case in SHIPPED if "dataset-initializer" in case.pods}
    assert shipped & set(FRAMEWORKS) == shipped - needs_initializers, "the local backend has no initializers"


@each_provider
@cases
def test_a_job_has_the_expected_pods_and_reports_its_result(launched: Launched, case: Shipped, provider: str) -> None:
    job = launched.ran[provider][case.runtime]
    assert condition(job.job, "Complete")
    assert {name: len(pods) for name, pods in job.pods.items()} == case.pods
    for pod in job.pods[case.trains_in]:
        container = _container(pod)
        expected = {name: value.format(job=job.name) for name, value in case.environment.items()}
        assert expected.items() <= _environment(container).items()
        if case.command:
            assert container["command"] == [word.format(job=job.name) for word in case.command]
        elif case.command is not None:
            assert container["command"] == case.asked["command"]
        else:
            assert container["command"] == _own_command(case.runtime)
    result = launched.results[provider][case.runtime]
    assert result["metrics"] == {"loss": 0.5}
    assert (result["name"], result["uid"]) == (job.name, job.job["metadata"]["uid"])


@each_provider
def test_initializers_get_their_variables(launched: Launched, provider: str) -> None:
    tuned = launched.ran[provider]["torchtune-llama3.2-1b"]
    (dataset,), (model,), (node,) = (tuned.pods[name] for name in ("dataset-initializer", "model-initializer", "node"))
    variables = _environment(_container(dataset))
    assert variables["STORAGE_URI"] == "hf://tatsu-lab/alpaca/data"
    container = _container(model)
    assert _environment(container)["STORAGE_URI"] == "hf://meta-llama/Llama-3.2-1B-Instruct"
    assert container["envFrom"] == [{"secretRef": {"name": "hugging-face"}}]
    assert _container(node)["args"][-1] == "model.lora_attn_modules=[q_proj,v_proj,output_proj]"
    assert _container(node)["resources"]["limits"] == {GPU: "2"}

    cached = launched.ran[provider]["torch-distributed-with-cache"]
    (dataset,) = cached.pods["dataset-initializer"]
    variables = _environment(_container(dataset))
    assert variables["STORAGE_URI"] == "cache://digits/train"
    assert variables["METADATA_LOC"] == "s3://data/metadata.json"
    assert dataset["spec"]["serviceAccountName"] == CACHE_ACCOUNT


def test_refusals_of_the_webhook_are_explained(cluster: Access, namespace: str) -> None:
    """Trainer 2.3 accepts `initializer` only if a container mounts a volume of that name: docs/how-to/runtimes.md."""
    with TrainJobClient(backend_of(cluster.kubeconfig), namespace) as client:
        cached = next(case for case in SHIPPED if case.runtime == "torch-distributed-with-cache")
        bare = {"runtime": cached.runtime, **cached.asked, "runtime_patches": []}
        with pytest.raises(Rejected, match=r"(?s)must have volumeMount.*mount a volume called initializer"):
            client.launch(bare, "bare")
        client.dry_run({**bare, "runtime_patches": [INITIALIZER_VOLUME]}, "mounted")
        plain = {"runtime": "torch-distributed", "initializer": {"dataset": "hf://a/b"}}
        with pytest.raises(Rejected, match=r"(?s)must have dataset-initializer job.*in a separate step"):
            client.launch(plain, "plain")


def _container(pod: Object) -> Object:
    (container,) = pod["spec"]["containers"]
    return dict(container)


def _environment(container: Mapping[str, Any]) -> dict[str, str]:
    """Variable -> its value, or the path of the pod's field."""
    return {
        each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] if "valueFrom" in each else each.get("value", "")
        for each in container.get("env", [])
    }


def _own_command(runtime: str) -> list[str]:
    shipped = {each["metadata"]["name"]: each["spec"] for each in load(build.rendered("trainer"), "runtimes")}
    jobs = {job["name"]: job for job in shipped[runtime]["template"]["spec"]["replicatedJobs"]}
    (container,) = jobs["node"]["template"]["spec"]["template"]["spec"]["containers"]
    return list(container["command"])
