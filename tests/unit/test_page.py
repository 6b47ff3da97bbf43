"""The HTML of the page: what stands in it without its script. `tests/page` looks at it in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tests.page import documents

from trainjob._pages.page import page_html
from trainjob.version import __version__

TEXTS = st.text() | st.sampled_from(documents.HOSTILE) | st.sampled_from(["\ud800", "\x00\x1b[2J", "\u202e"])


class Parsed(HTMLParser):
    """The elements of a page with their texts; scripts and styles are apart."""

    VOID = ("meta",)

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.data: dict[str, Any] = {}
        self.code: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self._open.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tag, attributes = self._open[-1] if self._open else ("", {})
        if attributes.get("type") == "application/json":
            self.data[str(attributes["id"])] = json.loads(data)
        elif tag in ("script", "style"):
            self.code.append(data)
        else:
            self.text += data

    @property
    def policy(self) -> str:
        return next(str(value) for name, value in self.attributes if name == "content" and "default-src" in str(value))


@pytest.mark.parametrize("make", documents.ALL.values(), ids=documents.ALL)
def test_a_page_is_one_correct_file(make: Callable[[], dict[str, Any]]) -> None:
    html = page_html(make())
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
    assert page.data["document"].keys() == make().keys()


def test_the_embedded_document_is_the_document() -> None:
    document = documents.hostile()
    embedded = Parsed(page_html(document)).data["document"]
    rest = ("history", "attempts", "compare")
    assert {name: each for name, each in embedded.items() if name not in rest} == {
        name: each for name, each in document.items() if name not in rest
    }
    assert embedded["history"].keys() == document["history"].keys()


def test_histories_are_embedded_with_seven_digits() -> None:
    history = {"loss": [[1, 1769860800.1234, 0.123456789], [None, 1769860801.0, float("nan")]]}
    document = documents.training(history=history, metrics={"loss": float("nan"), "top": float("-inf"), "n": 2**53})
    embedded = Parsed(page_html(document)).data["document"]
    assert embedded["history"] == {"loss": [[1, 1769860800.1, 0.1234568], [None, 1769860801.0, None]]}
    assert embedded["metrics"] == {"loss": "nan", "top": "-inf", "n": 2**53}
    assert document["history"] == history


def test_the_main_facts_can_be_read_without_the_script() -> None:
    page = Parsed(page_html(documents.failed()))
    for text in (
        *("team-a/digits-2", "Failed", "node-1 exited with code 3", "fix the training code"),
        *("need JavaScript", "0d9f2c54-6f43", f"trainjob {__version__}", "2026-11-26T02:00:00Z"),
        "Values of environment variables are left out.",
    ):
        assert text in page.text
    assert "queue gpu" in Parsed(page_html(documents.queued())).text
    assert "digits-0003: Failed" in Parsed(page_html(documents.listed())).text
    assert "team-a/digits-lr-3: Failed" in Parsed(page_html(documents.workflow())).text
    study = Parsed(page_html(documents.study_ended())).text
    for text in (
        "Study digits: ended",
        "56 complete, 40 pruned, 4 failed",
        "best loss: 0.17878",
        "in trial 28",
        "optimizer=adamw",
    ):
        assert text in study
    assert "uid" not in study
    assert "the TrainJob was deleted" in Parsed(page_html(documents.training("Deleted", uid=""))).text


def test_only_a_live_page_makes_requests() -> None:
    page = Parsed(page_html(documents.running()))
    assert "connect-src 'none'" in page.policy
    assert page.data["live"] is None
    live = {"document": "document.json?a=</script>&b", "seconds": 2}
    page = Parsed(page_html(documents.running(), live))
    assert "connect-src 'self'" in page.policy
    assert page.data["live"] == live


@pytest.mark.parametrize("kind", ["training", "list", "workflow", "study"])
@given(name=TEXTS, text=TEXTS)
def test_no_text_leaves_its_place(kind: str, name: str, text: str) -> None:
    document = {
        "training": documents.training(
            text, name=name, metrics={name: text}, blocker={"message": text, "advice": name}
        ),
        "list": documents.listed() | {"namespace": name, "jobs": [documents.job(0, text, name=name)]},
        "study": documents.study_failed()
        | {"title": text, "metric": name, "reason": text, "counts": {name: 1}, "best": 0}
        | {"trials": [documents.trial(0, parameters={name: text})]},
        "workflow": documents.workflow() | {"title": text, "trainings": [documents.training(text, name=name)]},
    }[kind]
    html = page_html(document)
    html.encode()
    page = Parsed(html)
    assert page.data["document"] == json.loads(json.dumps(document))
    assert len(page.tags) < 60
    outside = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]", outside)
