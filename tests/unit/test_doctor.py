"""`trainjob doctor`: checks of this machine, servers that are not API servers, and the output."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import click
import pytest
import yaml
from click.testing import CliRunner, Result
from tests.fakes.scripted import Answer, ScriptedServer
from tests.serving import serving
from tests.unit.program import kubeconfig

from trainjob._backends.kubernetes.client import Request
from trainjob._backends.kubernetes.errors import Forbidden, ObjectNotFound
from trainjob._backends.local import runtimes
from trainjob._backends.local.backend import LocalBackend
from trainjob._doctor import Finding, Level, admission, cluster, local, permissions, queues, server
from trainjob._doctor.secrets import Needed, needed
from trainjob._install import objects
from trainjob._jobs.controller import CONTROLLER
from trainjob._spec import RuntimeRef
from trainjob.cli import cluster as command
from trainjob.cli.program import program
from trainjob.errors import RetryVerdict, RuntimeNotFound
from trainjob.job import API_VERSION, KIND
from trainjob.status import QUEUE_LABEL


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("TRAINJOB_", "KUBE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nosuch"))
    monkeypatch.setenv("TRAINJOB_HOME", str(tmp_path / "home"))


def run(*words: str) -> Result:
    return CliRunner().invoke(program, ["doctor", *words], standalone_mode=False, catch_exceptions=False)


def by_check(findings: Iterator[Finding] | list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


# ---------------------------------------------------------------- this machine


def test_a_working_machine_has_no_findings(tmp_path: Path) -> None:
    found = by_check(local.examine(LocalBackend()))
    assert {finding.level for finding in found.values()} == {Level.OK}
    assert str(tmp_path / "home") in found["home"].message
    assert not (tmp_path / "home").exists(), "nothing is created"


@pytest.mark.parametrize(
    ("home", "message"),
    [
        ("file/home", "file is not a directory"),
        ("/proc/nosuch", "cannot be written"),
        ("open", "is writable by other users"),
    ],
)
def test_an_unusable_home_is_a_failure(tmp_path: Path, home: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    found = by_check(local.examine(LocalBackend(tmp_path / home)))["home"]
    assert found.level is Level.FAILURE
    assert message in found.message
    assert ("TRAINJOB_HOME" in found.advice) or home != "file/home"
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o777, "nothing is changed"


def test_unknown_and_incomplete_runtimes_are_failures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mpi = next(name for name, framework in runtimes.FRAMEWORKS.items() if framework == "mpi")
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = [*local.examine(LocalBackend(), ["nosuch", mpi], "gpus")]
    unknown, refused, incomplete = [finding for finding in findings if finding.check == "runtime"]
    assert {each.level for each in (unknown, refused, incomplete)} == {Level.FAILURE}
    assert "trainjob-step" in unknown.advice
    assert "needs mpirun, which is not installed here (Debian: apt install openmpi-bin)" in refused.message
    assert by_check(findings)["queue"].level is Level.SKIPPED


def test_environments_of_unknown_runtimes_are_warnings(tmp_path: Path) -> None:
    found = [*local.examine(LocalBackend(environments={"torch-distrbuted": tmp_path}))]
    (warning,) = [each for each in found if each.level is not Level.OK]
    assert (warning.check, warning.level) == ("python", Level.WARNING)
    assert "torch-distrbuted" in warning.message


def made_environment(path: Path, *, programs: tuple[str, ...] = (), modules: tuple[str, ...] = ()) -> Path:
    """A directory that looks like a virtual environment; its Python finds only `modules`."""
    (path / "bin").mkdir(parents=True)
    scripts = dict.fromkeys(programs, "#!/bin/sh\n")
    scripts["python"] = f'#!/bin/sh\nPYTHONPATH={path}/site exec {sys.executable} -S "$@"\n'
    for name, script in scripts.items():
        (path / "bin" / name).write_text(script)
        (path / "bin" / name).chmod(0o755)
    (path / "site").mkdir()
    for name in modules:
        (path / "site" / f"{name}.py").write_text("raise SystemExit('it is not imported')")
    return path


NEEDS: dict[str, tuple[str, ...]] = {
    "torch-distributed": ("torch",),
    "torch-resilient": ("torch",),
    "jax-distributed": ("jax",),
    "jax-resilient": ("jax",),
    "xgboost-distributed": ("xgboost",),
    "deepspeed-distributed": ("deepspeed", "torch"),
    "mlx-distributed": ("mlx",),
    "trainjob-step": (),
}


@pytest.mark.parametrize("runtime", runtimes.FRAMEWORKS)
def test_runtimes_are_checked_in_their_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runtime: str
) -> None:
    """Not in trainjob's environment, whose packages the ranks do not see."""
    monkeypatch.setenv("PATH", "/nonexistent")
    modules = NEEDS[runtime]
    complete = made_environment(tmp_path / "complete", programs=("mpirun",), modules=modules)
    bare = made_environment(tmp_path / "bare", programs=("mpirun",))
    found = by_check(local.examine(LocalBackend(environments={runtime: complete}), [runtime]))
    assert {each.level for each in found.values()} == {Level.OK}
    if modules:
        assert f"{complete}/bin/python, which has {' and '.join(modules)}" in found["runtime"].message
    found = by_check(local.examine(LocalBackend(environments={runtime: bare}), [runtime]))
    assert (found["runtime"].level is Level.FAILURE) == bool(modules)
    missing = by_check(local.examine(LocalBackend(environments={runtime: tmp_path / "gone"}), [runtime]))["runtime"]
    assert (missing.level, str(tmp_path / "gone") in missing.message) == (Level.FAILURE, True)
    for name in modules:
        assert f"no {name}" in found["runtime"].message
        assert f"{bare}/bin/python -m pip install" in found["runtime"].advice


def test_advice_for_an_incomplete_runtime_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(runtimes.MODULES, "torch-distributed", ("nosuch_module",))
    other = {"jax-distributed": Path("/venvs/jax")}
    finding = by_check(local.examine(LocalBackend(environments=other), ["torch-distributed"]))["runtime"]
    assert "the environment of trainjob, " in finding.message
    assert "no nosuch_module" in finding.message
    (variable,) = re.findall(r"TRAINJOB_LOCAL_ENVIRONMENTS='([^']+)'", finding.advice)
    assert json.loads(variable) == {"jax-distributed": "/venvs/jax", "torch-distributed": "/path/of/environment"}


def test_command_line_reports_local_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINJOB_BACKEND", "local")
    result = run()
    assert result.return_value == 0
    assert "failure" not in result.stdout
    result = run("--runtime", "nosuch", "--json")
    assert result.return_value == 2
    answer = json.loads(result.stdout)
    assert answer["ok"] is False
    (failure,) = [finding for finding in answer["findings"] if finding["level"] == "failure"]
    assert (failure["check"], failure["retry"]) == ("runtime", "configuration")


# ---------------------------------------------------------------- what is absent

ABSENT = re.compile(r"\b(no|none|not|nothing|without|missing|absent|lacks?|cannot|never|rejected|unused)\b")


class Bare:
    """A client of a cluster that has only the paths and objects given, and hides others."""

    def __init__(self, there: Mapping[str, Any], hidden: bool) -> None:
        self._there = there
        self._hidden = hidden

    async def send(self, request: Request) -> Any:
        for path, answer in self._there.items():
            if request.path.endswith(path):
                return answer
        if self._hidden and "/namespaces/" in request.path:
            raise Forbidden(403, "Forbidden", "hidden", None)
        raise ObjectNotFound(404, "NotFound", "absent", None)

    async def items(self, path: str, _: object) -> Any:
        if self._hidden and "/namespaces/" in path:
            raise Forbidden(403, "Forbidden", "hidden", None)
        return [each for name, each in self._there.items() if name == path.rpartition("/")[2]]

    def stream(self, _: Request) -> Any:
        raise ObjectNotFound(404, "NotFound", "absent", None)


class Refusing:
    """A backend of a cluster without runtimes."""

    async def create(self, trainjob: Mapping[str, Any], *, dry_run: bool) -> Any:
        raise RuntimeNotFound(f"{trainjob['metadata']['name']}: dry run {dry_run}")


TRAINJOB = {"x-kubernetes-group-version-kind": [{"kind": KIND}]}
KUEUE = {"versions": [{"version": "v1beta1"}], "preferredVersion": {"version": "v1beta1"}}
OBJECTS: dict[str, Any] = {
    f"/apis/{queues.GROUP}": KUEUE,
    f"/openapi/v3/apis/{API_VERSION}": {"components": {"schemas": {"x": TRAINJOB}}},
    "localqueues": {"metadata": {"name": "gpus"}, "spec": {"clusterQueue": "gpus"}},
    f"/deployments/{CONTROLLER}": {"status": {"availableReplicas": 1}},
}


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("queue", ["", "gpus"])
def test_nothing_absent_in_a_cluster_is_ok(hidden: bool, queue: str) -> None:
    async def examined(client: Any) -> list[Finding]:
        backend: Any = Refusing()
        place = cluster._Cluster(client, backend, "training")
        return [finding async for finding in place.examine(["trainjob-step"], queue)]

    for count in range(len(OBJECTS) + 1):
        for names in itertools.combinations(OBJECTS, count):
            found = anyio.run(examined, Bare({name: OBJECTS[name] for name in names}, hidden))
            wrong = [each for each in found if each.level is Level.OK and ABSENT.search(each.message)]
            assert not wrong, names
            assert not [each for each in found if "unexpected reply" in each.message], names


@pytest.mark.parametrize("runtimes", [[], ["trainjob-step"]])
def test_a_missing_runtime_of_steps_is_a_failure_only_if_asked_for(runtimes: list[str]) -> None:
    unused: Any = object()
    backend: Any = Refusing()
    place = cluster._Cluster(unused, backend, "training")
    missing, *unchecked = anyio.run(place._admission, runtimes, "")
    assert missing.level is (Level.FAILURE if runtimes else Level.WARNING)
    assert "ClusterTrainingRuntime trainjob-step does not exist" in missing.message
    assert "trainjob install --only runtimes" in missing.advice
    assert [each.level for each in unchecked] == ([] if runtimes else [Level.SKIPPED])


@pytest.mark.parametrize(
    ("labels", "warned"),
    [
        ({}, False),
        ({"istio-injection": "enabled"}, True),
        ({"istio.io/rev": "1-24"}, True),
        ({"istio-injection": "x"}, False),
    ],
)
def test_sidecars_that_keep_pods_running_are_a_warning(labels: dict[str, str], warned: bool) -> None:
    client: Any = Bare({"/namespaces/training": {"metadata": {"labels": labels}}}, hidden=False)
    unused: Any = object()
    found = anyio.run(cluster._Cluster(client, unused, "training")._sidecars)
    assert [(each.check, each.level) for each in found] == [("sidecars", Level.WARNING)] * warned


@pytest.mark.parametrize("suspended", [False, True])
def test_a_queue_that_holds_no_job_is_a_failure(suspended: bool) -> None:
    class Storing:
        async def create(self, trainjob: Mapping[str, Any], *, dry_run: bool) -> Any:
            assert dry_run
            assert trainjob["metadata"]["labels"][QUEUE_LABEL] == "gpus"
            return {**trainjob, "spec": {**trainjob["spec"], "suspend": suspended}}

    backend: Any = Storing()
    found = anyio.run(admission.check, backend, "training", RuntimeRef(name="torch-distributed"), "gpus")
    assert (found.check, found.level) == (("admission", Level.OK) if suspended else ("queueing", Level.FAILURE))
    assert "for queue gpus would" in found.message


# ---------------------------------------------------------------- no cluster, or no answer


def test_missing_and_invalid_settings_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("--json")
    assert result.return_value == 2
    (finding,) = json.loads(result.stdout)["findings"]
    assert finding["check"] == "credentials"
    assert "TRAINJOB_BACKEND=local" in finding["message"]
    monkeypatch.setenv("TRAINJOB_BACKEND", "kubernets")
    result = run("--json")
    assert result.return_value == 2
    assert json.loads(result.stdout)["findings"][0]["check"] == "settings"


def test_a_server_that_is_not_an_api_server_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(ScriptedServer(lambda _: Answer(404, b"<html>"))) as page:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", page.url, token="s3cret")))
        result = run("--json")
    assert result.return_value == 2
    credentials, failure = json.loads(result.stdout)["findings"]
    assert (credentials["level"], failure["level"]) == ("ok", "failure")
    assert "does not answer like an API server" in failure["message"]
    assert "s3cret" not in result.stdout + result.stderr


def test_an_unreachable_server_is_an_infrastructure_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"https://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", url, token="t0ken")))
        result = run()
    assert result.return_value == 3
    assert f"kubeconfig {tmp_path / 'config'}, context here" in result.stdout
    assert "no reply from the API server" in result.stdout
    assert "network, VPN, proxy" in result.stdout
    assert "t0ken" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("v1.36.2", Level.OK),
        ("v1.31.0-gke.1000", Level.OK),
        ("v1.31.1+rke2r1", Level.OK),
        ("v2.0.0", Level.OK),
        ("v1.30.9", Level.FAILURE),
        ("None", Level.SKIPPED),
    ],
)
def test_kubernetes_version_is_checked(version: str, level: Level) -> None:
    assert server._version(version).level is level


# ---------------------------------------------------------------- permissions


def test_checked_permissions_are_those_of_the_role() -> None:
    (role,) = [each for each in objects("rbac") if each["kind"] == "Role"]
    given = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    asked = {(permissions.GROUPS.get(each.resource, ""), each.resource, each.verb) for each in permissions.PERMISSIONS}
    # Pages use these, and a cluster may lack both APIs.
    optional = {
        ("metrics.k8s.io", "pods", "list"),
        ("visibility.kueue.x-k8s.io", "localqueues/pendingworkloads", "get"),
    }
    assert asked | optional == given
    assert not asked & optional


def test_advice_about_permissions_can_be_pasted() -> None:
    account = permissions._advice("training", "system:serviceaccount:airflow:worker")
    assert account.startswith("trainjob install --only rbac -n training --service-account airflow:worker | kubectl ")
    words = account.partition(" | ")[0].split()[1:]
    printed = CliRunner().invoke(program, words, standalone_mode=False, catch_exceptions=False).stdout
    _, binding = yaml.safe_load_all(printed)
    assert binding["subjects"] == [{"kind": "ServiceAccount", "namespace": "airflow", "name": "worker"}]
    assert "--user=jane" in permissions._advice("training", "jane")


# ---------------------------------------------------------------- output


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([], 0),
        ([RetryVerdict.INFRASTRUCTURE], 3),
        ([RetryVerdict.QUOTA, RetryVerdict.INFRASTRUCTURE], 3),
        ([RetryVerdict.INFRASTRUCTURE, RetryVerdict.CONFIGURATION], 2),
    ],
)
def test_exit_code_depends_on_the_verdicts(
    monkeypatch: pytest.MonkeyPatch, verdicts: list[RetryVerdict], code: int
) -> None:
    async def examined(*_: object) -> AsyncGenerator[Finding]:
        yield Finding("clock", Level.WARNING, "late")
        yield Finding("runtimes", Level.SKIPPED, "hidden")
        for verdict in verdicts:
            yield Finding("server", Level.FAILURE, "gone", "", verdict)

    monkeypatch.setattr(command, "_examined", examined)
    result = run()
    assert result.return_value == code
    failures = f", {len(verdicts)} failure" if verdicts else ""
    assert result.stdout.splitlines()[-1] == f"1 warning{failures}, 1 skipped"


def test_findings_fit_the_terminal_and_advice_is_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "70")
    advice = "kubectl " + "x" * 100
    text = click.unstyle(command._text(Finding("access", Level.WARNING, "may not watch\npods " * 8, advice), ""))
    *lines, last = text.splitlines()
    assert lines[0].startswith("warning  access       may not watch pods")
    assert len(lines) > 2
    assert max(map(len, lines)) <= 70
    assert all(line.startswith(" " * 22 + "may") or line[22] != " " for line in lines)
    assert last == " " * 22 + f"-> {advice}"
    assert advice not in command._text(Finding("access", Level.WARNING, "may not", advice), advice), "already printed"


def test_an_error_of_one_check_does_not_stop_the_others() -> None:
    async def broken() -> list[Finding]:
        raise KeyError("items")

    async def fine() -> list[Finding]:
        return [Finding("b", Level.OK, "")]

    async def both() -> list[Finding]:
        return [finding async for finding in cluster._all(("a", broken()), ("b", fine()))]

    found = anyio.run(both)
    assert [(finding.check, finding.level) for finding in found] == [("a", Level.SKIPPED), ("b", Level.OK)]
    assert "KeyError" in found[0].message


# ---------------------------------------------------------------- Secrets of a job


def pod(**fields: Any) -> dict[str, Any]:
    job = {"name": "node", "template": {"spec": {"template": {"spec": fields}}}}
    template = {"spec": {"replicatedJobs": [job]}}
    return {"runtimePatches": [{"manager": "x/y", "trainingRuntimeSpec": {"template": template}}]}


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ({"trainer": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}}, ["s"]),
        ({"initializer": {"dataset": {"secretRef": {"name": "s"}}, "model": {"secretRef": {"name": "t"}}}}, ["s", "t"]),
        (pod(containers=[{"name": "node", "envFrom": [{"secretRef": {"name": "s"}}]}]), ["s"]),
        (pod(initContainers=[{"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s"}}}]}]), ["s"]),
        (pod(volumes=[{"name": "v", "secret": {"secretName": "s"}}]), ["s"]),
        (pod(volumes=[{"name": "v", "projected": {"sources": [{"secret": {"name": "s"}}]}}]), ["s"]),
        (pod(volumes=[{"name": "v", "csi": {"nodePublishSecretRef": {"name": "s"}}}]), ["s"]),
        (pod(volumes=[{"name": "v", "secret": {"secretName": "s", "optional": True}}]), []),
        ({"trainer": {"env": [{"name": "secretRef", "value": "s"}], "args": ["secret"]}}, []),
        ({"trainer": None, "runtimePatches": "none", "initializer": {"dataset": {"secretRef": "s"}}}, []),
    ],
)
def test_required_secrets_are_found(spec: dict[str, Any], names: list[str]) -> None:
    assert [each.name for each in needed(spec)] == names


def test_secrets_for_images_are_distinguished() -> None:
    assert [*needed(pod(imagePullSecrets=[{"name": "s"}, {}]))] == [Needed("s", pulls=True)]
