"""How a Kubeflow Model Registry handles requests, without HTTP; `tests.fakes.model_registry` serves it.

It follows the server (kubeflow/hub bd07139, 2026-04-29), whose replies tests/registry/recorded.jsonl has: one table for
models and versions and one for artifacts, names that are unique with their parent's id before them, external ids that
are unique in their table, look-ups by name with an unescaped LIKE, custom properties replaced as a whole, integers of
32 bits, model artifacts whose state is unknown after a change of ``model_artifacts`` that does not name it.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, ClassVar
from uuid import uuid4

Json = dict[str, Any]
Query = Mapping[str, str]

_DATES = {"id", "createTimeSinceEpoch", "lastUpdateTimeSinceEpoch"}
_BASE = {"customProperties", "description", "externalId"}
_MODEL = {*_BASE, "owner", "state", "readme", "maturity", "language", "tasks", "provider", "logo", "license"}
_MODEL |= {"licenseLink", "libraryName"}
_VERSION = {*_BASE, "author", "state"}
_ARTIFACT = {*_BASE, "artifactType", "uri", "state", "storageKey", "storagePath", "serviceAccountName"}
_ARTIFACT |= {"modelFormatName", "modelFormatVersion"}
_ARTIFACT |= {f"modelSource{part}" for part in ("Kind", "Class", "Group", "Id", "Name")}
_ARTIFACTS = ("model artifact", "doc artifact")
_FIELDS = {"registered model": _MODEL, "model version": _VERSION, **dict.fromkeys(_ARTIFACTS, _ARTIFACT)}
_STATES = {kind: {"LIVE", "ARCHIVED"} for kind in ("registered model", "model version")}
_STATES |= {
    kind: {"UNKNOWN", "PENDING", "LIVE", "MARKED_FOR_DELETION", "DELETED", "ABANDONED", "REFERENCE"}
    for kind in _ARTIFACTS
}
_KINDS = ("Int", "Double", "String", "Bool", "Struct", "Proto")
_VALUES = {f"Metadata{kind}Value": f"{kind.lower()}_value" for kind in _KINDS}
_CONDITION = re.compile(r"""\s*(?:(\w+)|`([^`]+)`)\s*(=|!=|LIKE)\s*(?:"([^"]*)"|'([^']*)')\s*""", re.IGNORECASE)


def _kind(artifact: Json) -> str:
    return str(artifact.get("artifactType", "")).replace("-", " ")


class Refused(Exception):
    """An error response."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)

    def body(self) -> Json:
        if self.status == 405 or "page not found" in str(self):
            return {}
        status = HTTPStatus.BAD_REQUEST if self.status == 422 else HTTPStatus(self.status)
        return {"code": status.phrase, "message": str(self)}


@dataclass
class _Row:
    id: int
    kind: str
    stored: str  # the name, with the parent's id before it
    value: Json
    parent: int | None

    @property
    def json(self) -> Json:
        given = {key: value for key, value in self.value.items() if value not in (None, "")}
        return {"id": str(self.id), "customProperties": {}, **given}


@dataclass
class Store:
    """The database.

    Args:
        mysql: Compare text as MySQL's usual collations do: without regard to case.
        filters: Whether ``filterQuery`` and ``artifactType`` are supported; older servers ignore them.
    """

    mysql: bool = False
    filters: bool = True
    _contexts: list[_Row] = field(default_factory=list)
    _artifacts: list[_Row] = field(default_factory=list)

    # First segment of a path -> kind of object.
    KINDS: ClassVar[Mapping[str, str]] = {
        "registered_model": "registered model",
        "model_version": "model version",
        "model_artifact": "model artifact",
        "artifact": "artifact",
    }

    def handle(  # noqa: PLR0911 - one for each kind of request
        self, method: str, path: str, query: Query, body: Json | None
    ) -> tuple[int, Json]:
        """Status and body of the answer.

        Raises:
            Refused: With the status and body of an error response.
        """
        segments = path.strip("/").split("/")
        one = self.KINDS.get(segments[0].removesuffix("s"))
        if one is None or len(segments) > 3:
            raise Refused(404, "404 page not found\n")
        many = segments[0].endswith("s")
        match (method, many, segments[1:]):
            case ("GET", False, []):
                return 200, self._find(one, query)
            case ("GET", True, []):
                ignored = {"filterQuery"} if one == "model artifact" else set()
                return 200, self._list(self._of(one), {key: query[key] for key in query.keys() - ignored})
            case ("GET", True, [number]):
                return 200, self._get(one, number).json
            case ("GET", True, [number, "versions"]) if one == "registered model":
                self._id(number)
                return 200, self._list(self._of("model version", number), query)
            case ("GET", True, [number, "artifacts"]) if one == "model version":
                return 200, self._list(self._of("artifact", number), query)
            case ("POST", True, []) if body is not None:
                return 201, self._create(_kind(body) if one == "artifact" else one, body, body.get("registeredModelId"))
            case ("POST", True, [_, "versions"]) if body is not None:
                return 201, self._create("model version", body, body.get("registeredModelId"))
            case ("POST", True, [number, "artifacts"]) if body is not None:
                self._get("model version", number)
                if body.get("id"):
                    return 200, self._change(_kind(body), str(body["id"]), body)
                return 201, self._create(_kind(body), body, number)
            case ("PATCH", True, [number]) if body is not None:
                unknown = {"state": "UNKNOWN"} if one == "model artifact" else {}
                return 200, self._change(self._get(one, number).kind, number, unknown | body)
        raise Refused(405, "")

    # --- reading

    def _table(self, kind: str) -> list[_Row]:
        return self._artifacts if kind.endswith("artifact") else self._contexts

    def _of(self, kind: str, parent: str | None = None) -> list[_Row]:
        rows = [row for row in self._table(kind) if kind in (row.kind, "artifact")]
        return [row for row in rows if parent is None or str(row.parent) == parent]

    def _id(self, text: str) -> int:
        if not re.fullmatch(r"-?\d{1,10}", text) or abs(int(text)) >= 1 << 31:
            raise Refused(400, f"invalid ID: {text}: bad request")
        return int(text)

    def _get(self, kind: str, number: str) -> _Row:
        wanted = self._id(number)
        for row in self._of(kind):
            if row.id == wanted:
                return row
        raise Refused(404, f"no {'artifact' if kind.endswith('artifact') else kind} found for id {number}: not found")

    def _find(self, kind: str, query: Query) -> Json:
        name, external, parent = (query.get(key) or None for key in ("name", "externalId", "parentResourceId"))
        child = kind != "registered model"
        if child and parent is not None:
            self._id(parent)
        if external is None and (name is None or (child and parent is None)):
            needed = "(name and parentResourceId), or" if child else "name or"
            raise Refused(400, f"invalid parameters call, supply either {needed} externalId: bad request")
        rows = self._of(kind, parent)
        if name is not None:
            pattern = f"{parent}:{name}" if kind == "model version" else f"%:{name}" if child else name
            rows = [row for row in rows if self._like(row.stored, pattern)]
        else:
            rows = [row for row in rows if self._same(row.value.get("externalId"), external)]
        of = f"parentResourceId={parent or ''}, " if child else ""
        criteria = f"{kind}s found for name={name or ''}, {of}externalId={external or ''}: not found"
        if len(rows) != 1:
            raise Refused(404, f"{'multiple' if rows else 'no'} {criteria}")
        return rows[0].json

    def _list(self, rows: list[_Row], query: Query) -> Json:
        if self.filters:
            if (wanted := query.get("artifactType")) is not None:
                if wanted.replace("-", " ") not in (*_FIELDS, "dataset artifact", "metric", "parameter"):
                    raise Refused(400, f"invalid artifact type {wanted}: bad request")
                rows = [row for row in rows if row.value.get("artifactType") == wanted]
            if condition := query.get("filterQuery"):
                rows = [row for row in rows if self._fits(row, condition)]
        times = {"CREATE_TIME": "createTimeSinceEpoch", "LAST_UPDATE_TIME": "lastUpdateTimeSinceEpoch"}
        by = times.get(query.get("orderBy", ""))

        def order(row: _Row) -> int:
            return int(row.value[by]) if by else row.id

        down = query.get("sortOrder") == "DESC"
        rows = sorted(rows, key=lambda row: (order(row), row.id), reverse=down)
        if token := query.get("nextPageToken"):
            number, _, value = base64.b64decode(token).decode().partition(":")
            after = (int(value), int(number))
            rows = [row for row in rows if ((order(row), row.id) < after if down else (order(row), row.id) > after)]
        size = int(query.get("pageSize") or 0)
        page = rows[:size] if size else rows
        following = ""
        if page and len(page) < len(rows):
            following = base64.b64encode(f"{page[-1].id}:{order(page[-1])}".encode()).decode()
        return {"items": [row.json for row in page], "nextPageToken": following, "pageSize": size, "size": len(page)}

    def _fits(self, row: _Row, query: str) -> bool:
        for condition in re.split(r"\s+AND\s+", query, flags=re.IGNORECASE):
            match = _CONDITION.fullmatch(condition)
            if match is None:
                raise Refused(400, f"invalid filter query syntax: {condition}: bad request")
            name = match[1] or match[2]
            value = row.value.get(name)
            if value is None and name in row.value.get("customProperties", {}):
                value = row.value["customProperties"][name].get("string_value")
            wanted = match[4] if match[4] is not None else match[5]
            operator = match[3].upper()
            held = self._like(value, wanted) if operator == "LIKE" else self._same(value, wanted)
            if value is None or held == (operator == "!="):
                return False
        return True

    def _same(self, one: object, other: object) -> bool:
        if self.mysql and isinstance(one, str) and isinstance(other, str):
            return one.casefold() == other.casefold()
        return one is not None and one == other

    def _like(self, text: object, pattern: str) -> bool:
        expression = "".join({"%": ".*", "_": "."}.get(char, re.escape(char)) for char in pattern)
        flags = re.DOTALL | (re.IGNORECASE if self.mysql else 0)
        return isinstance(text, str) and re.fullmatch(expression, text, flags) is not None

    # --- writing

    def _create(self, kind: str, body: Json, parent: str | None) -> Json:
        if kind not in _FIELDS:
            raise Refused(400, f"invalid artifact type {kind!r}: bad request")
        child = kind != "registered model"
        self._check(kind, body, {"name", "registeredModelId"} if kind == "model version" else {"name"})
        for required in () if kind.endswith("artifact") else ("name", *(["registeredModelId"] if child else [])):
            if not body.get(required):
                raise Refused(422, f"required field '{required}' is zero value.")
        name = body.get("name") or str(uuid4())
        table = self._table(kind)
        stored = f"{parent or uuid4()}:{name}" if child else name
        if len(stored) > 255 or len(body.get("externalId") or "") > 255:
            raise Refused(500, f"error saving {kind}: value too long for type character varying(255)")
        for row in table:
            if row.kind == kind and self._same(row.stored, stored):
                raise Refused(409, f"{kind} with name {name} already exists: conflict")
        self._check_unique(kind, body, None)
        now = str(time.time_ns() // 1_000_000)
        initial = {"name": name} if kind.endswith("artifact") else {"state": "LIVE"}
        times = {"createTimeSinceEpoch": now, "lastUpdateTimeSinceEpoch": now}
        more = {"artifactType": kind.replace(" ", "-")} if kind.endswith("artifact") else {}
        number = 1 + max((row.id for row in table), default=0)
        row = _Row(number, kind, stored, {**initial, **body, **more, **times}, int(parent) if parent else None)
        table.append(row)
        return row.json

    def _change(self, kind: str, number: str, body: Json) -> Json:
        row = self._get(kind, number)
        self._check(kind, body, {"name", "registeredModelId", *_DATES} if body.get("id") else set())
        self._check_unique(kind, body, row)
        fixed = {"name", "id", "registeredModelId", "createTimeSinceEpoch"}
        row.value |= {key: value for key, value in body.items() if value is not None and key not in fixed}
        row.value["lastUpdateTimeSinceEpoch"] = str(time.time_ns() // 1_000_000)
        return row.json

    def _check_unique(self, kind: str, body: Json, own: _Row | None) -> None:
        external = body.get("externalId")
        if external and any(
            row is not own and self._same(row.value.get("externalId"), external) for row in self._table(kind)
        ):
            # The server reports the wrong cause.
            name = own.value["name"] if own else body.get("name")
            raise Refused(409, f"{kind} with name {name} already exists: conflict")
        names = list(body.get("customProperties") or {})
        if self.mysql and len({name.casefold() for name in names}) < len(names):
            raise Refused(409, f"{kind} with name {body.get('name')} already exists: conflict")

    def _check(self, kind: str, body: Json, more: Iterable[str]) -> None:
        if unknown := set(body) - _FIELDS[kind] - set(more):
            raise Refused(400, f'json: unknown field "{min(unknown)}"')
        if (state := body.get("state")) is not None and state not in _STATES[kind]:
            raise Refused(400, f"{state} is not a valid state: bad request")
        for name, value in (body.get("customProperties") or {}).items():
            key = _VALUES.get(value.get("metadataType"))
            if key is None or set(value) != {"metadataType", key}:
                raise Refused(400, f"metadataType not found for {name}: bad request")
            if key == "int_value" and not (re.fullmatch(r"-?\d+", value[key]) and abs(int(value[key])) < 1 << 31):
                raise Refused(400, f"unable to decode as int32 for key {name}: bad request")
            if len(name) > 255:
                raise Refused(500, "error creating property: value too long for type character varying(255)")
