"""Records of cancels on this machine: a file for each, which launches of the same key read.

::

    <home>/jobs/<namespace>/.cancelled/version                 number of the latest cancel
    <home>/jobs/<namespace>/.cancelled/<hash of the key>-<number>.json  a record, see `Cancel`

The number orders cancels and launches, so that no clock is needed.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from trainjob._backends.local import permissions
from trainjob._backends.local.store import FULL_DISK, OtherFormat, read_json, write_json
from trainjob._manifest.attempts import CANCEL_KEPT, Cancel, recent
from trainjob._support.kube_objects import parse_time
from trainjob.errors import Rejected


def write(directory: Path, work: str, cancel: Cancel) -> Cancel | None:
    """Write the record of a cancel, with the next version, and remove old records.

    Args:
        directory: Of the jobs of a namespace.
        work: Hash of the key.
        cancel: The cancel, without version, time and name of the record.

    Returns:
        The cancel with its version; None on a full disk, on which a launch that is on its way cannot store its job.

    Raises:
        Rejected: The directory cannot be written.
    """
    try:
        return _write(directory, work, cancel)
    except OSError as error:
        if error.errno in FULL_DISK:
            return None
        raise Rejected(f"the cancel cannot be recorded in {directory}: {error.strerror}") from error


def _write(directory: Path, work: str, cancel: Cancel) -> Cancel:
    now = datetime.now(UTC)
    with _locked(directory) as records:
        version = _version(records) + 1
        write_json(records / "version", {"version": version})
        done = replace(cancel, version=version, at=now, record=f"{work}-{version}")
        write_json(records / f"{done.record}.json", {**asdict(done), "at": now.isoformat()})
        for path in records.glob("*.json"):
            with suppress(OtherFormat):  # of a newer trainjob, which removes it
                written = parse_time((read_json(path) or {}).get("at"))
                if written is None or now - written > CANCEL_KEPT:
                    path.unlink(missing_ok=True)
    return done


def read(directory: Path, work: str) -> tuple[int, list[Cancel]]:
    """The version of the records, and the cancels of a key."""
    records = directory / ".cancelled"
    version = _version(records)
    found = [each for path in sorted(records.glob(f"{work}-*.json")) if (each := read_json(path)) is not None]
    cancels = [Cancel(**{**each, "at": parse_time(each["at"])}) for each in found]
    return version, recent(cancels, datetime.now(UTC))


def _version(records: Path) -> int:
    return int((read_json(records / "version") or {}).get("version", 0))


@contextmanager
def _locked(directory: Path) -> Iterator[Path]:
    """Exclude other writers of the records of a namespace."""
    records = directory / ".cancelled"
    for level in (directory.parents[1], directory.parent, directory, records):
        permissions.make(level, link=level == directory.parents[1])
    with open(records / "lock", "ab", opener=permissions.opener) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield records
