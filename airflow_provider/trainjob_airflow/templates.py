"""Templated fields: errors of rendering, and secrets in rendered values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import BaseOperator

from trainjob_airflow.exceptions import TrainJobFatal
from trainjob_airflow.given import EXACT, Sources, finished, mapped_sources, sources_of

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from trainjob import Problem, TrainJobSpec

SAMPLE = "⟨"
"""Begins the placeholder of a value that only a run knows, see `trainjob_airflow.sample`."""

_SAMPLES = (SAMPLE, r"\u27e8", "%E2%9F%A8")  # as text, in JSON and in a URL
_MASK = "***"
_SHORTEST = 8
"""Length from which a masked text counts as a secret: passwords of development setups are words like "admin"."""


class StrictTemplates(BaseOperator):
    """An operator that fails without a retry if a template cannot be rendered, and takes values of every type.

    Numbers, bools and dates of a run become text where text is due, as `trainjob._spec.texts.as_text` describes. A
    field that is one template is read from its text if it is a mapping or a list. This includes
    ``render_template_as_native_obj``: there, a text in a field of texts stays as it is written.
    """

    _field = ""  # the field that is being rendered

    def _do_render_template_fields(
        self, parent: Any, template_fields: Iterable[str], context: Context, jinja_env: Any, seen_oids: set[int]
    ) -> None:
        """Render as Airflow does, in mapped tasks too, without its traceback of each error.

        Raises:
            TrainJobFatal: A template is invalid, or uses an undefined name; a value is none that the field takes.
        """
        from jinja2 import TemplateError

        if parent is not self:
            super()._do_render_template_fields(parent, template_fields, context, jinja_env, seen_oids)
            return
        mapped = mapped_sources(self, [*template_fields], context)
        for name in template_fields:
            written, self._field = getattr(self, name), name
            sources: Sources = {(): mapped[name]} if name in mapped else sources_of(written)
            try:
                rendered = self.render_template(written, context, jinja_env, seen_oids)
            except TemplateError as error:
                raise TrainJobFatal(f"the template of {name!r} cannot be rendered: {error}") from None
            finally:
                self._field = ""
            is_sample = isinstance(rendered, str) and any(mark in rendered for mark in _SAMPLES)
            setattr(self, name, rendered if is_sample else finished(name, rendered, sources))

    def _render(self, template: Any, context: Context, *args: Any) -> Any:
        """Render one template; in a field of texts, natively without reading its text as Python."""
        from jinja2 import Undefined
        from jinja2.nativetypes import NativeEnvironment

        environment = template.environment
        if self._field not in EXACT or not isinstance(environment, NativeEnvironment):
            return super()._render(template, context, *args)
        from trainjob._spec.texts import as_text

        values: Any = copy(context)  # not a dict: that would look up all values, and warn about deprecated ones
        values.update((name, value) for name, value in template.globals.items() if name not in values)
        made = environment.context_class(environment, values, template.name, template.blocks)
        nodes = [*template.root_render_func(made)]
        if len(nodes) == 1 and not isinstance(nodes[0], Undefined):
            return nodes[0]
        return "".join(str(as_text(node)) for node in nodes)


def is_open(value: object) -> bool:
    """Whether only a run knows a value: a template, the XCom of another task, a sample of either."""
    if isinstance(value, str):
        return any(mark in value for mark in ("{{", "{%", *_SAMPLES))
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
