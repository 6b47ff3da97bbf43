"""Sign datasets and models, and verify signatures: OpenSSF Model Signing, in ``model.sig`` beside the files.

The signature covers the files of the model and those beside them, provenance and card.

The `model-signing` package signs the digests of a manifest, so that no file is read again. Its command line verifies
signatures made here, and signatures that it made are verified here. Files are identified by their SHA-256 (``files``,
``sha256``: the package's default); other kinds of signatures are refused.
"""

from __future__ import annotations

import base64
import hashlib
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from trainjob._support.foreign import LARGE, mapping_of
from trainjob.data import file_manifest
from trainjob.data.file_manifest import ContentManifest, File
from trainjob.errors import ChecksumMismatch, ConfigurationError, missing

Wanted = Callable[[str], bool]


class Verify(Protocol):
    """Verifies that files are signed with a key, see `verifier`."""

    def __call__(
        self, manifest: ContentManifest, beside: Mapping[str, Sequence[bytes]], where: str, wanted: Wanted
    ) -> Collection[str]:
        """Check that the signature covers the files of `manifest`, and no others except those in `beside`.

        Args:
            manifest: The existing files. Each of them must be signed, except ``model.sig``; also those that the
                signature lists as ignored.
            beside: Files of `file_manifest.SIDECARS` with their contents, including ``model.sig``. Of several
                versions of a file, one must be signed.
            where: Location for the error message.
            wanted: Whether a signed file must be in `manifest`.

        Returns:
            Paths of `beside` that the signature does not cover: another program made it, or a version of trainjob that
            did not sign these files.

        Raises:
            ChecksumMismatch: The signature is of another key or of other files, or is invalid.
        """
        ...


def signer(key: str) -> Callable[[ContentManifest, str, Mapping[str, bytes]], bytes]:
    """Make a function that returns ``model.sig`` for a manifest, a name for people, and the files beside the manifest.

    Args:
        key: Path of a PEM file with an unencrypted private key on the curve P-256, P-384 or P-521.

    Raises:
        ConfigurationError: The key cannot be read, or the extra ``trainjob[sign]`` is not installed.
    """
    library = _library()
    with _problems_of(key, "private"):
        config = library.signing.Config().use_elliptic_key_signer(private_key=_path(key, "sign"))

    def sign(manifest: ContentManifest, name: str, beside: Mapping[str, bytes]) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, file_manifest.SIGNATURE)
            own = {each.path for each in manifest.files}
            files = [*manifest.files, *(_beside(path, data) for path, data in beside.items() if path not in own)]
            files.sort(key=lambda each: file_manifest.in_order(each.path))
            config.set_hashing_config(_digests(files)).sign(PurePosixPath(name), file)
            return file.read_bytes()

    return sign


def verifier(key: str) -> Verify:
    """Make a function that verifies signatures.

    Args:
        key: Path of a PEM file with the public key.

    Raises:
        ConfigurationError: The key cannot be read, or the extra ``trainjob[sign]`` is not installed.
    """
    library = _library()
    with _problems_of(key, "public"):
        config = library.verifying.Config().use_elliptic_key_verifier(public_key=_path(key, "verify_key"))

    def verify(
        manifest: ContentManifest, beside: Mapping[str, Sequence[bytes]], where: str, wanted: Wanted
    ) -> Collection[str]:
        failures = []
        for signature in beside[file_manifest.SIGNATURE]:
            try:
                files, uncovered = _compared(manifest, beside, signature, wanted)
                config.set_hashing_config(_digests(files))
                with tempfile.TemporaryDirectory() as folder:
                    Path(folder, file_manifest.SIGNATURE).write_bytes(signature)
                    config.verify(PurePosixPath("model"), Path(folder, file_manifest.SIGNATURE))
                return uncovered
            except Exception as error:  # noqa: BLE001 - a dozen types, of four libraries; none may accept a model
                failures.append(" ".join(str(error).split()) or "it was made with another key, or modified")
        raise ChecksumMismatch(f"the signature of {where} is not valid for the key {key}: {failures[0]}")

    return verify


def _library() -> Any:
    try:
        import model_signing  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise missing("a signature", f"model-signing ({error})", "sign") from None
    return model_signing


def _path(key: str, option: str) -> Path:
    if "-----BEGIN" in key or "\n" in key:  # the message does not quote it
        raise ConfigurationError(
            f"{option} must be the path of a file with the key, for example of a mounted Secret, not the key itself:"
            " this value is visible in manifests and logs"
        )
    return Path(key)


@contextmanager
def _problems_of(key: str, kind: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"the {kind} key {key} cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, AttributeError):  # their messages may contain parts of the key
        raise ConfigurationError(
            f"{key} contains no supported {kind} key: use an elliptic curve key (P-256, P-384, P-521) in PEM"
        ) from None


def _beside(path: str, data: bytes) -> File:
    return File(path, len(data), hashlib.sha256(data).hexdigest())


def _compared(
    manifest: ContentManifest, beside: Mapping[str, Sequence[bytes]], signature: bytes, wanted: Wanted
) -> tuple[list[File], list[str]]:
    """The files that the signature must cover, and the paths of `beside` that it does not cover.

    Of several versions of a file beside the model, the signed one is used.
    """
    own = {file.path: file for file in manifest.files}
    signed = {file.path: file for file in _signed(signature)}
    versions = {
        path: [_beside(path, data) for data in contents]
        for path, contents in beside.items()
        if path not in own and path != file_manifest.SIGNATURE
    }
    files = [file for path, file in own.items() if path != file_manifest.SIGNATURE]
    for path in versions.keys() & signed.keys():
        known = [file for file in versions[path] if file.sha256 == signed[path].sha256]
        files += known[:1] or versions[path][:1]
    # Files that were left out are compared with themselves.
    there = {file.path for file in files} | {file_manifest.PROVENANCE, file_manifest.CARD}
    files += [file for path, file in signed.items() if path not in there and not wanted(path)]
    return files, sorted(versions.keys() - signed.keys())


def _digests(files: Iterable[File]) -> Any:
    """A hashing configuration for the library that returns known digests."""
    from model_signing import hashing, manifest  # noqa: PLC0415 - an extra

    digest_of = _library()._hashing.hashing.Digest  # the library has no public class for digests
    items = [
        manifest.FileManifestItem(path=PurePosixPath(file.path), digest=digest_of("sha256", bytes.fromhex(file.sha256)))
        for file in files
    ]
    # The files beside them, so that other tools ignore these when they verify.
    beside = sorted({file_manifest.NAME, *file_manifest.SIDECARS} - {file.path for file in files})
    parameters = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": beside}

    class Known(hashing.Config):  # type: ignore[misc]  # is Any: the library has no type information
        def add_ignored_paths(self, *, model_path: Any, paths: Any) -> None:
            del model_path, paths

        def hash(self, model_path: Any, *, files_to_hash: Any = None) -> Any:
            del files_to_hash
            return manifest.Manifest(
                PurePosixPath(model_path).name, items, manifest.SerializationType.from_args(parameters)
            )

    return Known()


def _signed(signature: bytes) -> list[File]:
    """The files that a signature covers, without verifying it."""
    envelope = mapping_of(signature, "the signature", LARGE)["dsseEnvelope"]
    predicate = mapping_of(base64.b64decode(envelope["payload"]), "the signed statement", LARGE)["predicate"]
    used = predicate["serialization"]
    if (used["method"], used["hash_type"]) != ("files", "sha256"):
        raise ValueError(f"it is of {used['hash_type']} digests of {used['method']}, not of SHA-256 digests of files")
    return [File(each["name"], 0, each["digest"]) for each in predicate["resources"]]
