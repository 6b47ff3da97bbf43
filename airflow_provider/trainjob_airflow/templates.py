"""Templated fields: errors of rendering, and secrets in rendered values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import BaseOperator

from trainjob_airflow.exceptions import TrainJobFatal

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from trainjob import Problem, TrainJobSpec

SAMPLE = "⟨"
"""Begins the placeholder of a value that only a run knows, see `trainjob_airflow.sample`."""

_MASK = "***"
_SHORTEST = 8
"""Length from which a masked text counts as a secret: passwords of development setups are words like "admin"."""


class StrictTemplates(BaseOperator):
    """An operator that fails without a retry if a template cannot be rendered."""

    def _do_render_template_fields(
        self, parent: Any, template_fields: Iterable[str], context: Context, jinja_env: Any, seen_oids: set[int]
    ) -> None:
        """Render as Airflow does, in mapped tasks too.

        Raises:
            TrainJobFatal: A template is invalid, or uses an undefined name; a retry would fail in the same way.
        """
        from jinja2 import TemplateError

        for name in template_fields:
            try:
                super()._do_render_template_fields(parent, [name], context, jinja_env, seen_oids)
            except TemplateError as error:
                raise TrainJobFatal(f"the template of {name!r} cannot be rendered: {error}") from None


def is_open(value: object) -> bool:
    """Whether only a run knows a value: a template, the XCom of another task, a sample of either."""
    if isinstance(value, str):
        return any(mark in value for mark in ("{{", "{%", SAMPLE))
    return hasattr(value, "iter_references")


def secrets_in(spec: TrainJobSpec) -> Iterator[Problem]:
    """Find secrets that a template has put into a spec, where everyone who can see the job could read them.

    Secrets are the values that Airflow masks in logs: passwords of the connections that this task has read, and values
    of variables with sensitive names.
    """
    from trainjob import Problem

    trainer = ((spec.manifest or {}).get("spec") or {}).get("trainer")
    parts = {name: getattr(spec, name) for name in ("env", "command", "args", "func_args")}
    for path in _masked({**parts, "manifest": {"spec": {"trainer": trainer}}}):
        message = "holds a secret of an Airflow connection or variable, which everyone who can see the job can read"
        yield Problem(path, message, "put it into a Secret in the job's namespace; set env by valueFrom: secretKeyRef")


def _masked(value: object, path: str = "") -> Iterator[str]:
    """Paths of all strings in which Airflow would mask a value."""
    if isinstance(value, str):
        if _hides(value):
            yield path
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _masked(part, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from _masked(part, f"{path}[{i}]")


def _hides(text: str) -> bool:
    from airflow.providers.common.compat.sdk import redact

    shown = str(redact(text))
    found = shown.count(_MASK) - text.count(_MASK)
    return found > 0 and (len(text) - len(shown)) / found + len(_MASK) >= _SHORTEST
