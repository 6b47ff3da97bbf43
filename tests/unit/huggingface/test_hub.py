"""Models and datasets of Hugging Face; `tests/stores` has what they share with other stores."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import parse_hf_uri
from tests.fakes.hub import Hub, Repo, served
from tests.trees import files, tree

from trainjob._support import retrying
from trainjob.data import copy, file_manifest, read_manifest
from trainjob.data.locations import hub_parts, parse_store
from trainjob.data.stores.opening import open_store
from trainjob.errors import ConfigurationError, DataError, SourceNotFound, StoreUnavailable

# The client raises this warning when it sends files.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

BIG = bytes(range(256)) * 48_000  # 12 MB: sent before the commit, and in parts
FILES = {"config.json": b"{}", "sub/w.bin": BIG, "sp ace/ü%20?#.txt": b"x", "empty": b""}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(retrying, "TRANSFER", partial(retrying.TRANSFER, first_pause=0.002))
    with served(monkeypatch) as server:
        yield server


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tree(tmp_path / "source", FILES)


def _there(repo: Repo, branch: str = "main") -> set[str]:
    """Paths in the last commit of a branch."""
    return set(repo.commits[repo.branches[branch]])


@pytest.mark.parametrize("uri", ["hf://org/model", "hf://datasets/org/data", "hf://org/model@v2"])
def test_an_upload_is_one_private_commit_that_replaces_the_one_before(hub: Hub, source: Path, uri: str) -> None:
    name, _, branch = uri.removeprefix("hf://").partition("@")
    there = copy(str(source), uri)
    held, branch = hub.repos[name], branch or "main"
    assert held.private
    assert _there(held, branch) == {*FILES, file_manifest.NAME, ".gitattributes"}
    assert copy(str(source), uri) == there
    assert hub.asked("POST .*/commit/") == 1
    (source / "empty").unlink()
    copy(str(source), uri)
    assert _there(held, branch) == {*FILES, file_manifest.NAME, ".gitattributes"} - {"empty"}


def test_copy_selects_a_directory_or_a_file(hub: Hub, tmp_path: Path) -> None:
    commit = hub.repo("org/model").commit({"a/1": b"1", "a/2.bin": b"two", "ab/3": b"3"})
    assert [file.path for file in copy("hf://org/model/a", str(tmp_path / "a")).files] == ["1", "2.bin"]
    assert [file.path for file in copy("hf://org/model/a/2.bin", str(tmp_path / "b")).files] == ["2.bin"]
    assert open_store(parse_store("hf://org/model/a")).resolved().uri == f"hf://org/model@{commit}/a"
    with pytest.raises(SourceNotFound, match="does not exist or is empty"):
        copy("hf://org/model/none", str(tmp_path / "c"))
    with pytest.raises(SourceNotFound, match="repository hf://org/none/ does not exist"):
        copy("hf://org/none", str(tmp_path / "c"))


def test_download_stays_on_one_commit_if_the_branch_moves(hub: Hub, tmp_path: Path) -> None:
    repo = hub.repo("org/model")
    repo.commit({"a.bin": b"old" * 1000, "b": b"old"})

    def move(method: str, path: str, count: int) -> dict[str, object]:
        if "/tree/" in path:
            repo.commit({"a.bin": b"new" * 1000, "b": b"new"})
        return {}

    hub.fault = move
    copy("hf://org/model", str(tmp_path / "t"))
    assert files(tmp_path / "t") == {"a.bin": b"old" * 1000, "b": b"old"}


def test_download_verifies_the_hash_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    hub.repo("org/model").commit({"a.bin": BIG})
    copy("hf://org/model", str(tmp_path / "first"))
    hub.fault = lambda method, path, count: (
        hub.blobs.update({hashlib.sha256(BIG).hexdigest(): BIG[:-1] + b"x"}) or {} if path.startswith("/cdn") else {}
    )
    with pytest.raises(DataError, match="SHA-256"):
        copy("hf://org/model", str(tmp_path / "t"))
    assert read_manifest(str(tmp_path / "t")) is None


def test_token_is_sent_to_the_hub_only(hub: Hub, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repo("org/model").commit({"a.bin": b"x"})
    hub.needs_token = "hf_hunter2"
    with pytest.raises(SourceNotFound, match="set HF_TOKEN"):
        copy("hf://org/model", str(tmp_path / "t"))
    monkeypatch.setenv("HF_TOKEN", "hf_hunter2")
    copy("hf://org/model", str(tmp_path / "t"))
    for request, token in zip(hub.requests, hub.tokens, strict=True):
        if "/cdn/" in request:
            assert not token
    copy(str(source), "hf://org/other")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(DataError) as caught:
        copy("hf://org/model", str(tmp_path / "t2"))
    assert "hf_wrong" not in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        (r"PUT /put/", {"status": 500}),
        (r"PUT /put/", {"lost": True}),
        (r"POST .*/objects/batch", {"status": 503}),
        (r"POST .*/preupload/", {"status": 502}),
        (r"POST .*/preupload/", {"lost": True}),
        (r"POST .*/commit/", {"status": 503}),
        (r"POST .*/commit/", {"lost": True}),
        (r"POST .*/repos/create", {"status": 503}),
        (r"GET .*/tree/", {"cut": 20}),
        (r"GET .*/revision/", {"status": 503}),
    ],
)
def test_faults_of_one_request_are_retried(
    hub: Hub, source: Path, tmp_path: Path, pattern: str, fault: dict[str, object]
) -> None:
    """The upload still succeeds, with one commit."""
    left = [fault]
    hub.fault = lambda method, path, count: left.pop() if left and re.match(pattern, f"{method} {path}") else {}
    hub.part_size = 4_000_000
    there = copy(str(source), "hf://org/model")
    repo = hub.repos["org/model"]
    assert len(repo.commits) == 2
    assert copy("hf://org/model", str(tmp_path / "back")).digest == there.digest
    assert not left


def test_failed_upload_commits_nothing_and_is_resumed(hub: Hub, source: Path) -> None:
    hub.fault = lambda method, path, count: {"status": 503} if "/commit/" in path else {}
    with pytest.raises(StoreUnavailable, match="503"):
        copy(str(source), "hf://org/model")
    repo = hub.repos["org/model"]
    assert len(repo.commits) == 1
    assert read_manifest("hf://org/model") is None
    puts = hub.asked("PUT /put/")
    hub.fault = lambda method, path, count: {}
    copy(str(source), "hf://org/model")
    assert hub.asked("PUT /put/") == puts, "stored files are not sent again"
    assert len(repo.commits) == 2


def test_upload_rejects_a_concurrent_commit(hub: Hub, source: Path) -> None:
    repo = hub.repo("org/model")

    def other(method: str, path: str, count: int) -> dict[str, object]:
        if "/commit/" in path and count == 1:
            repo.commit({"other": b"1"})
        return {}

    hub.fault = other
    with pytest.raises(ConfigurationError, match="another writer changed"):
        copy(str(source), "hf://org/model")
    assert _there(repo) == {"other"}
    copy(str(source), "hf://org/model")
    assert {*FILES, "other"} <= _there(repo)


def test_upload_rejects_files_excluded_by_gitignore(hub: Hub, source: Path) -> None:
    hub.repo("org/model").ignored = ("config.json",)
    with pytest.raises(ConfigurationError, match=r"\.gitignore leaves out config\.json"):
        copy(str(source), "hf://org/model")
    assert len(hub.repos["org/model"].commits) == 1


def test_upload_rejects_a_commit_and_manages_the_root_only(hub: Hub, source: Path) -> None:
    commit = hub.repo("org/model").branches["main"]
    with pytest.raises(ConfigurationError, match="is a commit"):
        copy(str(source), f"hf://org/model@{commit}")
    (source / ".gitattributes").write_bytes(b"x")
    copy(str(source), "hf://org/model/sub", exclude=[".gitattributes"])


def test_upload_batches_small_files(hub: Hub, tmp_path: Path) -> None:
    folder = tree(tmp_path / "many", {f"{number}.txt": b"%d" % number for number in range(300)})
    copy(str(folder), "hf://datasets/org/many")
    assert hub.asked("/preupload/") <= 3


@pytest.mark.parametrize(
    "uri",
    [
        "hf://org/model",
        "hf://models/org/model",
        "hf://datasets/org/data@v1.0/train/a@1.csv",
        "hf://datasets/org/data@refs/pr/3/train.json",
        "hf://datasets/org/data@refs/convert/parquet/x",
        "hf://spaces/org/app@feature%2Fx",
        "hf://org/model/a@b/c",
    ],
)
def test_uris_follow_the_official_grammar(uri: str) -> None:
    theirs, ours = parse_hf_uri(uri), parse_store(uri)
    assert hub_parts(ours) == (theirs.type, theirs.id, theirs.revision or "main")
    assert ours.path == theirs.path_in_repo


@pytest.mark.parametrize("address", ["169.254.169.254", "10.1.2.3"])
def test_download_rejects_a_redirect_outside_the_network(hub: Hub, tmp_path: Path, address: str) -> None:
    hub.repo("org/model").commit({"w.bin": b"weights"})
    hub.cdn = f"http://{address}"
    with pytest.raises(ConfigurationError, match=rf"w\.bin redirects to {re.escape(address)} .*outside the network"):
        copy("hf://org/model", str(tmp_path / "t"))
    assert not list((tmp_path / "t").rglob("w.bin"))
