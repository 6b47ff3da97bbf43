"""The objects for a cluster, and the output of `trainjob install`."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

import trainjob
from trainjob._install import STEP_IMAGE, STORAGE, images, objects
from trainjob._spec.arguments import STEP_RUNTIME
from trainjob.cli.program import program

INSTALL = Path(trainjob.__file__).parent / "_install"


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cluster and no namespace are configured."""
    for name in ("TRAINJOB_BACKEND", "TRAINJOB_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nosuch"))


def printed(*words: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(output(*words)))


def output(*words: str) -> str:
    return CliRunner().invoke(program, ["install", *words], standalone_mode=False, catch_exceptions=False).stdout


def of_kind(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in found if each["kind"] == kind]


def containers(each: dict[str, Any]) -> list[dict[str, Any]]:
    jobs = each["spec"]["template"]["spec"]["replicatedJobs"]
    return [container for job in jobs for container in job["template"]["spec"]["template"]["spec"]["containers"]]


def step_runtime(found: list[dict[str, Any]]) -> dict[str, Any]:
    return next(each for each in found if each["metadata"]["name"] == STEP_RUNTIME)


def test_the_step_runtime_names_the_image_of_this_version() -> None:
    (container,) = containers(step_runtime(objects()))
    assert container["image"] == STEP_IMAGE == f"trainjob-step:{trainjob.__version__}"
    assert f"{STEP_IMAGE} ." in (INSTALL / "Dockerfile").read_text()
    assert [source[kind]["name"] for source in container["envFrom"] for kind in source] == [STORAGE, STORAGE]


def test_every_file_is_printed_unchanged() -> None:
    files = sorted(INSTALL.glob("*.yaml"))
    assert len(files) >= 3
    written = [each for file in files for each in yaml.safe_load_all(file.read_text())]
    files = [INSTALL / f"{name}.yaml" for name in ("controller", "reaper")]  # they need a namespace
    left_out = [each for file in files for each in yaml.safe_load_all(file.read_text())]
    found = printed()
    assert found == [each for each in written if each["kind"] != "RoleBinding" and each not in left_out]
    assert printed("--only", "runtimes") + printed("--only", "rbac") == sorted(found, key=lambda e: e["kind"] == "Role")
    assert all(each["apiVersion"].startswith("trainer.kubeflow.org/") for each in printed("--only", "runtimes"))
    text = output()
    assert text == output(), "reproducible"
    assert text.splitlines()[:2] == [
        f"# What trainjob {trainjob.__version__} needs on a cluster: kubectl apply --server-side -f -",
        "---",
    ]
    listed = json.loads(output("--json"))
    assert (listed["kind"], listed["items"]) == ("List", found)


STOCK = """\
spec:
  ttlStrategy:
    secondsAfterCompletion: 3600
    secondsAfterSuccess: 3600
    secondsAfterFailure: 3600
  templateDefaults:
    retryStrategy:
      limit: '2'
      retryPolicy: OnError
"""
"""workflowDefaults of KFP 2.17.0 (``manifests/kustomize/third-party/argo/base``)."""


def test_the_kfp_config_map_is_printed_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_kind(printed(), "ConfigMap") == []
    monkeypatch.setenv("TRAINJOB_NAMESPACE", "ml")  # where jobs run
    (change,) = printed("--only", "kfp")
    assert change["metadata"] == {"name": "workflow-controller-configmap", "namespace": "kubeflow"}
    assert list(change["data"]) == ["workflowDefaults"]
    stock = yaml.safe_load(STOCK)
    del stock["spec"]["templateDefaults"]
    assert yaml.safe_load(change["data"]["workflowDefaults"]) == stock
    text = output("--only", "kfp", "-n", "pipelines")
    assert text.splitlines()[0].endswith(
        "kubectl patch configmap workflow-controller-configmap -n pipelines --type merge --patch-file /dev/stdin"
    )
    assert yaml.safe_load(text)["metadata"]["namespace"] == "pipelines"


def test_names_are_replaced_everywhere() -> None:
    image, secret = "registry.example/steps:1", "keys"
    filled = output("--image", image, "--storage-secret", secret)
    assert STEP_IMAGE not in filled
    (container,) = containers(step_runtime(list(yaml.safe_load_all(filled))))
    assert container["image"] == image
    assert container["envFrom"] == [
        {"configMapRef": {"name": STORAGE, "optional": True}},
        {"secretRef": {"name": secret, "optional": True}},
    ]
    plain = yaml.safe_dump(objects(image="a", storage_secret="c"))
    assert yaml.safe_dump(objects()) != plain, "arguments do not change later calls"


def test_runtimes_that_an_older_trainer_does_not_support_are_omitted() -> None:
    names = {each["metadata"]["name"] for each in printed("--only", "runtimes")}
    for release, unknown in (("2.1", {"jax-resilient", "torch-initialized"}), ("2.2", set()), ("2.3", set())):
        result = CliRunner().invoke(program, ["install", "--only", "runtimes", "--trainer", release])
        assert {each["metadata"]["name"] for each in yaml.safe_load_all(result.stdout)} == names - unknown
        left_out = [line for line in result.stderr.splitlines() if line.startswith("left out")]
        assert left_out == [f"left out: {name}, which needs Kubeflow Trainer 2.2" for name in sorted(unknown)]


DIGEST = f"sha256:{'0123456789abcdef' * 4}"


def test_images_are_pinned_by_digest() -> None:
    asked = ["install", "--only", "runtimes", "--image", f"registry.example/steps@{DIGEST}"]
    result = CliRunner().invoke(program, asked)
    tags = sorted(image for image in images(list(yaml.safe_load_all(result.stdout))) if "@" not in image)
    assert len(tags) >= 2, "images of trainings"
    assert sorted(result.stderr.splitlines()) == [
        f"not pinned: {tag}, whose tag can be moved; --pin {tag}@sha256:<digest>" for tag in tags
    ]
    result = CliRunner().invoke(program, [*asked, *(f"--pin={tag}@{DIGEST}" for tag in tags)])
    assert result.stderr == ""
    pinned = images(list(yaml.safe_load_all(result.stdout)))
    assert sorted(pinned) == sorted(f"{name}@{DIGEST}" for name in ("registry.example/steps", *tags))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pin", f"other:1@{DIGEST}"], "no object runs image other:1; images: "),
        (["--pin", "other:1"], "does not end in a digest: NAME:TAG@sha256:<64 hexadecimal digits>"),
        (["--pin", "other:1@sha256:0123"], "does not end in a digest"),
        (["--image", "other:1@sha256:0123"], "does not end in a digest"),
        (["--service-account", "worker"], "service account worker has no namespace: give NAMESPACE:worker"),
        (["--service-account", "a:b:c"], "is not the name of a service account"),
        (["--service-account", "system:serviceaccount:a:b"], "is not the name of a service account"),
        (["--service-account", "Worker"], "is not the name of a service account"),
    ],
)
def test_invalid_values_are_rejected(words: list[str], message: str) -> None:
    result = CliRunner().invoke(program, ["install", *words])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in " ".join(result.stderr.split())


def test_the_policy_is_for_one_namespace_and_printed_only_on_request() -> None:
    assert of_kind(printed("-n", "training"), "ValidatingAdmissionPolicy") == []
    lists, binding, policy = printed("--only", "policy", "-n", "training")
    assert (lists["kind"], lists["metadata"]) == (
        "ConfigMap",
        {"name": "trainjob-training", "namespace": "kube-system"},
    )
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    assert binding["spec"]["paramRef"] == {**lists["metadata"], "parameterNotFoundAction": "Deny"}
    assert binding["spec"]["matchResources"]["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "training"
    }
    shipped = [f"{each['kind']}/{each['metadata']['name']}" for each in objects("runtimes")]
    assert sorted(lists["data"]["runtimes"].split()) == sorted(shipped)
    assert lists["data"]["secrets"].split() == [STORAGE]
    assert "NAMESPACE" not in yaml.safe_dump([lists, binding, policy])
    with pytest.raises(click.UsageError, match="needs the namespace whose TrainJobs it checks: --namespace"):
        output("--only", "policy")


def test_permissions_are_bound_to_a_namespace_and_service_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["-n", "training", "--service-account", "airflow:worker", "--service-account", "pipeline"]
    role, binding = printed("--only", "rbac", *words)
    assert {each["metadata"]["namespace"] for each in (role, binding)} == {"training"}
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "namespace": "airflow", "name": "worker"},
        {"kind": "ServiceAccount", "namespace": "training", "name": "pipeline"},
    ]
    assert all("namespace" not in each["metadata"] for each in printed(*words) if each["kind"].endswith("Runtime"))
    (unbound,) = printed("--only", "rbac")
    assert "namespace" not in unbound["metadata"]
    monkeypatch.setenv("TRAINJOB_NAMESPACE", "ml")
    assert printed("--only", "rbac")[0]["metadata"]["namespace"] == "ml"


def test_the_reaper_has_a_separate_account() -> None:
    account, role, binding, reaper = printed(
        "--only", "reaper", "-n", "training", "--image", "registry.example/steps:1"
    )
    assert {each["metadata"]["namespace"] for each in (account, role, binding, reaper)} == {"training"}
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": "training"}
    ]
    pod = reaper["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    (container,) = pod["containers"]
    assert (container["image"], container["command"]) == ("registry.example/steps:1", ["trainjob", "reap"])
    kinds = {each["kind"] for each in printed("-n", "training")}
    assert "Deployment" in kinds
    assert "CronJob" not in kinds, "a namespace has the controller or the reaper"


def test_the_controller_may_only_what_it_needs() -> None:
    account, role, binding, controller = printed(
        "--only", "controller", "-n", "training", "--image", "registry.example/steps:1", "--keep-for", "P90D"
    )
    assert {each["metadata"]["namespace"] for each in (account, role, binding, controller)} == {"training"}
    assert role["kind"] == "Role"
    assert "update" not in {verb for rule in role["rules"] for verb in rule["verbs"]}
    assert {resource for rule in role["rules"] for resource in rule["resources"]} == {
        *("trainjobs", "leases", "workflows", "events")
    }
    pod = controller["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    (container,) = pod["containers"]
    assert (container["image"], container["args"]) == ("registry.example/steps:1", ["--keep-for", "P90D"])
    words = [*container["command"], *container["args"]]
    context = program.commands["reap"].make_context("reap", words[2:])
    assert (context.params["watch"], context.params["port"]) == (True, container["ports"][0]["containerPort"])


@pytest.mark.parametrize(
    ("asked", "written"),
    [
        ([], "P30D"),
        (["--keep-for", "P90D"], "P90D"),
        (["--keep-for", "P1DT12H"], "PT129600S"),
        (["--keep-for", "12h"], "PT43200S"),
        (["--keep-for", "86400"], "P1D"),
    ],
)
def test_the_reaper_removes_leftovers_after_some_time(asked: list[str], written: str) -> None:
    (reaper,) = of_kind(printed("--only", "reaper", "-n", "training", *asked), "CronJob")
    (container,) = reaper["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--keep-for", written]
    context = program.commands["reap"].make_context("reap", list(container["args"]))
    assert context.params["keeps"] == program.commands["install"].make_context("install", asked).params["keeps"] or (
        timedelta(days=30)
    )


@pytest.mark.parametrize("part", ["controller", "reaper"])
def test_the_controller_requires_a_namespace(part: str) -> None:
    result = CliRunner().invoke(program, ["install"])
    assert "left out: the controller, which needs --namespace\n" in result.stderr
    assert "Deployment" not in result.stdout
    with pytest.raises(click.UsageError, match=f"--only {part} needs the namespace"):
        output("--only", part)
