"""The elements of a page with their texts, as a browser without scripts has them."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any


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
