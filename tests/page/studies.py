"""Documents of studies, which the product makes of trials: one of each state."""

from __future__ import annotations

import math
from typing import Any

from tests.page.series import HOSTILE, TAKEN, Document, iso

from trainjob._pages.documents.study import study_document


def trial(number: int, state: str = "complete", **changes: Any) -> Document:
    """A trial whose value depends on its parameters, which are the same in each run."""
    noise = [abs(math.sin((number + 1) * factor) * 43758.5453) % 1 for factor in (12.9898, 78.233, 37.719, 4.581)]
    optimizer = ("adam", "sgd", "adamw")[int(noise[1] * 3)]
    parameters: Document = {
        "lr": 10 ** (-5 + 4 * noise[0]),
        "batch_size": 2 ** int(4 + 4 * noise[2]),
        "optimizer": optimizer,
        "dropout": round(noise[3] * 0.5, 3),
        "nesterov": noise[2] > 0.5,
    }
    if optimizer == "sgd":
        parameters["momentum"] = 0.8 + 0.19 * noise[3]
    value = 0.08 + 0.25 * abs(math.log10(parameters["lr"]) + 2.6) + 0.15 * noise[3] + (0.1 if optimizer == "sgd" else 0)
    steps = {"complete": 20, "pruned": 4 + number % 4, "running": 9, "failed": number % 3, "stopped": 6}[state]
    values = [
        [10 * step, value + 1.6 * math.exp(-step / 5) + 0.02 * math.sin(step * noise[0] * 9)]
        for step in range(1, steps + 1)
    ]
    last = values[-1][1] if values else None
    reasons = {
        "pruned": f"pruned at step {10 * steps}: worse than the median of the other trials",
        "failed": "node-0 exited with code 1",
        "stopped": "the study ended",
    }
    return {
        "number": number,
        "parameters": parameters,
        "state": state,
        "value": {"complete": value, "pruned": last}.get(state),
        "reason": reasons.get(state, ""),
        "job": f"digits-study-{number:03}",
        "href": f"trainings/{number}",
        "metrics": {"loss": value, "accuracy": 1 - value / 3} if state == "complete" else {},
        "outputs": {"model": f"s3://models/digits/{number}/"} if state == "complete" else {},
        "values": values,
        "seconds": 11.0 * steps,
        **changes,
    }


SPACE: Document = {
    "lr": {"type": "float", "low": 1e-5, "high": 0.1, "log": True},
    "batch_size": {"type": "int", "low": 16, "high": 128, "log": True},
    "optimizer": {"type": "categorical", "choices": ["adam", "sgd", "adamw"]},
    "momentum": {"type": "float", "low": 0.8, "high": 0.99, "when": {"optimizer": "sgd"}},
}


def study(trials: list[Document], title: str = "digits", limit: int = 50, **changes: Any) -> Document:
    fields: Document = {"metric": "loss", "direction": "minimize", "max_trials": limit, "parallel": 4, "space": SPACE}
    fields |= changes.pop("study", {})
    key = "airflow/tune_digits/manual__2026-11-26/tune"
    return study_document(title, "team-a", key, fields, trials, **changes) | {"taken": iso(TAKEN)}


def study_running() -> Document:
    states = ["complete"] * 14 + ["running"] * 4
    states[3] = states[9] = states[11] = "pruned"
    states[6] = "failed"
    return study([trial(number, state) for number, state in enumerate(states)])


def trials(count: int) -> list[Document]:
    """Trials of an ended study: two fifths are pruned, some have failed."""
    states = [
        "pruned" if number % 5 in (2, 4) else "failed" if number % 17 == 6 else "complete" for number in range(count)
    ]
    return [trial(number, state) for number, state in enumerate(states)]


IMPORTANCES = {"lr": 0.7213, "optimizer": 0.1402, "dropout": 0.0911, "batch_size": 0.0352, "nesterov": 0.0101,
               "momentum": 0.0021}  # fmt: skip


def study_ended(count: int = 100) -> Document:
    return study(trials(count), limit=count, importances=IMPORTANCES, ended=True, reason=f"{count} trials have ended")


def study_failed() -> Document:
    """All trials have failed."""
    failed = [trial(number, "failed", values=[]) for number in range(5)]
    return study(failed, ended=True, reason="5 trials have failed; max_failed_trials is 4")


def study_empty() -> Document:
    return study([])


def study_hostile() -> Document:
    """Names, values, states and reasons are hostile."""
    made = [
        trial(
            number,
            parameters={name: [text, 10.0**number, True][index % 3] for index, name in enumerate(HOSTILE)},
            value=10.0 ** (number - 4) if number != 4 else math.nan,
            href=HOSTILE[3] if number % 2 else HOSTILE[0],
            metrics=dict.fromkeys(HOSTILE, text),
            outputs=dict.fromkeys(HOSTILE, math.inf),
            values=[[step, 10.0 ** (number - step)] for step in range(5)] + [[6, math.inf]],
            reason=text,
            job=text,
        )
        | ({"state": text} if number % 3 == 2 else {})
        for number, text in enumerate(HOSTILE)
    ]
    fields = {"metric": HOSTILE[1], "direction": "maximize", "space": {name: {} for name in HOSTILE}}
    importances = dict.fromkeys(HOSTILE, 0.1)
    return study(made, HOSTILE[4], study=fields, importances=importances, reason=HOSTILE[8], notes=HOSTILE)
