"""The command as people and scripts use it: real processes, on the local backend.

`tests.integrations` has the ways in which a training ends.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.local.shell import FOREVER, INTERRUPTED, JAX, STEP, STUBBORN, TRAINJOB, Shell, events, interrupt
from tests.page.parsed import Parsed
from tests.processes import eventually, read_until

# --- run and wait


def test_a_good_run_shows_phases_logs_and_the_result(trainjob: Shell) -> None:
    out, err = trainjob.both("run", *trainjob.training(3))
    name = re.search(r"trainjob wait (train-\w+-1)", err)
    assert name, err
    export = f"export the model: trainjob export {name[1]} --name train"
    assert err.endswith(f"\nreport: trainjob report {name[1]} -o {name[1]}.html\n{export}\n")
    assert re.search(r"^\S+Z Running$", out, re.MULTILINE)
    assert re.search(r"^\S+Z progress 100%  loss 0\.33", out, re.MULTILINE)
    logged = {line for line in out.splitlines() if line.startswith("[node-")}
    assert logged == {f"[node-{rank}] epoch {epoch} of rank {rank}" for rank in "01" for epoch in "123"}
    assert re.search(r"Complete in \S+\nmetrics:\n  loss  0.333333\noutputs:\n  model  file:///models/1\n$", out)
    assert "\x1b" not in out + err
    status = trainjob("status", name[1])
    assert "outputs   model file:///models/1" in status
    assert "jax-distributed, 2 nodes" in status


def test_wait_reports_each_of_many_jobs_as_soon_as_it_ends(trainjob: Shell) -> None:
    commands = ("while ! [ -e go ]; do sleep 0.05; done", "exit 3", "true")
    slow, bad, quick = (trainjob.launch(*STEP, "--", "sh", "-c", command) for command in commands)
    process = trainjob.start("wait", slow, f"default/{bad}", "nosuch", quick, quick)
    assert process.stdout is not None
    first = dict(next(process.stdout).split("\t")[:2] for _ in range(2))
    assert first.keys() == {f"default/{bad}", quick}
    assert all(0 <= time.time() - float(ended) < 60 for ended in first.values())
    Path(trainjob.home, "go").touch()
    rest, errors = process.communicate(timeout=60)
    assert [line.split("\t")[0] for line in rest.splitlines()] == [slow]
    assert process.returncode == 1
    assert "there is no TrainJob default/nosuch" in errors
    assert f"TrainJob default/{bad} is Failed" in errors


def test_a_timeout_of_one_of_many_jobs_comes_before_a_missing_one(trainjob: Shell) -> None:
    """`tests/unit/test_cli_attempts.py` has the other exit codes."""
    good, endless = trainjob.launch(*STEP, "--", "true"), trainjob.launch(*STEP, *FOREVER)
    found = trainjob.events("wait", good, endless, "nosuch", "--run-timeout", "0.1s", code=4)
    ended = [(event["name"], event["phase"]) for event in found if event["event"] == "ended"]
    assert ended == [(good, "Complete")]


def test_waiting_for_many_reports_a_job_that_hangs_and_does_not_change_it(trainjob: Shell) -> None:
    hangs = "from trainjob import progress; import time; progress.step(); progress.step(); time.sleep(60)"
    stuck = trainjob.launch(*STEP, "--stall-timeout", "1s", "--", sys.executable, "-c", hangs)
    good = trainjob.launch(*STEP, "--stall-timeout", "1s", "--", "true")
    found = {event["event"]: event for event in trainjob.events("wait", stuck, good, code=1)}
    assert (found["ended"]["name"], found["hung"]["name"]) == (good, stuck)
    diagnosis = found["hung"]["diagnosis"]
    assert (diagnosis["category"], diagnosis["rank"]) == ("hang", "node-0")
    out, err = trainjob.both("wait", stuck, good, code=1)
    assert out.startswith(f"{good}\t")
    assert "no rank has made progress for 1s: node-0 makes no step" in err
    assert trainjob.phase(stuck) == "Running"


def test_a_run_as_json_lines(trainjob: Shell) -> None:
    reported = trainjob.events("run", "--key", "nightly/digits", "--json", *trainjob.training(2))
    launched, *_, result = reported
    assert (launched["event"], launched["key"], launched["adopted"]) == ("launched", "nightly/digits", False)
    assert {event["event"] for event in reported} == {"launched", "phase", "progress", "log", "result"}
    assert [e["phase"] for e in reported if e["event"] == "phase"][-1] == "Complete"
    assert len([e for e in reported if e["event"] == "log"]) == 4
    assert (result["event"], result["name"]) == ("result", launched["name"])
    assert (result["outputs"], result["metrics"]) == ({"model": "file:///models/1"}, {"loss": 0.5})
    assert [(step, value) for step, _, value in result["history"]["loss"]] == [(1, 1.0), (2, 0.5)]
    trainjob("report", result["name"], "-o", "page.html")
    page = Parsed((trainjob.home / "page.html").read_text()).data["document"]
    answers = [page, *(trainjob.json(command, result["name"]) for command in ("status", "diagnose"))]
    assert [answer["history"] for answer in answers] == [result["history"]] * 3


def typed(values: object) -> str:
    return json.dumps(values, sort_keys=True)


def test_metrics_and_outputs_have_one_type_in_every_answer(trainjob: Shell) -> None:
    """`tests.integrations` has the result of the run."""
    metrics = {"loss": 1 / 3, "steps": 7, "stopped": True, "kind": "x", "gap": "nan"}
    outputs = {"model": "s3://m", "promoted": False, "shards": 3}
    code = f"from trainjob.progress import report; report(progress=50, metrics={metrics}, outputs={outputs})"
    reported = trainjob.events("run", "--key", "k", "--json", *STEP, "--", sys.executable, "-c", code)
    # On a busy machine there are two, which differ in the remaining time.
    progress = [event for event in reported if event["event"] == "progress"][-1]
    (listed,) = trainjob.json("list")["jobs"]
    name = reported[-1]["name"]
    answers = [progress, listed, *(trainjob.json(command, name) for command in ("status", "diagnose"))]
    assert [typed(answer["metrics"]) for answer in answers] == [typed(metrics)] * 4
    assert {typed(answer["outputs"]) for answer in answers if "outputs" in answer} == {typed(outputs)}
    shown = trainjob("status", name)
    assert "loss 0.333333  steps 7  stopped true" in shown
    assert "promoted false" in shown


def test_a_spec_file_and_no_logs(trainjob: Shell) -> None:
    Path(trainjob.home, "hello.yaml").write_text("runtime: trainjob-step\ncommand: [echo, $(GREETING)]\n")
    out, err = trainjob.both("run", "hello.yaml", "--env", "GREETING=hei", "--no-logs")
    name = re.search(r"trainjob wait (hello-\w+-1)", err)
    assert name
    assert "hei" not in out
    assert trainjob("logs", name[1]) == "[node-0] hei\n"


@pytest.mark.parametrize(
    ("command", "fields", "code"),
    [("sleep 60", "active_deadline_seconds: 1", 1), ("no-such-command", "", 2)],
    ids=["deadline", "no such command"],
)
def test_a_failed_run_has_one_message_in_every_answer(trainjob: Shell, command: str, fields: str, code: int) -> None:
    Path(trainjob.home, "spec.yaml").write_text(f"runtime: trainjob-step\n{fields}")
    out, err = trainjob.both("run", "spec.yaml", "--json", "--key", "k", "--", *command.split(), code=code)
    error, (job,) = events(out)[-1]["error"], trainjob.json("list")["jobs"]
    assert (error["exit_code"], job["phase"]) == (code, "Failed")
    assert error["message"].splitlines()[0] in err
    assert error["message"] in trainjob("status", job["name"])
    assert error["diagnosis"]["job"] == f"default/{job['name']}"
    assert error["goodput"]["seconds"]["training"] + error["goodput"]["seconds"]["starting"] > 0


@pytest.mark.parametrize("command", ["wait", "status", "logs", "cancel", "resume", "delete"])
def test_a_missing_job_is_reported(trainjob: Shell, command: str) -> None:
    out, err = trainjob.both(command, "ml/nothing", "--json", code=5)
    assert "there is no TrainJob ml/nothing" in err
    assert json.loads(out)["error"]["type"] == "NotFound"


# --- Ctrl-C


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, 143)])
def test_an_interrupt_cancels_and_leaves_nothing_running(trainjob: Shell, number: signal.Signals, code: int) -> None:
    process = trainjob.start("run", *JAX, *FOREVER)
    read_until(process, "begun")
    ended, _, err = interrupt(process, number)
    name = re.search(r"cancelled default/(sh-\S+); its logs and metrics are kept: trainjob logs \1$", err, re.MULTILINE)
    assert name, err
    assert (ended, trainjob.phase(name[1])) == (code, "Cancelled")
    assert trainjob("logs", name[1]).count("begun") == 2
    eventually(trainjob.is_quiet)


def test_an_interrupt_can_keep_the_job(trainjob: Shell) -> None:
    process = trainjob.start("run", "--on-interrupt", "keep", *STEP, *FOREVER)
    read_until(process, "begun")
    code, _, err = interrupt(process)
    name = re.search(r"keeps running; wait for it: trainjob wait (\S+)", err)
    assert name
    assert (code, trainjob.phase(name[1])) == (INTERRUPTED, "Running")


@pytest.mark.parametrize(
    ("words", "event"), [(("wait", "--json"), ["interrupted"]), (("logs", "-f"), [])], ids=["wait", "logs"]
)
def test_an_interrupt_of_a_reader_keeps_the_job(trainjob: Shell, words: tuple[str, ...], event: list[str]) -> None:
    name = trainjob.launch(*STEP, *FOREVER)
    process = trainjob.start(*words, name)
    read_until(process, "begun")
    code, out, err = interrupt(process)
    assert (code, [each["event"] for each in events(out)][-1:]) == (INTERRUPTED, event)
    assert event or (out, err) == ("", "")
    assert trainjob.phase(name) == "Running"


@pytest.mark.full
def test_a_second_interrupt_leaves_at_once(trainjob: Shell) -> None:
    process = trainjob.start("run", *STEP, *STUBBORN)
    read_until(process, "begun")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "a second Ctrl-C" not in process.stderr.readline():
        pass
    assert process.poll() is None
    code, _, err = interrupt(process)
    assert code == INTERRUPTED
    assert "may still be stopping" in err


def test_interrupted_at_any_moment_nothing_is_left(trainjob: Shell) -> None:
    """From before the launch to after the first log line."""
    for pause in (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0):
        process = trainjob.start("run", *STEP, *FOREVER)
        time.sleep(pause)
        code, _, err = interrupt(process)
        early = code == 1 and "Fatal Python error: init_" in err  # the interpreter had not started yet
        assert early or code in (INTERRUPTED, -signal.SIGINT), err
    assert {job["phase"] for job in trainjob.json("list")["jobs"]} <= {"Cancelled"}
    eventually(trainjob.is_quiet)


# --- pipes


def piped(shell: Shell, line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = shell.environment | environment
    return subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, check=True)


def test_head_ends_logs_quietly(trainjob: Shell) -> None:
    name = trainjob.launch(*STEP, "--", "sh", "-c", "seq 100000")
    trainjob("wait", name, "--no-logs")
    done = piped(trainjob, f"{TRAINJOB} logs {name} | head -1; echo ${{PIPESTATUS[0]}}")
    assert (done.stdout, done.stderr) == ("[node-0] 1\n141\n", "")


def test_head_does_not_end_a_run(trainjob: Shell) -> None:
    script = "for i in 1 2 3 4 5; do echo $i; sleep 0.2; done; exit 7"
    line = f'{TRAINJOB} run --runtime trainjob-step -- sh -c "$SCRIPT" | head -1 >&2; echo ${{PIPESTATUS[0]}}'
    done = piped(trainjob, line, SCRIPT=script)
    assert done.stdout == "1\n"
    assert "node-0 exited with code 7" in done.stderr


# --- logs and the other commands


def test_logs_of_some_ranks_the_last_lines_and_json(trainjob: Shell) -> None:
    name = trainjob.launch(*trainjob.training(3))
    trainjob("wait", name)
    assert len(trainjob("logs", name).splitlines()) == 6
    assert trainjob("logs", f"default/{name}", "--rank", "node-1", "--tail", "1") == "[node-1] epoch 3 of rank 1\n"
    first = trainjob.events("logs", name, "--rank", "node-0")[0]
    assert (first["event"], first["rank"], first["text"]) == ("log", "node-0", "epoch 1 of rank 0")
    assert re.match(r"\d{4}-\S+Z \[node-0\] epoch 1", trainjob("logs", name, "--timestamps", "--rank", "node-0"))


def test_logs_follow_to_the_end(trainjob: Shell) -> None:
    waits = "echo one; while [ ! -e go ]; do sleep 0.1; done; echo two"
    process = trainjob.start("logs", "-f", trainjob.launch(*STEP, "--", "sh", "-c", waits))
    read_until(process, "one")
    assert process.poll() is None
    (trainjob.home / "go").touch()
    assert process.communicate(timeout=60) == ("[node-0] two\n", "")
    assert process.returncode == 0


def test_suspend_resume_cancel_and_delete(trainjob: Shell) -> None:
    name = trainjob.launch(*STEP, *FOREVER)
    _, err = trainjob.both("delete", name, code=2)
    assert f"cancel it instead: trainjob cancel {name}" in err
    assert trainjob("cancel", name, "--suspend") == f"suspended default/{name}\n"
    assert trainjob.phase(name) == "Suspended"
    assert trainjob("resume", name) == f"resumed default/{name}\n"
    assert trainjob.json("cancel", name)["stopped"] is True
    eventually(trainjob.is_quiet)


def test_what_can_be_done_with_a_finished_job(trainjob: Shell) -> None:
    name = trainjob.launch(*STEP, "--", "true")
    trainjob("wait", name)
    assert trainjob("cancel", name) == f"default/{name} has already ended: Complete\n"
    assert "launch it again" in trainjob.both("resume", name, code=2)[1]
    assert trainjob("delete", name) == f"deleted default/{name}\n"
    trainjob("status", name, code=5)


def test_list(trainjob: Shell) -> None:
    assert trainjob.both("list") == ("", "no jobs in namespace default\n")
    done = trainjob.launch(*STEP, "--key", "a", "--", "true")
    trainjob("wait", done)
    running = trainjob.launch(*STEP, "--key", "b", *FOREVER)
    elsewhere = trainjob("-n", "ml", "run", "-d", *STEP, "--", "true").strip()
    lines = trainjob("list").splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", running, done]
    assert [job["name"] for job in trainjob.json("list", "--phase", "running")["jobs"]] == [running]
    assert [job["name"] for job in trainjob.json("list", "--key", "a")["jobs"]] == [done]
    assert [f"ml/{job['name']}" for job in trainjob.json("list", "-n", "ml")["jobs"]] == [elsewhere]
    trainjob("wait", elsewhere)


def test_the_rendered_manifest_runs(trainjob: Shell) -> None:
    manifest = trainjob("render", *STEP, "--", "echo", "hei").replace("trainjob.dev/", "example.com/")
    manifest = manifest.replace("app.kubernetes.io/managed-by", "example.com/made-by")
    (trainjob.home / "manifest.yaml").write_text(manifest)
    assert "[node-0] hei" in trainjob("run", "manifest.yaml")


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
