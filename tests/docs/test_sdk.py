"""docs/how-to/kubeflow-sdk.md says what tests/conformance says, which the cluster's tests check."""

from __future__ import annotations

from tests.docs.sdk import PAGE, page


def test_the_tables_are_those_of_the_tests() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "python -m tests.docs.sdk"
