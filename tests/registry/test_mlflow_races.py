"""Promotions on an MLflow server, which moves an alias to the version requested last."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from trainjob.registry import Promotion
from trainjob.registry.mlflow import MlflowRegistry

DIGEST = "sha256:" + "a" * 64

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def name(mlflow_url: str) -> str:
    """A model with versions of accuracy 0.5, which is champion, 0.7 and 0.9."""
    name = f"race {random.getrandbits(40):x}"
    registry = MlflowRegistry(mlflow_url)
    for number, accuracy in enumerate((0.5, 0.7, 0.9), 1):
        registry.register(name, f"s3://b/{number}", export_id=str(number), digest=DIGEST, metrics={"acc": accuracy})
    promote(registry, name, 1)
    return name


def promote(registry: MlflowRegistry, name: str, version: int, metric: str | None = "acc") -> Promotion:
    return registry.promote(name, str(version), alias="champion", metric=metric)


def interrupted(url: str, method: str, action: Callable[[], Any]) -> MlflowRegistry:
    """A registry that runs ``action`` before the first call of one of its methods."""
    registry = MlflowRegistry(url)
    original = getattr(registry, method)
    done: list[bool] = []

    def call(*arguments: Any, **options: Any) -> Any:
        if not done:
            done.append(True)
            action()
        return original(*arguments, **options)

    setattr(registry, method, call)
    return registry


@pytest.mark.parametrize(("slow", "quick"), [(2, 3), (3, 2)])
@pytest.mark.parametrize("moment", ["_set_alias", "_settled"])
def test_the_best_version_holds_the_alias_in_any_order(
    mlflow_url: str, name: str, slow: int, quick: int, moment: str
) -> None:
    promotions: list[Promotion] = []
    registry = interrupted(
        mlflow_url, moment, lambda: promotions.append(promote(MlflowRegistry(mlflow_url), name, quick))
    )
    verdict = promote(registry, name, slow)
    assert registry.resolve(name, "champion").version == "3"
    assert verdict.promoted == (slow == 3)
    assert verdict.previous == "1"
    if slow == 2:
        assert promotions[0].promoted
        assert "moved to version 3 at the same time" in verdict.reason


def test_the_retry_of_a_promotion_killed_before_its_check_moves_the_alias_back(mlflow_url: str, name: str) -> None:
    def die() -> None:
        raise KeyboardInterrupt

    other = interrupted(mlflow_url, "_set_alias", lambda: promote(MlflowRegistry(mlflow_url), name, 3))
    other._settled = lambda *_, **__: die()  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        promote(other, name, 2)
    registry = MlflowRegistry(mlflow_url)
    assert registry.resolve(name, "champion").version == "2", "the worse one came last"
    assert not promote(registry, name, 2).promoted
    assert registry.resolve(name, "champion").version == "3"


def test_an_alias_moved_by_a_person_at_the_same_moment_stays(mlflow_url: str, name: str) -> None:
    def move() -> None:
        registry._client.set_registered_model_alias(name, "champion", "2")

    registry = MlflowRegistry(mlflow_url)
    verdict = promote(interrupted(mlflow_url, "_settled", move), name, 3)
    assert not verdict.promoted
    assert "moved to version 2" in verdict.reason
    assert registry.resolve(name, "champion").version == "2"


def test_without_a_metric_the_last_promotion_holds_the_alias(mlflow_url: str, name: str) -> None:
    quick: list[Promotion] = []
    registry = interrupted(
        mlflow_url, "_settled", lambda: quick.append(promote(MlflowRegistry(mlflow_url), name, 2, None))
    )
    verdict = promote(registry, name, 3, None)
    assert (verdict.promoted, quick[0].promoted) == (False, True)
    assert registry.resolve(name, "champion").version == "2"
