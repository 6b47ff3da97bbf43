from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from trainjob.errors import ConfigurationError
from trainjob.registry import Mode, ModelVersion, Promotion, connect
from trainjob.registry.base import check_alias, check_metrics, check_name, check_promotion, check_rule, compare


def _version(number: int, **metrics: float) -> ModelVersion:
    return ModelVersion("m", str(number), "s3://b/m", metrics=metrics)


def _compare(
    candidate: ModelVersion,
    holder: ModelVersion | None,
    metric: str | None = "acc",
    mode: Mode = "max",
    gain: float = 0.0,
) -> Promotion:
    return compare(candidate, holder, alias="champion", metric=metric, mode=mode, min_improvement=gain)


NO_HOLDER = "version 1, which holds 'champion', has no acc to compare with; promote once without a metric"


@pytest.mark.parametrize(
    ("new", "old", "mode", "gain", "reason"),
    [
        (0.9, 0.8, "max", 0.0, "'champion' moves: {}"),
        (0.7, 0.8, "min", 0.0, "'champion' moves: {}"),
        (0.75, 0.5, "max", 0.25, "'champion' moves: {}"),
        (math.inf, 0.1, "max", 0.0, "'champion' moves: {}"),
        (0.8, 0.8, "max", 0.0, "'champion' stays: {}; a higher value is required"),
        (0.7, 0.8, "max", 0.0, "'champion' stays: {}; a higher value is required"),
        (0.9, 0.8, "min", 0.0, "'champion' stays: {}; a lower value is required"),
        (0.74, 0.5, "max", 0.25, "'champion' stays: {}; an improvement of 0.25 is required"),
        (math.nan, 0.8, "max", 0.0, "acc of version 2 is not a number"),
        (math.nan, 0.1, "min", 0.0, "acc of version 2 is not a number"),
        (0.9, math.nan, "max", 0.0, NO_HOLDER),
    ],
)
def test_only_a_better_version_is_promoted_and_the_reason_names_the_values(
    new: float, old: float, mode: Mode, gain: float, reason: str
) -> None:
    verdict = _compare(_version(2, acc=new), _version(1, acc=old), mode=mode, gain=gain)
    assert (verdict.promoted, verdict.previous) == ("moves" in reason, "1")
    assert verdict.reason == reason.format(f"acc {new} of version 2, {old} of version 1")


def test_invalid_rules_are_rejected() -> None:
    assert check_rule("acc", "max", "0.25") == 0.25
    assert check_rule(None, "min", 0) == 0
    with pytest.raises(ConfigurationError, match="mode must be 'max' or 'min', not 'best'"):
        check_rule("acc", "best", 0)
    for wrong in ("much", math.inf, -0.1):
        with pytest.raises(ConfigurationError, match=f"at least 0, in units of the metric, not {wrong!r}"):
            check_rule("acc", "max", wrong)
    with pytest.raises(ConfigurationError, match=r"min_improvement=0\.1 requires a metric"):
        check_rule("", "max", 0.1)


def test_promotion_without_a_holder_or_a_metric() -> None:
    assert _compare(_version(1, acc=0.1), None) == Promotion(
        True, "no version held 'champion'; version 1 has acc 0.1", None
    )
    assert not _compare(_version(1, acc=math.nan), None).promoted
    assert _compare(_version(2), _version(1, acc=1), metric=None).promoted
    assert not _compare(_version(2, acc=1.0), _version(1)).promoted
    assert _compare(_version(2, acc=1.0), _version(2, acc=1.0)).promoted
    with pytest.raises(ConfigurationError, match="has no metric 'acc'; it has: loss"):
        _compare(_version(2, loss=1.0), None)


@given(st.floats(allow_nan=False), st.floats(allow_nan=False), st.floats(min_value=0, allow_nan=False))
def test_two_versions_never_replace_each_other(one: float, two: float, gain: float) -> None:
    there = _compare(_version(2, acc=one), _version(1, acc=two), gain=gain)
    back = _compare(_version(1, acc=two), _version(2, acc=one), gain=gain)
    assert not (there.promoted and back.promoted)


NAMES = ["", " ", "a/b", "a:b", "..", ".", "a'b", 'a"b', "a`b", "a\nb", "a\\b", "a@b", "x" * 201]
ALIASES = ["", "latest", "Latest", "v1", "V12", "7", "a.b", "a b", "a/b"]
METRICS: list[dict[str, Any]] = [{"a\n": 1.0}, {"": 1.0}, {"/a": 1.0}, {"a..b": 1.0}, {"acc": "high"}]


@pytest.mark.parametrize(
    ("check", "value", "words"),
    [
        *((check_name, name, "is not a valid model name") for name in NAMES),
        *((check_alias, alias, "is not a valid alias") for alias in ALIASES),
        *((check_metrics, metrics, "metric") for metrics in METRICS),
    ],
)
def test_invalid_names_are_rejected(check: Callable[[Any], object], value: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check(value)
    assert check_metrics({"val/acc": 1}) == {"val/acc": 1.0}


@pytest.mark.parametrize(
    ("alias", "metric", "words"),
    [
        ("latest", None, "'latest' is not a valid alias"),
        (None, "acc", "requires an alias; set alias"),
        ("champion", "acc", "metric 'acc' decides about 'champion', but the metrics given are: f1, loss"),
    ],
)
def test_an_impossible_promotion_is_rejected_before_the_upload(
    alias: str | None, metric: str | None, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_promotion({"loss": 0.1, "f1": 0.9}, alias, metric)
    check_promotion({"loss": 0.1}, "champion", "loss")
    check_promotion({}, None, None)


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        (None, "set TRAINJOB_REGISTRY"),
        ("", "set TRAINJOB_REGISTRY"),
        ("kubeflow+ftp://host", "is not a supported scheme of a registry"),
        ("kubeflow+https://user:hunter2@host", "KUBEFLOW_REGISTRY_TOKEN"),
        ("postgresql://user:hunter2@host/db", "'postgresql:' is not a supported scheme of a registry"),
        ("/plain/path.db", "is not a supported scheme of a registry"),
        ("https://user:hunter2@host", "MLFLOW_TRACKING_USERNAME"),
        ("mlflow+sqlite://", "has no file"),
        ("sqlite:///:memory:", "has no file"),
        ("mlflow:x", "is not a supported scheme of a registry"),
    ],
)
def test_invalid_registry_uris_are_rejected(uri: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINJOB_REGISTRY", raising=False)
    with pytest.raises(ConfigurationError, match=words) as caught:
        connect(uri)
    assert "hunter2" not in str(caught.value)
