"""The command on a real terminal: its bar, Ctrl-C, and what jobs may print there."""

from __future__ import annotations

import re
import unicodedata

import pytest
from tests.browser import SCREENSHOTS
from tests.local.shell import INTERRUPTED, STEP, Shell, Terminal, events
from tests.processes import eventually, read_until


def test_a_run_on_a_terminal_shows_its_progress_as_a_bar(trainjob: Shell) -> None:
    terminal = Terminal(trainjob, "run", "--key", "digits", *trainjob.training(8))
    eventually(lambda: re.search(r"━+ +\d\d% about \ds left  loss 0\.\d+", terminal.text))
    assert "Ctrl-C cancels the job" in terminal.text
    assert terminal.wait() == 0
    before, _, final = terminal.text.rpartition("Complete in ")
    assert "Running\n" in before
    assert before.count("[node-") == 16
    assert "progress" not in before, "it is in the bar"
    result, _, steps = final.rpartition("report: trainjob report digits-")
    assert result.endswith("metrics:\n  loss  0.125\noutputs:\n  model  file:///models/1\n")
    assert "━" not in result, "the bar is gone"
    assert re.fullmatch(r"(\w+-1) -o digits-\1\.html\nexport the model: \S+ export digits-\1 --name digits\n", steps)
    assert "\x1b[36m[node-0]" in terminal.raw
    assert "\x1b[32m[node-1]" in terminal.raw
    assert terminal.raw.rindex("\x1b[?25h") > terminal.raw.rindex("\x1b[?25l")  # the cursor is visible again


def test_a_failure_on_a_terminal_ends_with_the_diagnosis(trainjob: Shell) -> None:
    terminal = Terminal(trainjob, "run", *trainjob.training(4, "1"), lines=12, columns=60)
    assert terminal.wait() == 1
    final = terminal.text[terminal.text.rindex("error: ") :]
    assert "━" not in final
    assert "  | RuntimeError: the loss is not a number\n" in final
    assert "category: user code; can be retried: the failure may not repeat\n" in final
    assert re.search(r"\nreport: trainjob diagnose (\S+-1)\nlogs: trainjob logs \1 --rank node-1\n$", final)


MEASURING = """
import math, time
from trainjob import progress

for step in range(20):
    wave = {f"wave {i}": math.sin((step + i) / 3) for i in range(30)}
    progress.report(progress=step * 4, metrics={"loss": 10 / (step + 1), **wave, "note": "warm-up\\n", "gap": math.nan})
    time.sleep(0.12)
print("measured")
time.sleep(60)
"""


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_bar_is_one_line_on_each_terminal(trainjob: Shell, encoding: str) -> None:
    words = ("run", *STEP, "--", *trainjob.script(MEASURING))
    terminal = Terminal(trainjob, *words, lines=24, columns=90, PYTHONIOENCODING=encoding)
    eventually(lambda: "measured" in terminal.text)
    eventually(lambda: " 76% " in terminal.text)
    shown = re.findall(r"^.* 76% .*loss 0.5.*$", terminal.text, re.MULTILINE)
    assert shown
    assert max(map(len, shown)) <= 90
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    (SCREENSHOTS / f"bar-{encoding}.txt").write_text(terminal.text)
    terminal.press(b"\x03")
    assert terminal.wait() == INTERRUPTED


# --- lines with control sequences

HOSTILE = r"""
import os, sys

out = [
    b"\x1b]52;c;ZXZpbA==\x07clipboard", b"\x1b]0;title\x1b\\title", b"\x1bP$q q\x1b\\asked", b"\xc2\x9b2Jc1",
    b"\x9b2Jraw", b"\x1b[31mred", b"\x1b[?1049hscreen", b"\xe2\x80\xaegpj.exe", b"begin \x1b",
    b"]52;c;ZXZpbA==\x07 end",
    b"x" * (16 * 1024 - 1) + b"\x1b]52;c;ZXZpbA==\x07far", b"y" * (16 * 1024 - 2) + b"\xc2\x9b31mfar",
]
sys.stdout.buffer.write(b"\n".join(out))
sys.stdout.buffer.flush()
sys.exit(sys.argv[1])
"""
MESSAGE = "\x1b]52;c;ZXZpbA==\x07the reason"


def escapes(text: str) -> list[str]:
    """Control sequences except colors, and control characters except line ends."""
    left = re.sub(r"\x1b\[[0-9;:]*m", "", text)
    return [c for c in left if (unicodedata.category(c) == "Cc" and c not in "\t\n") or c in "\u202e\u2028"]


def test_no_control_sequence_of_a_job_reaches_the_terminal(trainjob: Shell) -> None:
    out, err = trainjob.both("run", *STEP, "--", *trainjob.script(HOSTILE), MESSAGE, code=1)
    (job,) = trainjob.json("list")["jobs"]
    page = trainjob.home / "page.html"
    outputs = [
        *(out, err, *trainjob.both("logs", job["name"]), *trainjob.both("diagnose", job["name"], code=1)),
        *(*trainjob.both("report", job["name"], "-o", str(page)), page.read_text(), trainjob("status", job["name"])),
    ]
    assert [escapes(text) for text in outputs] == [[]] * len(outputs)
    assert "\x1b" not in "".join(outputs)  # no colors without a terminal
    texts = ("clipboard", "asked", "c1", "raw", "red", "screen", "far", "the reason")
    assert [text for text in texts if text not in out] == []
    lines = trainjob("logs", job["name"], "--json")
    assert escapes(lines + trainjob("diagnose", job["name"], "--json", code=1)) == []
    assert events(lines)[0]["text"] == "\x1b]52;c;ZXZpbA==\x07clipboard", "the complete text, escaped by JSON"


def test_colors_of_a_job_stay_on_a_terminal_and_end_with_their_line(trainjob: Shell) -> None:
    job = trainjob.launch(*STEP, "--", *trainjob.script(HOSTILE), "0")
    trainjob.both("wait", job, code=1)
    shown = Terminal(trainjob, "logs", job)
    assert shown.wait() == 0
    raw = shown.raw.replace("\r\n", "\n")
    assert escapes(raw) == []
    assert "\x1b[36m[node-0]\x1b[0m \x1b[31mred\x1b[0m\n" in raw
    for shown in (Terminal(trainjob, "logs", job, TERM="dumb"), Terminal(trainjob, "logs", job, NO_COLOR="1")):
        assert shown.wait() == 0
        assert "[node-0] red\r\n" in shown.raw
        assert "\x1b" not in shown.raw


BAR = r"""
import pathlib, sys, time

def wait(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.02)

print("before")
sys.stderr.write("\r  0%|          |")
wait("first")
for percent in range(1, 60):
    sys.stderr.write(f"\r{percent:3d}%|#####     |")
wait("second")
sys.stderr.write("\r100%|##########|\n")
print("after")
"""


def test_a_progress_bar_is_seen_while_it_runs(trainjob: Shell) -> None:
    process = trainjob.start("run", *STEP, "--", *trainjob.script(BAR))
    read_until(process, "[node-0]   0%|")
    (trainjob.home / "first").touch()
    (trainjob.home / "second").touch()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "\r" not in out
    lines = [line for line in out.splitlines() if "[node-0]" in line]
    assert lines[-2:] == ["[node-0] 100%|##########|", "[node-0] after"]
    assert sum("%|" in line for line in lines) <= 3  # of 61 states
    (job,) = trainjob.json("list")["jobs"]
    assert trainjob("logs", job["name"]) == "[node-0] before\n[node-0] 100%|##########|\n[node-0] after\n"
    assert trainjob("logs", job["name"], "--tail", "2") == "[node-0] 100%|##########|\n[node-0] after\n"


def test_a_progress_bar_of_a_job_moves_in_place_on_a_terminal(trainjob: Shell) -> None:
    terminal = Terminal(trainjob, "run", *STEP, "--", *trainjob.script(BAR))
    eventually(lambda: "[node-0]   0%|" in terminal.text)
    (trainjob.home / "first").touch()
    eventually(lambda: "[node-0]  59%|" in terminal.text)
    (trainjob.home / "second").touch()
    assert terminal.wait() == 0
    lines = [re.sub(r".*\[node-0\]", "", line) for line in terminal.text.splitlines() if line.startswith("[node-0]")]
    assert lines == [" before", " 100%|##########|", " after"]
