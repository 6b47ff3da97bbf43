"""The page that shows a training, a list of trainings, a workflow or a study: one HTML file without external resources.

Its input is the JSON document of `trainjob._pages.documents`. All texts of the document are hostile: names, logs and
URIs can contain markup. Therefore the document is embedded as JSON without any character that could end the element,
and the page's script sets texts, never markup. The page's Content Security Policy allows only the embedded scripts, by
hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from html import escape
from importlib import resources
from typing import Any

from trainjob._support.control_characters import one_line
from trainjob.version import __version__

_LONGEST = 2000  # characters of a text outside of the JSON
_SHOWN = 200  # trainings of a list or a workflow that are named outside of the JSON
_PARTS = ("charts", "evaluation", "study")  # of the script
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_IN_JSON = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def page_html(document: Mapping[str, Any], live: Mapping[str, Any] | None = None) -> str:
    """The page of a document, as HTML.

    Args:
        document: The JSON document of a training, a list, a workflow or a study.
        live: How the page follows changes: ``document`` is the URL of the document, which may be relative, and
            ``seconds`` the time between two requests. Without it, the page makes no request.
    """
    parts = {
        **_assets(),
        "policy": _policy("'self'" if live else "'none'"),
        "title": escape(_title(document)),
        "facts": "\n".join(_facts(document)),
        "footer": _footer(document),
        "document": _embedded(_compact(document)),
        "live": _embedded(dict(live) if live else None),
    }
    return _PLACEHOLDER.sub(lambda found: parts[found[1]], _asset("page.html"))


def page_json(document: Mapping[str, Any]) -> str:
    """The document as the response to a page's request: JSON, with texts instead of NaN and infinity."""
    return _embedded(_compact(document))


@cache
def _asset(name: str) -> str:
    return resources.files("trainjob._pages").joinpath("static", name).read_text(encoding="utf-8")


@cache
def _assets() -> dict[str, str]:
    return {
        "style": _asset("page.css"),
        "script": _asset("page.js").replace("/* parts */", "".join(_asset(f"{name}.js") for name in _PARTS)),
        "uplot": _asset("uplot.iife.min.js"),
        "license": _asset("uplot.LICENSE"),
    }


@cache
def _policy(connect: str) -> str:
    assets = _assets()
    scripts = " ".join(_hash(assets[name]) for name in ("uplot", "script"))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {_hash(assets['style'])}; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# ---------------------------------------------------------------- the document as JSON


def _embedded(value: object) -> str:
    """JSON that can stand in a script element: ASCII without ``<``, ``>`` and ``&``."""
    return json.dumps(value, separators=(",", ":")).translate(_IN_JSON)


def _compact(value: Any, key: str = "") -> Any:
    """The document with shorter numbers in its histories, and texts instead of numbers that JSON lacks."""
    if isinstance(value, Mapping):
        if key == "history":
            return {name: [_point(point) for point in points] for name, points in value.items()}
        return {name: _compact(each, name) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_compact(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _point(point: Iterable[Any]) -> list[Any]:
    """A point of a history: the time in tenths of a second, the value with seven digits, which no chart can show."""
    step, time, value = point
    return [step, round(time, 1), float(f"{value:.7g}") if math.isfinite(value) else None]


# ---------------------------------------------------------------- what is readable without JavaScript


def _text(value: object) -> str:
    """A text of the document as HTML, isolated from the direction of the texts around it."""
    return f"<bdi>{escape(_line(value))}</bdi>"


def _line(value: object) -> str:
    return one_line(str(value or ""), _LONGEST)


def _name(training: Mapping[str, Any]) -> str:
    return "/".join(filter(None, (_line(training.get("namespace")), _line(training.get("name")))))


def _title(document: Mapping[str, Any]) -> str:
    match document.get("kind"):
        case "list":
            return one_line(f"Trainings in {_line(document.get('namespace')) or 'all namespaces'}", _LONGEST)
        case "workflow":
            return one_line(f"Trainings of {_line(document.get('title'))}", _LONGEST)
        case "study":
            return one_line(f"Study {_line(document.get('title'))}: {_line(document.get('state'))}", _LONGEST)
        case _:
            return one_line(f"{_name(document)}: {_line(document.get('phase'))}", _LONGEST)


def _facts(document: Mapping[str, Any]) -> Iterator[str]:
    """The main facts as HTML, which the script replaces."""
    trainings = document.get("jobs") or document.get("trainings") or []
    if document.get("kind") in ("list", "workflow"):
        yield f"<h1>{_text(_title(document))}</h1>"
        if trainings:
            yield "<ul>"
            for training in trainings[:_SHOWN]:
                yield f"<li>{_text(_name(training))}: {_text(training.get('phase'))}</li>"
            yield "</ul>"
        return
    if document.get("kind") == "study":
        yield from _study_facts(document)
        return
    yield f"<h1>{_text(_name(document))}</h1>"
    yield f"<p><strong>{_text(document.get('phase'))}</strong></p>"
    shown: list[str] = []
    for part, names in (
        (document.get("diagnosis") or {}, ("summary", "advice")),
        (document.get("blocker") or {}, ("message", "advice")),
        (document, ("message",)),
    ):
        for name in names:
            text = _line(part.get(name))
            if text and text not in shown:
                shown.append(text)
                yield f"<p>{_text(text)}</p>"


def _study_facts(study: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h1>{_text(_title(study))}</h1>"
    counts = ", ".join(f"{count} {_line(state)}" for state, count in study["counts"].items())
    yield f"<p>{_text(f'Trials: {counts}' if counts else 'No trials.')}</p>"
    best = next((each for each in study["trials"] if each["number"] == study["best"]), None)
    if best is not None:
        parameters = ", ".join(f"{name}={value}" for name, value in best["parameters"].items())
        value = f"best {_line(study['metric'])}: {best['value']} in trial {best['number']}"
        yield f"<p><strong>{_text(value)}</strong></p>"
        yield f"<p>{_text(parameters)}</p>"
    if study["reason"]:
        yield f"<p>{_text(study['reason'])}</p>"


def _footer(document: Mapping[str, Any]) -> str:
    parts = [f'<span>Taken <span id="taken">{_text(document.get("taken"))}</span></span>']
    if document.get("kind") not in ("list", "workflow", "study"):
        parts.append(f"<span>uid {_text(document.get('uid') or 'unknown: the TrainJob was deleted')}</span>")
    parts.append(f"<span>trainjob {escape(__version__)}</span>")
    parts.append("<span>Values of environment variables are left out.</span>")
    return "\n".join(parts)
