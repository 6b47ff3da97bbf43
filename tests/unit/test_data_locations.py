from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from trainjob.data.locations import Location, ModelRef, join, parse, parse_store, safe_path
from trainjob.errors import ConfigurationError, UnsafePath

_segment = st.text(st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="/\\"), min_size=1).filter(
    lambda text: text not in (".", "..")
)
_path = st.lists(_segment, min_size=1, max_size=4).map("/".join)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/a/b", Location("s3", "bucket", "a/b")),
        ("s3://bucket/a/", Location("s3", "bucket", "a", directory=True)),
        ("S3://bucket", Location("s3", "bucket", "", directory=True)),
        ("s3://bucket/what?#%20", Location("s3", "bucket", "what?#%20")),
        ("abfss://data@lake.dfs.core.windows.net/a", Location("abfss", "data@lake.dfs.core.windows.net", "a")),
        ("hf://org/model", Location("hf", "org/model", "", directory=True)),
        ("hf://models/org/model/a%20?#", Location("hf", "org/model", "a%20?#")),
        ("hf://datasets/org/x@refs/pr/3/a/", Location("hf", "datasets/org/x@refs/pr/3", "a", directory=True)),
        ("hf://org/x@a%2Fb/c@d", Location("hf", "org/x@a%2Fb", "c@d")),
        ("file:///a%20b/c", Location("file", "", "a b/c")),
        ("file://localhost/a", Location("file", "", "a")),
        ("pvc://claim", Location("pvc", "claim", "", directory=True)),
        ("PVC://my.claim/a%20b/", Location("pvc", "my.claim", "a b", directory=True)),
        ("/a/../b/", Location("file", "", "b", directory=True)),
        ("https://host:8443/d/x.csv?download=1", Location("https", "host:8443", "d/x.csv", query="download=1")),
        ("models:/digits@champion", ModelRef("digits", alias="champion")),
        ("models:/digits/3", ModelRef("digits", version="3")),
        ("model-registry://digits@champion", ModelRef("digits", alias="champion")),
        ("Model-Registry://digits/3", ModelRef("digits", version="3")),
    ],
)
def test_locations_are_parsed(text: str, expected: Location | ModelRef) -> None:
    assert parse(text) == expected


def test_a_plain_path_is_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_store("data").uri == (tmp_path / "data").as_uri()
    assert parse_store(Path("data")).local == tmp_path / "data"
    assert parse_store("a:b").local == tmp_path / "a:b"


INVALID = {
    "has no valid PersistentVolumeClaim; write pvc://claim/path": ["pvc:///x", "pvc://Claim/x"],
    "credentials": ["pvc://me@claim/x"],
    "no bucket": ["gs:///x", "s3:///key"],
    "no container": ["az:///x"],
    "write hf://namespace/name": [
        *("hf://squad", "hf://dataset/org/x", "hf://buckets/org/x", "hf://datasets/x", "hf://org/x@")
    ],
    "not a supported scheme; supported: abfs, abfss, az, file": ["ftp://host/x"],
    "no host": ["https:///x"],
    "has a host": ["file://host/x"],
    "two slashes": ["s3:/bucket/x"],
    "write models:/name@alias": ["models:/digits", "models:/a/b/c"],
    "write model-registry://name@alias": [
        *("model-registry://digits", "model-registry:/digits/1", "model-registry://host:8080/digits/1")
    ],
    "empty": [""],
    "not a valid": ["http://[::1/x"],
}


@pytest.mark.parametrize(("text", "words"), [(text, words) for words, texts in INVALID.items() for text in texts])
def test_errors_of_invalid_locations_name_the_valid_form(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "https://user:hunter2@host/x",
        "s3://AKIA:hunter2@bucket/x",
        "hf://user:hunter2@org/x",
        "abfs://user:hunter2@lake.dfs.core.windows.net/x",
        "https://b.s3.amazonaws.com/x?X-Amz-Signature=hunter2",
        "https://acc.blob.core.windows.net/x?sv=1&sig=hunter2",
        "https://host/x?access_token=hunter2",
    ],
)
def test_credentials_in_a_location_are_rejected_and_not_printed(text: str) -> None:
    with pytest.raises(ConfigurationError, match="credentials") as caught:
        parse(text)
    assert "hunter2" not in str(caught.value)


UNSAFE = ["", "/etc/passwd", "..", "a/../b", "a/./b", "a//b", "a/", "a\0b", "a\nb", "a\\b", "\udcff", "..\\x"]
UNSAFE_URIS = ["s3://b/a/../c", "file:///a/../../c", "https://h/%2e%2e/c", "s3://b/a//c", "s3://b/a\nb"]


@pytest.mark.parametrize(
    ("check", "text"), [*((parse, uri) for uri in UNSAFE_URIS), *((safe_path, path) for path in UNSAFE)]
)
def test_unsafe_paths_are_rejected(check: Callable[[str], object], text: str) -> None:
    with pytest.raises(UnsafePath):
        check(text)


@given(st.sampled_from(["s3", "gs", "az", "file", "https"]), _path, st.booleans())
def test_uri_of_a_location_parses_to_the_same_location(scheme: str, path: str, directory: bool) -> None:
    location = Location(scheme, "" if scheme == "file" else "host", path, directory=directory)
    assert parse(location.uri) == location


@given(st.text(max_size=30))
def test_safe_paths_stay_below_the_root(path: str) -> None:
    root = Path("/srv/root")
    try:
        safe_path(path)
    except UnsafePath:
        return
    resolved = (root / path).resolve()
    assert root in resolved.parents


@given(_path, _path)
def test_join_adds_paths_and_keeps_the_final_slash(base: str, path: str) -> None:
    assert parse_store(join(f"s3://bucket/{base}", path)).path == f"{base}/{path}"
    assert join("s3://b", "a", "c/") == "s3://b/a/c/"
    assert join("s3://b/x/", "a") == "s3://b/x/a"
    with pytest.raises(UnsafePath):
        join("s3://b/x", "../y")
    with pytest.raises(ConfigurationError):
        join("models:/m/1", "x")
