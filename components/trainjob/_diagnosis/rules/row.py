"""The rows of the three tables. A rule is one row, with a source and a verbatim example in tests/unit/rules."""

from __future__ import annotations

from typing import NamedTuple

from trainjob._diagnosis.meaning import Meaning


class ObjectRule(NamedTuple):
    """One row of the table.

    Attributes:
        id: Name of the row, and of its example in tests/unit/rules.
        reasons: Reasons in CamelCase, separated by spaces.
        says: A regular expression to find in the message.
        means: What it means.
        source: Who writes the reason and the message, with a version; or the recorded failure that has them.
    """

    id: str
    reasons: str
    says: str
    means: Meaning
    source: str


class RaisedRule(NamedTuple):
    """One row of the table.

    Attributes:
        id: Name of the row, and of its example in tests/unit/rules.
        classes: Names of classes as a traceback prints them, separated by spaces; with a dot at the end, of all classes
            of a package. The name of one of Python's own classes is that of its subclasses, too.
        within: Packages or modules of which one raised it, separated by spaces; empty if that does not matter.
        says: A regular expression to find in ``class: message``.
        means: What it means.
        source: Where the class and the message are written, with a version.
    """

    id: str
    classes: str
    within: str
    says: str
    means: Meaning
    source: str


class LineRule(NamedTuple):
    """One row of the table.

    Attributes:
        id: Name of the row, and of its example in tests/unit/rules.
        codes: Exit codes, separated by spaces; empty for any but those of signals, ``SIGBUS`` for that signal.
        says: A regular expression to find in the error or the last line.
        means: What it means.
        source: Where that is written, with a version.
    """

    id: str
    codes: str
    says: str
    means: Meaning
    source: str
