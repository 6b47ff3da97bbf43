"""The contract of every registry: MLflow on SQLite, on PostgreSQL and in memory, and the Kubeflow Model Registry."""

from __future__ import annotations

import math
import random
import time
from functools import partial
from typing import Any

import pytest
from tests.registry.conftest import at_once, on

from trainjob.errors import ConfigurationError, ModelNotFound, RegistryConflict
from trainjob.registry import Registry, connect

DIGEST = "sha256:" + "a" * 64
OTHER = "sha256:" + "b" * 64

every = on("mlflow-file", "mlflow-server", "mlflow-memory", "kubeflow")


@pytest.fixture
def name() -> str:
    """Name of a model that no registry contains; all tests share one server."""
    return f"digits {random.getrandbits(40):x}_%"


@every
def test_an_export_is_registered_once(registry: Registry, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    tags = {"trainjob.bytes": str(3 << 40), "trainjob.provenance.datasets": "[" + '"ä", ' * 2000 + "1]", "note": ""}
    first = registry.register(
        name, "s3://b/1", export_id="run 'a'\"`1", digest=DIGEST, metrics={"acc": 0.9, "val/loss": 1e-9}, tags=tags
    )
    assert (first.name, first.version, first.uri, first.digest) == (name, "1", "s3://b/1", DIGEST)
    assert dict(first.metrics) == {"acc": 0.9, "val/loss": 1e-9}
    assert {tag: first.tags[tag] for tag in tags} == tags
    assert first.tags["trainjob.export_id"] == "run 'a'\"`1"
    assert abs(first.created - time.time()) < 60
    again = registry.register(name, "s3://b/1", export_id="run 'a'\"`1", digest=DIGEST, metrics={"acc": 0.1})
    assert again == first
    assert registry.register(name, "s3://b/2", export_id="b", digest=DIGEST).version == "2"
    assert registry.list(name)[0] == first
    assert [version.version for version in registry.list(name)] == ["1", "2"]
    assert registry.resolve(name, "1") == first
    assert registry.list(f"no {name}") == []
    assert capfd.readouterr() == ("", "")


@every
def test_reserved_tags_and_metrics_that_are_no_numbers(registry: Registry, name: str) -> None:
    tags = {"trainjob.digest": "not mine to set", "trainjob.export_id": "nor this"}
    metrics = {"nan": math.nan, "inf": math.inf, "minus": -math.inf}
    version = registry.register(name, "s3://b/1", export_id="a", digest=DIGEST, tags=tags, metrics=metrics)
    assert (version.digest, version.tags["trainjob.export_id"]) == (DIGEST, "a")
    assert math.isnan(version.metrics["nan"])
    assert (version.metrics["inf"], version.metrics["minus"]) == (math.inf, -math.inf)


@every
def test_conflict(registry: Registry, name: str) -> None:
    registry.register(name, "s3://b/1", export_id="a", digest=DIGEST)
    with pytest.raises(RegistryConflict, match="new export_id"):
        registry.register(name, "s3://b/1", export_id="a", digest=OTHER)
    with pytest.raises(RegistryConflict, match="s3://b/1"):
        registry.register(name, "s3://b/2", export_id="a", digest=DIGEST)
    assert len(registry.list(name)) == 1
    assert registry.register(f"{name}2", "s3://b/2", export_id="a", digest=OTHER).version == "1", "another model"


@every
def test_names(registry: Registry, name: str) -> None:
    """Names that SQL's LIKE treats as equal."""
    names = [f"{name}a_b", f"{name}axb", f"{name}a%b", f"{name}A_b", f"{name}ä"]
    for number, each in enumerate(names):
        assert registry.register(each, f"s3://b/{number}", export_id="a", digest=DIGEST).version == "1"
    for number, each in enumerate(names):
        assert registry.resolve(each, "latest").uri == f"s3://b/{number}"
        assert len(registry.list(each)) == 1
    for bad in ("a/b", "a:b", "..", "", "a@b", 'a"b', "a\\b"):
        with pytest.raises(ConfigurationError, match="is not a valid model name"):
            registry.register(bad, "s3://b/1", export_id="a", digest=DIGEST)
        with pytest.raises(ConfigurationError, match="is not a valid model name"):
            registry.resolve(bad, "1")


@every
def test_resolve(registry: Registry, name: str) -> None:
    for version in ("1", "champion", "latest"):
        with pytest.raises(ModelNotFound):
            registry.resolve(name, version)
    for number in "12":
        registry.register(name, f"s3://b/{number}", export_id=number, digest=DIGEST)
    for version in ("champion", "3"):
        with pytest.raises(ModelNotFound):
            registry.resolve(name, version)
    assert registry.promote(name, "1", alias="champion").promoted
    assert registry.promote(name, "1", alias="stable").promoted
    for version in ("1", "champion", "stable"):
        found = registry.resolve(name, version)
        assert (found.version, found.uri, found.aliases) == ("1", "s3://b/1", ("champion", "stable"))
    assert registry.list(name)[0].aliases == ("champion", "stable")
    assert registry.resolve(name, "latest").version == "2"
    assert registry.register(name, "s3://b/1", export_id="1", digest=DIGEST).aliases == ("champion", "stable")


@every
def test_promote(registry: Registry, name: str) -> None:
    for number, accuracy in enumerate((0.8, 0.7, 0.9, 0.905), 1):
        metrics = {"acc": accuracy}
        registry.register(name, f"s3://b/{number}", export_id=str(number), digest=DIGEST, metrics=metrics)

    def promote(version: str, gain: float = 0.0, *, dry_run: bool = False) -> tuple[bool, str | None]:
        options: Any = {"alias": "champion", "metric": "acc", "min_improvement": gain, "dry_run": dry_run}
        verdict = registry.promote(name, version, **options)
        assert verdict.reason
        return verdict.promoted, verdict.previous

    assert [promote("1", dry_run=True), promote("1"), promote("1")] == [(True, None), (True, None), (True, "1")]
    assert [promote("2"), promote("3", dry_run=True)] == [(False, "1"), (True, "1")]
    assert registry.resolve(name, "champion").version == "1"
    assert [promote("3", 0.2), promote("3", 0.05)] == [(False, "1"), (True, "1")]
    assert [promote("4", 0.05), promote("latest")] == [(False, "3"), (True, "3")]
    assert registry.resolve(name, "champion").version == "4"
    assert registry.promote(name, "2", alias="champion").promoted, "without a metric, any version can be promoted"
    assert [version.aliases for version in registry.list(name)] == [(), ("champion",), (), ()]


@every
def test_promotions_that_are_refused(registry: Registry, name: str) -> None:
    registry.register(name, "s3://b/1", export_id="a", digest=DIGEST, metrics={"acc": 0.5})
    with pytest.raises(ModelNotFound):
        registry.promote(name, "9", alias="champion", metric="acc")
    refused: list[tuple[dict[str, Any], str]] = [
        *(({"alias": alias}, "is not a valid alias") for alias in ("latest", "v1", "a.b", "7", "")),
        ({"metric": "loss"}, "no metric 'loss'"),
        ({"min_improvement": 0.1}, "requires a metric; set metric"),
        ({"metric": "acc", "min_improvement": -0.1}, "at least 0"),
        ({"metric": "acc", "min_improvement": math.nan}, "at least 0"),
    ]
    for options, message in refused:
        with pytest.raises(ConfigurationError, match=message):
            registry.promote(name, "1", **({"alias": "champion"} | options))
    assert registry.resolve(name, "1").aliases == ()


@every
def test_exports_at_once(registry_uri: str, name: str) -> None:
    """Each of six exports, twice."""

    def register(number: int) -> str:
        return connect(registry_uri).register(name, f"s3://b/{number}", export_id=str(number), digest=DIGEST).version

    versions = at_once(*[partial(register, number) for number in (*range(6), *range(6))])
    assert versions[:6] == versions[6:]
    assert len(set(versions)) == 6
    listed = connect(registry_uri).list(name)
    assert sorted(version.uri for version in listed) == [f"s3://b/{number}" for number in range(6)]
    assert {version.version for version in listed} == set(versions)


@every
def test_promotions_at_once(registry_uri: str, name: str) -> None:
    """The best version holds the alias in the end, and its promotion reports success."""
    registry = connect(registry_uri)
    for number in range(1, 7):
        metrics = {"acc": number / 10}
        registry.register(name, f"s3://b/{number}", export_id=str(number), digest=DIGEST, metrics=metrics)
    registry.promote(name, "1", alias="champion", metric="acc")

    def promote(version: int) -> bool:
        return connect(registry_uri).promote(name, str(version), alias="champion", metric="acc").promoted

    order = random.sample(range(2, 7), 5)
    promoted = dict(zip(order, at_once(*[partial(promote, version) for version in order]), strict=True))
    assert registry.resolve(name, "champion").version == "6", promoted
    assert promoted[6]
