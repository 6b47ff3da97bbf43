"""Checks the fake Hub with the real client."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from tests.fakes.hub import Hub

# The client raises this warning when it sends files.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

BIG = bytes(range(256)) * 30_000


@pytest.mark.parametrize("part_size", [None, 1_000_000])
def test_client_downloads_its_own_upload(hub: Hub, tmp_path: Path, part_size: int | None) -> None:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.hf_api import RepoFile

    hub.part_size = part_size
    api = HfApi(endpoint=hub.url, token=False)
    api.create_repo("org/model", private=True)
    (tmp_path / "up/sub").mkdir(parents=True)
    (tmp_path / "up/config.json").write_bytes(b"{}")
    (tmp_path / "up/sub/w.bin").write_bytes(BIG)
    info = api.upload_folder(repo_id="org/model", folder_path=tmp_path / "up", parent_commit=None)
    assert hub.repos["org/model"].private
    assert api.repo_info("org/model").sha == info.oid
    files = {item.path: item for item in api.list_repo_tree("org/model", recursive=True) if isinstance(item, RepoFile)}
    large = files["sub/w.bin"].lfs
    assert large is not None
    assert large.sha256 == hashlib.sha256(BIG).hexdigest()
    assert files["config.json"].lfs is None
    down = snapshot_download("org/model", local_dir=tmp_path / "down", endpoint=hub.url, token=False)
    assert (Path(down) / "sub/w.bin").read_bytes() == BIG
    assert (Path(down) / "config.json").read_bytes() == b"{}"


def test_client_maps_error_responses_to_its_exceptions(hub: Hub) -> None:
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    hub.repo("org/model")
    api = HfApi(endpoint=hub.url, token=False)
    with pytest.raises(RepositoryNotFoundError):
        api.repo_info("org/none")
    with pytest.raises(RevisionNotFoundError):
        api.repo_info("org/model", revision="none")
    addition = CommitOperationAdd("a", b"1")
    with pytest.raises(HfHubHTTPError, match="412"):
        api.create_commit("org/model", [addition], commit_message="x", parent_commit="0" * 40)
