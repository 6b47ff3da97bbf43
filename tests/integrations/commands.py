"""The command ``trainjob run``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integrations.integration import Ended, Fields, Integration

from trainjob.cli import program

NO_OPTIONS = ("cancel_on_timeout", "retry_user_errors")
"""Options of other integrations: the command keeps a job that timed out, and each command is a new try."""


class CommandLine(Integration):
    name = "cli"

    def __init__(self, directory: Path, output: pytest.CaptureFixture[str]) -> None:
        self._spec = directory / "work.yaml"
        self._output = output

    def train(self, spec: Fields, tries: int = 1, **options: Any) -> Ended:
        self._spec.write_text(yaml.safe_dump(dict(spec)))
        words = ["run", str(self._spec), "--json", "--key", "work", *options_of(options)]
        log = ""
        for _ in range(tries):
            ended = self._command(*words)
            log += ended.log
            if ended.outcome == 0:
                break
        return replace(ended, log=log)

    def wait(self, job: str) -> Ended:
        return self._command("wait", job, "--json")

    def export(self, trained: Fields, target: str, **options: Any) -> Ended:
        return self._command("export", trained["name"], "--target", target, "--json", *options_of(options))

    def tune(self, study: Fields, template: Fields) -> Ended:
        self._spec.write_text(yaml.safe_dump({**study, "template": dict(template)}))
        return self._command("tune", str(self._spec), "--json", "--key", "work")

    def _command(self, *words: str) -> Ended:
        self._output.readouterr()
        with pytest.raises(SystemExit) as left:
            program.main(words)
        out, err = self._output.readouterr()
        events = [json.loads(line) for line in out.splitlines()]
        log = "\n".join([err, *map(_text, events)])
        if left.value.code:
            return Ended(left.value.code, events[-1]["error"]["message"], log=log)
        return Ended(0, result=events[-1], log=log)

    def outcome(self, code: int, *, certain: bool = False) -> int:
        return code


def options_of(given: Fields) -> list[str]:
    """Options of the command for the arguments of an operator."""
    words = []
    for name, value in given.items():
        if name in NO_OPTIONS:
            continue
        option = "--" + name.replace("_", "-")
        words += [option] if value is True else [option, f"{value}s" if name.endswith("timeout") else str(value)]
    return words


def _text(event: Fields) -> str:
    """An event as the log of other integrations has it."""
    if event.get("event") == "log":
        return f"[{event['rank']}] {event['text']}"
    return "\n".join(name if value is True else str(value) for name, value in event.items())
