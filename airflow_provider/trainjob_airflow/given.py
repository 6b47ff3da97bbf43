"""Values of a run in templated fields: of tasks, parameters and templates. They become what the field takes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from trainjob_airflow.exceptions import TrainJobFatal

Location = tuple[str | int, ...]
Sources = dict[Location, Any]
"""Location in a field -> the template, XCom or parameter that a run replaces there."""

_TEXTS = frozenset(
    {
        *("runtime", "image", "checkpoints", "managed_by", "unattended", "namespace"),
        *("trainjob_conn_id", "registry", "source", "target", "digest", "verify_key", "if_missing", "name", "alias"),
        *("metric", "mode", "export_id", "sign", "candidate", "dataset", "champion", "dataset_digest", "workspace"),
        *("key", "job", "condition", "phases", "action", "launched_by"),
    }
)
"""Fields that are text."""
_OF_TEXTS = frozenset(
    {
        *("command", "args", "env", "inputs", "outputs", "labels", "annotations"),
        *("packages_to_install", "pip_index_urls"),
    }
)
"""Fields that have texts."""
EXACT = _TEXTS | _OF_TEXTS
"""Fields in which a text stays as a template writes it: ``1.10`` is not a number there."""

_VALUES = frozenset({"metrics", "datasets", "base_model", "evaluation"})
"""Fields whose values are XComs: None is a value, too."""
_JSON = _VALUES | {"study", "gate", "code", "provenance", "torchtune"}
"""Fields whose numbers stay numbers."""
_OTHERS = frozenset(
    {
        *("spec", "num_nodes", "num_proc_per_node", "active_deadline_seconds", "stall_timeout", "suspend"),
        *("unattended_after", "min_improvement"),
    }
)

_MAPPINGS = frozenset(
    {
        *("torchtune", "resources_per_node", "env", "inputs", "outputs", "initializer", "labels", "annotations"),
        *("on_retry", "pod", "gate", "code", "study", "provenance", "metrics", "base_model"),
    }
)
_LISTS = frozenset(
    {
        *("command", "args", "env", "runtime_patches"),
        *("packages_to_install", "pip_index_urls", "datasets"),
    }
)
_EITHER = frozenset({"evaluation", "runtime", "phases", "launched_by"})
"""Fields that are text as well."""
_KNOWN = EXACT | _JSON | _OTHERS | _MAPPINGS | _LISTS
_LONGEST = 200  # characters of a text in an error


def sources_of(value: Any, at: Location = ()) -> Sources:
    """What a run replaces in a field."""
    if isinstance(value, str):
        return {at: value} if "{{" in value or "{%" in value else {}
    if hasattr(value, "iter_references"):
        return {at: value}
    parts: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, Mapping):
        parts = iter(value.items())
    elif isinstance(value, list | tuple):
        parts = iter(enumerate(value))
    return {place: source for name, part in parts for place, source in sources_of(part, (*at, name)).items()}


def mapped_sources(task: Any, names: Collection[str], context: Any) -> dict[str, Any]:
    """Fields of an element of a mapped task that other tasks give, with what they are mapped over."""
    dag = task.get_dag()
    mapped: Any = dag.task_dict.get(task.task_id) if dag is not None else None
    if not getattr(mapped, "is_mapped", False):
        return {}
    given = mapped._get_specified_expand_input().value
    if isinstance(given, dict):
        return {name: part for name, part in given.items() if hasattr(part, "iter_references")}
    if isinstance(given, list | tuple):
        given = given[context["ti"].map_index]
    taken = {name for name in names if name not in mapped.partial_kwargs and getattr(task, name) is not None}
    return dict.fromkeys(taken, given) if hasattr(given, "iter_references") else {}


def finished(field: str, value: Any, sources: Sources) -> Any:
    """A rendered field with text where text is due, and read from text where a mapping or a list is due.

    An empty text or None in place of a mapping is None: the field is not set.

    Raises:
        TrainJobFatal: A task has returned nothing, or the text is neither a mapping nor a list.
    """
    from trainjob._spec.texts import as_text, with_texts

    if not sources or field not in _KNOWN:  # arguments of a decorated function, fields of a subclass
        return value
    if field not in _VALUES:
        _check_results(field, value, sources)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | list | tuple):  # of a mapped task, lazy
        value = [*value]
    is_blank = value is None or (isinstance(value, str) and value.strip() in ("", "None"))  # as Jinja writes None
    if () in sources and field in _MAPPINGS and is_blank:
        return None
    if () in sources and isinstance(value, str):
        value = _read(field, value, sources[()])
    if () in sources and field in _TEXTS and not isinstance(value, Mapping | list | tuple):
        return None if value is None else as_text(value)
    if field in _JSON:
        return value
    return with_texts({field: value}, lambda at: any(at[1 : 1 + len(place)] == place for place in sources))[field]


def _check_results(field: str, value: Any, sources: Sources) -> None:
    """Refuse None of a task, also as a template writes it."""
    for place, source in sources.items():
        pulls = isinstance(source, str) and "xcom_pull" in source
        origin, part = f"the task of {source}" if pulls else _tasks(source), _part(value, place)
        if origin and (part is None or (pulls and isinstance(part, str) and part == "None")):
            raise TrainJobFatal(
                f"{_path(field, place)}: {origin} returned nothing (None); return a value there, or leave the field out"
            )


def _read(field: str, text: str, source: Any) -> Any:
    """The mapping or list that a text is; the text itself if the field takes it."""
    from trainjob._spec.reading import read_part

    kinds = {dict: field in _MAPPINGS, list: field in _LISTS}
    wanted = tuple(kind for kind, takes in kinds.items() if takes)
    if not (wanted or (field in _EITHER and text.lstrip().startswith(("{", "[")))):
        return text
    found = read_part(text)
    if found is None and field in _EITHER:
        return text
    if found is None or (wanted and not isinstance(found, wanted)):
        given = f"the template {source}" if isinstance(source, str) else _tasks(source) or "the parameter"
        kind = " or ".join({dict: "a mapping", list: "a list"}[kind] for kind in wanted)
        raise TrainJobFatal(
            f"{field}: {given} gives {_shown(text)}, which is not {kind}; give JSON, for example by the filter tojson"
        )
    return found


def _shown(text: str) -> str:
    from airflow.providers.common.compat.sdk import redact

    from trainjob._support.masking import public

    shown = public(str(redact(text)))
    return repr(shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…")


def _tasks(source: Any) -> str:
    if not hasattr(source, "iter_references"):
        return ""
    names = sorted({task.task_id for task, _ in source.iter_references()})
    return f"task{'s' if len(names) > 1 else ''} {', '.join(names)}" if names else ""


def _part(value: Any, place: Location) -> Any:
    for name in place:
        value = value[name]
    return value


def _path(field: str, place: Location) -> str:
    return field + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
