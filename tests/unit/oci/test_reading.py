"""Images from other tools, and hostile images."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tests.fakes.registry import MemoryRepository, entry, files, image, load, packed, read_all, zipped

from trainjob.data.stores.oci import layers as layers_module, tars
from trainjob.data.stores.oci.client import Client
from trainjob.data.stores.oci.gzips import Gunzip
from trainjob.data.stores.oci.images import Image
from trainjob.data.stores.oci.manifests import IMAGE_LAYER, MODEL, MODEL_LAYER
from trainjob.data.stores.oci.repository import DOCKER_INDEX, INDEX
from trainjob.data.stores.oci.tars import Member, Reader
from trainjob.errors import (
    ChecksumMismatch,
    ConfigurationError,
    CorruptData,
    DataError,
    SourceNotFound,
    StoreUnavailable,
    UnsafePath,
)

RAW, NAME = "application/vnd.cncf.model.weight.v1.raw", "org.cncf.model.filepath"
Blob = tuple[bytes, str, dict[str, str]]
"""Content, media type and annotations of a layer."""
LARGE = random.Random(1).randbytes(9_000_000)


@pytest.fixture
def repository() -> MemoryRepository:
    return MemoryRepository()


def read(*layers: bytes | Blob, **fields: Any) -> dict[str, bytes]:
    """The files of an image with these layers."""
    repository = MemoryRepository()
    image(repository, layers, "1", **fields)
    return read_all(repository, "1")


@pytest.fixture(params=["default", "large", "many stretches"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat small layers and files also as large, or as divided into many stretches: each case has its own code."""
    if request.param == "large":
        monkeypatch.setattr(layers_module, "_READ_COMPLETELY", 0)
        monkeypatch.setattr(layers_module, "_SMALL", -1)
    elif request.param == "many stretches":
        monkeypatch.setattr(layers_module, "_STRETCH", 1000)


@pytest.mark.usefixtures("size")
def test_images_of_other_tools_are_read() -> None:
    base = packed(
        entry("bin", kind=tarfile.DIRTYPE),
        entry("bin/sh", b"#!"),
        entry("bin/ls", kind=tarfile.SYMTYPE, target="/busybox"),
    )
    several = packed(
        entry("models", kind=tarfile.DIRTYPE),
        entry("./models/sub/a.bin", b"a" * 70_000),
        entry("models/" + "long/" * 40 + "b", b"b"),
        entry("models/ünï", b"u"),
        form=tarfile.GNU_FORMAT,
    )
    expected = {"sub/a.bin": b"a" * 70_000, "long/" * 40 + "b": b"b", "ünï": b"u"}
    expected |= {"c": b"c", "d": b"d" * 200_000, "large": LARGE}
    assert read(base, several, zipped(files(c=b"c", d=b"d" * 200_000)), files(large=LARGE)) == expected


@pytest.mark.usefixtures("size")
def test_ranges_of_files_are_read(repository: MemoryRepository) -> None:
    part = LARGE[:300_000]
    image(repository, [files(large=LARGE), files(a=part, b=b"xyz"), zipped(files(z=part, y=b"1"))], "1")
    loaded = load(repository, "1")
    for path, content in {"large": LARGE, "a": part, "z": part}.items():
        end = len(content)
        for start, length in ((0, 10), (5, None), (123_456, 99), (end, 5), (0, 10**9), (end + 9, None)):
            want = content[start:] if length is None else content[start : start + length]
            assert b"".join(loaded.read(path, start, length)) == want, (path, start, length)


def test_large_archives_are_listed_by_their_headers_and_downloaded_once(repository: MemoryRepository) -> None:
    image(repository, [files(a=LARGE, b=LARGE)], "1")
    loaded = load(repository, "1")
    assert {path: placed.size for path, placed in loaded.files.items()} == {"a": len(LARGE), "b": len(LARGE)}
    assert sum(length for _, length in repository.asked) < 300_000
    image(repository, [files(large=LARGE)], "2")
    repository.asked.clear()
    assert read_all(repository, "2") == {"large": LARGE}
    assert sum(length for _, length in repository.asked) < len(LARGE) + 300_000


@pytest.mark.parametrize("pack", [lambda data: (data, IMAGE_LAYER, {}), zipped], ids=["tar", "gzip"])
def test_many_small_files_are_read_together(repository: MemoryRepository, pack: Callable[[bytes], Blob]) -> None:
    """Sixteen threads read, as in a copy. Each reads a stretch of the layer, or waits for that of another thread."""
    there = {f"f{number:05}": b"%d" % number + LARGE[number : number + number % 3000] for number in range(1500)}
    image(repository, [pack(files(**there))], "1")
    loaded = load(repository, "1")
    loaded.read(next(iter(there)), 0, None)  # checks the layer
    repository.opened = 0
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda path: b"".join(loaded.read(path, 0, None)), there))
    assert found == list(there.values())
    stretches = sum(len(layer) for layer in repository.blobs.values()) // layers_module._STRETCH + 1
    assert repository.opened <= max(stretches, 4)


def test_failed_stretches_are_read_again(repository: MemoryRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_module, "_READ_COMPLETELY", 0)
    monkeypatch.setattr(layers_module, "_STRETCH", 100_000)
    monkeypatch.setattr(layers_module, "_SMALL", 10_000)
    image(repository, [files(a=LARGE[:5000], b=LARGE[:200_000])], "1")
    loaded = load(repository, "1")
    assert b"".join(loaded.read("b", 0, None)) == LARGE[:200_000]
    blob = repository.blob

    def away(*_: object, **__: object) -> Iterator[bytes]:
        raise StoreUnavailable("registry.example is away")

    monkeypatch.setattr(repository, "blob", away)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="is away"):
            list(loaded.read("a", 0, None))
    monkeypatch.setattr(repository, "blob", blob)
    assert b"".join(loaded.read("a", 0, None)) == LARGE[:5000]


LOWER, UPPER = packed(entry("models/a", b"old"), entry("models/sub/b", b"b")), packed(entry("models/c", b"c"))
WHITEOUTS = (".wh.models", ".wh..wh..opq", "./.wh.models", "models/.wh..wh..opq")
BESIDE = packed(entry("etc/.wh.models"), entry("models.old/.wh..wh..opq"), entry(".wh.mod"))
LINKS = packed(
    entry("models/blobs/1", b"one"),
    entry("models/snap/a", kind=tarfile.SYMTYPE, target="../blobs/1"),
    entry("models/snap/b", kind=tarfile.SYMTYPE, target="a"),
    entry("models/c", kind=tarfile.SYMTYPE, target="/models/blobs/1"),
    entry("models/d", kind=tarfile.LNKTYPE, target="models/blobs/1"),
)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (
            [
                files(**{"a": b"old", "sub/b": b"b", "sub/bb": b"bb", "opaque/x": b"x"}),
                files(**{"a": b"new", "sub/.wh.b": b"", "opaque/.wh..wh..opq": b"", "opaque/y": b"y"}),
            ],
            {"a": b"new", "sub/bb": b"bb", "opaque/y": b"y"},
        ),
        # Like `rm -rf /models` in a Dockerfile, followed by another COPY.
        *(([LOWER, packed(entry(gone)), UPPER], {"c": b"c"}) for gone in WHITEOUTS),
        ([LOWER, BESIDE, UPPER], {"a": b"old", "sub/b": b"b", "c": b"c"}),
        ([LINKS], dict.fromkeys(("blobs/1", "snap/a", "snap/b", "c", "d"), b"one")),
    ],
    ids=["whiteouts of files", *WHITEOUTS, "whiteouts of others", "links"],
)
def test_later_layers_override_whiteouts_remove_and_links_are_followed(
    layers: list[bytes], expected: dict[str, bytes]
) -> None:
    assert read(*layers) == expected


def test_layers_of_all_media_types_are_read() -> None:
    oci = [f"application/vnd.oci.image.layer.{kind}v1.tar" for kind in ("", "nondistributable.")]
    docker = [f"application/vnd.docker.image.rootfs.{kind}diff.tar" for kind in ("", "foreign.")]
    zips = [*(f"{kind}+gzip" for kind in oci), *(f"{kind}.gzip" for kind in docker)]
    there = {f"f{number}": kind.encode() for number, kind in enumerate([*oci, *docker, *zips])}
    tars_ = [files(**{name: content}) for name, content in there.items()]
    layers: list[Blob] = [(tar, kind, {}) for tar, kind in zip(tars_, [*oci, *docker], strict=False)]
    layers += [(gzip.compress(tar), kind, {}) for tar, kind in zip(tars_[4:], zips, strict=True)]
    assert read(*layers) == there


def test_model_packs_of_other_tools_are_read() -> None:
    layers: list[Blob] = [
        (LARGE, RAW, {NAME: "sub/model.safetensors"}),
        (packed(entry("config.json", b"{}")), MODEL_LAYER.format(kind="weight.config"), {NAME: "config.json"}),
        (gzip.compress(packed(entry("README.md", b"#"))), MODEL_LAYER.format(kind="doc") + "+gzip", {}),
        (b"file", "application/octet-stream", {"org.opencontainers.image.title": "oras.bin"}),
        (b"else", "application/vnd.example.unknown", {}),
    ]
    there = {"sub/model.safetensors": LARGE, "config.json": b"{}", "README.md": b"#", "oras.bin": b"file"}
    assert read(*layers, artifactType=MODEL) == there


def test_index_selects_the_image_of_this_platform(repository: MemoryRepository) -> None:
    def listed(*entries: tuple[str, str]) -> str:
        described = [
            {"digest": image(repository, [files(which=name.encode())]), "platform": {"os": os, "architecture": name}}
            for os, name in entries
        ]
        return repository.put({"schemaVersion": 2, "mediaType": INDEX, "manifests": described})

    for machine in ("amd64", "arm64"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("platform.machine", lambda machine=machine: {"amd64": "x86_64"}.get(machine, "aarch64"))
            for entries in (
                (("linux", "amd64"), ("linux", "arm64")),
                (("windows", machine), ("linux", "arm64"), ("linux", "amd64")),
            ):
                assert read_all(repository, listed(*entries)) == {"which": machine.encode()}
    assert read_all(repository, listed(("linux", "s390x"))) == {"which": b"s390x"}
    empty = repository.put({"schemaVersion": 2, "mediaType": DOCKER_INDEX, "manifests": []})
    with pytest.raises(ConfigurationError, match="an index without an image"):
        load(repository, empty)


def link(kind: bytes, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry("models/x", kind=kind, target=target)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        *((entry(name, b"x"), "'..' segment") for name in ("models/../../etc/passwd", "../models/x")),
        *((entry(name, b"x"), "absolute") for name in ("/models/x", "/etc/passwd")),
        (entry("models/a\\b", b"x"), "backslash"),
        (entry("models/a\nb", b"x"), "control character"),
        (entry("models//x", b"x"), "empty"),
        *((link(tarfile.SYMTYPE, to), "leads out") for to in ("/etc/passwd", "../../etc/passwd", "../etc")),
        *((link(tarfile.LNKTYPE, to), "leads out") for to in ("etc/passwd", "/etc/passwd")),
        (link(tarfile.SYMTYPE, "missing"), "does not exist in the model"),
        (link(tarfile.SYMTYPE, "x"), "a loop of links"),
        *((link(kind, ""), "device") for kind in (tarfile.CHRTYPE, tarfile.BLKTYPE)),
        (link(tarfile.FIFOTYPE, ""), "pipe"),
        (entry("models/a", b"again"), "second time"),
        (entry("models", kind=tarfile.SYMTYPE, target="/etc"), "is not a directory"),
    ],
)
@pytest.mark.parametrize("pack", [False, True])
def test_unsafe_archives_are_rejected(bad: tuple[tarfile.TarInfo, bytes], words: str, pack: bool) -> None:
    layer = packed(entry("models/a", b"a"), bad)
    with pytest.raises(UnsafePath, match=words):
        read(zipped(layer) if pack else layer)


def pack_link(target: str) -> Blob:
    layer = packed(entry("a", b"a"), entry("b", kind=tarfile.SYMTYPE, target=target))
    return layer, MODEL_LAYER.format(kind="weight"), {}


TWICE = (b"x", RAW, {NAME: "x"})


@pytest.mark.parametrize(
    ("layers", "error", "words"),
    [
        *(([pack_link(target)], UnsafePath, "leads out") for target in ("../x", "/x", "..", "a/../../x")),
        ([(b"x", RAW, {NAME: "../x"})], UnsafePath, "segment"),
        ([(b"x", RAW, {})], CorruptData, "without a name"),
        ([TWICE, TWICE], UnsafePath, "second time"),
    ],
)
def test_unsafe_model_packs_are_rejected(layers: list[Blob], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read(*layers, artifactType=MODEL)


OCI, DOCKER = "application/vnd.oci.image.layer.v1.tar+", "application/vnd.docker.image.rootfs.diff.tar."
UNSUPPORTED = (f"{OCI}zstd", f"{OCI}gzip+encrypted", f"{DOCKER}zstd", "application/vnd.cncf.model.weight.v1.tar+zstd")


@pytest.mark.parametrize(
    ("layer", "error"),
    [
        (b"no tar at all".ljust(512, b"\1"), CorruptData),
        (files(a=b"x" * 2000)[:1500], CorruptData),
        ((b"no gzip", f"{OCI}gzip", {}), CorruptData),
        ((gzip.compress(files(a=b"x"))[:-9], f"{OCI}gzip", {}), CorruptData),
        (packed(entry("models/a", b"x" * 600), entry("x", b"x" * 100))[:512] + b"7" * 512, CorruptData),
        *(((b"x", kind, {}), ConfigurationError) for kind in UNSUPPORTED),
    ],
)
def test_invalid_layers_are_rejected(layer: bytes | Blob, error: type[DataError]) -> None:
    with pytest.raises(error):
        read(layer)


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("more", [{}, {"b": b"b"}])
def test_layers_with_a_wrong_digest_are_rejected(
    repository: MemoryRepository, pack: bool, more: dict[str, bytes]
) -> None:
    layer, wrong = (files(a=LARGE[at : at + 50_000], **more) for at in (0, 1))
    image(repository, [zipped(layer) if pack else layer], "1")
    (digest,) = (name for name, data in repository.blobs.items() if len(data) > 2)
    repository.blobs[digest] = zipped(wrong)[0] if pack else wrong
    with pytest.raises((ChecksumMismatch, CorruptData)):
        read_all(repository, "1")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_size_of_extended_headers_is_limited(kind: bytes) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, 10**12

    def endless() -> Iterator[bytes]:
        yield info.tobuf(tarfile.GNU_FORMAT)
        while True:
            yield bytes(100_000)

    with pytest.raises(CorruptData, match="extended header"):
        list(tars.members(Reader(endless(), "it")))


BAD_LAYERS: list[object] = ["x", [{}], [{"size": 1, "digest": "sha256:../.."}], [{"size": -1}]]


@pytest.mark.parametrize("value", [{}, *({"layers": layers} for layers in BAD_LAYERS)])
def test_invalid_manifests_are_rejected(repository: MemoryRepository, value: dict[str, object]) -> None:
    repository.put(value, "1")
    with pytest.raises(CorruptData):
        load(repository, "1")


def test_missing_images_and_files_are_reported(repository: MemoryRepository) -> None:
    assert Image.load(repository, "none") is None
    image(repository, [files(a=b"x")], "1")
    loaded = load(repository, "1")
    with pytest.raises(SourceNotFound):
        loaded.read("b", 0, None)


_names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=150)


@given(
    st.lists(st.tuples(_names, st.binary(max_size=1500)), max_size=5),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    st.integers(1, 700),
)
def test_archives_are_read_as_tarfile_reads_them(content: list[tuple[str, bytes]], form: int, piece: int) -> None:
    """But for names that lead out of the model."""
    data = packed(*(entry(name, each) for name, each in content), form=form)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        expected = [(info.name, info.size, info.offset_data) for info in archive]
    pieces = (data[at : at + piece] for at in range(0, len(data), piece))
    try:
        found = list(tars.members(Reader(pieces, "it")))
    except UnsafePath:
        return
    for member, (name, size, offset) in zip(found, expected, strict=True):
        assert (member.size, member.offset) == (size, offset)
        assert name.rstrip("/").endswith(member.path)
        assert not member.path.startswith("/")
        assert ".." not in member.path.split("/")


@given(st.binary(max_size=3000))
def test_invalid_archives_raise_only_data_errors(data: bytes) -> None:
    for junk in (data, data.ljust(512, b"\0") + data):
        try:
            members: list[Member] = list(tars.members(Reader(iter((junk,)), "it")))
        except DataError:
            continue
        assert all(member.size >= 0 for member in members)


@given(
    st.lists(st.binary(max_size=400), min_size=1, max_size=4),
    st.integers(1, 97),
    st.lists(st.integers(0, 2000), max_size=4),
    st.binary(max_size=3).map(lambda x: bytes(len(x))),
)
def test_gzip_files_are_read_from_any_offset(parts: list[bytes], piece: int, starts: list[int], tail: bytes) -> None:
    plain = b"".join(parts)
    data = b"".join(gzip.compress(part) for part in parts) + tail

    def opened(at: int) -> Iterator[bytes]:
        return (data[place : place + piece] for place in range(at, len(data), piece))

    gunzip = Gunzip(opened, "it")
    gunzip._spacing = 50
    assert b"".join(gunzip.read(0, opened(0))) == plain
    for start in starts:
        assert b"".join(gunzip.read(start)) == plain[start:]


def test_reads_inside_a_gzip_start_at_a_checkpoint() -> None:
    plain = LARGE * 4
    data = gzip.compress(plain, 0)
    asked: list[int] = []

    def opened(at: int) -> Iterator[bytes]:
        asked.append(at)
        return (data[place : place + 100_000] for place in range(at, len(data), 100_000))

    gunzip = Gunzip(opened, "it")
    assert sum(map(len, gunzip.read(0, opened(0)))) == len(plain)
    assert next(gunzip.read(30_000_000))[:1000] == plain[30_000_000:30_001_000]
    assert asked[-1] > 20_000_000
    assert len(gunzip._checkpoints) <= 64


def test_decompressed_chunks_are_limited() -> None:
    data = gzip.compress(bytes(20_000_000))
    sizes = [len(chunk) for chunk in Gunzip(lambda at: iter((data[at:],)), "it").read(0)]
    assert (sum(sizes), max(sizes)) == (20_000_000, 1024 * 1024)


def test_size_of_documents_is_limited() -> None:
    """At most 16 MiB of a manifest are read: a registry could send an endless response."""
    sent: list[int] = []

    class Endless:
        def iter_raw(self) -> Iterator[bytes]:
            while True:
                sent.append(1 << 20)
                yield bytes(1 << 20)

    with pytest.raises(CorruptData, match="more than 16777216 bytes"):
        Client("registry.example").read(Endless())  # type: ignore[arg-type]  # only this method is used
    assert sum(sent) == 17 << 20
