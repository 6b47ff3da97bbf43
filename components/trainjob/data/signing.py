"""OpenSSF Model Signing: who vouches for a dataset or model, in ``model.sig`` beside it.

Signed are the files of the model and those that are written beside them, provenance and card.

The signature is that of the `model-signing` package, made over the digests of a manifest, so that no file is read
again; its command line verifies what is signed here, and what others have signed with it is verified here. Files are
named by their SHA-256 (``files``, ``sha256``: its default); what is signed in another way is refused.
"""

from __future__ import annotations

import base64
import hashlib
import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from trainjob.data import content
from trainjob.data.content import ContentManifest, File
from trainjob.errors import ChecksumMismatch, ConfigurationError, missing

Wanted = Callable[[str], bool]


class Verify(Protocol):
    """Checks that a key's owner has signed files, see `verifier`."""

    def __call__(
        self, manifest: ContentManifest, beside: Mapping[str, Sequence[bytes]], where: str, wanted: Wanted
    ) -> Collection[str]:
        """Check that the signature is of the files of `manifest`, and of no others but those in `beside`.

        Args:
            manifest: What is there. A ``model.sig`` in it need not be signed, every other file has to be, also those
                which the signature says that it ignores.
            beside: Files of `trainjob.data.content.SIDECARS` with their contents, among them ``model.sig``. Of several
                versions of one, one has to be signed.
            where: Location for the error message.
            wanted: Whether a signed file has to be in `manifest`.

        Returns:
            Paths of `beside` that the signature does not cover: it was made by other programs, or before they were
            signed.

        Raises:
            ChecksumMismatch: Another key has signed, or other files are signed, or none.
        """
        ...


def signer(key: str) -> Callable[[ContentManifest, str, Mapping[str, bytes]], bytes]:
    """What makes ``model.sig`` of a manifest, a name for people, and the other files beside the manifest, by path.

    Args:
        key: Path of a PEM file with a private key on the curve P-256, P-384 or P-521, not encrypted.

    Raises:
        ConfigurationError: There is no such key, or the extra ``trainjob[sign]`` is not installed.
    """
    signing, _ = _library()
    with _problems_of(key, "private"):
        config = signing.Config().use_elliptic_key_signer(private_key=_path(key, "sign"))

    def sign(manifest: ContentManifest, name: str, beside: Mapping[str, bytes]) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, content.SIGNATURE)
            own = {each.path for each in manifest.files}
            files = [*manifest.files, *(_beside(path, data) for path, data in beside.items() if path not in own)]
            files.sort(key=lambda each: content.in_order(each.path))
            config.set_hashing_config(_digests(files)).sign(PurePosixPath(name), file)
            return file.read_bytes()

    return sign


def verifier(key: str) -> Verify:
    """What verifies signatures.

    Args:
        key: Path of a PEM file with the public key.

    Raises:
        ConfigurationError: There is no such key, or the extra ``trainjob[sign]`` is not installed.
    """
    _, verifying = _library()
    with _problems_of(key, "public"):
        config = verifying.Config().use_elliptic_key_verifier(public_key=_path(key, "verify_key"))

    def verify(
        manifest: ContentManifest, beside: Mapping[str, Sequence[bytes]], where: str, wanted: Wanted
    ) -> Collection[str]:
        failures = []
        for signature in beside[content.SIGNATURE]:
            try:
                files, uncovered = _compared(manifest, beside, signature, wanted)
                config.set_hashing_config(_digests(files))
                with tempfile.TemporaryDirectory() as folder:
                    Path(folder, content.SIGNATURE).write_bytes(signature)
                    config.verify(PurePosixPath("model"), Path(folder, content.SIGNATURE))
                return uncovered
            except Exception as error:  # noqa: BLE001 - a dozen types, of four libraries, and none may let a model pass
                failures.append(" ".join(str(error).split()) or "made with another key, or altered")
        raise ChecksumMismatch(f"the signature of {where} does not hold for the key {key}: {failures[0]}")

    return verify


def _library() -> tuple[Any, Any]:
    try:
        from model_signing import signing, verifying  # noqa: PLC0415 - an extra, for those who need it
    except ImportError as error:
        raise missing("a signature", f"model-signing ({error})", "sign") from None
    return signing, verifying


def _path(key: str, option: str) -> Path:
    if "-----BEGIN" in key or "\n" in key:  # not repeated in the message
        raise ConfigurationError(
            f"{option} is the path of a file with the key, such as one that is mounted from a Secret, and not the key:"
            " what is given here can be read in manifests and logs"
        )
    return Path(key)


@contextmanager
def _problems_of(key: str, kind: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"the {kind} key {key} cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, AttributeError):  # what they say may hold parts of the key
        raise ConfigurationError(
            f"{key} holds no {kind} key that can be used: it takes an elliptic curve key (P-256, P-384, P-521) in PEM"
        ) from None


def _beside(path: str, data: bytes) -> File:
    return File(path, len(data), hashlib.sha256(data).hexdigest())


def _compared(
    manifest: ContentManifest, beside: Mapping[str, Sequence[bytes]], signature: bytes, wanted: Wanted
) -> tuple[list[File], list[str]]:
    """The files that have to be those of a signature, and the paths of `beside` that it does not name.

    Of several versions of a file beside the model, the one that was signed counts.
    """
    own = {file.path: file for file in manifest.files}
    signed = {file.path: file for file in _signed(signature)}
    versions = {
        path: [_beside(path, data) for data in contents]
        for path, contents in beside.items()
        if path not in own and path != content.SIGNATURE
    }
    files = [file for path, file in own.items() if path != content.SIGNATURE]
    for path in versions.keys() & signed.keys():
        known = [file for file in versions[path] if file.sha256 == signed[path].sha256]
        files += known[:1] or versions[path][:1]
    # What was left out cannot differ from what is signed: it is compared with itself.
    there = {file.path for file in files} | {content.PROVENANCE, content.CARD}
    files += [file for path, file in signed.items() if path not in there and not wanted(path)]
    return files, sorted(versions.keys() - signed.keys())


def _digests(files: Iterable[File]) -> Any:
    """The library's way to hash a model, with digests that are known already."""
    from model_signing import hashing, manifest  # noqa: PLC0415
    from model_signing._hashing.hashing import Digest  # noqa: PLC0415 - what its own manifests are made of

    items = [
        manifest.FileManifestItem(path=PurePosixPath(file.path), digest=Digest("sha256", bytes.fromhex(file.sha256)))
        for file in files
    ]
    # What is beside them, for those who verify with other tools.
    beside = sorted({content.NAME, *content.SIDECARS} - {file.path for file in files})
    way = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": beside}

    class Known(hashing.Config):  # type: ignore[misc]
        def add_ignored_paths(self, *, model_path: Any, paths: Any) -> None:
            del model_path, paths

        def hash(self, model_path: Any, *, files_to_hash: Any = None) -> Any:
            del files_to_hash
            return manifest.Manifest(PurePosixPath(model_path).name, items, manifest.SerializationType.from_args(way))

    return Known()


def _signed(signature: bytes) -> list[File]:
    """The files that a signature names; whether it holds is not looked at."""
    predicate = json.loads(base64.b64decode(json.loads(signature)["dsseEnvelope"]["payload"]))["predicate"]
    way = predicate["serialization"]
    if (way["method"], way["hash_type"]) != ("files", "sha256"):
        raise ValueError(f"it is of {way['hash_type']} digests of {way['method']}, not of SHA-256 digests of files")
    return [File(each["name"], 0, each["digest"]) for each in predicate["resources"]]
