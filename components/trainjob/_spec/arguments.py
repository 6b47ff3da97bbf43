"""The table of arguments: what the operators, the components, the command line and Python share, described once.

From its rows come the options of the command line, the messages about values, and the table in docs/reference.
Airflow's and KFP's signatures are written out, because editors read them; tests/unit/test_arguments.py holds them and
their defaults against the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "count", "words", "mapping", "duration", "switch", "choice"]
"""What a value is: text; a whole number from 1; a list of texts; names with values; a duration (a number is seconds);
True or False; one of `Argument.choices`."""

STEP_RUNTIME = "trainjob-step"
"""Runtime of the steps around training. Its image has trainjob with the extras for storage and registries."""

ACTIONS = ("suspend", "cancel", "keep")
"""What becomes of a job: its ranks end and the object stays, it is deleted, or it keeps running."""


@dataclass(frozen=True)
class Argument:
    """One argument of a step.

    Attributes:
        name: Its name in Airflow, in KFP and in Python.
        kind: What its values are.
        text: What it does.
        default: Its value if it is left out; None for the runtime's, or for no limit.
        choices: The allowed values of a ``choice``.
        option: The option of the command line; ``--name`` if left out, empty if there is none.
        faces: Where it is an argument.
    """

    name: str
    kind: Kind
    text: str
    default: object = None
    choices: tuple[str, ...] = ()
    option: str | None = None
    faces: tuple[str, ...] = ("operator", "component", "command", "python")

    @property
    def flag(self) -> str:
        """The option of the command line; empty if there is none."""
        if self.option is not None or "command" not in self.faces:
            return self.option or ""
        return f"--{self.name.replace('_', '-')}"


_STEPS = ("operator", "component")

ARGUMENTS: Mapping[str, Argument] = {
    each.name: each
    for each in (
        # fields of `TrainJobSpec`
        Argument("runtime", "text", "Name of a ClusterTrainingRuntime, such as torch-distributed."),
        Argument("image", "text", "Container image of the nodes; the runtime's if left out."),
        Argument("command", "words", "Entry point of each node.", option=""),
        Argument("args", "words", "Arguments of the command, or of the runtime's entry point.", option=""),
        Argument("num_nodes", "count", "Number of nodes."),
        Argument("num_proc_per_node", "count", "Processes on each node."),
        Argument("resources_per_node", "mapping", "Resources of each node, such as cpu, memory and gpu."),
        Argument("env", "mapping", "Environment variables of the nodes; secrets by reference."),
        Argument(
            "inputs",
            "mapping",
            "URIs that the training reads, by name; the nodes have each as TRAINJOB_INPUT_<NAME>.",
            option="--input",
        ),
        Argument(
            "outputs",
            "mapping",
            "URIs that the training writes, by name; the nodes have each as TRAINJOB_OUTPUT_<NAME>.",
            option="--output",
        ),
        Argument(
            "checkpoints",
            "text",
            "Location of checkpoints, from which an interrupted training resumes.",
        ),
        Argument(
            "labels",
            "mapping",
            "Labels of the TrainJob, such as kueue.x-k8s.io/queue-name.",
            option="--label",
        ),
        Argument(
            "stall_timeout",
            "duration",
            "Longest time without progress of any rank; after it the step fails and names the rank that hangs.",
        ),
        Argument(
            "on_retry",
            "mapping",
            "Changes of the next attempt after a failure, by its category.",
            faces=("operator", "component", "python"),
        ),
        # fields of `WaitOptions`
        Argument("queue_timeout", "duration", "Longest time that the job waits for admission (Kueue)."),
        Argument("start_timeout", "duration", "Longest time from admission to the first running rank."),
        Argument("run_timeout", "duration", "Longest time from admission to the end."),
        Argument(
            "fail_fast",
            "switch",
            "Fail as soon as the job is blocked by something that only a person can remove.",
            False,
        ),
        Argument("fail_on_first_crash", "switch", "Fail as soon as a rank crashes.", False),
        # what becomes of the job
        Argument(
            "on_crash_action",
            "choice",
            "Action on a job after fail_on_first_crash or stall_timeout.",
            "suspend",
            ACTIONS,
            faces=("operator", "component", "command"),
        ),
        Argument(
            "on_kill_action",
            "choice",
            "Action on the job when a person ends the step.",
            "suspend",
            ACTIONS,
            faces=_STEPS,
        ),
        Argument("cancel_on_timeout", "switch", "Cancel a job that exceeds a timeout.", True, faces=_STEPS),
        Argument(
            "retry_user_errors",
            "switch",
            "Retry after a failure of the training code that may not recur.",
            True,
            faces=_STEPS,
        ),
    )
}


def wrong_value(name: str, value: object) -> str:
    """What is wrong with the value of a ``choice`` or a ``switch`` of the table; empty if nothing is."""
    row = ARGUMENTS[name]
    if row.kind == "choice" and value not in row.choices:
        *most, last = map(repr, row.choices)
        return f"must be {', '.join(most)} or {last}, not {value!r}"
    if row.kind == "switch" and not isinstance(value, bool):
        return f"must be True or False, not {value!r}"
    return ""
