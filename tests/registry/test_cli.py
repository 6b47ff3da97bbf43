"""``trainjob registry``, against MLflow on SQLite and a fake Kubeflow Model Registry."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.registry.conftest import on

from trainjob.data.transfer import copy

DIGEST = "sha256:" + "a" * 64


each_registry = on("mlflow-file", "kubeflow")


@pytest.fixture
def uri(registry_uri: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """``TRAINJOB_REGISTRY`` of this test."""
    monkeypatch.setenv("TRAINJOB_REGISTRY", registry_uri)
    return registry_uri


@pytest.fixture
def registry(trainjob: Any) -> Any:
    return partial(trainjob, "registry")


@each_registry
def test_register_promote_list_and_show(uri: str, registry: Any, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"1")
    held = copy(str(tmp_path / "model"), str(tmp_path / "stored"))
    registered = ("register", "digits", f"{tmp_path}/stored", "--metric", "acc=0.8", "--tag", "who=ada")
    code, out, err = registry(*registered, "--json")
    assert (code, err) == (0, "")
    first = json.loads(out)
    assert first["created"] > 1e9
    assert first["tags"]["who"] == "ada"
    given = {name: first[name] for name in ("name", "version", "uri", "digest", "metrics", "aliases")}
    assert given == {
        "name": "digits", "version": "1", "uri": f"file://{tmp_path}/stored", "digest": held.digest,
        "metrics": {"acc": 0.8}, "aliases": [],
    }  # fmt: skip
    assert json.loads(registry(*registered, "--json")[1]) == first
    other = ("--digest", "A" * 64, "--export-id", "b", "--metric", "acc=0.7")
    assert "digits 2" in registry("register", "digits", "pvc://claim/m", *other)[1]
    better = ("--alias", "champion", "--metric", "acc")
    assert "dry run: no version held 'champion'" in registry("promote", "digits", "1", *better, "--dry-run")[1]
    assert json.loads(registry("promote", "digits", "1", *better, "--json")[1])["promoted"]
    code, out, _ = registry("promote", "digits", "latest", *better)
    assert (code, "'champion' stays" in out) == (0, True)
    verdict = json.loads(registry("promote", "digits", "2", *better, "--mode", "min", "--dry-run", "--json")[1])
    reason = verdict.pop("reason")
    assert verdict == {"name": "digits", "alias": "champion", "promoted": True, "previous": "1", "dry_run": True}
    assert "'champion' moves" in reason
    code, out, _ = registry("list", "digits")
    head, one, two = (line.split() for line in out.splitlines())
    assert head == ["VERSION", "ALIASES", "METRICS", "CREATED", "URI"]
    assert one == ["1", "champion", "acc", "0.8", one[4], f"file://{tmp_path}/stored"]
    assert two == ["2", "acc", "0.7", two[3], "pvc://claim/m"]
    assert [each["version"] for each in json.loads(registry("list", "digits", "--json")[1])["versions"]] == ["1", "2"]
    assert registry("list", "none")[1].split() == head
    code, out, _ = registry("show", "digits", "champion", "--registry", uri)
    shown = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert (shown["uri"], shown["who"], shown["aliases"]) == (f"file://{tmp_path}/stored", "ada", "champion")
    assert json.loads(registry("show", "digits", "2", "--json")[1])["digest"] == DIGEST


@each_registry
@pytest.mark.usefixtures("uri")
def test_the_verdict_of_each_version_is_shown(registry: Any) -> None:
    def register(number: int, **tags: str) -> None:
        words = [word for name, text in tags.items() for word in ("--tag", f"trainjob.evaluation.{name}={text}")]
        registry("register", "digits", f"s3://b/{number}", "--digest", "a" * 64, "--metric", "acc=0.8", *words)

    register(1, digest="sha256:1", passed="true", rule="metrics.acc.min", reason="acc is 0.8; at least 0.5")
    register(2, digest="sha256:2", passed="false", rule="metrics.acc.min", reason="acc is 0.8; at least 0.9")
    register(3, digest="sha256:3")
    register(4)
    head, *rows = (line.split() for line in registry("list", "digits")[1].splitlines())
    assert head == ["VERSION", "ALIASES", "GATE", "METRICS", "CREATED", "URI"]
    assert [row[1] for row in rows] == ["passed", "failed", "none", "acc"]
    lines = [registry("show", "digits", str(number))[1].splitlines() for number in range(1, 5)]
    shown = [dict(line.split(maxsplit=1) for line in each) for each in lines]
    assert shown[1]["gate"] == "failed: metrics.acc.min: acc is 0.8; at least 0.9"
    assert shown[1]["trainjob.evaluation.digest"] == "sha256:2"
    assert "trainjob.evaluation.passed" not in shown[1]
    assert [each.get("gate", "")[:6] for each in shown] == ["passed", "failed", "none", ""]
    tags = json.loads(registry("show", "digits", "2", "--json")[1])["tags"]
    assert tags["trainjob.evaluation.passed"] == "false"


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("show", "none", "1"), 5, "none"),
        (("show", "digits", "champion"), 5, "champion"),
        (("promote", "digits", "7", "--alias", "champion"), 5, "7"),
        (("promote", "digits", "7"), 2, "--alias"),
        (("promote", "digits", "7", "--alias", "v1"), 2, "is not a valid alias"),
        (
            ("promote", "digits", "7", "--alias", "a", "--min-improvement", "1"),
            2,
            "--min-improvement has no effect without --metric",
        ),
        (("promote", "digits", "7", "--alias", "a", "--metric", "acc", "--min-improvement", "nan"), 2, "at least 0"),
        (("register", "a/b", "s3://b/m", "--digest", DIGEST), 2, "is not a valid model name"),
        (("register", "m", "s3://b/m", "--digest", "abc"), 2, "not a digest"),
        (("register", "m", "s3://b/m", "--digest", DIGEST, "--metric", "acc=high"), 2, "must be numbers"),
        (("register", "m", "oci://me:hunter2@host/m", "--digest", DIGEST), 2, "credentials"),
        (("register", "m", "pvc://me:hunter2@host/m", "--digest", DIGEST), 2, "credentials"),
        (("register", "m", "/var/empty/none"), 2, "give --digest sha256:"),
        (("list", "m", "--registry", "ftp://x"), 2, "is not a supported scheme of a registry"),
    ],
)
@each_registry
@pytest.mark.usefixtures("uri")
def test_errors(registry: Any, words: tuple[str, ...], code: int, expected: str) -> None:
    left, out, err = registry(*words)
    assert (left, out) == (code, "")
    assert expected in err
    assert "hunter2" not in err
    left, out, _ = registry(*words, "--json")
    error = json.loads(out)["error"]
    assert (left, error["exit_code"]) == (code, code)
    assert expected in error["message"]
