"""docs/how-to/runtimes.md says what the tests of the cluster run."""

from __future__ import annotations

import re

from tests.cluster.runtimes import INITIALIZER_VOLUME
from tests.docs import runtimes


def test_the_table_is_what_runs() -> None:
    page = runtimes.PAGE.read_text()
    assert runtimes.table() in page, "python -m tests.docs.runtimes writes it"


def test_the_patch_is_the_one_that_runs() -> None:
    (snippet,) = re.findall(r"```python\n(INITIALIZER_VOLUME = .*?)```", runtimes.PAGE.read_text(), re.DOTALL)
    defined: dict[str, object] = {}
    exec(snippet, defined)
    assert defined["INITIALIZER_VOLUME"] == INITIALIZER_VOLUME
