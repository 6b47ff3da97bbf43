"""Read and write repositories of the Hugging Face Hub, through huggingface-hub.

All reads are of one commit: the revision is resolved once, on first use. All writes become one commit, created when the
manifest is written, so that no reader sees an incomplete model.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from trainjob._support import retrying
from trainjob.data.file_manifest import NAME, WORK
from trainjob.data.locations import Location, at_revision, hub_parts
from trainjob.data.stores.base import Entry, WritableStore, read_small, retry
from trainjob.data.stores.files import os_errors
from trainjob.data.stores.web import Web
from trainjob.errors import (
    ConfigurationError,
    CorruptData,
    OutOfSpace,
    SourceNotFound,
    StoreUnavailable,
    TrainJobError,
    UnsafePath,
    missing,
)
from trainjob.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.hf_api import RepoFile

_UPLOAD_BEFORE_COMMIT = 5 * 1024 * 1024  # bytes; the Hub keeps files larger than this in LFS only
_SILENCE = 120.0  # seconds without a byte of a response; a commit of many files takes long
_OID = re.compile(r"(?:W/)?\"?([0-9a-f]{40}|[0-9a-f]{64})\"?")
_GIT_ATTRIBUTES = ".gitattributes"  # lists the files in LFS; created by the Hub, and not part of the content


class HuggingFaceStore(WritableStore):
    """A repository or a directory of it.

    The token is read from ``HF_TOKEN`` only, and never written to disk. ``HF_ENDPOINT`` sets another hub or a mirror.

    Raises:
        ConfigurationError: huggingface-hub is not installed.
    """

    def __init__(self, location: Location) -> None:
        try:
            from huggingface_hub import HfApi, constants, get_session
            from huggingface_hub.utils.tqdm import disable_progress_bars
        except ImportError:
            raise missing("hf://", "huggingface-hub", "hf") from None
        disable_progress_bars()
        session: Any = get_session()  # of httpx, or in some versions of a fork of it
        if session.timeout.read is None:  # the default of huggingface-hub, which waits for a silent server forever
            session.timeout = _SILENCE
        super().__init__(location)
        self._kind, self._repo, self._revision = hub_parts(location)
        token = os.environ.get("HF_TOKEN", "").strip()
        self._endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        # False: do not use the token of a login on this machine.
        self._api = HfApi(
            endpoint=self._endpoint, token=token or False, library_name="trainjob", library_version=__version__
        )
        self._web = Web(self._endpoint, {"Authorization": f"Bearer {token}"} if token else {}, _oid)
        self._commit = ""
        self._ranges: bool | None = None
        self._files: dict[str, Entry] | None = None
        self._spool: Path | None = None
        self._additions: dict[str, CommitOperationAdd] = {}
        self._deletions: set[str] = set()

    def close(self) -> None:
        """Close the store's connections."""
        self._web.close()

    def resolved(self) -> Location:
        """The location with the commit that is read."""
        return at_revision(self._location, self._resolve())

    def supports_ranges(self, path: str, entry: Entry) -> bool:
        """Whether ranges can be read; asked for the first file, since mirrors may not support them."""
        del entry
        if self._ranges is None:
            url, where = self._url(path), self._where(path)
            self._ranges = retry(lambda: self._web.facts(url, where)).ranges
        return self._ranges

    def list(self) -> Iterator[Entry]:
        """List all files; raise SourceNotFound if the repository does not exist."""
        prefix = f"{self._location.path}/" if self._location.path else ""
        for path, entry in self._tree().items():
            if path.startswith(prefix) and path != _GIT_ATTRIBUTES:
                yield replace(entry, path=path.removeprefix(prefix))

    def stat(self, path: str) -> Entry:
        """Return one file; raise SourceNotFound if it does not exist."""
        entry = self._tree().get(self._full(path))
        if entry is None:
            raise SourceNotFound(f"{self._where(path)} does not exist")
        return replace(entry, path=path)

    def read(self, path: str, *, start: int = 0, length: int | None = None, etag: str = "") -> Iterator[bytes]:
        """Read the bytes from ``start`` on: ``length`` of them, or to the end."""
        return self._web.read(self._url(path), self._where(path), start, length, etag)

    @contextmanager
    def begin(self, notify: Callable[[str], None]) -> Iterator[None]:
        """Create repository and branch. Of two writers one commits; the Hub rejects the other's outdated parent."""
        del notify
        if re.fullmatch(r"[0-9a-f]{40}", self._revision):
            raise ConfigurationError(
                f"{self._location} is a commit, which cannot be written; use a branch, or no revision"
            )
        self._create()
        with tempfile.TemporaryDirectory(prefix="trainjob-hub-") as folder:
            self._spool = Path(folder)
            try:
                yield
            finally:
                self._spool = None
                self._additions.clear()
                self._deletions.clear()

    def write(self, path: str, chunks: Iterable[bytes], size: int) -> None:
        """Keep a file in a temporary file until it is verified, then upload it. It appears with the commit."""
        from huggingface_hub import CommitOperationAdd

        if self._spool is None:
            raise ConfigurationError(f"{self._location} can be written by copies only; use trainjob.data.copy")
        full = self._full(path)
        if full == _GIT_ATTRIBUTES:
            raise UnsafePath(f"{_GIT_ATTRIBUTES} at the root of a repository is managed by the Hub; exclude it")
        file = self._spool / secrets.token_hex(12)
        with os_errors(file), file.open("wb") as spooled:
            for chunk in chunks:
                spooled.write(chunk)
        with errors(self._where(path)):
            addition = CommitOperationAdd(path_in_repo=full, path_or_fileobj=str(file))
        if size >= _UPLOAD_BEFORE_COMMIT:
            self._send([addition], self._where(path))
        # Files that were uploaded are not kept. Hundreds of small files are uploaded by one request, before the commit.
        if addition.path_or_fileobj == b"":
            file.unlink()
        self._additions[full] = addition
        self._deletions.discard(full)

    def write_small(self, path: str, data: bytes) -> None:
        """Write a small file. Writing the manifest creates the commit, which makes all files durable."""
        if path.partition("/")[0] == WORK:
            return  # one commit is atomic: a mark of an incomplete copy is not needed
        self.write(path, [data], len(data))
        if path == NAME:
            self._finish(data)

    def delete(self, path: str) -> None:
        """Remove a file with the commit; no error if it does not exist."""
        full = self._full(path)
        self._additions.pop(full, None)
        if path.partition("/")[0] != WORK and any(full == each for each in self._known()):
            self._deletions.add(full)

    def finish(self) -> None:
        """Do nothing: nothing is written below ``.trainjob``."""

    def _full(self, path: str) -> str:
        return self._location.child(path).path if path else self._location.path

    def _where(self, path: str) -> str:
        return self._location.child(path).uri if path else self._location.uri

    def _url(self, path: str) -> str:
        from huggingface_hub import hf_hub_url

        return str(
            hf_hub_url(
                self._repo, self._full(path), repo_type=self._kind, revision=self._resolve(), endpoint=self._endpoint
            )
        )

    def _resolve(self) -> str:
        """Resolve the revision to the commit that is read."""
        if not self._commit:
            self._commit = retry(self._head)
        return self._commit

    def _head(self) -> str:
        with errors(self._location.uri):
            info = self._api.repo_info(self._repo, repo_type=self._kind, revision=self._revision, timeout=_SILENCE)
        if not info.sha:
            raise StoreUnavailable(f"{self._location}: the hub did not report the commit of this revision")
        return str(info.sha)

    def _tree(self) -> dict[str, Entry]:
        """All files of the commit below the location, by path."""
        if self._files is None:
            commit = self._resolve()
            self._files = retry(lambda: self._tree_of(commit))
        return self._files

    def _tree_of(self, commit: str) -> dict[str, Entry]:
        from huggingface_hub.hf_api import RepoFile

        with errors(self._location.uri):
            # List the complete repository: the location may be a single file, which has no tree.
            items = self._api.list_repo_tree(self._repo, recursive=True, revision=commit, repo_type=self._kind)
            return {item.path: _entry(item) for item in items if isinstance(item, RepoFile)}

    def _known(self) -> Iterable[str]:
        try:
            return self._tree()
        except SourceNotFound:
            return ()

    def _create(self) -> None:
        """Create the repository and the branch if they do not exist."""

        def create() -> None:
            with errors(self._location.uri):
                # Private: publishing is a person's decision.
                self._api.create_repo(self._repo, repo_type=self._kind, private=True, exist_ok=True)
                if self._revision != "main":
                    self._api.create_branch(self._repo, branch=self._revision, repo_type=self._kind, exist_ok=True)

        try:
            self._resolve()
        except SourceNotFound:
            retry(create)
            self._files = None
            self._resolve()

    def _send(self, additions: Sequence[CommitOperationAdd], where: str) -> None:
        """Upload the files that the Hub requires before the commit, except those that it has."""

        def send() -> None:
            with errors(where):
                self._api.preupload_lfs_files(
                    self._repo, [*additions], repo_type=self._kind, revision=self._revision, num_threads=4
                )

        retry(send)
        ignored = [each.path_in_repo for each in additions if getattr(each, "_should_ignore", False)]
        if ignored:
            # huggingface-hub would leave them out silently.
            raise ConfigurationError(
                f"{where}: the repository's .gitignore leaves out {', '.join(sorted(ignored)[:5])}; change the"
                " .gitignore or exclude these files"
            )

    def _finish(self, manifest: bytes) -> None:
        from huggingface_hub import CommitOperationDelete

        additions = list(self._additions.values())
        self._send(additions, self._location.uri)
        deletions = [CommitOperationDelete(path, is_folder=False) for path in sorted(self._deletions)]
        parent = self._commit

        def commit() -> str:
            with errors(self._location.uri):
                info = self._api.create_commit(
                    self._repo,
                    [*deletions, *additions],
                    commit_message=f"trainjob: {len(additions)} files",
                    repo_type=self._kind,
                    revision=self._revision,
                    parent_commit=parent,
                )
            return str(info.oid)

        def commit_or_find() -> str:
            try:
                return commit()
            except StoreUnavailable:
                # Perhaps the commit succeeded and only the response was lost.
                head = self._head()
                if head != parent and self._manifest_at(head) == manifest:
                    return head
                if head != parent:
                    raise ConfigurationError(
                        f"another writer changed {self._location} meanwhile; run the step again"
                    ) from None
                raise

        self._commit = retry(commit_or_find)
        self._files = None
        self._verify(additions)

    def _manifest_at(self, commit: str) -> bytes | None:
        other = HuggingFaceStore(at_revision(self._location, commit))
        try:
            return read_small(other, NAME)
        except SourceNotFound:
            return None

    def _verify(self, additions: Sequence[CommitOperationAdd]) -> None:
        """Compare the commit with the files that were written."""
        found = self._tree()
        for addition in additions:
            entry, path = found.get(addition.path_in_repo), addition.path_in_repo
            if entry is None or entry.size != addition.upload_info.size:
                raise CorruptData(f"{self._location}: commit {self._commit} lacks {path!r} or has it with another size")
            if entry.sha256 and entry.sha256 != addition.upload_info.sha256.hex():
                raise CorruptData(f"{self._location}: commit {self._commit} has other content of {path!r}")


def _entry(item: RepoFile) -> Entry:
    """The facts that are needed; huggingface-hub's object takes ten times as much memory."""
    if item.lfs is not None:
        return Entry(item.path, item.lfs.size, item.lfs.sha256, sha256=item.lfs.sha256)
    return Entry(item.path, item.size, item.blob_id)


def _oid(response: httpx.Response) -> str | None:
    """The git or LFS hash that the Hub, not the target of its redirect, reports; None if it reports none."""
    for each in (*response.history, response):
        if match := _OID.fullmatch(each.headers.get("X-Linked-Etag") or each.headers.get("ETag", "")):
            return match[1]
    return None


# ---------------------------------------------------------------- errors of huggingface-hub


@contextmanager
def errors(where: str) -> Iterator[None]:
    """Translate errors of huggingface-hub into those of `trainjob.errors`."""
    from huggingface_hub import errors as hub_errors

    # Errors of its HTTP client, which is httpx or, in some versions, a fork of it.
    transport: type[Exception] = hub_errors.HfHubHTTPError.__bases__[0]
    try:
        yield
    except TrainJobError:
        raise
    except hub_errors.GatedRepoError:
        raise ConfigurationError(
            f"{where} is gated: accept its conditions on the Hub and set HF_TOKEN to a token of that account"
        ) from None
    except hub_errors.RepositoryNotFoundError:
        hint = "or HF_TOKEN has no access to it" if os.environ.get("HF_TOKEN") else "if it is private, set HF_TOKEN"
        raise SourceNotFound(f"repository {where} does not exist; {hint}") from None
    except (hub_errors.RevisionNotFoundError, hub_errors.EntryNotFoundError):
        raise SourceNotFound(f"{where} does not exist") from None
    except hub_errors.HfHubHTTPError as error:
        raise _translated(where, error) from None
    except hub_errors.HFValidationError as error:
        raise ConfigurationError(f"{where}: {_brief(error)}") from None
    except ValueError as error:
        if "path_in_repo" in str(error):
            raise UnsafePath(f"{where}: {_brief(error)}") from None
        raise StoreUnavailable(f"{where}: {_brief(error)}") from None
    except RuntimeError as error:
        # Of an upload; its cause is the original error.
        if isinstance(error.__cause__, hub_errors.HfHubHTTPError):
            raise _translated(where, error.__cause__) from None
        raise StoreUnavailable(f"{where}: {_brief(error.__cause__ or error)}") from None
    except (transport, OSError) as error:
        raise StoreUnavailable(f"{where}: {_brief(error)}") from None


def _translated(where: str, error: Exception) -> TrainJobError:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", 0)
    if status in (401, 403):
        return ConfigurationError(
            f"access to {where} was denied; set HF_TOKEN to a token with read (or write) permission ({_brief(error)})"
        )
    if status == 507:
        return OutOfSpace(f"no space left for {where}: {_brief(error)}; delete data or raise the quota")
    if status in (408, 409, 412, 425, 429) or status >= 500 or not status:
        unavailable = StoreUnavailable(f"{where}: the hub replied HTTP {status}")
        if response is not None:
            unavailable.retry_after = retrying.seconds(response.headers.get("Retry-After"))
        return unavailable
    return ConfigurationError(f"{where}: the hub replied HTTP {status}: {_brief(error)}")


def _brief(error: BaseException) -> str:
    """The message on one line, without the token."""
    text = " ".join(str(error).split()) or type(error).__name__
    if token := os.environ.get("HF_TOKEN"):
        text = text.replace(token, "***")
    return text[:300]
