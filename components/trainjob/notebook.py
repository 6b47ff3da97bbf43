"""HTML of a result and of a diagnosis for notebooks: fragments without scripts, for light and dark themes.

All texts are escaped and masked, and long ones are cut: metrics, outputs and logs come from the training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from trainjob._support.control_characters import one_line, plain
from trainjob._support.masking import masked_lines, public

if TYPE_CHECKING:
    from trainjob._diagnosis import Diagnosis
    from trainjob._jobs.results import TrainJobResult

_LONGEST = 300  # characters of a text
_LINE = 500  # characters of a line of a log
_ROWS = 100  # metrics
_WIDTH, _HEIGHT, _MARGIN = 140, 28, 2  # pixels of a sparkline
_POINTS = 280  # two for each pixel
# The colors are readable on white and on black; all other text has the color of the notebook.
_GREEN, _RED, _BLUE = "#2f8f4e", "#d1453b", "#3b7dd8"
_CARD = "border:1px solid rgba(128,128,128,.4);border-left:4px solid {};border-radius:4px;padding:8px 12px;margin:4px 0"
_CELL = "text-align:left;padding:2px 12px 2px 0;vertical-align:middle;overflow-wrap:anywhere"


def result_html(result: TrainJobResult) -> str:
    """A `TrainJobResult`: its metrics with their history, and its outputs."""
    seconds = result.seconds.get("total")
    took = f" in {_shown(round(seconds, 1))} s" if seconds is not None else ""
    attempt = f", attempt {result.attempt}" if result.attempt > 1 else ""
    name = _text(f"{result.namespace}/{result.name}")
    parts = [f'<div><b>{name}</b> <span style="color:{_GREEN}">Complete</span>{took}{attempt}</div>']
    if result.metrics:
        parts.append(_table("Metrics", _metric_rows(result)))
    if result.outputs:
        parts.append(_table("Outputs", ((_text(name), _value(value)) for name, value in result.outputs.items())))
    return _card(_GREEN, parts)


def diagnosis_html(diagnosis: Diagnosis) -> str:
    """A `Diagnosis`: why the job failed, the last lines of the log, and what to do."""
    color = _RED if diagnosis.failed else _BLUE
    parts = [
        f'<div><b>{_text(diagnosis.job)}</b> <span style="color:{color}">{_text(diagnosis.phase)}</span></div>',
        f"<div>{_text(diagnosis.summary, 2000)}</div>",
    ]
    if diagnosis.log:
        lines = masked_lines(plain(line[: 4 * _LINE]) for line in diagnosis.log)
        log = "\n".join(escape(one_line(line, _LINE)) for line in lines)
        style = "margin:4px 0;max-height:20em;overflow:auto;white-space:pre-wrap;overflow-wrap:anywhere"
        parts.append(f'<div>{_text(diagnosis.log_heading.capitalize())}</div><pre style="{style}">{log}</pre>')
    if diagnosis.advice:
        parts.append(f"<div><b>What to do:</b> {_text(diagnosis.advice, 2000)}</div>")
    parts.append(f'<div style="opacity:.8">Category: {_text(diagnosis.category)}; {_text(diagnosis.outlook)}</div>')
    parts += [f'<div style="opacity:.8">Not seen: {_text(what)}</div>' for what in diagnosis.unseen]
    return _card(color, parts)


def _metric_rows(result: TrainJobResult) -> Iterator[tuple[str, ...]]:
    for name in [*result.metrics][:_ROWS]:
        values = [value for _, _, value in result.history.get(name, ()) if math.isfinite(value)]
        span = f"{_shown(min(values))} to {_shown(max(values))}" if len(values) > 1 else ""
        yield _text(name), _value(result.metrics[name]), _curve(values), span
    if (more := len(result.metrics) - _ROWS) > 0:
        yield (f"and {more} more",)


def _curve(values: Sequence[float]) -> str:
    """A sparkline as SVG, one point after the other; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    chosen = (
        values if len(values) <= _POINTS else [values[i * (len(values) - 1) // (_POINTS - 1)] for i in range(_POINTS)]
    )
    low, high = min(chosen), max(chosen)
    half = high / 2 - low / 2 or 1.0  # the difference of two floats can be infinite
    heights = [(value / 2 - low / 2) / half if high > low else 0.5 for value in chosen]
    wide, tall = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN
    points = " ".join(
        f"{_MARGIN + i * wide / (len(heights) - 1):.1f},{_MARGIN + (1 - height) * tall:.1f}"
        for i, height in enumerate(heights)
    )
    line = f'<polyline points="{points}" fill="none" stroke="{_BLUE}" stroke-width="1.5"/>'
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="history" style="display:block">{line}</svg>'
    )


def _table(title: str, rows: Iterable[Sequence[str]]) -> str:
    style = "border-collapse:collapse;margin:4px 0;background:transparent;color:inherit;font:inherit"
    shown = "".join("<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in row) + "</tr>" for row in rows)
    caption = f'<caption style="text-align:left;font-weight:bold;color:inherit">{title}</caption>'
    return f'<table style="{style}">{caption}{shown}</table>'


def _card(color: str, parts: Sequence[str]) -> str:
    return f'<div style="{_CARD.format(color)}">{"".join(parts)}</div>'


def _value(value: bool | float | str) -> str:
    return _text(value) if isinstance(value, str) else _shown(value)


def _shown(value: bool | float) -> str:
    """A number with six digits; bools as in JSON."""
    return str(value).lower() if isinstance(value, bool) else f"{value:.6g}"


def _text(text: str, characters: int = _LONGEST) -> str:
    """The text without secrets and control sequences, escaped and isolated from the direction of other texts."""
    return f"<bdi>{escape(one_line(public(str(text)), characters))}</bdi>"
