"""What a notebook shows of a result and of a diagnosis."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, strategies as st

from trainjob import Category, Diagnosis, RetryVerdict, TrainJobResult

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</table></div><style>*{display:none}</style>",
    "' onmouseover='x",
    "\u202egpj.exe",
    "\x1b]52;c;ZXZpbA==\x07",
    "x" * 10_000,
    "javascript:alert(1)",
    "&lt;script&gt;",
]
SECRET = "AKIAIOSFODNN7EXAMPLE"
ALLOWED = {
    "div": {"style"},
    "b": set(),
    "bdi": set(),
    "span": {"style"},
    "pre": {"style"},
    "table": {"style"},
    "caption": {"style"},
    "tr": set(),
    "td": {"style"},
    "svg": {"width", "height", "role", "aria-label", "style"},
    "polyline": {"points", "fill", "stroke", "stroke-width"},
}


class Checked(HTMLParser):
    """Reads a fragment; fails for any element or attribute that the module does not write, and for unclosed ones."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.open: list[str] = []
        self.found: set[str] = set()
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert {name for name, _ in attrs} <= ALLOWED[tag]
        assert not any("url" in (value or "") or "expression" in (value or "") for _, value in attrs)
        self.found.add(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def html(shown: object) -> str:
    fragment: str = shown._repr_html_()  # type: ignore[attr-defined]  # the method that notebooks call
    return fragment


def test_a_result() -> None:
    history = {"loss": [(1, 0.0, 3.0), (2, 1.0, math.nan), (3, 2.0, 0.25)]}
    metrics: dict[str, bool | float | str] = {"loss": 0.25, "ok": True, "kind": "x", "gap": math.nan}
    outputs = {"model": "s3://models/1"}
    shown = TrainJobResult("team-a", "digits-1", "u", 2, metrics, outputs, {"total": 12.34}, history=history)
    page = Checked(html(shown))
    assert page.text.startswith("team-a/digits-1 Complete in 12.3 s, attempt 2Metricsloss0.250.25 to 3oktrue")
    assert page.text.endswith("gapnanOutputsmodels3://models/1")
    assert html(shown).count("<svg") == 1
    assert 'points="2.0,2.0 138.0,26.0"' in html(shown)


def test_a_diagnosis() -> None:
    shown = Diagnosis(
        Category.USER_CODE,
        RetryVerdict.USER,
        "node-1 exited with code 3",
        rank="node-1",
        exit_code=3,
        log=("Traceback", "ValueError: x < 3"),
        advice="fix the training code",
        job="team-a/digits-1",
        unseen=("Events: forbidden",),
    )
    page = Checked(html(shown))
    assert page.text.startswith(
        "team-a/digits-1 Failednode-1 exited with code 3Last lines of node-1:Traceback\nValueError: x < 3"
    )
    assert "What to do: fix the training code" in page.text
    assert page.text.endswith("Not seen: Events: forbidden")


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts(text: str) -> None:
    result = TrainJobResult(
        text, text, text, 1, {text: text, "number": 1.0}, {text: text}, history={text: [(1, 0.0, 1.0), (2, 1.0, 2.0)]}
    )
    diagnosis = Diagnosis(
        Category.USER_CODE, RetryVerdict.USER, text, rank=text, log=(text, text), advice=text, job=text, unseen=(text,)
    )
    for shown in (html(result), html(diagnosis)):
        page = Checked(shown)
        assert "script" not in page.found
        assert len(shown) < 20_000
        assert not {"\x1b", "\u202e", "\x07"} & set(shown)


def test_secrets_are_masked() -> None:
    result = TrainJobResult("ns", "n", "u", 1, {"note": f"aws {SECRET}"}, {"model": "https://me:hunter2secret@host/x"})
    key = ("-----BEGIN RSA PRIVATE KEY-----", "MIIEpAIBAAKCAQEA1234567890abcdef", "-----END RSA PRIVATE KEY-----")
    diagnosis = Diagnosis(
        Category.USER_CODE, RetryVerdict.USER, f"key {SECRET}", log=(f"token {SECRET}", *key), advice=SECRET
    )
    for shown in (html(result), html(diagnosis)):
        for secret in (SECRET, "hunter2secret", "MIIEpAIBAAKCAQEA"):
            assert secret not in shown


@given(st.lists(st.floats(), max_size=600))
def test_any_history(values: list[float]) -> None:
    history = {"loss": [(i, float(i), value) for i, value in enumerate(values)]}
    result: Any = TrainJobResult("ns", "n", "u", 1, {"loss": 1.0}, history=history)
    shown = html(result)
    Checked(shown)
    points = shown.partition('points="')[2].partition('"')[0]
    assert all(0 <= float(x) <= 140 for point in points.split() for x in point.split(","))
    assert len(points) < 8000


def test_many_metrics() -> None:
    shown = html(TrainJobResult("ns", "n", "u", 1, {f"m{i}": float(i) for i in range(1000)}))
    assert "and 900 more" in Checked(shown).text
