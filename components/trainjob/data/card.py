"""The model card of an exported model: its provenance as Markdown for people."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from trainjob.data import file_manifest
from trainjob.data.provenance import Record
from trainjob.version import __version__

_SHOWN = 100  # files; a checkpoint of many shards has a few hundred, a dataset exported as a model many more
_HUB = re.compile(r"hf://(?:models/|datasets/)?(?P<name>[^/@]+/[^/@]+)")


def card(record: Record) -> bytes:
    """Make the card of a model, with the front matter that the Hugging Face Hub and its tools read."""
    matter = yaml.safe_dump(_matter(record), sort_keys=True, allow_unicode=True)
    return "\n".join([f"---\n{matter}---", "", *_lines(record), ""]).encode()


def _matter(record: Record) -> dict[str, Any]:
    hub = {
        field: [match["name"] for origin in record.origins(field) if (match := _HUB.match(origin.get("uri", "")))]
        for field in ("base_model", "datasets")
    }
    return {"model_name": record.name, "tags": ["trainjob"], **{field: names for field, names in hub.items() if names}}


def _lines(record: Record) -> Iterator[str]:
    manifest, facts = record.manifest, record.facts
    yield f"# {_plain(record.name)}"
    yield ""
    yield f"Exported by trainjob {__version__}. `{file_manifest.PROVENANCE}` has the provenance for programs."
    summary = [("Export", _code(record.export_id)), ("Location", _code(record.uri)), ("Digest", _code(manifest.digest))]
    number = len(manifest.files)
    summary.append(("Size", f"{manifest.size:,} bytes in {number:,} file{'s' * (number != 1)}"))
    if facts.parameters:
        summary.append(("Parameters", f"{facts.parameters:,}"))
    if facts.formats:
        summary.append(("Formats", ", ".join(_code(each) for each in facts.formats)))
    yield from _table("", ("", ""), summary)
    yield from _table(
        "Metrics", ("Metric", "Value"), [(_code(key), str(record.metrics[key])) for key in record.metrics]
    )
    for title, field in (("Datasets", "datasets"), ("Base model", "base_model")):
        yield from _table(title, ("Location", "Digest"), [_origin(each) for each in record.origins(field)])
    yield from _table("How it was trained", ("", ""), _training(record))
    yield from _table("More", ("", ""), [(_plain(key), _code(value)) for key, value in record.rest.items()])
    files = [(_code(file.path), f"{file.size:,}", _code(file.sha256)) for file in manifest.files]
    yield from _table("Files", ("Path", "Bytes", "SHA-256"), files[:_SHOWN])
    if len(files) > _SHOWN:
        yield f"\n… and {len(files) - _SHOWN:,} more, in `{file_manifest.NAME}`."


def _training(record: Record) -> Iterator[tuple[str, str]]:
    job = record.provenance.get("trainjob")
    if isinstance(job, dict):
        place = "/".join(str(job[key]) for key in ("namespace", "name") if job.get(key))
        more = ", ".join(f"{key} {_code(job[key])}" for key in ("attempt", "uid") if job.get(key))
        yield "TrainJob", f"{_code(place)}{', ' if more else ''}{more}"
        for name in ("key", "runtime", "started", "finished"):
            if job.get(name):
                yield name.capitalize(), _code(job[name])
    elif job:
        yield "TrainJob", _code(job)
    if record.run:
        yield "Run", _code(record.run)
    for title, field in (("Image", "images"), ("Code", "code")):
        for origin in record.origins(field):
            yield title, " ".join(each for each in _origin(origin) if each)


def _origin(origin: dict[str, Any]) -> tuple[str, str]:
    location = origin.get("uri") or origin["name"]
    version = origin.get("annotations", {}).get("version")
    digests = [f"{algorithm}:{value}" for algorithm, value in origin.get("digest", {}).items()]
    return (
        _code(location) + (f", version {_code(version)}" if version else ""),
        ", ".join(_code(digest) for digest in digests),
    )


def _table(title: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if lines:
        yield ""
        if title:
            yield f"## {title}\n"
        yield "| " + " | ".join(head) + " |"
        yield "|" + "---|" * len(head)
        yield from lines


def _code(value: Any) -> str:
    """A code span, in which Markdown and HTML have no effect; also valid inside a table."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
    text = " ".join(text.split()).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if "`" in text or not text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _plain(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|~!])", r"\\\1", " ".join(text.split()))
