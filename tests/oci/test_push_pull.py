"""Models to and from a real registry."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes.faults import Proxy
from tests.oci.conftest import MEBI, Repository
from tests.oci.registry import Server, needs_skopeo
from tests.trees import files, tree

from trainjob.data import copy, read_manifest
from trainjob.data.locations import parse_store
from trainjob.data.stores.oci import OciStore, attach, attached
from trainjob.data.transfer import scan
from trainjob.errors import ConfigurationError, SourceNotFound


def digest_of(uri: str) -> str:
    store = OciStore(parse_store(uri))
    return store.resolved().path.partition("@")[2]


def get(server: Server, name: str, rest: str, kind: str = "application/vnd.oci.image.index.v1+json") -> Any:
    return httpx.get(f"http://{server.host}/v2/{name}/{rest}", headers={"accept": kind}).json()


def test_a_push_is_pulled_by_its_other_tag_and_its_digest(repository: Repository) -> None:
    lines: list[str] = []
    pushed = copy(str(repository.source), repository.uri, progress=lines.append)
    assert any("100 %" in line for line in lines)
    for tag in (":1-modelpack", f"@{digest_of(repository.uri)}"):
        assert repository.pulled(tag, digest=pushed.digest) == repository.content


def test_another_tag_transfers_manifests_only(proxy: Proxy, repository: Repository) -> None:
    repository.push()
    proxy.requests.clear()
    repository.push(":2")
    assert [each.target.rpartition("/")[2] for each in proxy.seen("PUT")] == ["2-modelpack", "2"]
    assert proxy.seen("POST") == proxy.seen("PATCH") == []


def test_one_changed_file_is_one_layer(proxy: Proxy, repository: Repository, tmp_path: Path) -> None:
    repository.push()
    changed = repository.content | {"sub/dir/model-00002-of-00002.safetensors": b"x" * (3 * MEBI)}
    proxy.requests.clear()
    copy(str(tree(tmp_path / "changed", changed)), repository.uri)
    assert 3 * MEBI < proxy.sent < 3 * MEBI + 30_000
    assert repository.pulled() == changed


def test_a_source_with_a_manifest_is_compared_file_by_file(
    proxy: Proxy, repository: Repository, tmp_path: Path
) -> None:
    """Files that the image's manifest lists are not even read, large or small."""
    copy(str(repository.source), str(tmp_path / "whole"))
    copy(str(tmp_path / "whole"), repository.uri)
    changed = repository.content | {"config.json": b'{"changed": true}'}
    copy(str(tree(tmp_path / "changed", changed)), str(tmp_path / "whole2"))
    proxy.requests.clear()
    copy(str(tmp_path / "whole2"), repository.uri)
    assert proxy.sent < 200_000
    assert repository.pulled() == changed


def test_the_tag_is_put_last(proxy: Proxy, repository: Repository, name: str) -> None:
    repository.push()
    assert (proxy.requests[-1].method, proxy.requests[-1].target) == ("PUT", f"/v2/{name}/manifests/1")
    written = [each for each in proxy.requests if each.method in ("POST", "PATCH", "PUT")]
    tags = [each.target.rpartition("/")[2] for each in written if "/manifests/" in each.target]
    assert tags[-2:] == ["1-modelpack", "1"]
    assert all(tag.startswith("sha256:") for tag in tags[:-2])


def test_manifests_and_layers_of_a_push(server: Server, name: str, repository: Repository) -> None:
    manifest = repository.push()
    index = get(server, name, "manifests/1")
    assert index["annotations"]["dev.trainjob.content.digest"] == manifest.digest
    image, _, model = (
        get(server, name, f"manifests/{entry['digest']}", entry["mediaType"]) for entry in index["manifests"]
    )
    assert model["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    config = get(server, name, f"blobs/{image['config']['digest']}")
    assert config["rootfs"]["diff_ids"] == [layer["digest"] for layer in image["layers"]]
    # Two large files, a bundle each of weights, configuration, documents and code, and the manifest.
    kinds = [layer["mediaType"].split(".")[3:-2] for layer in model["layers"]]
    assert kinds == [["weight"]] * 3 + [["weight", "config"], ["doc"], ["code"], ["doc"]]
    assert get(server, name, "manifests/1-modelpack", model["mediaType"]) == model


def test_copy_between_repositories_of_one_registry(proxy: Proxy, repository: Repository) -> None:
    """The registry mounts the layers; they are read once, to be checked."""
    one, two = f"{repository.at}/a:1", f"{repository.at}/b:1"
    pushed = repository.push("/a:1")
    proxy.requests.clear()
    assert copy(one, two).digest == pushed.digest
    assert [each.status for each in proxy.seen("POST", "mount=")][:2] == [201, 201]
    assert proxy.seen("PATCH") == []
    # Bundles of small files are packed again, mostly tokenizer.model; the rest are manifests.
    assert proxy.sent < len(repository.content["tokenizer.model"]) + 40_000
    assert digest_of(one) == digest_of(two)
    assert repository.pulled("/b:1") == repository.content


def test_copy_from_another_registry(server: Server, name: str, proxy: Proxy, repository: Repository) -> None:
    """Layers of another host cannot be mounted: they are sent while they are read, once."""
    there, here = server.uri(f"{name}/a:1"), f"{repository.at}/b:1"
    copy(str(repository.source), there)
    copy(there, here)
    assert proxy.seen("POST", "mount=") == []
    assert sum(each.sent for each in proxy.seen("PATCH")) > 14 * MEBI
    assert digest_of(there) == digest_of(here)
    proxy.requests.clear()
    copy(there, here)
    assert proxy.sent == 0


def test_missing_sources_and_invalid_targets(repository: Repository, tmp_path: Path) -> None:
    source, digest = str(repository.source), f"{repository.at}@sha256:{'0' * 64}"
    for uri in (f"{repository.at}:none", digest):
        assert read_manifest(uri) is None
        with pytest.raises(SourceNotFound):
            copy(uri, str(tmp_path / "x"))
    for here, to, words in (
        (source, repository.at, "has no tag"),
        (source, digest, "cannot be written"),
        (repository.uri, repository.uri, "overlaps"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            copy(here, to)


def test_a_tag_that_moves_is_read_as_it_was_listed(repository: Repository, tmp_path: Path) -> None:
    repository.push()
    store = OciStore(parse_store(repository.uri))
    listed = {entry.path: entry for entry in store.list()}
    copy(str(tree(tmp_path / "other", {"config.json": b"other"})), repository.uri)
    read = b"".join(store.read("config.json", etag=listed["config.json"].etag))
    assert read == repository.content["config.json"]
    assert [entry.path for entry in OciStore(parse_store(repository.uri)).list()] == ["config.json", "MANIFEST.json"]


# ---------------------------------------------------------------- referrers


def test_attachments(server: Server, proxy: Proxy, name: str, repository: Repository) -> None:
    repository.push()
    location = parse_store(repository.uri)
    first = attach(location, "provenance.json", b'{"a": 1}')
    signature = "application/vnd.dev.sigstore.bundle.v0.3+json"
    attach(location, "model.sig", b"bundle", signature)
    proxy.requests.clear()
    assert attach(location, "provenance.json", b'{"a": 1}') == first
    assert {each.method for each in proxy.requests} <= {"HEAD", "GET"}
    assert attached(location) == {"provenance.json": b'{"a": 1}'}
    assert attached(location, signature) == {"model.sig": b"bundle"}
    # docker-registry has no referrers API: the fallback tag, as other clients look for it.
    index = get(server, name, f"manifests/{digest_of(repository.uri).replace(':', '-')}")
    assert [entry["artifactType"] for entry in index["manifests"]] == ["application/vnd.in-toto+json", signature]
    subject = get(server, name, f"manifests/{first}", "application/vnd.oci.image.manifest.v1+json")["subject"]
    assert subject["digest"] == digest_of(repository.uri)
    with pytest.raises(SourceNotFound):
        attach(parse_store(f"{repository.at}:none"), "x", b"")


# ---------------------------------------------------------------- skopeo


def skopeo(*arguments: str) -> str:
    done = subprocess.run(["skopeo", *arguments], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_skopeo
@pytest.mark.parametrize("pack", [False, True])
def test_a_push_of_skopeo_is_read(
    server: Server, name: str, repository: Repository, tmp_path: Path, pack: bool
) -> None:
    """The image of one platform, in Docker's format, or compressed with gzip."""
    other = f"{repository.at}:other"
    repository.push()
    form = ["--dest-compress", "--format=oci"] if pack else ["--format=v2s2"]
    between = f"dir:{tmp_path}/between"
    skopeo("copy", "--src-tls-verify=false", *form, f"docker://{server.host}/{name}:1", between)
    skopeo("copy", "--dest-tls-verify=false", between, f"docker://{server.host}/{name}:other")
    copy(other, str(tmp_path / "back"))
    assert files(tmp_path / "back") == repository.content
    # Push over it: the layers of another program are packed again.
    copy(str(tmp_path / "back"), other)
    assert scan(other).digest == scan(str(repository.source)).digest
