"""What registries have in common: rules of promotions, claims of an alias, records, and the lock of a file."""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from trainjob.errors import ConfigurationError, RegistryUnavailable
from trainjob.registry import Mode, ModelVersion, Promotion, connect
from trainjob.registry.alias_claims import Claim, holder
from trainjob.registry.base import check_alias, check_metrics, check_name, check_rule, compare
from trainjob.registry.records import METRIC, double, parse, plain, text
from trainjob.registry.sqlite import create, locked, probe


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
        (0.9, 0.8, "min", 0.0, "'champion' stays: {}; a lower value is required"),
        (0.74, 0.5, "max", 0.25, "'champion' stays: {}; an improvement of 0.25 is required"),
        (math.nan, 0.8, "max", 0.0, "acc of version 2 is not a number"),
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
    ("uri", "words"),
    [
        (None, "set TRAINJOB_REGISTRY"),
        ("kubeflow+ftp://host", "is not a supported scheme of a registry"),
        ("kubeflow+https://user:hunter2@host", "KUBEFLOW_REGISTRY_TOKEN"),
        ("postgresql://user:hunter2@host/db", "'postgresql:' is not a supported scheme of a registry"),
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


def _claimed(number: int, claim: str, **metrics: float) -> tuple[ModelVersion, Claim]:
    return ModelVersion("m", str(number), "s3://b/m", metrics=metrics), Claim.parse(claim)


@given(st.integers(0, 10**17), st.none() | st.from_regex(r"[\w.\-/][\w.\- /]{0,50}", fullmatch=True), st.booleans())
@example(7, "val/loss 2", False)
def test_text_of_a_claim_parses_to_the_same_claim(order: int, metric: str | None, more: bool) -> None:
    claim = Claim(order, metric.strip() if metric else None, "max" if more or not metric else "min")
    assert Claim.parse(str(claim)) == claim


def test_stored_texts_of_claims_are_read() -> None:
    texts = {"7": Claim(7), "7 max acc": Claim(7, "acc"), "7 min val/loss 2": Claim(7, "val/loss 2", "min")}
    assert {text: Claim.parse(text) for text in texts} == texts
    assert [Claim.parse(other) for other in ("yes", "", "7 best acc", "-1")] == [Claim(0)] * 4


@pytest.mark.parametrize(
    ("claims", "held"),
    [
        ([], None),
        ([_claimed(1, "yes")], "1"),
        ([_claimed(1, "2"), _claimed(2, "1")], "1"),
        ([_claimed(1, "yes"), _claimed(2, "no")], "2"),
        ([_claimed(1, "2 min acc", acc=0.9), _claimed(2, "2 min acc", acc=0.5)], "2"),
        ([_claimed(1, "2 min acc", acc=0.9), _claimed(2, "2 min acc", acc=0.9)], "1"),
        ([_claimed(1, "2 max acc", acc=0.9), _claimed(2, "2 max acc", acc=math.nan), _claimed(3, "2 max acc")], "1"),
        ([_claimed(1, "2 max acc", acc=0.9), _claimed(2, "2 max f1", acc=0.5)], "1"),
        # A person moves the alias to a worse version; later versions are compared with that one.
        ([_claimed(1, "3", acc=0.5), _claimed(2, "2 max acc", acc=0.9)], "1"),
        ([_claimed(1, "3", acc=0.5), _claimed(2, "2 max acc", acc=0.9), _claimed(3, "4 max acc", acc=0.6)], "3"),
    ],
)
def test_the_holder_is_selected(claims: list[tuple[ModelVersion, Claim]], held: str | None) -> None:
    found = holder(claims)
    assert (found.version if found else None) == held


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(allow_nan=False)), min_size=1, max_size=6))
def test_the_best_version_by_metric_holds_in_any_order(merits: list[tuple[int, float]]) -> None:
    """The writer of a later claim may not have read the better version."""
    found = holder(_claimed(number, f"{order} max acc", acc=acc) for number, (order, acc) in enumerate(merits))
    assert found is not None
    assert found.metrics["acc"] == max(acc for _, acc in merits)


@given(st.floats(allow_nan=False), st.floats(allow_nan=False), st.floats(min_value=0, allow_nan=False))
def test_two_versions_never_replace_each_other(one: float, two: float, gain: float) -> None:
    there = _compare(_version(2, acc=one), _version(1, acc=two), gain=gain)
    back = _compare(_version(1, acc=two), _version(2, acc=one), gain=gain)
    assert not (there.promoted and back.promoted)


def test_manual_edits_do_not_hide_other_properties() -> None:
    properties = {
        f"{METRIC}a": text("edited by hand"),
        f"{METRIC}b": double(0.5),
        "recall": {"metadataType": "MetadataDoubleValue", "double_value": 0.25},
        "b": double(0.75),
        "stage": text("trial"),
    }
    version = parse("digits", {"name": "1", "customProperties": properties, "createTimeSinceEpoch": "1000"}).version
    assert version.metrics == {"b": 0.5, "recall": 0.25}, "prefixed metrics have priority"
    assert version.tags == {"stage": "trial"}
    assert version.created == 1.0
    assert parse("digits", {"name": "1"}).version.created == 0.0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"string_value": "a"}, "a"),
        ({"struct_value": "eyJhIjogMX0="}, "eyJhIjogMX0="),
        ({"double_value": 1}, "1.0"),
        ({"bool_value": True}, "true"),
        ({}, ""),
    ],
)
def test_properties_of_every_kind_are_tags(value: dict[str, Any], expected: str) -> None:
    assert plain(value) == expected
    if "double_value" not in value:
        assert parse("m", {"name": "1", "customProperties": {"note": value}}).version.tags == {"note": expected}


def test_a_lock_is_waited_for_until_its_timeout(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    with locked(path, 1):
        pass
    taken, release, released = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        with locked(path, 1), locked(path, 1):  # nested, and after an earlier one
            taken.set()
            release.wait(20)
            released.set()

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(10)
    for seconds in (0.1, 0):
        with pytest.raises(RegistryUnavailable, match=f"locked by another process for {seconds} s"):
            locked(path, seconds).__enter__()
    threading.Timer(0.3, release.set).start()
    with locked(path, 20):
        assert released.is_set()
    thread.join(10)


def test_an_empty_file_is_initialized_once(tmp_path: Path) -> None:
    """A program that only opened the file leaves it empty; a file with content is not initialized again."""
    path = tmp_path / "some" / "where" / "mlflow.db"
    with locked(path, 1):  # creates the folders
        assert path.with_name("mlflow.db.lock").exists()
    path.touch()
    built: list[str] = []

    def build(uri: str) -> None:
        built.append(uri)
        Path(uri.removeprefix("sqlite:///")).write_bytes(b"schema")

    for _ in range(2):
        create(path, build)
    assert len(built) == 1
    assert path.read_bytes() == b"schema"


def test_unusable_databases_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("CREATE TABLE x (y)")
        probe(path, 0)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(RegistryUnavailable, match="is locked by another program"):
            probe(path, 0)
    with pytest.raises(ConfigurationError, match="cannot use the registry"):
        probe(tmp_path / "nosuch" / "mlflow.db", 0)
    (tmp_path / "text.db").write_text("no database, but a text that is long enough to be looked at")
    with pytest.raises(ConfigurationError, match="is not a registry"):
        probe(tmp_path / "text.db", 0)
