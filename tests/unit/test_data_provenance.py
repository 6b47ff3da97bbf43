from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st

from trainjob import __version__
from trainjob.data import file_manifest
from trainjob.data.card import card
from trainjob.data.file_manifest import File
from trainjob.data.models import ModelFacts
from trainjob.data.provenance import Record, public, statement
from trainjob.errors import ConfigurationError

RECORDED = Path(__file__).parent / "provenance"
_SHA, _COMMIT = "ab" * 32, "cd" * 20
_GIVEN: dict[str, Any] = {
    "datasets": [{"uri": "hf://datasets/org/digits@v1", "digest": f"sha256:{_SHA}"}, "s3://data/more"],
    "base_model": {"uri": "models:/m@champion", "digest": f"sha256:{_SHA}", "version": "3"},
    "images": [f"registry.example/train@sha256:{_SHA}"],
    "code": {"uri": "git+https://git.example/digits", "revision": _COMMIT},
    "trainjob": {"namespace": "n", "name": "j", "uid": "u", "attempt": 2},
    "run": {"kfp": "0b1e"},
    "seed": 7,
}


def _record(given: Any, files: tuple[str, ...] = ("a|b", "c"), **more: Any) -> Record:
    manifest = file_manifest.build(File(path, 3, _SHA) for path in files)
    facts = ModelFacts(12_345, (".safetensors",))
    values: dict[str, Any] = {"name": "digits", "export_id": "run 7", "metrics": {"accuracy": 0.97}} | more
    return Record(**values, uri="s3://models/digits/1", manifest=manifest, facts=facts, provenance=public(given))


def test_statement_has_dependencies_parameters_and_builder() -> None:
    text = statement(_record(_GIVEN))
    recorded = (RECORDED / "statement.json").read_text().replace("VERSION", __version__)
    assert json.loads(text) == json.loads(recorded)
    assert statement(_record(_GIVEN)) == text


_ORIGINS: st.SearchStrategy[Any] = st.sampled_from(
    [
        *(None, "", "x", "s3://b/k", _COMMIT, {}, [], {"uri": "x"}, {"digest": _SHA}, {"digest": {"sha512": "a"}}),
        *({"revision": "main"}, {"uri": "u", "revision": _COMMIT}, {"name": "n", "uri": "u"}, {"uri": 1, "z": None}),
    ]
)


_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(?:[A-Za-z0-9:/?#\[\]@!$&'()*+,;=._~-]|%[0-9A-Fa-f]{2})*")
"""RFC 3986, 3: a scheme, and the characters of the rest."""


@given(st.fixed_dictionaries({}, optional=dict.fromkeys([*_GIVEN, "other"], st.one_of(_ORIGINS, st.lists(_ORIGINS)))))
def test_statement_follows_in_toto_and_slsa(given: dict[str, Any]) -> None:
    from google.protobuf import json_format
    from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
    from in_toto_attestation.v1 import statement_pb2
    from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
    from in_toto_attestation.v1.statement import Statement

    value = json.loads(statement(_record(given)))
    predicate = value["predicate"]
    # Both reject unknown fields.
    read = json_format.ParseDict(value, statement_pb2.Statement())
    Statement.copy_from_pb(read).validate()
    built = json_format.ParseDict(predicate, provenance_pb2.Provenance())
    for dependency in built.build_definition.resolved_dependencies:
        ResourceDescriptor.copy_from_pb(dependency).validate()
        assert not dependency.uri or _URI.fullmatch(dependency.uri)
        assert all(algorithm and digits for algorithm, digits in dependency.digest.items())
    # TypeURI is not a type of protocol buffers, so it is checked here.
    definition, builder = built.build_definition.build_type, built.run_details.builder.id
    for uri in (value["_type"], value["predicateType"], definition, builder):
        assert _URI.fullmatch(uri)
        assert "://" in uri
    assert card(_record(given))


def test_statement_has_invocation_and_times() -> None:
    job = {"namespace": "n", "name": "j", "uid": "u", "started": "2026-11-25T18:00:00.5Z"}
    run = json.loads(statement(_record({"trainjob": job | {"finished": "2026-11-25T20:00:00+01:00"}})))
    assert run["predicate"]["runDetails"]["metadata"] == {
        "invocationId": "n/j/u",
        "startedOn": "2026-11-25T18:00:00.5Z",
        "finishedOn": "2026-11-25T20:00:00+01:00",
    }
    for wrong in ("yesterday", "2026-11-25", "2026-13-25T18:00:00Z", 7, ""):
        value = json.loads(statement(_record({"trainjob": {"started": wrong}})))
        assert value["predicate"]["runDetails"]["metadata"] == {}


@pytest.mark.parametrize(
    ("field", "given", "described"),
    [
        ("images", "python:3.12", {"uri": "oci://docker.io/library/python:3.12"}),
        ("images", "org/train", {"uri": "oci://docker.io/org/train"}),
        ("images", f"localhost:5000/x@sha256:{_SHA}", {"uri": "oci://localhost:5000/x", "digest": {"sha256": _SHA}}),
        ("images", {"uri": f"quay.io/x@sha256:{_SHA}"}, {"uri": "oci://quay.io/x", "digest": {"sha256": _SHA}}),
        ("images", "pkg:docker/x@1", {"uri": "pkg:docker/x@1"}),
        ("datasets", "/data/a b", {"uri": "file:///data/a%20b"}),
        ("datasets", "s3://b/ü?<x>", {"uri": "s3://b/%C3%BC?%3Cx%3E"}),
        ("datasets", "s3://b/[1] 100%/a%20b", {"uri": "s3://b/%5B1%5D%20100%25/a%20b"}),
        ("datasets", "http://[::1]:80/a[b]", {"uri": "http://[::1]:80/a%5Bb%5D"}),
        ("datasets", "my notes", {"name": "dataset my notes"}),
        ("datasets", {"uri": "s3://b", "digest": "v1"}, {"uri": "s3://b", "annotations": {"digest": "v1"}}),
        (
            "datasets",
            {"uri": "s3://b", "digest": f"SHA256:{_SHA.upper()}"},
            {"uri": "s3://b", "digest": {"sha256": _SHA}},
        ),
        ("code", {"revision": "main"}, {"name": "code @main"}),
    ],
)
def test_origins_become_dependencies(field: str, given: Any, described: dict[str, Any]) -> None:
    value = json.loads(statement(_record({field: given})))
    (found,) = value["predicate"]["buildDefinition"]["resolvedDependencies"]
    kind = {"images": "image", "datasets": "dataset", "code": "code"}[field]
    assert found == {"name": kind} | described


def test_card_has_all_sections() -> None:
    text = card(_record(_GIVEN | {"note": "<b>`x`</b> | y"}, metrics={"acc|uracy": 0.97})).decode()
    assert text == (RECORDED / "card.md").read_text().replace("VERSION", __version__)
    _, matter, _ = text.split("---\n", 2)
    assert yaml.safe_load(matter) == {"model_name": "digits", "tags": ["trainjob"], "datasets": ["org/digits"]}


def test_card_omits_empty_sections() -> None:
    text = card(_record({}, tuple(f"{i:03}" for i in range(101)), metrics={})).decode()
    assert "… and 1 more, in `MANIFEST.json`." in text
    assert "## Metrics" not in text
    assert "## How" not in text
    # Names of models and runs cannot add headings, tables or front matter.
    text = card(_record({"run": "a\n---\n# b | c"}, name="x\n# y", export_id="-\n---\n")).decode()
    assert text.count("\n---\n") == 1
    assert "\n# b" not in text


def test_secrets_are_removed() -> None:
    secret = "hunter2-hunter2"
    given = {
        "datasets": [f"https://me:{secret}@host/a?X-Amz-Signature={secret}", {"uri": f"https://host/b?sig={secret}#c"}],
        "base_model": {"uri": "hf://org/m@main", "digest": f"sha256:{_SHA}", "token": secret},
        "code": f"git+https://{secret}@git.example/x",
        "settings": {"HF_TOKEN": secret, "deep": [{"password": secret}], "note": f"see https://u:{secret}@h/x?y={secret}"},
        "key": "-----BEGIN EC PRIVATE KEY-----\nMHc",
        "ACCESS_TOKEN": secret,
        "trainjob": {"name": "j", "api_key": secret},
    }  # fmt: skip
    shown = public(given)
    for text in (json.dumps(shown), statement(_record(given)).decode(), card(_record(given)).decode()):
        assert secret not in text
        assert "BEGIN EC" not in text
        assert "https://host/a" in text
    assert shown["datasets"][1] == {"uri": "https://host/b"}
    assert shown["settings"]["note"] == "see https://h/x"
    assert public({"uri": "s3://bucket/a?b#c", "gap": float("nan")}) == {"uri": "s3://bucket/a?b#c", "gap": "nan"}


def test_values_that_are_not_json_are_rejected() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for wrong in (object(), b"x", {1, 2}, loop):
        with pytest.raises(ConfigurationError, match="JSON"):
            public({"x": wrong})


def test_locations_are_kept_without_credentials() -> None:
    lake = "abfss://{}@account.dfs.core.windows.net/data"
    kept = ["s3://bucket/a?b#c@d", "az://container/a?b#c@d", lake.format("container")]
    kept += ["hf://datasets/org/digits@v1/a#b", "oci://registry.example/team/digits@sha256:" + "0" * 64]
    kept += ["model-registry://digits@champion"]
    assert public({"datasets": kept}) == {"datasets": kept}
    (shown,) = public({"datasets": [lake.format("me:hunter2-hunter2")]})["datasets"]
    assert shown == "abfss://account.dfs.core.windows.net/data"
