from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from trainjob import Settings, connect
from trainjob._backends.local.backend import LocalBackend
from trainjob.errors import ConfigurationError


def test_settings_have_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINJOB_HOME")
    settings = Settings()
    assert settings.backend == "kubernetes"
    assert settings.namespace is None
    assert settings.home == Path.home() / ".trainjob"
    assert settings.registry is None
    assert settings.local_environments == {}


def test_environment_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for namespace in ("one", "two"):
        monkeypatch.setenv("TRAINJOB_NAMESPACE", namespace)
        assert Settings().namespace == namespace


def test_names_are_case_insensitive_and_empty_values_count_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("trainjob_registry", "mlflow+https://host")
    monkeypatch.setenv("TRAINJOB_NAMESPACE", "")
    assert Settings().registry == "mlflow+https://host"
    assert Settings().namespace is None
    assert Settings(registry="kubeflow+https://host").registry == "kubeflow+https://host", "an argument has priority"


def test_home_becomes_an_absolute_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINJOB_HOME", "here")
    assert Settings().home == tmp_path / "here"
    monkeypatch.setenv("TRAINJOB_HOME", "~/there")
    assert Settings().home == Path.home() / "there"


def test_local_environments_are_read_from_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINJOB_LOCAL_ENVIRONMENTS", '{"torch-distributed": "/venvs/torch"}')
    assert Settings().local_environments == {"torch-distributed": Path("/venvs/torch")}
    assert LocalBackend().environments == {"torch-distributed": Path("/venvs/torch")}
    assert LocalBackend(environments={}).environments == {}


def test_the_local_backend_is_never_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    with pytest.raises(ConfigurationError, match="TRAINJOB_BACKEND=local"):
        anyio.run(connect().get, "default", "x")


def test_local_backend_is_selected_by_argument_or_environment(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    assert isinstance(connect("local"), LocalBackend)
    monkeypatch.setenv("TRAINJOB_BACKEND", "local")
    backend = connect()
    assert isinstance(backend, LocalBackend)
    assert backend.home == home


def test_error_of_an_unknown_backend_lists_the_backends() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown backend 'lokal'.*kubernetes, local"):
        connect("lokal")
