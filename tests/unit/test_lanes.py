"""The lanes of `make test`: a target whose tests did not run has failed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import lanes

PROPERTIES = '<properties><property name="seed" value="7"/><property name="schedules" value="20"/></properties>'
CASE = '<testcase file="tests/unit/test_a.py" name="test_b" time="0.1">{}</testcase>'
SUITE = "<testsuites><testsuite>{}</testsuite></testsuites>"


@pytest.fixture(autouse=True)
def no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECORD", raising=False)


@pytest.mark.parametrize(
    ("results", "status", "code", "printed"),
    [
        (SUITE.format(CASE.format("")), 0, 0, "1 passed, 0 failed, 0 skipped"),
        (SUITE.format(CASE.format(PROPERTIES)), 0, 0, "tests/unit/test_a.py::test_b: schedules 20, seed 7"),
        (SUITE.format(CASE.format('<failure message="wrong"/>')), 2, 2, "test-a: tests/unit/test_a.py::test_b: wrong"),
        (SUITE.format(CASE.format("")), 2, 2, "FAILED test-a: exit status 2"),
        (SUITE.format(CASE.format(""))[:-20], 0, 1, "FAILED test-a: its results cannot be read: "),
        (SUITE.format(CASE.format('<skipped message="no root"/>')), 0, 1, "FAILED test-a: 1 skipped"),
        (SUITE.format(""), 0, 1, "FAILED test-a: no test ran"),
        (None, 0, 1, "FAILED test-a: its results cannot be read: "),
    ],
    ids=["passed", "recorded properties", "failed", "status", "truncated", "skipped", "no test", "no file"],
)
def test_a_target_passes_only_if_its_tests_ran(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    results: str | None,
    status: int,
    code: int,
    printed: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").write_text(results or "")
    copied = "" if results is None else f"cp {tmp_path}/results {tmp_path}/.test-output/test-a.xml"
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\n[ "$2" = lint ] && exit 0\n{copied}\nexit {status}\n')
    make.chmod(0o755)
    assert lanes.main(str(make), "lint", "test-a") == code
    assert printed in capsys.readouterr().out


def test_a_target_that_did_not_run_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lanes.Target, "run", lambda *_: None)
    assert lanes.main("make", "campaign-a") == 1
    assert "FAILED campaign-a: it did not run" in capsys.readouterr().out
