"""The command ``trainjob run``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integrations.integration import Ended, Fields, Integration

from trainjob.cli import program

ON_A_CRASH = ("on_crash_action",)
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
            code, out, err = self.command(*words)
            log += err + "\n".join(map(_text, out))
            if code == 0:
                return Ended(0, result=out[-1], log=log)
        return Ended(code, out[-1]["error"]["message"], log=log)

    def command(self, *words: str) -> tuple[int, list[dict[str, Any]], str]:
        """Run a command; return its exit code, the objects that it prints, and what it prints on stderr."""
        self._output.readouterr()
        with pytest.raises(SystemExit) as left:
            program.main(words)
        out, err = self._output.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, [json.loads(line) for line in out.splitlines()], err

    def outcome(self, code: int) -> int:
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
    return "\n".join(str(value) for value in event.values())
