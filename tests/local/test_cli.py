"""The command as people and scripts use it: real processes, on the local backend and on a real terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.page.parsed import Parsed
from tests.processes import eventually, read_until
from tests.warm import Warm

SCREENSHOTS = Path(__file__).parents[2] / ".test-output" / "screenshots"
TRAINJOB = str(Path(sys.executable).parent / "trainjob")
STEP = ("--runtime", "trainjob-step")
JAX = ("--runtime", "jax-distributed", "--num-nodes", "2")
FOREVER = ("--", "sh", "-c", "echo begun; exec sleep 300")
STUBBORN = ("--", "sh", "-c", "trap '' TERM; echo begun; while true; do sleep 0.2; done")

TRAINING = """
import os, sys, time
from trainjob import progress

rank, epochs = os.environ["JAX_PROCESS_ID"], int(sys.argv[1])
for epoch in range(1, epochs + 1):
    print(f"epoch {epoch} of rank {rank}")
    if rank == "0":
        outputs = {"model": "file:///models/1"} if epoch == epochs else {}
        done = {"progress": 100 * epoch / epochs, "remaining_seconds": epochs - epoch}
        progress.report(**done, metrics={"loss": 1 / epoch}, outputs=outputs)
    time.sleep(0.25)
if sys.argv[2:] == [rank]:
    raise RuntimeError("the loss is not a number")
"""


class Shell:
    """Runs the command with a separate home."""

    def __init__(self, home: Path, warm: Warm) -> None:
        self.home = home
        self._warm = str(warm.bin / "trainjob")
        self.script = home / "train.py"
        self.script.write_text(TRAINING)
        clean = {
            k: v for k, v in os.environ.items() if not k.startswith("TRAINJOB_") and k not in ("NO_COLOR", "COLUMNS")
        }
        self.environment = clean | {"TRAINJOB_BACKEND": "local", "TRAINJOB_HOME": str(home)}

    def start(self, *words: str, program: str = TRAINJOB) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [program, *words],
            env=self.environment,
            cwd=self.home,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def __call__(self, *words: str, code: int = 0) -> str:
        return self.both(*words, code=code)[0]

    def both(self, *words: str, code: int = 0) -> tuple[str, str]:
        process = self.start(*words, program=self._warm)
        out, err = process.communicate(timeout=60)
        assert process.returncode == code, f"exit {process.returncode}\n{out}\n{err}"
        assert "\nTraceback" not in err  # tracebacks of trainings have a prefix
        return out, err

    def json(self, *words: str, code: int = 0) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self(*words, "--json", code=code))
        return answer

    def training(self, epochs: int, *more: str) -> tuple[str, ...]:
        return (*JAX, "--", sys.executable, str(self.script), str(epochs), *more)

    def is_quiet(self) -> bool:
        return not self.processes()

    def processes(self) -> list[psutil.Process]:
        """All running processes of these jobs: each has inherited the home."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                mine = process.environ().get("TRAINJOB_HOME") == str(self.home)
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """Runs commands that get no signal and have no terminal."""
    modules = ["cli.run", "cli.look", "cli.pages", "client", "_jobs.launching", "_backends.local.backend"]
    with Warm({"trainjob": "trainjob.cli:main"}, [f"trainjob.{module}" for module in modules]) as running:
        yield running


@pytest.fixture
def trainjob(tmp_path: Path, warm: Warm) -> Iterator[Shell]:
    shell = Shell(tmp_path, warm)
    yield shell
    if shell.processes():
        for job in shell.json("list")["jobs"]:
            shell("cancel", job["name"])
    for process in shell.processes():  # left by commands of a failed test
        with suppress(psutil.Error):
            process.kill()


def events(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


# --- run


def test_a_good_run_shows_phases_logs_and_the_result(trainjob: Shell) -> None:
    out, err = trainjob.both("run", *trainjob.training(3))
    name = re.search(r"trainjob wait (train-\w+-1)", err)
    assert name, err
    export = f"export the model: trainjob export {name[1]} --name train"
    assert err.endswith(f"\nreport: trainjob report {name[1]} -o {name[1]}.html\n{export}\n")
    assert re.search(r"^\S+Z Running$", out, re.MULTILINE)
    assert re.search(r"^\S+Z progress 100%  loss 0\.33", out, re.MULTILINE)
    for rank in "01":
        for epoch in "123":
            assert f"[node-{rank}] epoch {epoch} of rank {rank}\n" in out
    assert re.search(r"Complete in \S+\nmetrics:\n  loss  0.333333\noutputs:\n  model  file:///models/1\n$", out)
    assert "\x1b" not in out + err
    status = trainjob("status", name[1])
    assert "outputs   model file:///models/1" in status
    assert "jax-distributed, 2 nodes" in status


def test_wait_reports_each_of_many_jobs_when_it_ends(trainjob: Shell) -> None:
    """Each job is reported as soon as it has ended, independently of the others."""
    slow, bad, quick = [
        trainjob("run", "--detach", *STEP, "--", "sh", "-c", f"{command}").strip()
        for command in ("while ! [ -e go ]; do sleep 0.05; done", "exit 3", "true")
    ]
    names = [slow, f"default/{bad}", "nosuch", quick, quick]
    process = subprocess.Popen(
        [TRAINJOB, "wait", *names],
        env=trainjob.environment,
        cwd=trainjob.home,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    first = {line.split("\t")[0]: float(line.split("\t")[1]) for line in (next(process.stdout), next(process.stdout))}
    assert first.keys() == {f"default/{bad}", quick}
    assert time.time() - 20 < min(first.values()) <= max(first.values()) <= time.time()
    Path(trainjob.home, "go").touch()
    assert next(process.stdout).startswith(f"{slow}\t")
    assert process.wait(20) == 1
    assert process.stdout.read() == ""
    assert process.stderr is not None
    errors = process.stderr.read()
    assert "there is no TrainJob default/nosuch" in errors
    assert f"TrainJob default/{bad} is Failed" in errors
    process.stdout.close()
    process.stderr.close()


@pytest.mark.parametrize(
    ("names", "words", "code"),
    [
        ("{good} {good}", (), 0),
        ("{good} nosuch", (), 5),
        ("{good} {endless} nosuch", ("--run-timeout", "0.1s"), 4),
    ],
)
def test_exit_codes_of_waiting_for_many(trainjob: Shell, names: str, words: tuple[str, ...], code: int) -> None:
    good = trainjob("run", "--detach", *STEP, "--", "true").strip()
    endless = trainjob("run", "--detach", *STEP, *FOREVER).strip()
    done = subprocess.run(
        [TRAINJOB, "wait", *names.format(good=good, endless=endless).split(), "--json", *words],
        env=trainjob.environment,
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    ended = [event for event in events(done.stdout) if event["event"] == "ended"]
    assert [(event["name"], event["phase"]) for event in ended] == [(good, "Complete")]


def test_waiting_for_many_reports_a_job_that_hangs(trainjob: Shell) -> None:
    hangs = "from trainjob import progress; import time; progress.step(); time.sleep(60)"
    stuck = trainjob("run", "--detach", *STEP, "--stall-timeout", "1s", "--", sys.executable, "-c", hangs).strip()
    good = trainjob("run", "--detach", *STEP, "--stall-timeout", "1s", "--", "true").strip()
    for words in (("--json",), ()):
        done = subprocess.run(
            [TRAINJOB, "wait", stuck, good, *words],
            env=trainjob.environment,
            text=True,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        if words:
            found = {event["event"]: event for event in events(done.stdout)}
            assert (found["ended"]["name"], found["hung"]["name"]) == (good, stuck)
            assert found["hung"]["diagnosis"]["category"] == "hang"
            assert found["hung"]["diagnosis"]["rank"] == "node-0"
        else:
            assert done.stdout.startswith(f"{good}\t")
            assert "no rank has made progress for 1s: node-0 makes no step" in done.stderr
    assert trainjob.json("status", stuck)["phase"] == "Running", "a waiter does not change the job"
    trainjob("cancel", stuck)


def test_a_run_as_json_lines(trainjob: Shell) -> None:
    reported = events(trainjob("run", "--json", "--key", "nightly/digits", *trainjob.training(2)))
    launched, *_, result = reported
    assert (launched["event"], launched["key"], launched["adopted"]) == ("launched", "nightly/digits", False)
    assert {event["event"] for event in reported} == {"launched", "phase", "progress", "log", "result"}
    assert [e["phase"] for e in reported if e["event"] == "phase"][-1] == "Complete"
    assert len([e for e in reported if e["event"] == "log"]) == 4
    assert result["event"] == "result"
    assert result["outputs"] == {"model": "file:///models/1"}
    assert result["metrics"] == {"loss": 0.5}
    assert result["name"] == launched["name"]
    assert [(step, value) for step, _, value in result["history"]["loss"]] == [(1, 1.0), (2, 0.5)]
    for command in ("status", "diagnose"):
        assert trainjob.json(command, result["name"])["history"] == result["history"]
    trainjob("report", result["name"], "-o", "page.html")
    page = Parsed((trainjob.home / "page.html").read_text())
    assert page.data["document"]["history"] == result["history"]


def test_metrics_and_outputs_have_one_type_in_every_answer(trainjob: Shell) -> None:
    metrics = {"loss": 1 / 3, "steps": 7, "stopped": True, "kind": "x", "gap": "nan"}
    outputs = {"model": "s3://m", "promoted": False, "shards": 3}
    code = f"from trainjob.progress import report; report(progress=50, metrics={metrics}, outputs={outputs})"
    reported = events(trainjob("run", "--json", "--key", "k", *STEP, "--", sys.executable, "-c", code))
    # On a busy machine there are two, which differ in the remaining time.
    progress = [event for event in reported if event["event"] == "progress"][-1]
    (listed,) = trainjob.json("list")["jobs"]
    answers = [
        progress,
        reported[-1],
        listed,
        *(trainjob.json(command, reported[-1]["name"]) for command in ("status", "diagnose")),
    ]
    for answer in answers:
        assert json.dumps(answer["metrics"], sort_keys=True) == json.dumps(metrics, sort_keys=True)
    for answer in answers:
        if "outputs" in answer:
            assert json.dumps(answer["outputs"], sort_keys=True) == json.dumps(outputs, sort_keys=True)
    shown = trainjob("status", reported[-1]["name"])
    assert "loss 0.333333  steps 7  stopped true" in shown
    assert "promoted false" in shown


def test_a_spec_file_and_no_logs(trainjob: Shell) -> None:
    Path(trainjob.home, "hello.yaml").write_text("runtime: trainjob-step\ncommand: [echo, $(GREETING)]\n")
    out, err = trainjob.both("run", "hello.yaml", "--env", "GREETING=hei", "--no-logs")
    name = re.search(r"trainjob wait (hello-\w+-1)", err)
    assert name
    assert "hei" not in out
    assert trainjob("logs", name[1]) == "[node-0] hei\n"


FAILURES = {
    "user code": (("sh", "-c", "echo why; exit 3"), (), 1),
    "deadline": (("sleep", "60"), ("active_deadline_seconds: 1",), 1),
    "no such command": (("no-such-command",), (), 2),
    "killed from outside": (("sh", "-c", "kill -9 $$$$"), (), 3),
    "run timeout": (("sleep", "60"), (), 4),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_exit_codes_of_run(trainjob: Shell, failure: str) -> None:
    command, fields, code = FAILURES[failure]
    Path(trainjob.home, "spec.yaml").write_text("\n".join(["runtime: trainjob-step", *fields]))
    words = (
        "run",
        "spec.yaml",
        "--json",
        "--key",
        "k",
        *(("--run-timeout", "1s") if code == 4 else ()),
        "--",
        *command,
    )
    out, err = trainjob.both(*words, code=code)
    error = events(out)[-1]["error"]
    assert error["exit_code"] == code
    assert error["message"].splitlines()[0] in err
    assert error["goodput"]["seconds"]["training"] + error["goodput"]["seconds"]["starting"] > 0
    job = trainjob.json("list")["jobs"][0]
    if code == 4:
        assert (error["type"], job["phase"]) == ("RunTimeout", "Running")
    else:
        assert error["diagnosis"]["job"] == f"default/{job['name']}"
        assert job["phase"] == "Failed"
        status = trainjob("status", job["name"])
        assert error["message"] in status


def test_a_failure_ends_with_its_diagnosis(trainjob: Shell) -> None:
    out, err = trainjob.both("run", *trainjob.training(1, "1"), code=1)
    assert "Failed" in out.splitlines()[-1]
    last = err.splitlines()
    assert any("failed: node-1 exited with code 1" in line for line in last)
    assert "  | RuntimeError: the loss is not a number" in last
    assert last[-3] == "category: user code; can be retried: the failure may not repeat"
    assert last[-1].startswith("logs: trainjob logs train-")


def test_a_missing_job_is_reported(trainjob: Shell) -> None:
    for command in ("wait", "status", "logs", "cancel", "resume", "delete"):
        out, err = trainjob.both(command, "ml/nothing", "--json", code=5)
        assert "there is no TrainJob ml/nothing" in err
        assert json.loads(out)["error"]["type"] == "NotFound"


def test_waiting_for_a_cancelled_job_exits_with_5(trainjob: Shell) -> None:
    name = trainjob("run", "-d", *STEP, *FOREVER).strip()
    process = trainjob.start("wait", name)
    read_until(process, "begun")
    trainjob("cancel", name)
    assert process.communicate(timeout=20)[1].startswith("error: ")
    assert process.returncode == 5


def test_the_same_key_is_the_same_job_until_its_result_was_shown(trainjob: Shell) -> None:
    work = (*STEP, "--key", "nightly", "--", "sh", "-c", "sleep 1; echo done")
    name = trainjob("run", "--detach", *work).strip()
    out, err = trainjob.both("run", *work)
    assert f"adopted default/{name}" in err
    assert "[node-0] done" in out
    launched = trainjob.json(
        "run", "--detach", "--key", "nightly", *STEP, "--json", "--", "sh", "-c", "sleep 1; echo done"
    )
    assert (launched["attempt"], launched["adopted"]) == (2, False)


def test_another_spec_under_the_same_key_is_refused(trainjob: Shell) -> None:
    trainjob("run", "-d", *STEP, "--key", "k", *FOREVER)
    _, err = trainjob.both("run", "-d", *STEP, "--key", "k", "--", "true", code=2)
    assert "spec.trainer.command" in err


# --- Ctrl-C


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_cancels_and_leaves_nothing_running(trainjob: Shell, number: signal.Signals, code: int) -> None:
    process = trainjob.start("run", *JAX, *FOREVER)
    read_until(process, "begun")
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    name = re.search(r"cancelled default/(sh-\S+); its logs and metrics are kept: trainjob logs \1$", err, re.MULTILINE)
    assert name, err
    assert [job["phase"] for job in trainjob.json("list")["jobs"]] == ["Cancelled"]
    assert trainjob("logs", name[1]).count("begun") == 2
    eventually(trainjob.is_quiet)


def test_an_interrupt_can_keep_the_job(trainjob: Shell) -> None:
    process = trainjob.start("run", "--on-interrupt", "keep", *STEP, *FOREVER)
    read_until(process, "begun")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    name = re.search(r"keeps running; wait for it: trainjob wait (\S+)", err)
    assert name
    assert process.returncode == 130
    assert trainjob.json("status", name[1])["phase"] == "Running"

    process = trainjob.start("wait", name[1], "--json")
    read_until(process, "begun")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, events(out)[-1]["event"]) == (130, "interrupted")
    assert trainjob.json("status", name[1])["phase"] == "Running"


@pytest.mark.full
def test_a_second_interrupt_leaves_at_once(trainjob: Shell) -> None:
    process = trainjob.start("run", *STEP, *STUBBORN)
    read_until(process, "begun")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "a second Ctrl-C" not in process.stderr.readline():
        pass
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "may still be stopping" in err


def test_interrupted_at_any_moment_nothing_is_left(trainjob: Shell) -> None:
    """From before the launch to after the first log line."""
    for pause in (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0):
        process = trainjob.start("run", *STEP, *FOREVER)
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        early = process.returncode == 1 and "Fatal Python error: init_" in err  # the interpreter had not started yet
        assert early or process.returncode in (130, -signal.SIGINT), err
    assert {job["phase"] for job in trainjob.json("list")["jobs"]} <= {"Cancelled"}
    eventually(trainjob.is_quiet)


# --- pipes


def test_head_ends_logs_quietly(trainjob: Shell) -> None:
    name = trainjob("run", "-d", *STEP, "--", "sh", "-c", "seq 100000").strip()
    trainjob("wait", name, "--no-logs")
    line = f"{TRAINJOB} logs {name} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], env=trainjob.environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[node-0] 1\n141\n", "")


def test_head_does_not_end_a_run(trainjob: Shell) -> None:
    script = "for i in 1 2 3 4 5; do echo $i; sleep 0.2; done; exit 7"
    line = f'{TRAINJOB} run --runtime trainjob-step -- sh -c "$SCRIPT" | head -1 >&2; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", line], env={**trainjob.environment, "SCRIPT": script}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"
    assert "node-0 exited with code 7" in done.stderr


# --- logs


def test_logs_of_some_ranks_the_last_lines_and_json(trainjob: Shell) -> None:
    name = trainjob("run", "-d", *trainjob.training(3)).strip()
    trainjob("wait", name)
    assert len(trainjob("logs", name).splitlines()) == 6
    assert trainjob("logs", f"default/{name}", "--rank", "node-1", "--tail", "1") == "[node-1] epoch 3 of rank 1\n"
    first = events(trainjob("logs", name, "--json", "--rank", "node-0"))[0]
    assert (first["event"], first["rank"], first["text"]) == ("log", "node-0", "epoch 1 of rank 0")
    assert re.match(r"\d{4}-\S+Z \[node-0\] epoch 1", trainjob("logs", name, "--timestamps", "--rank", "node-0"))
    out, err = trainjob.both("logs", name, "--rank", "node-7", code=2)
    assert out == ""
    assert f"default/{name} has no rank node-7; it has node-0, node-1" in err


def test_logs_follow_to_the_end(trainjob: Shell) -> None:
    name = trainjob(
        "run", "-d", *STEP, "--", "sh", "-c", "echo one; while [ ! -e go ]; do sleep 0.1; done; echo two"
    ).strip()
    process = trainjob.start("logs", "-f", name)
    read_until(process, "one")
    assert process.poll() is None
    (trainjob.home / "go").touch()
    assert process.communicate(timeout=20) == ("[node-0] two\n", "")
    assert process.returncode == 0


def test_an_interrupt_ends_following(trainjob: Shell) -> None:
    name = trainjob("run", "-d", *STEP, *FOREVER).strip()
    process = trainjob.start("logs", "-f", name)
    read_until(process, "begun")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 130
    assert trainjob.json("status", name)["phase"] == "Running"


# --- the other commands


def test_suspend_resume_cancel_and_delete(trainjob: Shell) -> None:
    name = trainjob("run", "-d", *STEP, *FOREVER).strip()
    _, err = trainjob.both("delete", name, code=2)
    assert f"cancel it instead: trainjob cancel {name}" in err
    assert trainjob("cancel", name, "--suspend") == f"suspended default/{name}\n"
    assert trainjob.json("status", name)["phase"] == "Suspended"
    assert trainjob("resume", name) == f"resumed default/{name}\n"
    assert trainjob.json("cancel", name)["stopped"] is True
    eventually(trainjob.is_quiet)


def test_what_can_be_done_with_a_finished_job(trainjob: Shell) -> None:
    name = trainjob("run", "-d", *STEP, "--", "true").strip()
    trainjob("wait", name)
    assert trainjob("cancel", name) == f"default/{name} has already ended: Complete\n"
    assert "launch it again" in trainjob.both("resume", name, code=2)[1]
    assert trainjob("delete", name) == f"deleted default/{name}\n"
    trainjob("status", name, code=5)


def test_list(trainjob: Shell) -> None:
    assert trainjob.both("list") == ("", "no jobs in namespace default\n")
    done = trainjob("run", "-d", *STEP, "--key", "a", "--", "true").strip()
    trainjob("wait", done)
    running = trainjob("run", "-d", *STEP, "--key", "b", *FOREVER).strip()
    elsewhere = trainjob("-n", "ml", "run", "-d", *STEP, "--", "true").strip()
    assert elsewhere.startswith("ml/")
    lines = trainjob("list").splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", running, done]
    assert [job["name"] for job in trainjob.json("list", "--phase", "running")["jobs"]] == [running]
    assert [job["name"] for job in trainjob.json("list", "--key", "a")["jobs"]] == [done]
    assert [f"ml/{job['name']}" for job in trainjob.json("list", "-n", "ml")["jobs"]] == [elsewhere]
    trainjob("wait", elsewhere)


def test_the_rendered_manifest_runs(trainjob: Shell) -> None:
    manifest = trainjob("render", *STEP, "--", "echo", "hei")
    (trainjob.home / "manifest.yaml").write_text(
        manifest.replace("trainjob.dev/", "example.com/").replace("app.kubernetes.io/managed-by", "example.com/made-by")
    )
    assert "[node-0] hei" in trainjob("run", "manifest.yaml")


# --- on a terminal


class Terminal:
    """The command on a separate pseudo-terminal, which is its controlling terminal, so that Ctrl-C can be typed."""

    TAKE = (
        "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )

    def __init__(
        self, shell: Shell, *words: str, lines: int = 30, columns: int = 100, environment: dict[str, str] | None = None
    ) -> None:
        self._main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.TAKE, TRAINJOB, *words],
            env={**shell.environment, "TERM": "xterm-256color", **(environment or {})},
            cwd=shell.home,
            stdin=side,
            stdout=side,
            stderr=side,
        )
        os.close(side)
        self.raw = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # on Linux the error means that the other side is closed
            while data := os.read(self._main, 65536):
                self.raw += data.decode(errors="replace")

    @property
    def text(self) -> str:
        """What was printed; a line that was redrawn is there several times."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw).replace("\r\n", "\n").replace("\r", "\n")

    def press(self, key: bytes) -> None:
        os.write(self._main, key)

    def wait(self) -> int:
        code = self._process.wait(30)
        self._reader.join(10)
        os.close(self._main)
        return code


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
    trainjob.script.write_text(MEASURING)
    words = ("run", *STEP, "--", sys.executable, str(trainjob.script))
    terminal = Terminal(trainjob, *words, lines=24, columns=90, environment={"PYTHONIOENCODING": encoding})
    eventually(lambda: "measured" in terminal.text)
    eventually(lambda: " 76% " in terminal.text)
    shown = re.findall(r"^.* 76% .*loss 0.5.*$", terminal.text, re.MULTILINE)
    assert shown
    assert max(map(len, shown)) <= 90
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    (SCREENSHOTS / f"bar-{encoding}.txt").write_text(terminal.text)
    terminal.press(b"\x03")
    assert terminal.wait() == 130


def test_commands_to_run_next_repeat_the_backend_and_the_namespace(trainjob: Shell) -> None:
    del trainjob.environment["TRAINJOB_BACKEND"]
    options = ("--backend", "local", "-n", "ml")
    _, err = trainjob.both("run", *options, *trainjob.training(1))
    name = re.search(r"ml/(train-\w+-1)", err)
    assert name
    assert f"\nreport: trainjob --backend local report ml/{name[1]} -o {name[1]}.html\n" in err
    _, err = trainjob.both("run", *options, *STEP, "--", "sh", "-c", "exit 3", code=1)
    commands = re.findall(r"^(?:report|logs): trainjob (.*)$", err, re.MULTILINE)
    assert [command.split()[2] for command in commands] == ["diagnose", "logs"]
    trainjob(*commands[0].split(), code=1)
    trainjob(*commands[1].split())
    _, err = trainjob.both("run", *options, "--json", *STEP, "--", "true")
    assert "report:" not in err
    trainjob.environment["TRAINJOB_BACKEND"] = "local"


@pytest.mark.full
def test_typing_ctrl_c_cancels(trainjob: Shell) -> None:
    terminal = Terminal(trainjob, "run", *JAX, *STUBBORN)
    eventually(lambda: terminal.text.count("begun") >= 2)
    terminal.press(b"\x03")
    eventually(lambda: "cancelling the job; a second Ctrl-C exits" in terminal.text)
    assert terminal.wait() == 130
    assert re.search(
        r"\ncancelled default/sh-\w+-1; its logs and metrics are kept: trainjob logs sh-\S+\n$", terminal.text
    )
    eventually(trainjob.is_quiet)


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
    script = trainjob.home / "hostile.py"
    script.write_text(HOSTILE)
    words = (*STEP, "--", sys.executable, str(script), MESSAGE)
    outputs = []
    out, err = trainjob.both("run", *words, code=1)
    outputs += [out, err]
    (job,) = trainjob.json("list")["jobs"]
    page = trainjob.home / "page.html"
    outputs += trainjob.both("logs", job["name"])
    outputs += trainjob.both("diagnose", job["name"], code=1)
    outputs += trainjob.both("report", job["name"], "-o", str(page))
    outputs += [page.read_text(), trainjob("status", job["name"])]
    assert [escapes(text) for text in outputs] == [[]] * len(outputs)
    assert "\x1b" not in "".join(outputs)  # no colors without a terminal
    for text in ("clipboard", "asked", "c1", "raw", "red", "screen", "far", "the reason"):
        assert text in out
    lines = trainjob("logs", job["name"], "--json")
    assert escapes(lines + trainjob("diagnose", job["name"], "--json", code=1)) == []
    assert (
        json.loads(lines.splitlines()[0])["text"] == "\x1b]52;c;ZXZpbA==\x07clipboard"
    )  # the complete text, escaped by JSON


def test_colors_of_a_job_stay_on_a_terminal_and_end_with_their_line(trainjob: Shell) -> None:
    script = trainjob.home / "hostile.py"
    script.write_text(HOSTILE)
    job = trainjob("run", "-d", *STEP, "--", sys.executable, str(script), "0").strip()
    trainjob.both("wait", job, code=1)
    shown = Terminal(trainjob, "logs", job)
    assert shown.wait() == 0
    raw = shown.raw.replace("\r\n", "\n")
    assert escapes(raw) == []
    assert "\x1b[36m[node-0]\x1b[0m \x1b[31mred\x1b[0m\n" in raw
    for plain in ({"TERM": "dumb"}, {"NO_COLOR": "1"}):
        shown = Terminal(trainjob, "logs", job, environment=plain)
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


def bar(shell: Shell) -> tuple[str, ...]:
    (shell.home / "bar.py").write_text(BAR)
    return (*STEP, "--", sys.executable, str(shell.home / "bar.py"))


def test_a_progress_bar_is_seen_while_it_runs(trainjob: Shell) -> None:
    process = trainjob.start("run", *bar(trainjob))
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
    terminal = Terminal(trainjob, "run", *bar(trainjob))
    eventually(lambda: "[node-0]   0%|" in terminal.text)
    (trainjob.home / "first").touch()
    eventually(lambda: "[node-0]  59%|" in terminal.text)
    (trainjob.home / "second").touch()
    assert terminal.wait() == 0
    lines = [re.sub(r".*\[node-0\]", "", line) for line in terminal.text.splitlines() if line.startswith("[node-0]")]
    assert lines == [" before", " 100%|##########|", " after"]


def test_without_a_cursor_lines_are_plain_on_a_terminal(trainjob: Shell) -> None:
    terminal = Terminal(trainjob, "run", *trainjob.training(2), environment={"TERM": "dumb"})
    assert terminal.wait() == 0
    assert "progress 100%" in terminal.text
    assert "\x1b" not in terminal.raw
