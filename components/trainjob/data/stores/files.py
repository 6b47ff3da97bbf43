"""The local file system as a store."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from trainjob._support import durable
from trainjob.data.file_manifest import WORK
from trainjob.data.locations import Location
from trainjob.data.parallel import for_each
from trainjob.data.stores.base import CHUNK, Entry, Resumable, WritableStore
from trainjob.data.stores.parts import Part, start_writing
from trainjob.data.stores.translated import Translated
from trainjob.errors import ConfigurationError, CorruptData, OutOfSpace, SourceNotFound, StoreUnavailable, UnsafePath

_NO_FILE = "{} is neither a file nor a directory; exclude it"
_SYNCS = 16  # files at once: a disk syncs several in the time of one


_MISSES = 100  # writers that finish at the same moment; more misses mean that no directory can be made, as in /proc


class FileStore(WritableStore):
    """A directory or a single file of this machine."""

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._root = location.local
        self._unsynced: set[str] = set()  # files and directories, by their relative paths
        self._made: set[str] = set()
        # Random: on a file system without locks, another process may be writing the same files.
        self._name, self._parts = secrets.token_hex(12), itertools.count()
        self._alone = False

    def list(self) -> Iterator[Entry]:
        """List all files. Links to files inside the root are followed; other links are listed as refused."""
        root, folders = os.path.realpath(self._root), [""]
        with os_errors(self._root):
            while folders:
                folder = folders.pop()
                try:
                    # Not `Path.walk` or `os.walk`: listing small files would take as long as reading them.
                    found = os.scandir(f"{root}/{folder}")
                except FileNotFoundError:
                    continue
                with found:
                    for each in found:
                        path = f"{folder}{each.name}"
                        if each.is_symlink() and (why := _refusal(each, root)):
                            yield Entry(path, -1, refused=why)
                        elif each.is_dir():
                            folders.append(f"{path}/")
                        elif stat.S_ISREG((status := each.stat()).st_mode):
                            yield Entry(path, status.st_size, _etag(status))
                        else:
                            yield Entry(path, -1, refused=_NO_FILE.format(each.path))

    def stat(self, path: str) -> Entry:
        """Return one file; raise SourceNotFound if it does not exist."""
        full = self._root / path
        with os_errors(full):
            if full.is_dir():
                raise SourceNotFound(f"{full} is a directory")
            return _entry(full.stat(), full, path)

    def read(self, path: str, *, start: int = 0, length: int | None = None, etag: str = "") -> Iterator[bytes]:
        """Read the bytes from ``start`` on: ``length`` of them, or to the end."""
        full = self._at(path)
        with os_errors(full), open(full, "rb", buffering=0, opener=_without_wait) as file:
            status = os.fstat(file.fileno())
            before = _entry(status, full, path).etag
            if start:
                file.seek(start)
            # Read no more than the file's size: a buffer for a full chunk costs more than a small file. Some file
            # systems report no size (FUSE). The entity tag reveals bytes that are appended meanwhile.
            left = length if length is not None else (status.st_size or CHUNK) - start
            while left > 0 and (chunk := file.read(min(left, CHUNK))):
                left -= len(chunk)
                yield chunk
            after = _etag(os.fstat(file.fileno()))
        if after != before or (etag and etag != before):
            raise CorruptData(f"{full} changed while it was read; run the step again when nothing writes to it")

    def write(self, path: str, chunks: Iterable[bytes], size: int) -> None:
        """Write a part file under ``.trainjob`` and rename it. It is on disk when `write_small` returns."""
        # Syncing after each of many files would take longer than downloading them. Starting the write-back of each
        # small file would take as long as writing it.
        self._write(path, chunks, start_writing if size >= CHUNK else None)
        self._unsynced.add(path)

    def resume_write(self, path: str, content: Resumable, size: int, identity: str) -> None:
        """Write a file and keep its part if a store fails or this process ends, but not if the data is wrong."""
        if not self._alone:
            # Another process may be writing the same part.
            self.write(path, content, size)
            return
        full = self._at(path)
        part = Part(self._root / WORK, path, identity)
        try:
            with os_errors(full):
                self._make_parent(path)
                part.append(content.after(part.held()), lambda: content.digest)
                part.move(Path(full))
        except Exception as error:
            if not isinstance(error, StoreUnavailable):
                part.remove()
            raise

    def write_small(self, path: str, data: bytes) -> None:
        """Create or replace a small file durably."""
        self._sync()
        self._write(path, [data], os.fsync)
        self._sync()

    def create(self, path: str, data: bytes) -> bool:
        """Create a small file durably by a hard link, which fails if the file exists."""
        part = f"{WORK}/{self._name}-{next(self._parts)}.new"
        self._write(part, [data], os.fsync)
        try:
            with os_errors(self._at(path)):
                self._make_parent(path)
                try:
                    os.link(self._at(part), self._at(path))
                except FileExistsError:
                    return False
        finally:
            os.unlink(self._at(part))
        self._sync()
        return True

    def delete(self, path: str) -> None:
        """Remove a file. Directories that become empty remain."""
        full = self._root / path
        self._confine(full.parent)
        with os_errors(full):
            try:
                full.unlink()
                self._unsynced.discard(path)
                self._unsynced.add(path.rpartition("/")[0])
            except OSError as error:
                # ENAMETOOLONG: a try failed because of this name, so the file does not exist either.
                if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):
                    raise
        self._sync()

    @contextmanager
    def begin(self, notify: Callable[[str], None]) -> Iterator[None]:
        """Allow one writer at a time, by a lock that ends with its process."""
        work = self._root / WORK
        missed = 0
        while True:
            with os_errors(work):
                if self._root.is_file():
                    raise ConfigurationError(f"{self._root} is a file; the target must be a directory")
                try:
                    file = _open_lock(work)
                except (FileExistsError, FileNotFoundError) as error:
                    # The previous writer finished and removed the directory, perhaps during our `mkdir`.
                    missed += 1
                    if _is_no_directory(work):
                        raise
                    if missed > _MISSES:
                        raise ConfigurationError(f"{self._root} cannot be created: {error.strerror}") from None
                    continue
            try:
                alone = _lock(file, lambda: notify(f"waiting for another process that writes to {self._root}"))
                if not _same(file, work / "lock"):
                    continue
                self._remove_parts()
                self._alone = alone
                yield
                return
            finally:
                self._alone = False
                os.close(file)

    def finish(self) -> None:
        """Remove everything below ``.trainjob``."""
        work = self._root / WORK
        with os_errors(work):
            for path in work.iterdir():
                if path.name != "lock":
                    path.unlink()
            # The lock is removed last: a process that waits for it sees that it was replaced, and takes the new one.
            (work / "lock").unlink()
            with suppress(OSError):
                work.rmdir()  # fails if the next writer has already created its files

    def _remove_parts(self) -> None:
        """Remove the part files of writers that were killed."""
        work = self._root / WORK
        with os_errors(work):
            for part in work.glob("*.part"):
                part.unlink(missing_ok=True)

    def _at(self, path: str) -> str:
        """The full path; no ``Path``: with many small files, creating those would take a quarter of the time."""
        return f"{self._root}/{path}" if path else str(self._root)

    def _write(self, path: str, chunks: Iterable[bytes], end: Callable[[int], None] | None) -> None:
        full, part = self._at(path), self._at(f"{WORK}/{self._name}-{next(self._parts)}.part")
        try:
            with os_errors(full):
                self._make_parent(path)
                file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
                try:
                    for chunk in chunks:
                        view = memoryview(chunk)
                        while view:
                            view = view[os.write(file, view) :]
                    if end is not None:
                        end(file)
                finally:
                    os.close(file)
                os.replace(part, full)
        except BaseException:
            # Free the space on a full disk.
            with suppress(FileNotFoundError):
                os.unlink(part)
            raise

    def _make_parent(self, path: str) -> None:
        folder = path.rpartition("/")[0]
        self._unsynced.add(folder)
        if folder in self._made:
            return
        parent = Path(self._at(folder))
        self._confine(parent)
        parent.mkdir(parents=True, exist_ok=True)
        self._made.add(folder)
        while folder:
            folder = folder.rpartition("/")[0]
            self._unsynced.add(folder)

    def _confine(self, folder: Path) -> None:
        root, real = self._root.resolve(), folder.resolve()
        if real != root and root not in real.parents:
            raise UnsafePath(f"{folder} leads out of {self._root} through a link; remove the link")

    def _sync(self) -> None:
        """Sync files and, since that does not cover their names, their directories."""
        paths, self._unsynced = tuple(self._unsynced), set()
        for_each(lambda path: _fsync(self._at(path)), paths, _SYNCS)


def _refusal(link: os.DirEntry[str], root: str) -> str:
    """Why a link is not followed; empty if it is."""
    try:
        status = link.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return f"{link.path} is a link to {os.readlink(link.path)}, which does not exist; exclude it"
    if stat.S_ISDIR(status.st_mode):
        return f"{link.path} is a link to a directory; exclude it, or replace it by a copy of its target"
    if not os.path.realpath(link.path).startswith(root.rstrip("/") + "/"):
        return f"{link.path} is a link that leads out of {root}; exclude it, or replace it by a copy of its target"
    return ""


def _entry(status: os.stat_result, full: Path | str, path: str) -> Entry:
    if not stat.S_ISREG(status.st_mode):
        raise UnsafePath(_NO_FILE.format(full))
    return Entry(path, status.st_size, _etag(status))


def _without_wait(path: str, flags: int) -> int:
    """Open a file; a FIFO without a writer, too, which `_entry` then refuses."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _fsync(path: str) -> None:
    with os_errors(path):
        durable.sync(path)


def _etag(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"


def _open_lock(work: Path) -> int:
    """Open the lock of a target, in its `WORK` directory, which is created if needed.

    Raises:
        UnsafePath: The directory or an entry of it is a link: others may be able to write to the target. Or an entry
            is neither a file nor a directory: a FIFO would block the transfer.
    """
    if work.is_symlink():
        raise UnsafePath(f"{work} is a link, and nothing is written through it; remove the link")
    work.mkdir(parents=True, exist_ok=True)
    folder = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with os.scandir(folder) as found:
            entries = {each.name: each for each in found}
        for name, each in sorted(entries.items()):
            if each.is_symlink():
                raise UnsafePath(f"{work / name} is a link, and nothing is written through it; remove the link")
            if not each.is_file() and not each.is_dir():
                raise UnsafePath(f"{work / name} is neither a file nor a directory; remove it")
        return os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)
    finally:
        os.close(folder)


def _lock(file: int, waiting: Callable[[], None]) -> bool:
    """Take the lock; False if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        # Some network file systems have no locks. Writers of the same content still write the same bytes, each file
        # appears complete, and the manifest does not match a mixture of different contents.
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        return False
    return True


def _same(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _is_no_directory(folder: Path) -> bool:
    try:
        return not stat.S_ISDIR(folder.lstat().st_mode)
    except FileNotFoundError:
        return False


def os_errors(path: Path | str) -> Translated:
    """Translate errors of the operating system into those of `trainjob.errors`."""
    return Translated(partial(_translate, path))


def _translate(path: Path | str, error: BaseException) -> None:
    match error:
        case FileNotFoundError():
            raise SourceNotFound(f"{path} does not exist") from None
        case PermissionError():
            raise ConfigurationError(f"no permission for {error.filename or path}") from None
        case IsADirectoryError() | NotADirectoryError() | FileExistsError():
            raise UnsafePath(f"{path}: a file and a directory have the same name; rename one of them") from None
        case OSError(errno=errno.ENAMETOOLONG):
            raise UnsafePath(
                f"the name of {path} is too long for this file system; rename or exclude the file"
            ) from None
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            raise OutOfSpace(f"no space left for {path}; free space or use a larger volume") from None
        case OSError(errno=errno.EFBIG):
            raise OutOfSpace(f"{path} is larger than the file system or a limit (ulimit -f) allows") from None
        case OSError(errno=errno.EROFS):
            raise ConfigurationError(f"{path} is on a read-only file system") from None
        case OSError():
            raise StoreUnavailable(f"{path}: {error.strerror or error}") from None
