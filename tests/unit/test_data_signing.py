"""Digests of folders and models, and the signatures of exports."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import given, strategies as st
from tests.fakes.model_registry import FakeRegistry
from tests.keys import PEM, key_pair
from tests.trees import files, tree
from tests.warm import Warm

from trainjob.data import copy, export, file_manifest, initialize, read_manifest
from trainjob.data.__main__ import main
from trainjob.data.file_manifest import File
from trainjob.data.signing import signer
from trainjob.data.stores.files import FileStore
from trainjob.errors import ChecksumMismatch, ConfigurationError, CorruptData, UnsafePath
from trainjob.registry import Registry, connect

_name = st.text("abc.-_ é", min_size=1, max_size=4).filter(lambda name: name not in (".", ".."))
_path = st.lists(_name, min_size=1, max_size=3).map("/".join)


def _file(path: str, data: bytes = b"x") -> File:
    return File(path, len(data), hashlib.sha256(data).hexdigest())


_paths = st.sets(_path, max_size=8).filter(
    lambda paths: not any(str(parent) in paths for path in paths for parent in PurePosixPath(path).parents)
)


@given(_paths, st.binary(max_size=4))
def test_manifest_is_canonical_and_can_be_parsed(paths: set[str], data: bytes) -> None:
    one = file_manifest.build([_file(path, data) for path in sorted(paths)], "origin")
    two = file_manifest.build([_file(path, data) for path in sorted(paths, reverse=True)], "origin")
    assert one.to_json() == two.to_json()
    assert file_manifest.parse(one.to_json(), "here") == one
    assert one.size == len(paths) * len(data)


@given(_paths)
def test_digest_sorts_paths_segment_by_segment(paths: set[str]) -> None:
    # model-signing sorts PurePosixPath objects, that is, segment by segment: "a/b" comes before "a.b".
    files = [_file(path, path.encode()) for path in paths]
    total = hashlib.sha256()
    for file in sorted(files, key=lambda each: PurePosixPath(each.path)):
        total.update(bytes.fromhex(file.sha256))
    assert file_manifest.build(files).digest == f"sha256:{total.hexdigest()}"


def test_names_are_reserved_in_the_root_only() -> None:
    file_manifest.check_paths(["a/MANIFEST.json", "a/.trainjob/x"])
    for path in ("MANIFEST.json", ".trainjob/x"):
        with pytest.raises(UnsafePath):
            file_manifest.check_paths([path])


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    with FakeRegistry() as fake:
        monkeypatch.setenv("TRAINJOB_REGISTRY", f"kubeflow+{fake.url}")
        yield connect()


_WRONG = "sha256:" + "0" * 64


def _tree(folder: Path, word: str = "x") -> Path:
    return tree(folder, {"config.json": f'"{word}"'.encode(), "sub/more.txt": word.encode()})


def _digest(folder: Path) -> str:
    files = (hashlib.sha256((folder / name).read_bytes()).digest() for name in ("config.json", "sub/more.txt"))
    return "sha256:" + hashlib.sha256(b"".join(files)).hexdigest()


@pytest.fixture(params=["plain", "with a manifest"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = _tree(tmp_path / "source")
    if request.param == "plain":
        return folder
    copy(str(folder), str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_a_digest_has_several_spellings_and_a_complete_target_is_checked_again(source: Path, tmp_path: Path) -> None:
    right, target = _digest(source), str(tmp_path / "in")
    for spelled in (right, right.removeprefix("sha256:"), f" {right.upper()} ".replace("SHA256", "sha256")):
        assert initialize(str(source), target, digest=spelled).digest == right
    with pytest.raises(ChecksumMismatch):
        initialize(str(source), target, digest=_WRONG)
    manifest = read_manifest(target)
    assert manifest is not None
    assert manifest.digest == right


def test_digest_of_selected_files_is_verified(source: Path, tmp_path: Path) -> None:
    own = hashlib.sha256((source / "config.json").read_bytes()).hexdigest()
    assert initialize(str(source), str(tmp_path / "in"), include=["*.json"], digest=own).files == 1
    with pytest.raises(ChecksumMismatch):
        initialize(str(source), str(tmp_path / "in2"), include=["*.json"], digest=_digest(source))


def test_digest_of_a_registered_version_is_verified(tmp_path: Path) -> None:
    """`tests/registry` replaces the whole model."""
    done = export(str(_tree(tmp_path / "out")), str(tmp_path / "models"), name="m", export_id="a")
    place = Path(done.uri.removeprefix("file://"))
    assert initialize("models:/m/1", str(tmp_path / "in"), digest=done.digest).digest == done.digest
    (place / "sub/more.txt").write_text("y")
    for _ in range(2):
        for more in ({}, {"digest": done.digest}, {"include": ["*.txt"]}):
            with pytest.raises((ChecksumMismatch, CorruptData)):
                initialize("models:/m/1", str(tmp_path / "no"), **more)
            assert read_manifest(str(tmp_path / "no")) is None
        (place / file_manifest.NAME).unlink(missing_ok=True)
    shutil.rmtree(place)
    shutil.copytree(tmp_path / "out", place)
    assert initialize("models:/m/1", str(tmp_path / "back")).digest == done.digest, "equal files are the same model"
    with pytest.raises(ChecksumMismatch):  # the registered digest does not cover a part
        initialize("models:/m/1", str(tmp_path / "part"), include=["*.txt"])


def test_digest_of_a_version_without_a_registered_digest_is_verified(registry: Registry, tmp_path: Path) -> None:
    folder = _tree(tmp_path / "source")
    registry.register("m", str(folder.as_uri()), export_id="x", digest="", metrics={}, tags={})
    assert initialize("models:/m/1", str(tmp_path / "in")).digest == _digest(folder)
    with pytest.raises(ChecksumMismatch):
        initialize("models:/m/1", str(tmp_path / "in2"), digest=_WRONG)


# ---------------------------------------------------------------- signatures


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, str]:
    return key_pair(tmp_path)


def _model(folder: Path, value: int = 0, more: Mapping[str, bytes] | None = None) -> str:
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    weights = struct.pack("<Q", len(header)) + header + bytes([value] * 4)
    there = {"config.json": b"{}", "a/model.safetensors": weights, "a.b/x.txt": b"1", "é/ü": b"2"}
    return str(tree(folder, there | dict(more or {})))


def _export(source: str, target: Path, **options: Any) -> Path:
    done = export(source, str(target), **{"name": "m", "export_id": "a", **options})
    return Path(done.uri.removeprefix("file://"))


@pytest.fixture(scope="module")
def official() -> Iterator[Warm]:
    """The command line of model-signing, independent of trainjob."""
    with Warm({"model-signing": "model_signing._cli:main"}, ["model_signing._cli"]) as running:
        yield running


def _statement(signature: Path) -> dict[str, Any]:
    payload = json.loads(signature.read_bytes())["dsseEnvelope"]["payload"]
    statement: dict[str, Any] = json.loads(base64.b64decode(payload))
    return statement


def _official(official: Warm, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(official.bin / "model-signing"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _verified(official: Warm, folder: Path, public: str, *options: object) -> bool:
    verify = ("verify", "key", "--signature", folder / "model.sig", "--public_key", public, *options, folder)
    done = _official(official, *verify)
    assert done.returncode == 0 or "failed with error" in done.stderr + done.stdout, done
    return done.returncode == 0


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_model_signing_verifies_an_export(official: Warm, tmp_path: Path, curve: ec.EllipticCurve) -> None:
    private, public = key_pair(tmp_path, "signer", curve)
    folder = _export(_model(tmp_path / "out"), tmp_path / "models", sign=private)
    assert not _verified(official, folder, key_pair(tmp_path, "other", curve)[1])
    statement = _statement(folder / "model.sig")
    complete = copy(str(folder), str(tmp_path / "all"), exclude=[file_manifest.NAME, file_manifest.SIGNATURE])
    assert [each["name"] for each in statement["predicate"]["resources"]] == [file.path for file in complete.files]
    assert {file_manifest.PROVENANCE, file_manifest.CARD} <= {file.path for file in complete.files}
    assert statement["subject"] == [{"name": "m", "digest": {"sha256": complete.digest.removeprefix("sha256:")}}]
    if curve.name == "secp256r1":
        for name in ("config.json", file_manifest.PROVENANCE, file_manifest.CARD):
            before = (folder / name).read_bytes()
            (folder / name).write_bytes(before + b" ")
            assert not _verified(official, folder, public)
            (folder / name).write_bytes(before)
    assert _verified(official, folder, public)
    assert b"PRIVATE" not in b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_digest_equals_that_of_model_signing(official: Warm, tmp_path: Path, keys: tuple[str, str]) -> None:
    # Without trainjob's files, and with names whose order is not that of their characters.
    folder = Path(_model(tmp_path / "out", more={"a/b/c": b"3", "a-b": b"4", "B": b"5", "\U0001f600": b"6"}))
    signed = _official(official, "sign", "key", "--private_key", keys[0], "--signature", tmp_path / "sig", folder)
    assert signed.returncode == 0, signed.stderr
    statement = _statement(tmp_path / "sig")
    manifest = copy(str(folder), str(tmp_path / "copy"))
    assert manifest.digest == "sha256:" + statement["subject"][0]["digest"]["sha256"]
    assert [file.path for file in manifest.files] == [each["name"] for each in statement["predicate"]["resources"]]


def test_only_signed_content_is_downloaded(tmp_path: Path, keys: tuple[str, str]) -> None:
    private, public = keys
    folder = _export(_model(tmp_path / "out"), tmp_path / "models", sign=private, alias="champion")
    got = initialize("models:/m@champion", str(tmp_path / "in"), verify_key=public)
    assert got.digest == initialize(str(folder), str(tmp_path / "in2"), verify_key=public).digest
    assert initialize(str(folder), str(tmp_path / "part"), include=["*.json"], verify_key=public).files == 1
    with pytest.raises(ChecksumMismatch, match="signature"):
        initialize("models:/m@champion", str(tmp_path / "in3"), verify_key=key_pair(tmp_path, "other")[1])
    # An attacker who can write to the store replaces the model and its manifest.
    beside = {name: (folder / name).read_bytes() for name in file_manifest.SIDECARS if (folder / name).exists()}
    shutil.rmtree(folder)
    copy(_model(tmp_path / "evil", 7), str(folder))
    cases: list[tuple[dict[str, bytes], list[str], str]] = [
        ({}, [], "not signed"),
        ({"model.sig": beside["model.sig"]}, ["*.json"], r"Missing.*provenance\.json"),
        (beside, [], r"model\.safetensors"),
        (beside, ["*.safetensors"], r"model\.safetensors"),
    ]
    for restored, include, words in cases:
        tree(folder, restored)
        with pytest.raises(ChecksumMismatch, match=words):
            initialize(str(folder), str(tmp_path / "in3"), include=include, verify_key=public)
    assert not (tmp_path / "in3").exists()


def test_a_card_of_the_author_is_signed_as_a_file(tmp_path: Path, keys: tuple[str, str]) -> None:
    source = _model(tmp_path / "out", more={file_manifest.CARD: b"mine"})
    folder = _export(source, tmp_path / "models", sign=keys[0])
    assert initialize(str(folder), str(tmp_path / "card"), verify_key=keys[1]).files == 5
    (folder / file_manifest.CARD).write_bytes(b"his.")
    with pytest.raises(ChecksumMismatch):
        initialize(str(folder), str(tmp_path / "in"), verify_key=keys[1])


@pytest.mark.parametrize("name", [file_manifest.PROVENANCE, file_manifest.CARD])
@pytest.mark.parametrize("what", ["changed", "removed"])
def test_provenance_and_card_are_signed(tmp_path: Path, keys: tuple[str, str], name: str, what: str) -> None:
    folder = _export(_model(tmp_path / "out"), tmp_path / "models", sign=keys[0], provenance={"code": "x"})
    lines: list[str] = []
    initialize("models:/m/1", str(tmp_path / "in"), verify_key=keys[1], progress=lines.append)
    assert not [line for line in lines if "not covered" in line]
    if what == "changed":
        (folder / name).write_bytes((folder / name).read_bytes().replace(b"x", b"y"))
    else:
        (folder / name).unlink()
    choices: list[dict[str, Any]] = [{}, {"include": ["*.json"]}, {"exclude": [name]}]
    for options in choices:
        with pytest.raises(ChecksumMismatch, match=re.escape(name)):
            initialize("models:/m/1", str(tmp_path / "in"), verify_key=keys[1], **options)  # the target is complete
        with pytest.raises(ChecksumMismatch, match=re.escape(name)):
            initialize(str(folder), str(tmp_path / "in2"), verify_key=keys[1], **options)
    assert not (tmp_path / "in2").exists()
    initialize("models:/m/1", str(tmp_path / "in3"))


@pytest.mark.parametrize(
    ("files_written", "signed"), [*((files, True) for files in range(1, 5)), *((files, False) for files in range(1, 4))]
)
def test_a_killed_export_leaves_no_signature_of_other_content(
    tmp_path: Path, keys: tuple[str, str], monkeypatch: pytest.MonkeyPatch, files_written: int, signed: bool
) -> None:
    """Killed before each of the small files: mark, provenance, card, signature (if signed), manifest."""
    source, target, write = _model(tmp_path / "out"), tmp_path / "models", FileStore.write_small
    written: list[str] = []

    def killed(store: FileStore, path: str, data: bytes) -> None:
        if len(written) == files_written:
            raise KeyboardInterrupt
        written.append(path)
        write(store, path, data)

    with monkeypatch.context() as patched:
        patched.setattr(FileStore, "write_small", killed)
        with pytest.raises(KeyboardInterrupt):
            _export(source, target, sign=keys[0] if signed else None)
    (place,) = (target / "m").iterdir()
    assert read_manifest(str(place)) is None
    small = (file_manifest.MARK, file_manifest.PROVENANCE, file_manifest.CARD, file_manifest.SIGNATURE)
    assert written == list(small[:files_written])
    # The retry has another provenance, and signs if the first did not.
    assert _export(source, target, sign=None if signed else keys[0], provenance={"seed": 1}) == place
    assert (place / file_manifest.SIGNATURE).exists() is not signed
    if not signed:
        initialize(str(place), str(tmp_path / "in"), verify_key=keys[1])


def test_a_signature_without_provenance_is_accepted_and_reported(tmp_path: Path, keys: tuple[str, str]) -> None:
    """Earlier versions of trainjob did not sign the provenance."""
    folder = _export(_model(tmp_path / "out"), tmp_path / "models")
    manifest = read_manifest(str(folder))
    assert manifest is not None
    (folder / file_manifest.SIGNATURE).write_bytes(signer(keys[0])(manifest, "m", {}))
    (folder / file_manifest.PROVENANCE).write_bytes(b"{}")
    lines: list[str] = []
    initialize("models:/m/1", str(tmp_path / "in"), verify_key=keys[1], progress=lines.append)
    (message,) = [line for line in lines if "not covered" in line]
    assert f"covers its 4 files; not covered: {file_manifest.CARD}, {file_manifest.PROVENANCE}" in message
    (folder / "config.json").write_text("[]")
    with pytest.raises(ChecksumMismatch):
        initialize("models:/m/1", str(tmp_path / "in2"), verify_key=keys[1])


def test_signatures_of_other_tools_are_verified(official: Warm, tmp_path: Path, keys: tuple[str, str]) -> None:
    private, public = keys
    folder, target = Path(_model(tmp_path / "hub", more={".gitattributes": b"*"})), tmp_path / "in"
    signed = _official(official, "sign", "key", "--private_key", private, "--signature", folder / "model.sig", folder)
    assert signed.returncode == 0, signed.stderr
    # model-signing ignores git's files; unsigned files are rejected.
    with pytest.raises(ChecksumMismatch, match="gitattributes"):
        initialize(str(folder), str(target), verify_key=public)
    assert {Path(name).parts[0] for name in files(target)} <= {file_manifest.WORK}
    assert initialize(str(folder), str(target), exclude=[".git*"], verify_key=public).files == 5
    assert _verified(official, target, public, "--ignore-paths", target / file_manifest.NAME), "its signature, too"
    # A target from a download without a key does not count as verified.
    (folder / "config.json").write_text("[]")
    initialize(str(folder), str(tmp_path / "in2"), exclude=[".git*"])
    for unverified in (tmp_path / "in2", target):
        with pytest.raises(ChecksumMismatch, match=r"config\.json"):
            initialize(str(folder), str(unverified), exclude=[".git*"], verify_key=public)
    # A missing signed file is an error unless it is excluded.
    (folder / "config.json").unlink()
    for left in ([".git*"], [".git*", "*.npy"]):
        with pytest.raises(ChecksumMismatch, match=r"Missing.*config\.json"):
            initialize(str(folder), str(tmp_path / "in3"), exclude=left, verify_key=public)
    assert initialize(str(folder), str(tmp_path / "in4"), exclude=[".git*", "*.json"], verify_key=public).files == 4


PAYLOADS = (b'{"dsseEnvelope": {"payload": ""}}', b'{"dsseEnvelope": {"payload": "e30="}}')
BUNDLE = b'{"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json", "verificationMaterial": {}}'


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b"[" * 100_000, *PAYLOADS, BUNDLE])
def test_invalid_signatures_are_rejected(tmp_path: Path, keys: tuple[str, str], data: bytes) -> None:
    folder = tree(Path(_model(tmp_path / "hub")), {"model.sig": data})
    with pytest.raises(ChecksumMismatch, match="signature"):
        initialize(str(folder), str(tmp_path / "in"), verify_key=keys[1])
    with pytest.raises(ChecksumMismatch, match="not signed"):
        initialize(str(folder / "config.json"), str(tmp_path / "in"), verify_key=keys[1])


def test_a_changed_payload_invalidates_the_signature(tmp_path: Path, keys: tuple[str, str]) -> None:
    folder = _export(_model(tmp_path / "out"), tmp_path / "models", sign=keys[0])
    bundle = json.loads((folder / "model.sig").read_bytes())
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    (folder / "config.json").write_text("[]")
    evil = copy(str(folder), str(tmp_path / "evil"), exclude=[file_manifest.NAME, *file_manifest.SIDECARS])
    statement["subject"][0]["digest"]["sha256"] = evil.digest.removeprefix("sha256:")
    statement["predicate"]["resources"] = [
        {"name": file.path, "algorithm": "sha256", "digest": file.sha256} for file in evil.files
    ]
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    (tmp_path / "evil" / "model.sig").write_text(json.dumps(bundle))
    with pytest.raises(ChecksumMismatch, match="signature"):
        initialize(str(tmp_path / "evil"), str(tmp_path / "in"), verify_key=keys[1])


def test_a_signature_of_the_author_is_a_file_and_no_place_for_another(tmp_path: Path, keys: tuple[str, str]) -> None:
    source = _model(tmp_path / "out", more={"model.sig": b"{}"})
    with pytest.raises(ConfigurationError, match=r"the export writes model\.sig"):
        _export(source, tmp_path / "models", sign=keys[0])
    assert (_export(source, tmp_path / "models") / "model.sig").read_bytes() == b"{}"


def _stored(path: Path, key: Any, encryption: Any) -> str:
    path.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, encryption))
    return str(path)


def test_keys_must_be_paths_of_valid_keys(
    tmp_path: Path, keys: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """They are checked before anything is copied."""
    source, private, public = _model(tmp_path / "out"), Path(keys[0]).read_text(), Path(keys[1]).read_text()
    key = serialization.load_pem_private_key(private.encode(), None)
    locked = _stored(tmp_path / "locked.key", key, serialization.BestAvailableEncryption(b"x"))
    other = _stored(tmp_path / "ed25519.key", ed25519.Ed25519PrivateKey.generate(), serialization.NoEncryption())
    missing = str(tmp_path / "none")
    for wrong in (private, missing, str(tmp_path), keys[1], locked, other):
        with pytest.raises(ConfigurationError) as raised:
            _export(source, tmp_path / "models", sign=wrong)
        assert "BEGIN" not in str(raised.value)
    for wrong in (public, missing, keys[0]):
        with pytest.raises(ConfigurationError):
            initialize(source, str(tmp_path / "in"), verify_key=wrong)
    program = ["export", "--source", source, "--target", str(tmp_path / "models"), "--name", "m", "--export-id", "p"]
    assert main([*program, f"--sign={private}"]) == 2
    assert "MH" not in capsys.readouterr().err
    assert not (tmp_path / "models").exists()
    assert not (tmp_path / "in").exists()


def test_keys_are_given_by_an_option_or_the_environment(
    tmp_path: Path, keys: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = _model(tmp_path / "out"), str(tmp_path / "models")
    exporting = ["export", "--source", source, "--target", target, "--name", "m", "--export-id=p"]
    getting = ["initialize-model", "--source", "models:/m/1", "--target", str(tmp_path / "in")]
    assert main([*exporting, f"--sign={keys[0]}"]) == 0
    assert main([*getting, f"--verify-key={keys[1]}"]) == 0
    monkeypatch.setenv("TRAINJOB_SIGN_KEY", keys[0])
    monkeypatch.setenv("TRAINJOB_VERIFY_KEY", keys[1])
    assert (_export(source, tmp_path / "models", export_id="e") / "model.sig").exists()
    assert main(getting) == 0
    with pytest.raises(ChecksumMismatch, match="not signed"):
        initialize(source, str(tmp_path / "in4"))
