from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from huggingface_hub import parse_hf_uri
from tests.fakes.hub import Hub
from tests.trees import files, tree

from trainjob.data import copy, file_manifest, read_manifest
from trainjob.data.locations import hub_parts, parse_store
from trainjob.data.stores.opening import open_store
from trainjob.errors import ConfigurationError, DataError, SourceNotFound, StoreUnavailable, UnsafePath

# The client raises this warning when it sends files.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

BIG = bytes(range(256)) * 48_000  # 12 MB: sent before the commit, and in parts
FILES = {"config.json": b"{}", "sub/w.bin": BIG, "sp ace/ü%20?#.txt": b"x", "empty": b""}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tree(tmp_path / "source", FILES)


@pytest.mark.parametrize("repo", ["org/model", "datasets/org/data", "org/model@v2"])
def test_upload_and_download_preserve_content(hub: Hub, source: Path, tmp_path: Path, repo: str) -> None:
    there = copy(str(source), f"hf://{repo}")
    held = hub.repos[repo.partition("@")[0]]
    branch = repo.partition("@")[2] or "main"
    assert held.private
    assert set(held.commits[held.branches[branch]]) == {*FILES, file_manifest.NAME, ".gitattributes"}
    assert hub.asked("POST .*/commit/") == 1
    assert copy(str(source), f"hf://{repo}") == there
    assert hub.asked("POST .*/commit/") == 1
    back = copy(f"hf://{repo}", str(tmp_path / "back"), digest=there.digest)
    assert back.digest == there.digest
    assert files(tmp_path / "back") == FILES


def test_copy_selects_a_directory_or_a_file(hub: Hub, tmp_path: Path) -> None:
    commit = hub.repo("org/model").commit({"a/1": b"1", "a/2.bin": b"two", "ab/3": b"3"})
    assert [file.path for file in copy("hf://org/model/a", str(tmp_path / "a")).files] == ["1", "2.bin"]
    assert [file.path for file in copy("hf://org/model/a/2.bin", str(tmp_path / "b")).files] == ["2.bin"]
    assert open_store(parse_store("hf://org/model/a")).resolved().uri == f"hf://org/model@{commit}/a"
    with pytest.raises(SourceNotFound, match="does not exist or is empty"):
        copy("hf://org/model/none", str(tmp_path / "c"))
    with pytest.raises(SourceNotFound, match="repository hf://org/none/ does not exist"):
        copy("hf://org/none", str(tmp_path / "c"))
    with pytest.raises(SourceNotFound):
        copy("hf://org/model@none", str(tmp_path / "c"))


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


def test_download_retries_a_failed_listing(hub: Hub, tmp_path: Path) -> None:
    hub.repo("org/model").commit({"b": b"x"})
    hub.fault = lambda method, path, count: {"status": 503} if "/revision/" in path and count == 1 else {}
    copy("hf://org/model", str(tmp_path / "t"))
    assert files(tmp_path / "t") == {"b": b"x"}


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
    ],
)
def test_upload_retries_faults(hub: Hub, source: Path, tmp_path: Path, pattern: str, fault: dict[str, object]) -> None:
    """Each fault happens once: the upload still succeeds, with one commit."""
    left = [fault]
    hub.fault = lambda method, path, count: left.pop() if left and re.match(pattern, f"{method} {path}") else {}
    hub.part_size = 4_000_000
    there = copy(str(source), "hf://org/model")
    assert not left
    repo = hub.repos["org/model"]
    assert len(repo.commits) == 2
    assert copy("hf://org/model", str(tmp_path / "back")).digest == there.digest


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
    assert set(repo.commits[repo.branches["main"]]) == {"other"}
    copy(str(source), "hf://org/model")
    assert {*FILES, "other"} <= set(repo.commits[repo.branches["main"]])


def test_upload_replaces_changed_files(hub: Hub, source: Path, tmp_path: Path) -> None:
    copy(str(source), "hf://org/model")
    (source / "config.json").write_bytes(b"[]")
    (source / "empty").unlink()
    copy(str(source), "hf://org/model")
    repo = hub.repos["org/model"]
    assert set(repo.commits[repo.branches["main"]]) == {*FILES, file_manifest.NAME, ".gitattributes"} - {"empty"}
    copy("hf://org/model", str(tmp_path / "t"))
    assert (tmp_path / "t/config.json").read_bytes() == b"[]"


def test_upload_rejects_files_excluded_by_gitignore(hub: Hub, source: Path) -> None:
    hub.repo("org/model").ignored = ("config.json",)
    with pytest.raises(ConfigurationError, match=r"\.gitignore leaves out config\.json"):
        copy(str(source), "hf://org/model")
    assert len(hub.repos["org/model"].commits) == 1


def test_upload_rejects_commits_and_managed_files(hub: Hub, source: Path) -> None:
    commit = hub.repo("org/model").branches["main"]
    with pytest.raises(ConfigurationError, match="is a commit"):
        copy(str(source), f"hf://org/model@{commit}")
    (source / ".gitattributes").write_bytes(b"x")
    with pytest.raises(UnsafePath, match="managed by the Hub"):
        copy(str(source), "hf://org/model")
    copy(str(source), "hf://org/model/sub", exclude=[".gitattributes"])


def test_upload_batches_thousands_of_small_files(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(1200):
        (folder / f"{number}.txt").write_bytes(b"%d" % number)
    there = copy(str(folder), "hf://datasets/org/many")
    assert hub.asked("/preupload/") <= 6
    assert copy("hf://datasets/org/many", str(tmp_path / "back")).digest == there.digest


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
