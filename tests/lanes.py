"""Runs make targets in parallel lanes and prints a table of the results, for `make test`, `test-rest` and `campaign`.

::

    python tests/lanes.py MAKE "lint test-unit …" "test-cluster" …

The targets of a lane run one after the other. Each writes its output to `.test-output/<target>.log`. This program
prints a line when a target starts or ends, then each failure with the command that repeats it, then the table. A
failure does not stop the other targets; Ctrl-C stops all.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

OUTPUT = Path(".test-output")
SLOWEST = 5
PROGRESS_SECONDS = 60.0  # between two lines about running targets
RECORDED = Path("tests/recorded_cpu.json")
"""CPU seconds of each target by the value of SELECT: those of `make test`, `make test-rest` and `make campaign`."""
GROWN, GROWN_SECONDS = 1.25, 10  # a target has grown if it takes this factor and these seconds more than recorded


@dataclass(frozen=True)
class Test:
    """One test that ran.

    Attributes:
        name: Its pytest id.
        seconds: Duration, including its fixtures.
        skipped: Why it was skipped; empty if it was not.
        failed: pytest's report of the failure; empty if it passed.
        properties: Recorded properties (``record_property``), such as seeds.
    """

    name: str
    seconds: float
    skipped: str = ""
    failed: str = ""
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Target:
    """A make target.

    Attributes:
        name: Name of the target.
        seconds: Duration.
        cpu: CPU seconds of its processes, without containers and what outlives its parent.
        code: Exit status; None until the target has ended.
        tests: The tests that it ran.
        unknown: Why it has not tested everything: its results cannot be read, or tests were skipped; empty if it has.
    """

    name: str
    seconds: float = 0.0
    cpu: float = 0.0
    code: int | None = None
    tests: list[Test] = field(default_factory=list)
    unknown: str = ""
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether it ended without a failure, and all its tests ran."""
        return self.code == 0 and not self.unknown

    @property
    def log(self) -> Path:
        """File with the output."""
        return OUTPUT / f"{self.name}.log"

    @property
    def results(self) -> Path:
        """pytest's JUnit file."""
        return OUTPUT / f"{self.name}.xml"

    def run(self, make: str) -> None:
        """Run the target to its end."""
        self.results.unlink(missing_ok=True)
        options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --junitxml={self.results.absolute()} -o junit_family=xunit1"
        self.started = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [make, "--no-print-directory", self.name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in os.environ.items() if name != "RECORD"}
                | {"PYTEST_ADDOPTS": options.strip()},
                start_new_session=True,
            )
            code = self._wait(self.process)
        self.seconds = time.monotonic() - self.started
        if self.name.startswith(("test-", "campaign-")):
            try:
                self.tests = list(read(self.results))
            except (OSError, ET.ParseError) as error:
                self.unknown = f"its results cannot be read: {error}"
            else:
                # An older version lacks what some tests are about.
                skipped = 0 if self.name.endswith("-oldest") else sum(bool(each.skipped) for each in self.tests)
                self.unknown = f"{skipped} skipped" if skipped else "" if self.tests else "no test ran"
        self.code = code

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the target, and measure the CPU time of its processes."""
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except ChildProcessError:  # `end` has waited for it
            return process.wait()
        process.returncode = os.waitstatus_to_exitcode(status)
        self.cpu = usage.ru_utime + usage.ru_stime
        return process.returncode

    def end(self) -> None:
        """Stop the target as Ctrl-C does: pytest then ends the processes of its tests, which are in other sessions."""
        if self.process is None or self.process.poll() is not None:
            return
        os.killpg(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def progress(self) -> str:
        """Name of the target, and the progress that pytest reports."""
        percent = re.findall(rb"\[ *(\d+%)\]", self.log.read_bytes()) if self.log.exists() else []
        return f"{self.name} {percent[-1].decode() if percent else ''}".strip()


def read(results: Path) -> Iterator[Test]:
    """The tests of a JUnit file in pytest's older format, which contains the file of each test."""
    for case in ET.parse(results).iter("testcase"):
        name = re.sub(r"@\w+$", "", case.get("name", ""))  # the group of pytest-xdist
        problems = [*case.iter("failure"), *case.iter("error")]
        skipped = case.find("skipped")
        yield Test(
            f"{case.get('file')}::{name}",
            float(case.get("time", "0")),
            "" if skipped is None else skipped.get("message", "no reason"),
            "\n".join(f"{each.get('message', '')}\n{each.text or ''}" for each in problems),
            {each.get("name", ""): each.get("value", "") for each in case.iter("property")},
        )


def main(make: str, *lanes: str) -> int:
    """Run the lanes; return 0 if every target passed. ``RECORD=1`` in the environment records their CPU time."""
    OUTPUT.mkdir(exist_ok=True)
    targets = [[Target(name) for name in lane.split()] for lane in lanes]
    every = [target for lane in targets for target in lane]
    stopped = Event()

    def run(lane: Sequence[Target]) -> None:
        for target in lane:
            if stopped.is_set():
                return
            print(f"{clock()} {target.name} starts (output: {target.log})", flush=True)
            target.run(make)
            how = "passed" if target.passed else f"FAILED ({target.unknown or f'exit status {target.code}'})"
            print(f"{clock()} {target.name} {how} in {target.seconds:.0f} s{counted(target.tests)}", flush=True)

    threads = [Thread(target=run, args=(lane,)) for lane in targets]
    for thread in threads:
        thread.start()
    try:
        printed = time.monotonic()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.2)
            if time.monotonic() > printed + PROGRESS_SECONDS:
                printed = time.monotonic()
                running = [target.progress() for target in every if target.process and target.code is None]
                print(f"{clock()} running: {', '.join(running)}", flush=True)
    finally:
        stopped.set()
        for target in every:
            target.end()
        for thread in threads:
            thread.join()
    for target in every:
        failures(target)
    recorded: dict[str, dict[str, float]] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    before = recorded.setdefault(os.environ.get("SELECT", ""), {})
    table(every, before)
    compare(every, before)
    if os.environ.get("RECORD"):
        before |= {target.name: round(target.cpu) for target in every if target.passed}
        RECORDED.write_text(json.dumps(recorded, indent=2, sort_keys=True) + "\n")
    return 0 if all(target.passed for target in every) else max(1, *(abs(target.code or 0) for target in every))


def clock() -> str:
    """The time of day."""
    return time.strftime("%H:%M:%S")


def counted(tests: Sequence[Test]) -> str:
    """Number of tests by result; empty if there are no tests."""
    kinds = Counter("failed" if each.failed else "skipped" if each.skipped else "passed" for each in tests)
    return "".join(f", {kinds[kind]} {kind}" for kind in ("passed", "failed", "skipped") if kinds[kind])


def failures(target: Target) -> None:
    """Print each failure and the command that repeats it."""
    for test in target.tests:
        if test.failed:
            print(f"\n{'=' * 120}\nFAILED {test.name}\n{test.failed.strip()}")
            print(f"again: make {target.name} TESTS='{test.name}'")
    if not target.passed and not any(test.failed for test in target.tests):
        why = target.unknown or ("it did not run" if target.code is None else f"exit status {target.code}")
        end = target.log.read_text(errors="replace").splitlines()[-60:] if target.log.exists() else []
        print("\n".join([f"\n{'=' * 120}\nFAILED {target.name}: {why} (complete output: {target.log})", *end]))
        print(f"again: make {target.name}")


def table(targets: Sequence[Target], recorded: Mapping[str, float]) -> None:
    """Print the results and durations, the skipped tests with their reasons, and the names of the failed ones."""
    print(f"\n{'target':24}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}{'CPU':>7}{'before':>7}  slowest")
    for target in targets:
        kinds = Counter("failed" if each.failed else "skipped" if each.skipped else "passed" for each in target.tests)
        slow = sorted(target.tests, key=lambda each: -each.seconds)[:SLOWEST]
        slowest = ", ".join(
            f"{each.name.rpartition('/')[2]} {each.seconds:.0f} s" for each in slow if each.seconds >= 1
        )
        counts = "".join(f"{kinds[kind]:>{width}}" for kind, width in (("passed", 8), ("failed", 8), ("skipped", 9)))
        row = f"{target.name:24}{counts}{target.seconds:>9.0f}{target.cpu:>7.0f}{recorded.get(target.name, ''):>7}"
        print(f"{row}  {slowest}" if target.code is not None else f"{target.name:24} did not run")
    tests = [test for target in targets for test in target.tests]
    skipped = Counter((test.name.partition("::")[0], test.skipped) for test in tests if test.skipped)
    if skipped:
        print("\nskipped:")
    for (file, why), number in sorted(skipped.items()):
        print(f"  {number} of {file}: {why}")
    for name, values in sorted(_properties(tests).items()):
        print(f"{name}: {values}")
    failed = [(target.name, test) for target in targets for test in target.tests if test.failed]
    print(f"\n{len(tests) - len(failed) - skipped.total()} passed, {len(failed)} failed, {skipped.total()} skipped")
    for name, test in failed:  # again and last: a log that is cut keeps its end
        why = next((line.strip() for line in test.failed.splitlines() if line.strip()), "")
        print(f"  {name}: {test.name}: {why[:300]}")


def _properties(tests: Sequence[Test]) -> dict[str, str]:
    """What campaigns have recorded, by their functions: schedules, the seed that repeats them, and results."""
    found: dict[str, dict[str, str]] = {}
    for test in tests:
        if test.properties:
            found.setdefault(test.name.partition("[")[0], {}).update(test.properties)
    return {name: ", ".join(f"{key} {value}" for key, value in sorted(each.items())) for name, each in found.items()}


def compare(targets: Sequence[Target], recorded: Mapping[str, float]) -> None:
    """Name the targets that take more CPU time than recorded."""
    for target in targets:
        if target.name in recorded and target.cpu > GROWN * recorded[target.name] + GROWN_SECONDS:
            print(f"{target.name} grew: {target.cpu:.0f} CPU seconds, {recorded[target.name]:.0f} recorded")


if __name__ == "__main__":
    # A shell can start background processes with SIGINT ignored, and the lanes would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(*sys.argv[1:]))
