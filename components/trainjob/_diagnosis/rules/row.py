"""The rows of the three tables. A rule is one row, with a source and a verbatim example in tests/unit/rules.

Each row has an `id`, which is the name of its example, too; `says`, a regular expression to find in the message;
`means`, what it means; and `source`: who writes it, with a version, or the recorded failure that has it.
"""

from __future__ import annotations

from typing import NamedTuple

from trainjob._diagnosis.meaning import Meaning


class ObjectRule(NamedTuple):
    """What an object or Event reports: `reasons` in CamelCase, separated by spaces, and a message."""

    id: str
    reasons: str
    says: str
    means: Meaning
    source: str


class RaisedRule(NamedTuple):
    """An exception; `says` is searched in ``class: message``.

    Attributes:
        classes: Names of classes as a traceback prints them, separated by spaces; with a dot at the end, of all classes
            of a package. The name of one of Python's own classes is that of its subclasses, too.
        within: Packages or modules of which one raised it, separated by spaces; empty if that does not matter.
    """

    id: str
    classes: str
    within: str
    says: str
    means: Meaning
    source: str


class LineRule(NamedTuple):
    """A last line. `codes`: exit codes or signals (``SIGBUS``), separated by spaces; empty for all but signals."""

    id: str
    codes: str
    says: str
    means: Meaning
    source: str
