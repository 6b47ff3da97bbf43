"""The client of the Kubeflow Model Registry: its requests, unexpected content, concurrent promotions."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from tests.fakes.model_registry import FakeRegistry
from tests.fakes.model_registry_store import Json, Store

from trainjob.errors import ConfigurationError, ModelNotFound, RegistryConflict
from trainjob.registry import Registry, connect

DIGEST = "sha256:" + "a" * 64


def at(fake: FakeRegistry) -> Registry:
    return connect(f"kubeflow+{fake.url}")


def register(fake: FakeRegistry, number: int = 1, name: str = "m", **fields: Any) -> str:
    given = {"export_id": str(number), "digest": DIGEST, **fields}
    return at(fake).register(name, f"s3://b/{number}", **given).version


def text(value: str) -> Json:
    return {"metadataType": "MetadataStringValue", "string_value": value}


# --- requests


@pytest.mark.parametrize(("served", "used"), [(("v1",), "v1"), (("v1alpha3",), "v1alpha3"), (("v1", "v1alpha3"), "v1")])
def test_the_newest_api_is_used(served: tuple[str, ...], used: str) -> None:
    with FakeRegistry(served) as fake:
        assert register(fake) == "1"
        assert {request.version for request in fake.requests[2:]} == {used}


def test_a_server_without_the_api(fake: FakeRegistry) -> None:
    fake.versions = ("v2",)
    with pytest.raises(ConfigurationError, match=r"http://127\..* is not a Kubeflow Model Registry"):
        at(fake).list("m")


def test_the_order_of_requests(fake: FakeRegistry) -> None:
    register(fake, metrics={"acc": 0.5}, tags={"trainjob.bytes": str(7 << 40)})
    assert fake.sent("POST", "PATCH") == [
        "POST registered_models", "POST model_versions", "POST model_versions/2/artifacts", "PATCH model_artifacts/1"
    ]  # fmt: skip
    artifact, live = (request.body for request in fake.requests if "artifacts" in request.path and request.body)
    assert artifact["state"] == "PENDING"
    (created,) = (request.body for request in fake.requests if request.path == "model_versions" and request.body)
    assert (created["name"], created["state"], created["author"]) == ("1", "LIVE", "trainjob")
    assert live == {"artifactType": "model-artifact", "state": "LIVE"}
    version = fake.call("GET", "model_versions/2")
    assert version["customProperties"]["trainjob.bytes"] == text(str(7 << 40))
    assert version["customProperties"]["trainjob.metric.acc"]["double_value"] == 0.5
    sent = len(fake.requests)
    register(fake)
    assert fake.sent("POST", "PATCH") == fake.sent("POST", "PATCH")[:4], "the second time nothing is written"
    assert len(fake.requests) == sent + 3  # the version of the API, the version, its artifact


@pytest.mark.parametrize(
    ("tags", "source"),
    [
        ({}, {}),
        (
            {"run": '{"kfp": "run-7"}', "trainjob": '{"namespace": "team", "name": "x"}'},
            {"Kind": "kfp", "Class": "pipelinerun", "Group": "team", "Id": "run-7", "Name": "run-7"},
        ),
        (
            {"run": '{"kfp": "run-7"}', "source": '{"group": "ns", "name": "nightly"}'},
            {"Kind": "kfp", "Class": "pipelinerun", "Group": "ns", "Id": "run-7", "Name": "nightly"},
        ),
        (
            {"run": "airflow/https://airflow.example/prod/retrain/manual__1 a/3/export"},
            {
                "Kind": "airflow", "Class": "dagrun", "Group": "retrain", "Id": "retrain/manual__1%20a/export/3",
                "Name": "retrain/manual__1 a",
            },
        ),
        ({"run": "by hand"}, {}),
    ],
)  # fmt: skip
def test_provenance(fake: FakeRegistry, tags: dict[str, str], source: dict[str, str]) -> None:
    register(fake, tags={f"trainjob.provenance.{name}": value for name, value in tags.items()})
    artifact = fake.call("GET", "model_artifacts/1")
    assert {name: value for name, value in artifact.items() if name.startswith("modelSource")} == {
        f"modelSource{name}": value for name, value in source.items()
    }
    authors = {"kfp": "Kubeflow Pipelines", "airflow": "Apache Airflow"}
    assert fake.call("GET", "model_versions/2")["author"] == authors.get(source.get("Kind", ""), "trainjob")


def test_a_tag_that_the_database_cannot_hold(fake: FakeRegistry) -> None:
    for tag in ("", "x" * 251, "a\0b"):
        with pytest.raises(ConfigurationError, match="name of a tag"):
            register(fake, tags={tag: "x"})
    assert register(fake, tags={"nul": "a\0b", "x": "short", "x" * 250: "long"}) == "1"
    assert at(fake).resolve("m", "1").tags["x"] == "short"
    assert at(fake).resolve("m", "1").tags["x" * 250] == "long"
    assert at(fake).resolve("m", "1").tags["nul"] == "a\ufffdb"


# --- unexpected content


def test_names_that_mysql_considers_equal_are_a_conflict() -> None:
    with FakeRegistry(store=Store(mysql=True)) as fake:
        register(fake, name="Digits")
        with pytest.raises(RegistryConflict, match="considers another model's name equal"):
            register(fake, name="digits")
        assert at(fake).list("digits") == []
        assert len(at(fake).list("Digits")) == 1
        with pytest.raises(ConfigurationError, match="is not a valid model name"):
            at(fake).list("a/b")
        with pytest.raises(RegistryConflict, match="rejected the version"):
            register(fake, name="other", metrics={"acc": 0.5, "ACC": 0.5})


def test_an_older_server_without_filters_lists_the_right_and_complete_versions() -> None:
    """Such a server returns artifacts of every kind and state."""
    with FakeRegistry(("v1alpha3",), store=Store(filters=False)) as fake:
        for name in ("a_b", "axb", "ä"):
            for number in (1, 2):
                register(fake, number, name=name)
        assert [version.uri for version in at(fake).list("a_b")] == ["s3://b/1", "s3://b/2"]
        card = {"artifactType": "doc-artifact", "name": "card", "uri": "s3://b/card"}
        fake.call("POST", "model_versions/2/artifacts", card)
        fake.call("PATCH", "model_artifacts/2", {"artifactType": "model-artifact", "state": "PENDING"})
        assert [version.uri for version in at(fake).list("a_b")] == ["s3://b/1"]


def test_many_versions_take_few_requests(fake: FakeRegistry) -> None:
    model = fake.call("POST", "registered_models", {"name": "m"})["id"]
    register(fake)
    key = fake.call("GET", "model_versions/2")["externalId"]
    for number in range(2, 251):
        body = {"name": str(number), "registeredModelId": model, "externalId": f"{key[:26]}{number}"}
        version = fake.call("POST", "model_versions", body)["id"]
        artifact = {"artifactType": "model-artifact", "name": "m", "uri": f"s3://b/{number}", "state": "LIVE"}
        fake.call("POST", f"model_versions/{version}/artifacts", {**artifact, "externalId": body["externalId"]})
    fake.requests.clear()
    listed = at(fake).list("m")
    assert [version.uri for version in listed] == [f"s3://b/{number}" for number in range(1, 251)]
    assert len(fake.requests) == 8  # the version of the API, the model, three pages of versions, three of artifacts
    assert register(fake, 251) == "251"


def test_versions_named_by_other_programs(fake: FakeRegistry) -> None:
    model = fake.call("POST", "registered_models", {"name": "m"})["id"]
    for name in ("v1.0", "10", "²"):
        version = fake.call("POST", "model_versions", {"name": name, "registeredModelId": model})["id"]
        body = {"artifactType": "model-artifact", "uri": f"s3://b/{name}", "name": "m"}
        fake.call("POST", f"model_versions/{version}/artifacts", body)
    assert register(fake) == "11"
    assert at(fake).resolve("m", "v1.0").uri == "s3://b/v1.0"
    assert at(fake).promote("m", "v1.0", alias="champion").promoted
    assert at(fake).resolve("m", "champion").version == "v1.0"


def test_an_incomplete_registration_is_not_listed(fake: FakeRegistry) -> None:
    register(fake)
    model = fake.call("GET", "registered_models")["items"][0]["id"]
    version = fake.call("POST", "model_versions", {"name": "2", "registeredModelId": model})["id"]
    for state in (None, "PENDING", "ABANDONED", "DELETED", "MARKED_FOR_DELETION"):
        if state:
            body = {"artifactType": "model-artifact", "uri": "s3://b/2", "name": state, "state": state}
            fake.call("POST", f"model_versions/{version}/artifacts", body)
        assert [each.version for each in at(fake).list("m")] == ["1"]
        assert at(fake).resolve("m", "latest").version == "1"
        with pytest.raises(ModelNotFound, match="registration is incomplete"):
            at(fake).resolve("m", "2")
        with pytest.raises(ModelNotFound, match="registration is incomplete"):
            at(fake).promote("m", "2", alias="champion")


def test_an_artifact_added_by_others_is_ignored(fake: FakeRegistry) -> None:
    register(fake)
    body = {"artifactType": "model-artifact", "uri": "s3://b/other", "name": "other", "state": "LIVE"}
    fake.call("POST", "model_versions/2/artifacts", body)
    assert at(fake).resolve("m", "1").uri == "s3://b/1"
    assert [version.uri for version in at(fake).list("m")] == ["s3://b/1"]
    assert register(fake) == "1"


def test_an_archived_version_loses_its_alias(fake: FakeRegistry) -> None:
    for number in (1, 2, 3):
        register(fake, number, metrics={"acc": number})
        at(fake).promote("m", str(number), alias="champion", metric="acc")
    fake.call("PATCH", "model_versions/4", {"state": "ARCHIVED"})
    assert at(fake).resolve("m", "champion").version == "2"
    assert at(fake).resolve("m", "latest").version == "2"
    assert at(fake).resolve("m", "3").aliases == ()
    assert [version.version for version in at(fake).list("m")] == ["1", "2"]
    with pytest.raises(ConfigurationError, match="is archived"):
        at(fake).promote("m", "3", alias="champion")
    assert register(fake, 4, metrics={"acc": 2.5}) == "4"
    assert at(fake).promote("m", "4", alias="champion", metric="acc").previous == "2"
    assert at(fake).resolve("m", "champion").version == "4"


def test_an_alias_written_by_a_person_is_used(fake: FakeRegistry) -> None:
    register(fake, 1)
    register(fake, 2)
    fake.call("PATCH", "model_versions/2", {"customProperties": {"alias.champion": text("yes"), "mine": text("kept")}})
    assert at(fake).resolve("m", "champion").version == "1"
    assert at(fake).promote("m", "2", alias="champion").previous == "1"
    assert at(fake).resolve("m", "champion").version == "2"
    assert at(fake).promote("m", "1", alias="champion").promoted
    assert at(fake).resolve("m", "champion").tags == {"mine": "kept"}


def test_an_alias_may_not_be_the_name_of_a_version(fake: FakeRegistry) -> None:
    register(fake)
    model = fake.call("GET", "registered_models")["items"][0]["id"]
    fake.call("POST", "model_versions", {"name": "champion", "registeredModelId": model})
    with pytest.raises(ConfigurationError, match="is the name of a version"):
        at(fake).promote("m", "1", alias="champion")


# --- concurrent promotions


@pytest.mark.parametrize(
    ("metric", "order", "theirs", "promoted", "holds"),
    [
        ("acc", 2, 0.7, True, "2"),
        ("acc", 2, 0.95, False, "3"),
        ("acc", 2, 0.9, True, "2"),
        # The order of this promotion is then the higher one, although it has not seen the other.
        ("acc", 1, 0.95, False, "3"),
        (None, 2, 0.7, False, "3"),
    ],
)
def test_another_promotion_at_the_same_moment(
    fake: FakeRegistry, metric: str | None, order: int, theirs: float, promoted: bool, holds: str
) -> None:
    """Both promotions have read the alias; the other one writes first."""
    for number, accuracy in enumerate((0.5, 0.9, theirs), 1):
        register(fake, number, metrics={"acc": accuracy})
    at(fake).promote("m", "1", alias="champion", metric="acc")
    claim = f"{order} max acc" if metric else str(order)

    def between(request: Any) -> None:
        if request.method == "PATCH" and request.path == "model_versions/3":
            fake.fault = lambda _: None
            fake.call("PATCH", "model_versions/4", {"customProperties": {**given, "alias.champion": text(claim)}})

    given = fake.call("GET", "model_versions/4")["customProperties"]
    fake.fault = between
    verdict = at(fake).promote("m", "2", alias="champion", metric=metric)
    assert (verdict.promoted, verdict.previous) == (promoted, "1")
    assert ("moved to version 3 at the same time" in verdict.reason) is not promoted
    assert at(fake).resolve("m", "champion").version == holds


def test_a_claim_that_another_program_overwrote_is_written_again(fake: FakeRegistry) -> None:
    register(fake, 1)
    written: list[str] = []

    def overwrite(request: Any) -> None:
        if request.method == "GET" and written.count("PATCH") == 1:
            written.append("other")
            fake.call("PATCH", "model_versions/2", {"customProperties": {"mine": text("x")}})
        written.append(request.method)

    fake.fault = overwrite
    assert at(fake).promote("m", "1", alias="champion").promoted
    assert written.count("PATCH") == 2
    assert at(fake).resolve("m", "champion").tags == {"mine": "x"}


def test_connecting_changes_nothing_in_the_process() -> None:
    """The official client does, which would break a triggerer."""
    program = (
        "import asyncio, logging, sys; run = asyncio.run\n"
        "from trainjob.registry import connect; connect('kubeflow+http://127.0.0.1:1')\n"
        "assert asyncio.run is run and not logging.root.handlers and 'mlflow' not in sys.modules\n"
        "assert not [name for name in sys.modules if name.startswith(('nest_asyncio', 'model_registry', 'aiohttp'))]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_httpx(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("httpx", "trainjob.registry.kubeflow", "trainjob.registry.rest"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=r"trainjob\[model-registry\]"):
        connect("kubeflow+http://127.0.0.1:1")
