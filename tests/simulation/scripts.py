"""Directed schedules: promises that were broken before this protocol, and cases that random schedules seldom reach.

Each file of the folder `scripts` is one, for `tests.simulation.schedules.replay`; with a mechanism of the protocol
switched off, some of them violate a property (`tests.simulation.mechanisms`). A file begins with comments: what the
script shows, ``with:`` what fills its gaps ({0} and {1}), and what is seen after the last line:

* ``active``, ``jobs``, ``created``: the jobs that are active; all, with those in parentheses that are suspended; those
  that were created, in their order
* ``p2``: the outcome of a process; ``p2 sends``: one of its requests; ``job of p2``: the job that it has launched
* each of these after ``end``: what is seen once everything has ended
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Script:
    """A directed schedule.

    Attributes:
        name: Name of its file.
        text: The script.
        fillings: What fills its gaps: once each.
        expected: What is seen -> how it looks.
    """

    name: str
    text: str
    fillings: tuple[tuple[str, ...], ...]
    expected: dict[str, str]


def _read() -> Iterator[Script]:
    for file in sorted((Path(__file__).parent / "scripts").glob("*.txt")):
        comments, _, text = file.read_text().partition("\n\n")
        expected = dict(line.removeprefix("# ").split(":", 1) for line in comments.splitlines()[1:])
        fillings = tuple(tuple(each.split()) for each in expected.pop("with", "").split(";"))
        yield Script(file.stem, f"\n{text}", fillings, {what: looks.strip() for what, looks in expected.items()})


SCRIPTS = {each.name: each for each in _read()}


def script(name: str, *gaps: str) -> str:
    """The text of a script, with its gaps filled."""
    return SCRIPTS[name].text.format(*gaps)


EXAMPLES = (
    # Properties do not know the request that a step has prepared as a stop.
    *(each.text for each in SCRIPTS.values() if "{" not in each.text and each.name != "late_sigterm"),
    script("cancel_without_webhooks", "cancel", "refuse"),
    script("cancel_without_webhooks", "kfpstop", "hang"),
    script("verdict", "False"),
    script("verdict", "True"),
    script("quota", "3"),
    script("runtime_gone_before_a_stop", "cancel"),
    script("failed_before_its_launch_obeys", "False", "suspend"),
    script("failed_before_its_launch_obeys", "False", "delete"),
    script("failed_before_its_launch_obeys", "True", "delete"),
    script("failed_before_the_reaper", "False", "suspend"),
    script("slow_create_beside_the_next_launch", "kfp"),
    script("slow_create_that_is_found", "airflow"),
    # Parts of `all_objects_are_gone`: recorded seeds draw among these, too.
    "".join(
        f"spawn cli nightly/a\nuntil p{number} wait\nrun p{number}\n"
        f"crash nightly/a#{number}\nuntil p{number} end\ntick 300\n"
        for number in range(1, 10)
    ),
    "do p11 ok DELETE trainjobs\n" * 11,
)
"""Scripts, those with gaps filled: what `tests.simulation.variations` varies."""
