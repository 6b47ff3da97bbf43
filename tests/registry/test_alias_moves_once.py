"""An export that once moved an alias does not move it again: retries, clears and kills, on every registry."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.registry.conftest import on
from tests.trees import model

from trainjob.data import export
from trainjob.registry import Registry, connect
from trainjob.registry.kubeflow import KubeflowRegistry
from trainjob.registry.mlflow import MlflowRegistry

DIGEST = "sha256:" + "a" * 64

each_registry = on("mlflow-file", "mlflow-memory", "kubeflow")


@pytest.fixture
def name(registry: Registry) -> str:
    """A model with versions of accuracy 0.5, which is champion, 0.9 and 0.7."""
    name = f"once {random.getrandbits(40):x}"
    for number, accuracy in enumerate((0.5, 0.9, 0.7), 1):
        registry.register(name, f"s3://b/{number}", export_id=str(number), digest=DIGEST, metrics={"acc": accuracy})
    assert registry.promote(name, "1", alias="champion", once=True).promoted
    return name


def holder(registry: Registry, name: str) -> str:
    return registry.resolve(name, "champion").version


class Killed(BaseException):
    """The process of a promotion is killed."""


class Writes:
    """Counts the writes of a registry's client, and kills it before one of them."""

    def __init__(self, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        if isinstance(registry, KubeflowRegistry):
            self._trap(monkeypatch, "trainjob.registry.rest.Session.patch")
            return
        assert isinstance(registry, MlflowRegistry)
        client = "mlflow.MlflowClient" if registry._database else "tests.fakes.mlflow.MemoryMlflow"
        for method in ("set_model_version_tag", "set_registered_model_alias"):
            self._trap(monkeypatch, f"{client}.{method}")

    def _trap(self, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
        module, owner, method = path.rsplit(".", 2)
        original: Callable[..., Any] = getattr(getattr(importlib.import_module(module), owner), method)

        def call(*arguments: Any, **options: Any) -> Any:
            if self.left == 0:
                raise Killed
            if self.left:
                self.left -= 1
            return original(*arguments, **options)

        monkeypatch.setattr(path, call)

    def kill(self, after: int, action: Callable[[], Any]) -> bool:
        """Run `action` and kill its process before the write that follows so many writes; whether it was killed."""
        self.left = after
        try:
            action()
        except Killed:
            return True
        finally:
            self.left = None
        return False


@each_registry
def test_a_retry_does_not_move_the_alias_back(registry: Registry, name: str) -> None:
    assert registry.promote(name, "2", alias="champion", once=True).promoted
    assert registry.promote(name, "2", alias="champion", once=True).promoted, "it holds the alias"
    assert registry.promote(name, "3", alias="champion", once=True).promoted
    for metric in (None, "acc"):
        for dry_run in (True, False):
            again = registry.promote(name, "2", alias="champion", metric=metric, once=True, dry_run=dry_run)
            assert (again.promoted, again.previous) == (False, "3")
            assert again.reason == "'champion' stays: this export has moved it before, and version 3 holds it now"
    assert holder(registry, name) == "3"
    assert registry.promote(name, "2", alias="stable", once=True).promoted, "another alias"


@each_registry
def test_a_version_that_has_never_held_the_alias_is_promoted_later(
    registry: Registry, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trainjob.registry.mlflow_promotions._SIMULTANEOUS", -1
    )  # these promotions are not simultaneous
    assert registry.promote(name, "2", alias="champion", metric="acc", once=True).promoted
    refused = registry.promote(name, "3", alias="champion", metric="acc", once=True)
    assert not refused.promoted
    assert "a higher value is required" in refused.reason
    assert registry.promote(name, "1", alias="champion").promoted
    assert registry.promote(name, "3", alias="champion", metric="acc", once=True).promoted
    assert holder(registry, name) == "3"


@each_registry
@pytest.mark.parametrize("metric", [None, "acc"])
@pytest.mark.parametrize("later", ["nothing", "another export", "a person"])
def test_a_promotion_that_was_killed_at_any_write(
    registry: Registry, registry_uri: str, metric: str | None, later: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The retry completes it, or leaves the alias where another one has moved it."""
    writes = Writes(registry, monkeypatch)

    for after in range(6):
        model = f"killed {after}"
        for number, accuracy in enumerate((0.5, 0.9, 0.7), 1):
            metrics = {"acc": accuracy}
            registry.register(model, f"s3://b/{number}", export_id=str(number), digest=DIGEST, metrics=metrics)
        assert registry.promote(model, "1", alias="champion", once=True).promoted

        def promote(model: str = model) -> Any:
            return connect(registry_uri).promote(model, "2", alias="champion", metric=metric, once=True)

        killed = writes.kill(after, promote)
        had_it = holder(registry, model) == "2"
        if later == "another export":
            registry.promote(model, "3", alias="champion", once=True)
        elif later == "a person":
            _move_by_hand(registry, model, "3")
        done = promote()
        # Killed before it recorded that it moves the alias, or the rule decides after another export.
        moves = after == 0 or (metric is not None and later == "another export")
        kept = later == "nothing" or (moves and not had_it)
        assert (done.promoted, holder(registry, model)) == ((True, "2") if kept else (False, "3")), after
        assert promote().promoted == done.promoted, after
        if not killed:
            return
    raise AssertionError("a promotion with more than 5 writes")


def _move_by_hand(registry: Registry, name: str, version: str) -> None:
    """Move the alias as another program does: with MLflow's client; a Kubeflow Model Registry has no other way."""
    if isinstance(registry, MlflowRegistry):
        registry._client.set_registered_model_alias(name, "champion", version)
    else:
        registry.promote(name, version, alias="champion")


def test_the_alias_was_removed_by_a_person(database: Path) -> None:
    registry = MlflowRegistry(f"sqlite:///{database}")
    registry.register("m", "s3://b/1", export_id="1", digest=DIGEST)
    registry.promote("m", "1", alias="champion", once=True)
    registry._client.delete_registered_model_alias("m", "champion")
    again = registry.promote("m", "1", alias="champion", once=True)
    assert (again.promoted, again.previous) == (False, None)
    assert again.reason == "'champion' stays: this export has moved it before, and no version holds it now"


@on("mlflow-file", "kubeflow")
@pytest.mark.parametrize("metric", [None, "acc"])
def test_mondays_retry_does_not_move_the_alias_back_from_tuesdays(
    registry_uri: str, registry: Registry, tmp_path: Path, metric: str | None
) -> None:
    """Case 09 of the launch protocol: Monday's export was killed after it had moved the alias."""

    def run(day: str, accuracy: float) -> Any:
        source, target = model(tmp_path / day, int(accuracy * 100)), str(tmp_path / "models")
        options: dict[str, Any] = {"alias": "champion", "metric": metric, "metrics": {"acc": accuracy}}
        return export(source, target, name="digits", export_id=day, registry=registry_uri, **options)

    assert run("monday", 0.8).promoted
    assert run("tuesday", 0.9).promoted
    assert registry.promote("digits", "2", alias="champion").promoted
    retry = run("monday", 0.8)
    assert (retry.version, retry.promoted, holder(registry, "digits")) == ("1", False, "2")
    if metric is None:  # a worse metric is reason enough
        assert retry.reason == "'champion' stays: this export has moved it before, and version 2 holds it now"
    registry.promote("digits", "1", alias="champion")  # a person takes Tuesday's model back
    for _ in range(2):
        cleared = run("tuesday", 0.9)
        assert (cleared.promoted, holder(registry, "digits")) == (False, "1")
        assert cleared.reason == "'champion' stays: this export has moved it before, and version 1 holds it now"
