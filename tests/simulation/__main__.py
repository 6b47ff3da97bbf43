"""Campaigns of random schedules: ``python -m tests.simulation campaign``, ``mechanisms``, ``show`` and ``replay``."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulation import mechanisms
from tests.simulation.processes import load
from tests.simulation.schedules import STEPS, Outcome, replay, run, shrink
from tests.simulation.settings import LAUNCHERS, MIXES

_CHUNK = 50  # schedules that a process runs before it reports
_PROGRESS_SECONDS = 30.0
_SHOWN = 3  # violations of each kind that are printed with their shrunk script


@dataclass
class Result:
    """What became of the schedules of a mix.

    Attributes:
        schedules: How many ran.
        steps: Their actions.
        found: Kind of a violation -> seeds and texts.
    """

    schedules: int = 0
    steps: int = 0
    found: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def add(self, seed: int, outcome: Outcome) -> None:
        """Add a schedule."""
        self.schedules += 1
        self.steps += outcome.steps
        for kind, text in outcome.found.items():
            self.found.setdefault(kind, []).append((seed, text))

    def merge(self, other: Result) -> None:
        """Add other schedules."""
        self.schedules += other.schedules
        self.steps += other.steps
        for kind, found in other.found.items():
            self.found[kind] = sorted([*self.found.get(kind, []), *found])


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    campaign = commands.add_parser("campaign", help="run random schedules and print a table of violations")
    campaign.add_argument("--schedules", type=int, default=1000, help="schedules of each mix (%(default)s)")
    campaign.add_argument("--mix", action="append", choices=MIXES, help="mix; all of them if left out")
    campaign.add_argument("--seed", type=int, help="first seed; random if left out")
    campaign.add_argument("--steps", type=int, default=STEPS, help="random actions of a schedule (%(default)s)")
    campaign.add_argument("--processes", type=int, default=2, help="processes (%(default)s)")
    off = commands.add_parser("mechanisms", help="switch each mechanism off and print the property that then fails")
    off.add_argument("--schedules", type=int, default=0, help="random schedules of each mix, too (%(default)s)")
    off.add_argument("--seed", type=int, default=1, help="their first seed (%(default)s)")
    show = commands.add_parser("show", help="shrink the violations of one seed and print their scripts")
    show.add_argument("mix", choices=MIXES)
    show.add_argument("seed", type=int)
    again = commands.add_parser("replay", help="run a script and print the changes of TrainJobs that were requested")
    again.add_argument("file", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "campaign":
        return _campaign(arguments)
    if arguments.command == "mechanisms":
        print(mechanisms.table(arguments.schedules, arguments.seed))
    elif arguments.command == "show":
        _show(arguments.mix, arguments.seed)
    else:
        _print_requests(replay(arguments.file.read_text()))
    return 0


def _campaign(arguments: argparse.Namespace) -> int:
    seed = arguments.seed if arguments.seed is not None else random.randrange(1_000_000_000)
    mixes: Sequence[str] = arguments.mix or MIXES
    print(f"seeds from {seed}, {arguments.schedules} schedules of each mix, {arguments.steps} steps", flush=True)
    for kind in {kind for mix in mixes for kind in LAUNCHERS[mix]}:
        load(kind)
    gc.freeze()  # the processes share what is imported
    results: dict[str, Result] = {}
    began = time.monotonic()
    with multiprocessing.get_context("fork").Pool(arguments.processes) as pool:
        for mix in mixes:
            chunks = list(_chunks(mix, seed, arguments.schedules, arguments.steps))
            total, told = Result(), time.monotonic()
            for part in pool.imap_unordered(_run_chunk, chunks):
                total.merge(part)
                for kind, found in part.found.items():
                    print("".join(f"  {mix}, seed {each}: {kind} {text}\n" for each, text in found), end="", flush=True)
                if time.monotonic() - told >= _PROGRESS_SECONDS:
                    told = time.monotonic()
                    counts = {kind: len(found) for kind, found in total.found.items()}
                    print(
                        f"  {mix}: {total.schedules} of {arguments.schedules}, {counts or 'no violation'}", flush=True
                    )
            results[mix] = total
    print(f"\n{time.monotonic() - began:.0f} s\n\n{_table(results, seed)}")
    for mix, total in results.items():
        for kind, found in total.found.items():
            for each, text in found[:_SHOWN]:
                print(
                    f"\nmix {mix}, seed {each}: {kind} {text}\n{_shrunk(mix, each, arguments.steps, kind)}", flush=True
                )
    return int(any(total.found for total in results.values()))


def _chunks(mix: str, seed: int, schedules: int, steps: int) -> Iterator[tuple[str, range, int]]:
    for first in range(seed, seed + schedules, _CHUNK):
        yield mix, range(first, min(first + _CHUNK, seed + schedules)), steps


def _run_chunk(chunk: tuple[str, range, int]) -> Result:
    mix, seeds, steps = chunk
    result = Result()
    for seed in seeds:
        result.add(seed, run(seed, mix, steps))
    return result


def _table(results: dict[str, Result], seed: int) -> str:
    lines = ["| mix | schedules | seeds | steps | violations |", "|---|---|---|---|---|"]
    for mix, total in results.items():
        counts = Counter({kind: len(found) for kind, found in total.found.items()})
        text = ", ".join(f"{kind} {count}" for kind, count in counts.most_common()) or "0"
        seeds = f"{seed} to {seed + total.schedules - 1}"
        lines.append(f"| {mix} | {total.schedules:,} | {seeds} | {total.steps:,} | {text} |")
    return "\n".join(lines)


def _shrunk(mix: str, seed: int, steps: int, kind: str) -> str:
    outcome = run(seed, mix, steps)
    return shrink(outcome, kind) or f"(not shrunk)\n{outcome.script}"


def _show(mix: str, seed: int) -> None:
    outcome = run(seed, mix)
    print(outcome.found or "no violation")
    for kind in outcome.found:
        script = shrink(outcome, kind) or outcome.script
        print(f"\n{kind}\n\n{script}")
        _print_requests(replay(script, kind))


def _print_requests(outcome: Outcome) -> None:
    for entry in outcome.world.server.log:
        if entry.method != "GET" and (entry.plural == "trainjobs" or "cancelled" in entry.name):
            change = {name: (entry.body or {}).get(name) for name in ("spec", "preconditions")}
            shown = "" if entry.method == "POST" else {name: value for name, value in change.items() if value}
            text = (
                f"{entry.at:8.1f} s {entry.who:8} {entry.method:6} {entry.plural} {entry.name} {entry.status} {shown}"
            )
            print(text.rstrip())
    for process in outcome.world.processes:
        print(process)
    print(outcome.found or "no violation")


if __name__ == "__main__":
    sys.exit(main())
