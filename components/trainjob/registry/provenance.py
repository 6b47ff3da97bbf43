"""Provenance of a model in a Kubeflow Model Registry's fields (KEP-12020), and as tags."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from trainjob._support.foreign import Unreadable, json_of

PREFIX = "trainjob.provenance."
"""Prefix of the tags that `trainjob.data.export` makes of its ``provenance``."""
LONGEST = 65_535
"""Maximum bytes of a tag's value: the size of MLflow's column on MySQL (migration bda7b8c39065). MLflow itself accepts
100,000 characters (3.17, ``MAX_MODEL_REGISTRY_TAG_VALUE_LENGTH``)."""

_FIELDS = ("kind", "class", "group", "id", "name")
# airflow/<deployment>/<dag>/<run>/<map index>/<task>, see `trainjob_airflow.identity`; a deployment may be a URL.
_AIRFLOW = re.compile(r"airflow/.+/([^/]+)/([^/]+)/(-?\d+)/([^/]+)")


def tags(provenance: Mapping[str, Any]) -> dict[str, str]:
    """Convert a provenance to tags of a version: texts as they are, other fields as JSON.

    A value that is too long for a registry is truncated and ends with the digest of the complete value, which is in
    ``provenance.json`` beside the model.
    """
    return {f"{PREFIX}{name}": _shortened(_text(value)) for name, value in provenance.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _shortened(text: str) -> str:
    data = text.encode()
    if len(data) <= LONGEST:
        return text
    digest = hashlib.sha256(data).hexdigest()
    note = f"… (cut off: {len(data)} bytes, sha256:{digest}; complete in provenance.json)"
    return data[: LONGEST - len(note.encode())].decode(errors="ignore") + note


def model_source(tags: Mapping[str, str]) -> dict[str, str]:
    """Make ``modelSourceKind``, ``modelSourceClass``, ``…Group``, ``…Id`` and ``…Name`` of a model artifact.

    The source is the run (``{"kfp": run id}`` or the key of an Airflow task), overridden by a ``source`` with ``kind``,
    ``class``, ``group``, ``id`` and ``name``. The registry's UI links kind ``kfp``, class ``pipelinerun``, whose group
    is the namespace of the run.
    """
    run, source = (_read(tags.get(f"{PREFIX}{name}", "")) for name in ("run", "source"))
    trained = _read(tags.get(f"{PREFIX}trainjob", ""))
    found: dict[str, Any] = {}
    if isinstance(run, Mapping) and isinstance(run.get("kfp"), str):
        namespace = trained.get("namespace", "") if isinstance(trained, Mapping) else ""
        found = {"kind": "kfp", "class": "pipelinerun", "group": namespace, "id": run["kfp"], "name": run["kfp"]}
    elif isinstance(run, str) and (match := _AIRFLOW.fullmatch(run)):
        dag, dag_run, index, task = match.groups()
        path = "/".join(quote(part, safe="") for part in (dag, dag_run, task, index))
        found = {"kind": "airflow", "class": "dagrun", "group": dag, "id": path, "name": f"{dag}/{dag_run}"}
    if isinstance(source, Mapping):
        found |= source
    return {f"modelSource{name.capitalize()}": str(found[name]) for name in _FIELDS if found.get(name)}


def author(source: Mapping[str, str]) -> str:
    """The author of a version, as KEP-12020 defines it for pipelines."""
    names = {"kfp": "Kubeflow Pipelines", "airflow": "Apache Airflow"}
    return names.get(source.get("modelSourceKind", ""), "trainjob")


def _read(text: str) -> Any:
    try:
        return json_of(text, "a value in the registry")
    except Unreadable:
        return text
