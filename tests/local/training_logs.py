"""What a training of `tests.local.preempted` has written: its steps, its checkpoints and its model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open
from tests.local.preempted import EVERY

Result = tuple[dict[str, bytes], set[str]]
"""The weights of a model, and their hashes on all ranks."""


@dataclass
class Life:
    """The log of the ranks from one start to the next end.

    Attributes:
        resumed: Step after which rank 0 resumed, 0 for the beginning; None if it did not get so far.
        steps: Steps that rank 0 began.
        times: Unix time at which each of them began.
        pids: Process of each rank.
        ended: Whether rank 0 has saved the model; it removes the checkpoints then.
    """

    resumed: int | None = None
    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    pids: dict[int, int] = field(default_factory=dict)
    ended: bool = False

    @property
    def begun(self) -> int:
        """The last step that it began."""
        return (self.resumed or 0) + len(self.steps)

    def check(self, saved: int, expected: int | None) -> int:
        """Check what it repeated and lost; return the number of steps that the next life repeats.

        Args:
            saved: Step of the complete checkpoint after its end.
            expected: Step of the complete checkpoint before its start.
        """
        if self.resumed is None:  # it ended before
            assert saved == expected
            return 0
        assert self.resumed == expected
        assert self.steps == list(range(self.resumed + 1, self.begun + 1))
        assert saved >= self.resumed
        assert saved % EVERY == 0
        assert self.begun - saved <= EVERY
        return max(0, self.begun - saved)


def lives_of(lines: Iterable[str]) -> list[Life]:
    """The lives in the log of a job, the current one last."""
    lives = [Life()]
    for line in lines:
        if found := re.match(r"rank (\d) of \d starts, process (\d+)", line):
            if int(found[1]) in lives[-1].pids:
                lives.append(Life())
            lives[-1].pids[int(found[1])] = int(found[2])
        elif found := re.match(r"resumes after step (\d+)", line):
            lives[-1].resumed = int(found[1])
        elif found := re.fullmatch(r"step (\d+) at ([\d.]+)", line):
            lives[-1].steps.append(int(found[1]))
            lives[-1].times.append(float(found[2]))
        elif line.startswith("saved "):
            lives[-1].ended = True
    return lives


class Files:
    """The files of a training.

    Args:
        directory: Where its model and its checkpoints are.
    """

    def __init__(self, directory: Path) -> None:
        self.model, self.checkpoints = directory / "model", directory / "checkpoints"

    def unfinished(self) -> set[Path]:
        """Files and directories that a write of a checkpoint has not completed."""
        found = set()
        for directory, directories, files in os.walk(self.checkpoints):  # unlike rglob, while they are renamed
            names = [name for name in (*directories, *files) if name.startswith((".checkpoint.", "unfinished-"))]
            found |= {Path(directory, name) for name in names}
        return found

    def complete(self) -> int:
        """Step of the complete checkpoint; 0 without one."""
        for path in self.checkpoints.rglob("checkpoint.safetensors"):
            with safe_open(path, framework="numpy") as file:
                return int(file.metadata()["epoch"])
        names = sorted(path.name for path in self.checkpoints.rglob("[0-9]*-step-*"))
        return int(names[-1].rpartition("-")[2]) if names else 0

    def result(self, lines: Iterable[str], world: int) -> Result:
        """The result of a complete training of `world` ranks, which has left no checkpoint.

        Args:
            lines: The logs of all ranks.
            world: Number of ranks.
        """
        hashes = re.findall(r"^rank \d ends with weights (\w+)$", "\n".join(lines), re.MULTILINE)
        assert len(hashes) == world
        assert [path for path in self.checkpoints.rglob("*") if path.is_file()] == [], "checkpoints are left"
        with safe_open(self.model / "model.safetensors", framework="numpy") as file:
            return {name: file.get_tensor(name).tobytes() for name in file.keys()}, set(hashes)  # noqa: SIM118 - no dict
