"""The HTML of the page: what stands in it without its script. `tests/page` looks at it in a browser."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tests.page import documents, series, studies
from tests.page.parsed import Parsed

from trainjob._pages.page import page_html
from trainjob.version import __version__

TEXTS = st.text() | st.sampled_from(series.HOSTILE) | st.sampled_from(["\ud800", "\x00\x1b[2J", "\u202e"])


@functools.cache
def made(make: Callable[[], series.Document]) -> series.Document:
    return make()


@pytest.mark.parametrize("make", documents.ALL.values(), ids=documents.ALL)
def test_a_page_is_one_correct_file(make: Callable[[], dict[str, Any]]) -> None:
    document = made(make)
    html = page_html(document)
    html.encode()
    page = Parsed(html)
    assert set(page.tags) <= {
        *("html", "head", "meta", "title", "style", "body", "main", "div", "h1", "p", "strong", "bdi", "ul", "li"),
        *("noscript", "footer", "span", "script"),
    }
    assert [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href", "style")] == []
    for code in page.code:
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in page.policy
    assert len(page.code) == 3
    assert page.data["document"].keys() == document.keys()


def test_histories_are_embedded_with_seven_digits() -> None:
    history = {"loss": [[1, 1769860800.1234, 0.123456789], [None, 1769860801.0, float("nan")]]}
    document = documents.training(history=history, metrics={"loss": float("nan"), "top": float("-inf"), "n": 2**53})
    embedded = Parsed(page_html(document)).data["document"]
    assert embedded["history"] == {"loss": [[1, 1769860800.1, 0.1234568], [None, 1769860801.0, None]]}
    assert embedded["metrics"] == {"loss": "nan", "top": "-inf", "n": 2**53}
    assert document["history"] == history


STUDY = ("Study digits: ended", "56 complete, 40 pruned, 4 failed", "best loss: 0.17878", "trial 28", "optimizer=adamw")

FAILURE = (
    *("team-a/digits-2", "Failed", "node-1 exited with code 3", "fix the training code", "uid-digits-2"),
    *("need JavaScript", f"trainjob {__version__}", "2026-11-26T02:00:00Z", "environment variables are left out"),
)


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (documents.failed, FAILURE),
        (documents.queued, ("queue gpu",)),
        (documents.listed, ("digits-0003: Failed",)),
        (documents.workflow, ("team-a/digits-lr-3: Failed",)),
        (studies.study_ended, STUDY),
        (lambda: documents.training("Deleted", uid=""), ("the TrainJob was deleted",)),
    ],
)
def test_the_main_facts_can_be_read_without_the_script(make: Callable[[], Any], texts: tuple[str, ...]) -> None:
    shown = Parsed(page_html(made(make))).text
    assert [text for text in texts if text not in shown] == []
    if texts is STUDY:
        assert "uid" not in shown


def test_only_a_live_page_makes_requests() -> None:
    page = Parsed(page_html(documents.running()))
    assert "connect-src 'none'" in page.policy
    assert page.data["live"] is None
    live = {"document": "document.json?a=</script>&b", "seconds": 2}
    page = Parsed(page_html(documents.running(), live))
    assert "connect-src 'self'" in page.policy
    assert page.data["live"] == live


def marked(kind: str, name: str, text: str) -> series.Document:
    """A document of a kind with a name and a text."""
    if kind == "list":
        return made(documents.listed) | {"namespace": name, "jobs": [documents.job(0, text, name=name)]}
    if kind == "study":
        shown = {"title": text, "metric": name, "reason": text, "counts": {name: 1}, "best": 0}
        return made(studies.study_failed) | shown | {"trials": [studies.trial(0, parameters={name: text})]}
    shown = {"phase": text, "name": name, "metrics": {name: text}, "blocker": {"message": text, "advice": name}}
    training = made(documents.training) | shown
    return training if kind == "training" else made(documents.workflow) | {"title": text, "trainings": [training]}


@pytest.mark.parametrize("kind", ["training", "list", "workflow", "study"])
@given(name=TEXTS, text=TEXTS)
def test_no_text_leaves_its_place(kind: str, name: str, text: str) -> None:
    document = marked(kind, name, text)
    html = page_html(document)
    html.encode()
    page = Parsed(html)
    assert page.data["document"] == json.loads(json.dumps(document))
    assert len(page.tags) < 60
    outside = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]", outside)
