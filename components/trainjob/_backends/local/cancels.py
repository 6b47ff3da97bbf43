"""Records of cancels on this machine: a file for each, which launches of the same key read.

::

    <home>/jobs/<namespace>/.cancelled/version                 number of the latest cancel
    <home>/jobs/<namespace>/.cancelled/<hash of the key>-<number>.json  a record, see `Cancel`

The number orders cancels and launches, so that no clock is needed.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainjob._backends.local import permissions
from trainjob._backends.local.store import FULL_DISK, OtherFormat, make_namespace, read_json, write_json
from trainjob._manifest.attempts import CANCEL_KEPT, Cancel, recent, stops_by
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
    """The version of the records, and the cancels of a key.

    Raises:
        OtherFormat: A record is not readable: whether it applies to a launch is unknown.
    """
    records = directory / ".cancelled"
    version = _version(records)
    found = [each for path in sorted(records.glob(f"{work}-*.json")) if (each := read_json(path)) is not None]
    return version, recent(map(_cancel, found), datetime.now(UTC))


def _cancel(found: Mapping[str, Any]) -> Cancel:
    tried = found.get("tried")
    return Cancel(
        version=_number(found),
        tried=tried if isinstance(tried, int) else None,
        uid=str(found.get("uid") or ""),
        action=stops_by(found.get("action")),
        at=parse_time(found.get("at")),
        record=str(found.get("record") or ""),
    )


def _version(records: Path) -> int:
    found = read_json(records / "version")
    return 0 if found is None else _number(found)


def _number(found: Mapping[str, Any]) -> int:
    if not isinstance(version := found.get("version"), int):
        raise OtherFormat(
            f"a record of a cancel is damaged ({found}): remove the directory .cancelled of its namespace"
        )
    return version


@contextmanager
def _locked(directory: Path) -> Iterator[Path]:
    """Exclude other writers of the records of a namespace."""
    records = directory / ".cancelled"
    permissions.make(directory.parents[1])
    make_namespace(directory)
    records.mkdir(mode=0o700, exist_ok=True)
    with open(records / "lock", "ab", opener=permissions.opener) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield records
