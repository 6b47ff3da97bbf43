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
    assert (settings.backend, settings.namespace, settings.registry) == ("kubernetes", None, None)
    assert (settings.home, settings.local_environments) == (Path.home() / ".trainjob", {})


def test_names_are_case_insensitive_and_empty_values_count_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("trainjob_registry", "mlflow+https://host")
    for namespace in ("one", "two", ""):
        monkeypatch.setenv("TRAINJOB_NAMESPACE", namespace)
        assert Settings().namespace == (namespace or None), "the environment is read at every call"
    assert Settings().registry == "mlflow+https://host"
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


def test_the_local_backend_is_selected_by_argument_or_environment_only(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    assert isinstance(connect("local"), LocalBackend)
    with pytest.raises(ConfigurationError, match=r"unknown backend 'lokal'.*kubernetes, local"):
        connect("lokal")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    with pytest.raises(ConfigurationError, match="TRAINJOB_BACKEND=local"):
        anyio.run(connect().get, "default", "x")
    monkeypatch.setenv("TRAINJOB_BACKEND", "local")
    backend = connect()
    assert isinstance(backend, LocalBackend)
    assert backend.home == home
