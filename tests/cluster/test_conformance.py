"""The controllers create the same JobSets from requests of the Kubeflow SDK and from `TrainJobSpec`.

The SDK's requests are recorded (``make record-sdk``). Both jobs of a row are created, most of them suspended: JobSets
are created for suspended jobs, too. The tests compare the JobSets, and the pods of some jobs, without the job names.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import pytest
from tests.conformance.row import Row
from tests.conformance.runtimes import install
from tests.conformance.table import TABLE, recorded
from tests.processes import wait_until
from tests.testcluster.access import JOBSET, Access
from tests.testcluster.api import ApiError

from trainjob import InvalidSpec, TrainJobSpec
from trainjob._manifest.render import render

pytestmark = pytest.mark.timeout(300)

Object = dict[str, Any]
CALLS = recorded()["calls"]
WITH_PODS = {"container-with-resources", "patched-containers", "hugging-face", "container-by-mpirun"}
"""Rows whose jobs are not suspended. (JobSet refuses to resume jobs whose runtime creates PVCs.)"""


@dataclass
class Made:
    """A row's jobs.

    Attributes:
        sdk: The stored TrainJob of the SDK's request.
        ours: The stored TrainJob of the spec.
    """

    sdk: Object
    ours: Object


@pytest.fixture(scope="module")
def namespace_of_both(cluster: Access) -> Iterator[str]:
    with cluster.namespace("conformance") as name:
        for account in ("trainer", "launcher"):
            metadata = {"name": account, "namespace": name}
            cluster.api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
        install(cluster, name)
        yield name


@pytest.fixture(scope="module")
def made(cluster: Access, namespace_of_both: str) -> dict[str, Made]:
    """All jobs that the server must accept."""
    found = {}
    for number, row in enumerate(row for row in TABLE if not row.refused):
        suspend = row.name not in WITH_PODS
        ours = render(TrainJobSpec.parse({**row.fields(), "suspend": suspend}), row.name, 1, namespace_of_both)
        theirs = sdk_request(row, f"sdk-{number}", namespace_of_both)
        theirs["spec"]["suspend"] = suspend
        found[row.name] = Made(cluster.api.create(theirs), cluster.api.create(ours))
    return found


@pytest.fixture(scope="module")
def jobsets(cluster: Access, namespace_of_both: str, made: dict[str, Made]) -> dict[str, Object]:
    """Name -> the JobSet that the controllers created."""

    wanted = {each["metadata"]["name"] for both in made.values() for each in (both.sdk, both.ours)}

    def all_of_them() -> dict[str, Object]:
        present = {each["metadata"]["name"]: each for each in cluster.api.find(JOBSET, "JobSet", namespace_of_both)}
        assert not wanted - set(present), "no JobSet yet"
        return present

    return wait_until("every TrainJob has a JobSet", all_of_them, 150, ignore=AssertionError, poll=1)


def sdk_request(row: Row, name: str, namespace: str) -> Object:
    """The TrainJob that the SDK sent."""
    request: Object = copy.deepcopy(CALLS[row.name]["request"])
    request["metadata"].setdefault("name", name)
    return {**request, "metadata": {**request["metadata"], "namespace": namespace}}


def without_names(each: Object, name: str) -> Object:
    """The object without the job's name and without random names in pods."""
    text = json.dumps(each).replace(name, "NAME")
    plain: Object = json.loads(re.sub(r"kube-api-access-\w+", "kube-api-access", text))
    return plain


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path -> value; list items with names by their name, other lists as one value."""
    if isinstance(value, list) and value and all(isinstance(each, dict) and "name" in each for each in value):
        value = {each["name"]: {k: v for k, v in each.items() if k != "name"} or True for each in value}
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from leaves(part, f"{path}.{name}".lstrip("."))
    else:
        yield path, value


def described(jobset: Object) -> dict[str, Any]:
    metadata = jobset["metadata"]
    compared = {"labels": metadata.get("labels"), "annotations": metadata.get("annotations"), "spec": jobset["spec"]}
    found = {}
    for path, value in leaves(without_names(compared, metadata["name"])):
        in_pod = re.fullmatch(r"spec\.replicatedJobs\.([^.]+)\.template\.spec\.template\.spec\.(.+)", path)
        found[f"{in_pod[1]}: {in_pod[2]}" if in_pod else path] = value
    return found


def differing(sdk: dict[str, Any], ours: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {path: (sdk.get(path), ours.get(path)) for path in sorted({*sdk, *ours}) if sdk.get(path) != ours.get(path)}


@pytest.mark.parametrize("row", [row for row in TABLE if not row.refused], ids=lambda row: row.name)
def test_both_make_the_same_jobset(row: Row, made: dict[str, Made], jobsets: dict[str, Object]) -> None:
    both = made[row.name]
    sdk, ours = (described(jobsets[each["metadata"]["name"]]) for each in (both.sdk, both.ours))
    found = differing(sdk, ours)
    undeclared = {path: pair for path, pair in found.items() if not any(fnmatchcase(path, one) for one in row.differs)}
    assert undeclared == {}, "differences of (SDK's value, ours) that the table does not declare"
    gone = [one for one in row.differs if not any(fnmatchcase(path, one) for path in found)]
    assert gone == [], "declared differences that no longer exist"


@pytest.mark.parametrize("row", [row for row in TABLE if not row.refused], ids=lambda row: row.name)
def test_both_make_the_same_job(row: Row, made: dict[str, Made]) -> None:
    """Fields of the TrainJob that do not affect its pods."""
    sdk, ours = made[row.name].sdk, made[row.name].ours
    for name in ("runtimeRef", "activeDeadlineSeconds", "managedBy"):
        assert sdk["spec"].get(name) == ours["spec"].get(name)
    for kind in ("labels", "annotations"):
        assert (sdk["metadata"].get(kind) or {}).items() <= ours["metadata"][kind].items()
    assert bool(sdk["spec"].get("initializer")) == bool(ours["spec"].get("initializer"))
    assert len(ours["metadata"]["name"]) <= 33


@pytest.mark.parametrize("name", sorted(WITH_PODS))
def test_both_make_the_same_pods(name: str, cluster: Access, made: dict[str, Made], jobsets: dict[str, Object]) -> None:
    sdk, ours = (_first_pods(cluster, jobsets[job["metadata"]["name"]]) for job in (made[name].sdk, made[name].ours))
    assert sdk
    assert sdk == ours


def _first_pods(cluster: Access, jobset: Object) -> list[dict[str, Any]]:
    """The pods of replicated jobs that do not depend on others."""
    namespace, name = jobset["metadata"]["namespace"], jobset["metadata"]["name"]
    first = [each for each in jobset["spec"]["replicatedJobs"] if not each.get("dependsOn")]
    expected = sum(each["template"]["spec"].get("parallelism", 1) * each["replicas"] for each in first)
    jobs = f"jobset.sigs.k8s.io/replicatedjob-name in ({','.join(each['name'] for each in first)})"

    def all_of_them() -> list[Object]:
        pods = cluster.api.find("v1", "Pod", namespace, labels=f"jobset.sigs.k8s.io/jobset-name={name},{jobs}")
        return pods if len(pods) == expected else []

    pods = wait_until(f"{name} has {expected} pods", all_of_them, 60)
    return [_pod(each, name) for each in sorted(pods, key=lambda pod: str(pod["metadata"]["generateName"]))]


def _pod(pod: Object, job: str) -> dict[str, Any]:
    """Labels and spec of a pod, without its node and generated labels."""
    labels = {
        k: v for k, v in pod["metadata"]["labels"].items() if "uid" not in k and k != "jobset.sigs.k8s.io/job-key"
    }
    spec = {k: v for k, v in pod["spec"].items() if k != "nodeName"}
    return dict(leaves(without_names({"labels": labels, "spec": spec}, job)))


@pytest.mark.parametrize("row", [row for row in TABLE if row.refused], ids=lambda row: row.name)
def test_invalid_specs_are_refused_by_both(row: Row, cluster: Access, namespace_of_both: str) -> None:
    assert row.refused in CALLS[row.name]["refused"]
    if CALLS[row.name]["request"]:  # by the server, then and now
        with pytest.raises(ApiError, match=re.escape(row.refused)):
            cluster.api.create(sdk_request(row, "refused", namespace_of_both), dry_run=True)
    if row.sooner:
        with pytest.raises(InvalidSpec, match=re.escape(row.sooner)):
            TrainJobSpec.parse(row.fields())
    else:
        ours = render(TrainJobSpec.parse(row.fields()), row.name, 1, namespace_of_both)
        with pytest.raises(ApiError, match=re.escape(row.refused)):
            cluster.api.create(ours, dry_run=True)
