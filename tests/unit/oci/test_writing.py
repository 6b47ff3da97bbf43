"""Layers and manifests depend on names and content only."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from tests.fakes.registry import MemoryRepository

from trainjob.data.stores.base import CHUNK, ReadableStore
from trainjob.data.stores.files import FileStore
from trainjob.data.stores.oci import manifests, tars
from trainjob.data.stores.oci.bundles import Small
from trainjob.data.stores.oci.images import Image
from trainjob.data.stores.oci.manifests import Layer, attachment, documents, kind_of
from trainjob.data.stores.oci.payloads import Again, Data, Hashing, Joined, Once, Payload, digest_of
from trainjob.data.stores.oci.repository import IMAGE, INDEX, sha256
from trainjob.errors import CorruptData, OutOfSpace, StoreUnavailable


@pytest.mark.parametrize(
    ("path", "size", "digest"),
    [
        # Recorded once: a later version must not push the images of an earlier one again.
        ("models/model.safetensors", 2_000_000, "41a2ccc754882fcc"),
        ("models/" + "long/" * 60 + "x", 5, "7caf182de1575af2"),
        ("models/ünï cödé", 5, "a6cc2c0e5b1d9cd1"),
        ("models/large", 20 * 2**30, "3f12a141484aa2ed"),
    ],
)
def test_headers_match_recorded_digests(path: str, size: int, digest: str) -> None:
    assert hashlib.sha256(tars.header(path, size)).hexdigest()[:16] == digest


def test_headers_do_not_depend_on_this_machine() -> None:
    archive = tars.archive([("models/a", Data(b"abc")), ("models/b", Data(b"x" * 512))])
    data = b"".join(archive.open(0, archive.size))
    with tarfile.open(fileobj=io.BytesIO(data)) as read:
        for info in read:
            assert (info.mode, info.uid, info.gid, info.uname, info.gname, info.mtime) == (0o644, 0, 0, "", "", 0)
            file = read.extractfile(info)
            assert file is not None
            assert file.read() == {"models/a": b"abc", "models/b": b"x" * 512}[info.name]


CONFIG = "sha256:" + "c" * 64
LAYERS = [
    Layer("sha256:" + "1" * 64, 5000, "weight", "sub/model.safetensors", 4000),
    Layer("sha256:" + "2" * 64, 6000, "weight.config"),
    Layer("sha256:" + "3" * 64, 2560, "doc", "MANIFEST.json", 300),
]


def test_documents_describe_images_and_a_model_pack() -> None:
    """A later version must not push other manifests than the recorded ones."""
    made = documents(LAYERS, CONFIG, ["sub/model.safetensors", "config.json"])
    found = {each.digest: json.loads(each.data) for each in (made.index, *made.manifests, *made.blobs)}
    assert found == json.loads((Path(__file__).parent / "documents.json").read_text())
    index = found[made.index.digest]
    assert [entry["digest"] for entry in index["manifests"]] == [each.digest for each in made.manifests]
    assert documents(LAYERS, CONFIG, ["sub/model.safetensors", "config.json"]) == made


def test_written_images_can_be_read() -> None:
    repository, path, data = MemoryRepository(), "sub/model.safetensors", b"m" * 5000
    archive = tars.archive([(f"models/{path}", Data(data))])
    blob = b"".join(archive.open(0, archive.size))
    layer = Layer(repository.add(blob), len(blob), "weight", path, len(data))
    made = documents([layer], CONFIG, [path])
    for document in (*made.manifests, made.index):
        repository.put(json.loads(document.data))
        repository.documents[document.digest] = document.data
    for document in (*made.manifests, made.index):
        repository.asked.clear()
        image = Image.load(repository, document.digest)
        assert image is not None
        assert repository.asked == [], "the annotations list the files"
        assert dict(image.layers) == {path: layer}
        assert b"".join(image.read(path, 0, None)) == data
        assert b"".join(image.read(path, 4990, 100)) == b"m" * 10


@pytest.mark.parametrize(
    ("names", "size"), [("a", 4), ("a", 6), ("x", 5), ("ab", 5), ("", 5)], ids=lambda value: str(value) or "nothing"
)
def test_layers_that_contradict_their_annotations_are_rejected(names: str, size: int) -> None:
    repository = MemoryRepository()
    archive = tars.archive([(f"models/{name}", Data(b"12345")) for name in names])
    blob = b"".join(archive.open(0, archive.size))
    made = documents([Layer(repository.add(blob), len(blob), "weight", "a", size)], CONFIG, ["a"])
    repository.documents["1"] = made.manifests[0].data
    image = Image.load(repository, "1")
    assert image is not None
    with pytest.raises(CorruptData):
        list(image.read("a", 0, None))


def test_attachments_refer_to_their_subject() -> None:
    kind = "application/vnd.in-toto+json"
    subject = {"mediaType": INDEX, "digest": "sha256:" + "1" * 64, "size": 5}
    layer = {"mediaType": kind, "digest": "sha256:" + "2" * 64, "size": 7}
    document = attachment(subject, kind, layer, "provenance.json")
    value = json.loads(document.data)
    assert (value["mediaType"], value["subject"], value["artifactType"]) == (IMAGE, subject, kind)
    assert value["config"] == {"mediaType": "application/vnd.oci.empty.v1+json", "digest": sha256(b"{}"), "size": 2}
    assert attachment(subject, kind, layer, "provenance.json") == document


KINDS = {
    "weight": ("model-00001-of-00002.safetensors", "a/pytorch_model.bin", "unknown"),
    "weight.config": ("config.json", "tokenizer.model"),
    "doc": ("README.md", "LICENSE", "LICENSE.txt"),
    "code": ("modeling_x.py",),
}


def test_layer_kind_depends_on_the_path() -> None:
    assert {kind: tuple(path for path in paths if kind_of(path) == kind) for kind, paths in KINDS.items()} == KINDS
    assert KINDS.keys() <= set(manifests.KINDS)


# ---------------------------------------------------------------- payloads


class _File:
    """A `Rereadable` of known bytes."""

    def __init__(self, data: bytes, store: ReadableStore) -> None:
        self.data, self.source = data, store
        self.read = 0

    def __iter__(self) -> Iterator[bytes]:
        return self.reread(0)

    def preview(self) -> Iterator[bytes]:
        return self.reread(0)

    def reread(self, start: int) -> Iterator[bytes]:
        for at in range(start, len(self.data), 7):
            self.read += 1
            yield self.data[at : at + 7]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ReadableStore:
    from trainjob.data.locations import parse_store

    return FileStore(parse_store(tmp_path_factory.mktemp("store")))


def _payload(kind: str, data: bytes, store: ReadableStore) -> Payload:
    half = len(data) // 2
    if kind == "data":
        return Data(data)
    if kind == "joined":
        return Joined([Data(data[:half]), Data(b""), Data(data[half:])])
    if kind == "again":
        return Again(_File(data, store), len(data))
    if kind == "small":
        small = Small()
        small.add("other", b"xyz")
        small.add("it", data)
        return small.payload("it")
    return Joined([Data(data[:half]), Once(_File(data[half:], store), len(data) - half, "it")])


@pytest.mark.parametrize("kind", ["data", "joined", "again", "small", "once"])
@given(
    data=st.binary(min_size=1, max_size=120),
    cuts=st.lists(st.tuples(st.integers(0, 120), st.integers(0, 60)), max_size=6),
)
def test_payloads_can_be_reread_from_any_offset(
    kind: str, data: bytes, cuts: list[tuple[int, int]], store: ReadableStore
) -> None:
    """Like an upload, which continues at the registry's offset: never beyond the bytes that were sent."""
    payload = Hashing(_payload(kind, data, store))
    sent = 0
    assert payload.size == len(data)
    for back, length in cuts:
        start = max(0, sent - back)
        end = min(len(data), start + length)
        assert b"".join(payload.open(start, end - start)) == data[start:end]
        sent = max(sent, end)
    assert b"".join(payload.open(sent, len(data) - sent)) == data[sent:]
    assert payload.digest == sha256(data) == digest_of([data])


def _take_all(once: Once) -> None:
    for _ in once.open(0, once.size):
        pass
    once.finish()


def test_a_stream_of_another_size_is_rejected_and_cannot_be_reread() -> None:
    for size in (4, 6):
        once = Once([b"12", b"345"], size, "it")
        with pytest.raises(CorruptData, match="it has"):
            _take_all(once)
    once = Once(iter([b"123"]), 3, "it")
    assert list(once.open(0, 2)) == [b"12"]
    with pytest.raises(StoreUnavailable, match="cannot be reread"):
        list(once.open(0, 2))


def test_small_files_can_be_replaced_and_removed() -> None:
    small = Small()
    for data in (b"one", b"three"):
        small.add("a", data)
    payload = small.payload("a")
    assert b"".join(payload.open(0, payload.size)) == b"three"
    small.remove("a")
    small.remove("a")
    assert "a" not in small


def test_a_full_disk_for_small_files_is_reported(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    small = Small()
    small.add("first", b"x")
    with pytest.raises(OutOfSpace, match=f"no space left for {small_disk}"):
        small.add("second", bytes(20 * CHUNK))
