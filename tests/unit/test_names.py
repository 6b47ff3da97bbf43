"""Namespaces and job names become parts of paths and URLs: names that Kubernetes does not allow are rejected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import click
import pytest
from tests.unit.program import exit_of

from trainjob import JobRef, Settings, TrainJobClient, TrainJobSpec, names
from trainjob._backends.base import Backend
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.local.backend import LocalBackend
from trainjob._jobs.cancellation import cancel_key
from trainjob._jobs.launching import dry_run, launch
from trainjob._manifest.attempts import Cancel
from trainjob._manifest.render import render
from trainjob.cli.options import job_name
from trainjob.errors import ConfigurationError

OUTSIDE = "../../x"
NO_NAMESPACE = [OUTSIDE, "..", ".", "a/b", "/x", "a.b", "A", "-a", "a-", "ä", "%2e", "", "a" * 64, "a\n", "a b", "a\0"]
NO_JOB = [*["../x", "..", ".", "a/b", "/x", "A", "-a", "a..b", "a.", ".deleted", "%2e%2e"], "", "a" * 254, "a\n"]

SPEC = TrainJobSpec.parse({"runtime": "trainjob-step", "command": ["true"]})


@pytest.fixture(params=[LocalBackend, KubernetesBackend])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Either backend; without a cluster and without requests."""
    made: Backend = request.param()
    return made


def test_valid_names_are_accepted() -> None:
    for name in ("a", "0", "default", "a-b", "a" * 63, "1-2"):
        assert names.namespace(name) == name
    for name in ("a", "train-6rm04nbcle-1", "a.b", "0.1", ".".join(["a" * 63] * 3)):
        assert names.job(name) == name
        assert job_name(f"ns/{name}") == ("ns", name)


@pytest.mark.parametrize(
    ("read", "name", "problem"),
    [
        *((names.namespace, name, "is not a namespace: write 1 to 63 lower-case letters") for name in NO_NAMESPACE),
        *((names.job, name, "is not the name of a TrainJob: write 1 to 253 lower-case") for name in NO_JOB),
    ],
)
def test_invalid_names_are_rejected(read: Callable[[str], str], name: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        read(name)


def test_backends_reject_invalid_names(backend: Backend, tmp_path: Path) -> None:
    ref = JobRef(OUTSIDE, "x-1", "uid")
    calls = [
        lambda: backend.get(OUTSIDE, "x-1"),
        lambda: backend.find(OUTSIDE, {}),
        lambda: backend.refs(OUTSIDE, ["x-1"]),
        lambda: anext(backend.watch(ref)),
        lambda: anext(backend.logs(ref)),
        lambda: backend.patch(ref, {}),
        lambda: backend.delete(ref),
        lambda: backend.stopped(ref),
        lambda: backend.evidence(ref),
        lambda: backend.cancels(OUTSIDE, "0123456789"),
        lambda: backend.announce_cancel(OUTSIDE, "0123456789", Cancel(0)),
        lambda: cancel_key(backend, "key", namespace=OUTSIDE),
        lambda: launch(backend, SPEC, "key", namespace=OUTSIDE),
        lambda: dry_run(backend, SPEC, "key", namespace=OUTSIDE),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError, match="is not a namespace"):
            anyio.run(call)
    for call in (lambda: backend.get("default", OUTSIDE), lambda: backend.delete(JobRef("default", OUTSIDE, "uid"))):
        with pytest.raises(ConfigurationError, match="is not the name of a TrainJob"):
            anyio.run(call)
    assert list(tmp_path.rglob("*")) == []


def test_render_client_and_settings_reject_an_invalid_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (OUTSIDE, ""):
        with pytest.raises(ConfigurationError, match="is not a namespace"):
            render(SPEC, "key", 1, name)
    with pytest.raises(ConfigurationError, match="is not a namespace"):
        TrainJobClient("local", namespace=OUTSIDE)
    monkeypatch.setenv("TRAINJOB_NAMESPACE", OUTSIDE)
    with pytest.raises(ConfigurationError, match=r"TRAINJOB_NAMESPACE: .* is not a namespace"):
        Settings()


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINJOB_BACKEND", "local")
    monkeypatch.setenv("TRAINJOB_HOME", str(tmp_path / "a" / "b" / "home"))


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize(
    "words",
    [
        "-n ../../x run --runtime trainjob-step -- true",
        "render -n ../../x --runtime trainjob-step -- true",
        "list -n ../../x",
        "status -n a/../.. x-1",
    ],
)
def test_command_line_rejects_invalid_namespaces(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str
) -> None:
    code, _, err = exit_of(capsys, *words.split())
    assert code == 2
    assert "is not a namespace" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize("command", ["status", "logs", "wait", "cancel", "delete", "resume", "diagnose"])
@pytest.mark.parametrize("text", ["../../x/y", "Not A Name"])
def test_command_line_takes_what_is_no_name_as_a_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, text: str
) -> None:
    code, _, err = exit_of(capsys, command, text)
    assert code == 5
    assert f"there is no TrainJob default/{text}, nor one of the key {text!r}" in err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", [name for name in NO_JOB if name != "a/b"])
def test_job_name_option_takes_what_is_no_name_as_a_key(name: str) -> None:
    if name.strip():
        assert job_name(name) == ("", name)
    else:
        with pytest.raises(click.BadParameter, match="is blank: write NAME, NAMESPACE/NAME or the key of a TrainJob"):
            job_name(name)
