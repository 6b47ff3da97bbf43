"""Templated fields: what cannot be rendered, and what must not be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import BaseOperator

from trainjob_airflow.exceptions import TrainJobFatal

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from trainjob import TrainJobSpec
    from trainjob.errors import Problem

SAMPLE = "⟨"
"""Begins what stands in a text for a value that only a run knows, see `trainjob_airflow.sample`."""

_MASK = "***"
_SHORTEST = 8
"""Letters of a secret that counts as found: the passwords of development set-ups are words like "admin"."""


class StrictTemplates(BaseOperator):
    """An operator that does not try again what cannot be rendered."""

    def _do_render_template_fields(
        self, parent: Any, template_fields: Iterable[str], context: Context, jinja_env: Any, seen_oids: set[int]
    ) -> None:
        """As Airflow does, for mapped tasks too.

        Raises:
            TrainJobFatal: A template is wrong, or a name in it is not defined: it will be so in the next try.
        """
        from jinja2 import TemplateError

        for name in template_fields:
            try:
                super()._do_render_template_fields(parent, [name], context, jinja_env, seen_oids)
            except TemplateError as error:
                raise TrainJobFatal(f"the template of {name!r} cannot be rendered: {error}") from None


def is_open(value: object) -> bool:
    """Whether a value is decided when the task runs: a template, the XCom of another task, a sample of either."""
    if isinstance(value, str):
        return any(mark in value for mark in ("{{", "{%", SAMPLE))
    return hasattr(value, "iter_references")


def secrets_in(spec: TrainJobSpec) -> Iterator[Problem]:
    """Where a spec holds a secret that came out of a template: everyone who can see the job could read it.

    Secrets are what Airflow masks in logs: passwords of the connections that this task has asked for, and values of
    variables whose names say so.
    """
    from trainjob.errors import Problem

    trainer = ((spec.manifest or {}).get("spec") or {}).get("trainer")
    parts = {name: getattr(spec, name) for name in ("env", "command", "args", "func_args")}
    for path in _masked({**parts, "manifest": {"spec": {"trainer": trainer}}}):
        message = "holds a secret of an Airflow connection or variable, which everyone who can see the job can read"
        yield Problem(path, message, "put it into a Secret beside the job, and into env by valueFrom: secretKeyRef")


def _masked(value: object, path: str = "") -> Iterator[str]:
    """Paths of all text in which Airflow would mask something."""
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
