"""Masking changes no message of ours: each constant text of the product stays as it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from trainjob._support.masking import masked

ROOT = Path(__file__).parents[2]
SOURCES = sorted(chain.from_iterable(ROOT.glob(f"{part}/*/**/*.py") for part in ("components", "*_provider", "kfp_*")))
VALUES = ("model-7", "unexpected status")
"""A name, and the beginning of another error."""
MASKED = {
    # The value is always an example URL, with a reference as its password, which masking leaves.
    "the URL of the Optuna storage contains a password",
}
"""Beginnings of messages that masking changes with one of `VALUES`, each with the reason."""


def messages(tree: ast.AST) -> Iterator[str]:
    """All texts of several words in code, except documentation; f-strings with `VALUES` in place of each expression."""
    left_out: set[ast.AST] = set()
    for node in ast.walk(tree):  # parents come first
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            left_out.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            left_out |= {*node.values}
            for value in VALUES:
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else value for part in node.values)
        elif isinstance(node, ast.Constant) and node not in left_out and " " in str(node.value).strip():
            yield str(node.value)


def test_masking_leaves_every_message_of_ours() -> None:
    found = set(chain.from_iterable(messages(ast.parse(path.read_bytes())) for path in SOURCES))
    assert len(found) > 5000
    assert [text for text in found if masked(text) != text and not text.startswith((*MASKED,))] == []
