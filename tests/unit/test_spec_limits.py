"""Specs that are too large, too deep or unreadable: one line names the file, the limit and the position.

Without checks of size and depth, these specs hung, ended in a traceback or exhausted memory.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainjob import InvalidSpec, TrainJobSpec
from trainjob._spec.literals import check_literals
from trainjob._spec.reading import MAX_BYTES, MAX_DEPTH, check_limits, load_spec, read_spec_file
from trainjob.cli import main

STEP = "runtime: trainjob-step\ncommand: [echo]\n"
MANIFEST = "apiVersion: trainer.kubeflow.org/v1alpha1\nkind: TrainJob\nspec:\n  runtimeRef: {name: torch-distributed}\n"


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def laughs(levels: int) -> str:
    """A few lines of YAML that expand to 10 to the power of `levels` words."""
    lines = ["func_args:", '  a0: &a0 ["lol"]']
    for i in range(1, levels):
        aliases = ", ".join([f"*a{i - 1}"] * 10)
        lines.append(f"  a{i}: &a{i} [{aliases}]")
    return STEP + "\n".join(lines)


WRONG: dict[str, tuple[str | bytes, str]] = {
    "lists": (f"{STEP}func_args: {{a: {'[' * 100_000}", "line 3"),
    "JSON": (f'{{"runtime": "trainjob-step", "func_args": {{"a": {"[" * 5000}{"]" * 5000}}}}}', f"at most {MAX_DEPTH}"),
    "mappings": (f"{STEP}func_args: {'{a: ' * 20_000}", f"at most {MAX_DEPTH}"),
    "mappings in a block": (f"{STEP}x:\n" + "".join(f"{' ' * i}a:\n" for i in range(1, 500)), f"at most {MAX_DEPTH}"),
    "a manifest": (f"{MANIFEST}  trainer: {'{a: ' * 300}1{'}' * 300}", f"at most {MAX_DEPTH}"),
    "aliases": (laughs(9), "more than 50,000 names and values with its aliases expanded"),
    "merged mappings": (
        f"{STEP}x: &x {{{', '.join(f'k{i}: 1' for i in range(1000))}}}\n" + "y: {<<: [" + "*x, " * 1000 + "]}",
        "more than 50,000 names and values with its aliases expanded",
    ),
    "deep by aliases": (
        "a0: &a0 [1]\n" + "\n".join(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 200)),
        f"at most {MAX_DEPTH}",
    ),
    "an alias of what it is in": (f"{STEP}func_args: &a {{a: [*a]}}", "inside its own anchor: *a, line 3"),
    "an integer": (f"{STEP}num_nodes: {'9' * 5000}", "line 3, column 12: not valid YAML: an integer of 5,000 digits"),
    "a hexadecimal": (f"{STEP}func_args: {{a: 0x{'f' * 100_000}}}", "an integer of 100,002 digits"),
    "base 60": (f"{STEP}num_nodes: 1{':59' * 100_000}", "num_nodes"),
    "a quantity": (f"{STEP}resources_per_node: {{cpu: '{'9' * 5000}'}}", "is not a Kubernetes quantity"),
    "a key": (f"{STEP}? {'k' * 500_000}\n: 1", "no such field"),
    "capitals": (f"{STEP}? {'AKIA' * 25_000}\n: 1", "no such field"),
    "keys": (STEP + "".join(f"k{i}: 1\n" for i in range(60_000)), "more than 50,000 names and values, line"),
    "fields": (STEP + "".join(f"k{i}: 1\n" for i in range(20_000)), "more problems"),
    "text": (f"{STEP}checkpoints: {'x' * 900_000}", " characters) … "),
    "the same start again": (f"{STEP}env: {{A: {'eyJ' * 300_000}}}\ninputs: {{d: x}}", "inputs.d"),
    "half a character": ('{"runtime": "trainjob-step", "command": ["\\ud800"]}', "line 1, column 45"),
    "a byte that is no text": (b"runtime: trainjob-step\ncommand: [a\xff]", "line 2, column 12"),
    "a tag of Python": (f"{STEP}x: !!python/object/apply:os.system [id]", "line 3, column 4"),
    "a value that is none of its tag": (f"{STEP}x: !!bool maybe", "'maybe' is not a valid bool"),
    "a tag that JSON has not": (f"{STEP}x: !!timestamp 2001-99-99", "line 3, column 4"),
    "two documents": (f"{STEP}---\n{STEP}", "line 3"),
    "no end": (f"{STEP}env: {{A: b", "line 4, column 1"),
}


WITH_FIELDS = {"fields", "an integer", "base 60", "a quantity", "a key", "capitals", "text", "the same start again"}
"""Specs whose problems are listed below the first line."""


@pytest.mark.parametrize("kind", WRONG)
def test_errors_are_one_line(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, expected = WRONG[kind]
    file = tmp_path / "spec.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SystemExit) as left:
        main(["render", str(file)])
    out, err = capsys.readouterr()
    assert (left.value.code, out) == (2, "")
    assert expected in err
    assert "Traceback" not in err
    assert len(err) < 200_000
    assert kind in WITH_FIELDS or len(err.splitlines()) == 1
    if "no such field" not in expected and str(file) not in err:
        assert err.startswith("error: invalid TrainJob spec:\n  - "), "the error names the file or a field"


def test_a_file_of_50_mb_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "large.yaml"
    with file.open("wb") as made:
        made.truncate(50_000_000)
    for words in (["render", str(file)], ["run", "--backend", "local", str(file), "--json"]):
        with pytest.raises(SystemExit) as left:
            main(words)
        out, err = capsys.readouterr()
        assert left.value.code == 2
        (line,) = err.splitlines()
        assert f"{file} has 50,000,000 bytes; a spec has at most 1,048,576 (1 MiB)" in line
    assert json.loads(out)["error"]["type"] == "InvalidSpec"
    with pytest.raises(InvalidSpec, match="50,000,000 bytes"):
        TrainJobSpec.parse(file)


class Endless(io.RawIOBase):
    """Endless standard input."""

    given = 0

    def read(self, size: int = -1) -> bytes:
        assert size > 0, "the read has no limit"
        self.given += size
        return b"#" * size


def test_reading_stops_at_the_maximum_size() -> None:
    endless = Endless()
    with pytest.raises(InvalidSpec, match="standard input has more than 1,048,576 bytes"):
        read_spec_file(endless, "standard input")  # type: ignore[arg-type]  # only this method is used
    assert endless.given == MAX_BYTES + 1
    with pytest.raises(InvalidSpec, match=r"the spec has 1,048,6\d\d bytes; a spec has at most"):
        TrainJobSpec.parse(STEP + "#" * MAX_BYTES)


def loop() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def shared(levels: int) -> list[Any]:
    value: list[Any] = ["lol"]
    for _ in range(levels):
        value = [value] * 10
    return value


VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "deep": (lambda: nested(50_000), f"at most {MAX_DEPTH}"),
    "a loop": (loop, f"at most {MAX_DEPTH}"),
    "shared parts": (lambda: shared(12), "more than 50,000 names and values"),
    "long text": (lambda: "x" * (MAX_BYTES + 1), "more than 1,048,576 bytes"),
    "much text": (lambda: ["x" * 1000] * 2000, "more than 1,048,576 bytes"),
    "many keys": (lambda: dict.fromkeys(range(100_000)), "more than 50,000 names and values"),
    "an integer": (lambda: 1 << 5000, "an integer of 5,001 bits; at most 1,024"),
    "half a character": (lambda: "a\ud800", "not Unicode"),
}


@pytest.mark.parametrize("kind", VALUES)
def test_limits_apply_to_parsed_values(kind: str) -> None:
    """Arguments of Airflow, KFP and Python."""
    make, expected = VALUES[kind]
    fields: dict[str, Any] = {"runtime": "trainjob-step", "command": ["a"], "func_args": {"a": make()}}
    manifest = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "spec": {"x": make()}}
    readers: list[Callable[[], object]] = [
        lambda: TrainJobSpec.parse(fields),
        lambda: TrainJobSpec(**fields),
        lambda: TrainJobSpec.parse(manifest),
        lambda: check_literals(fields, lambda _: False),
    ]
    for read in readers:
        with pytest.raises(InvalidSpec, match=expected) as refused:
            read()
        assert len(str(refused.value).splitlines()) == 1
        assert len(str(refused.value)) < 1000


def test_values_at_the_limits_are_accepted() -> None:
    check_limits(nested(MAX_DEPTH))
    check_limits(["x" * (MAX_BYTES - 10)])
    check_limits((1 << 1024) - 1)
    text = f"{STEP}func_args: {{a: {'[' * (MAX_DEPTH - 2)}{']' * (MAX_DEPTH - 2)}}}"
    assert load_spec(text)["func_args"]
    shared_names = f"{STEP}labels: &names {{team: vision}}\nannotations: *names"
    assert load_spec(shared_names)["annotations"] == {"team": "vision"}
    large = f"{STEP}args: [{'x' * 1000_000}]"
    assert len(load_spec(large)["args"][0]) == 1000_000


def test_yaml_is_parsed_like_kubectl() -> None:
    """Unlike in YAML 1.1, dates and numbers to base 60 are text."""
    texts = {"2026-01-31": "2026-01-31", "12:30": "12:30", "1:30.5": "1:30.5", "=": "=", "'1'": "1"}
    others = {"010": 8, "0x10": 16, "1.5": 1.5, "yes": True, "~": None, "1_000": 1000}
    for written, value in {**texts, **others}.items():
        assert load_spec(f"a: {written}") == {"a": value}
