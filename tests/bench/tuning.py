"""Measures hyperparameter searches: what pruning saves, and the cost of one trial.

``python -m tests.bench.tuning [--trials N] [--parallel N] [--epoch-seconds S] [--cost N]``

* Random search and ASHA (successive halving) over the same 100 configurations of a real training on the digits:
  trial-seconds until the best loss of random search is reached, within 5 %.
* The seconds of a trial that does nothing, one at a time: Optuna that runs the same script in a process is the peer.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from tests.bench.figures import ROOT, Output

from trainjob import TrainJobClient, TrainJobSpec
from trainjob._backends.local.backend import LocalBackend
from trainjob.tuning import Study, Trial, tune
from trainjob.tuning.journal import open_journal

SCRIPT = Path(__file__).parent / "clients" / "digits_trial.py"
DATA = ROOT / "dags_examples" / "data" / "digits.csv.gz"
EPOCHS, CLOSE = 27, 1.05
SPACE = {
    "rate": {"type": "float", "low": 1e-3, "high": 1.0, "log": True},
    "decay": {"type": "float", "low": 1e-5, "high": 1e-1, "log": True},
}
ASHA = {"name": "successive_halving", "options": {"min_resource": 1, "reduction_factor": 4}}
"""4 is Optuna's default. With 3 and a first rung of 1, ASHA prunes all good configurations in 57 of 100 orders."""
NOTHING = """
import os
from trainjob import progress
x = float(os.environ["KUBEFLOW_TRAINER_OPT_RATE"])
progress.report(metrics={"loss": x * x})
print(x * x)
"""


class Search:
    """A study, and when its trials ran."""

    def __init__(self, client: TrainJobClient, home: Path, name: str, command: list[str], **fields: Any) -> None:
        self._began: dict[int, float] = {}
        self._ended: dict[int, tuple[float, Trial]] = {}
        env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        template = TrainJobSpec.parse({"runtime": "trainjob-step", "command": command, "env": env})
        study = Study.read({"space": SPACE, "metric": "loss", "direction": "minimize", **fields})
        with open_journal((home / "journals" / name).as_uri()) as journal:
            client.call(
                lambda: tune(
                    client.backend, study, template, name, journal, namespace="default", on_change=self._change
                )
            )

    def _change(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            if trial.job:
                self._began.setdefault(trial.number, time.monotonic())
            if trial.ended:
                self._ended.setdefault(trial.number, (time.monotonic(), trial))

    def losses(self) -> dict[float, float]:
        """Moment of the end of a trial -> its loss, without trials that were pruned."""
        return {at: t.value for at, t in self._ended.values() if t.state == "complete" and t.value is not None}

    def spent(self, until: float = float("inf")) -> float:
        """Seconds of all trials until a moment."""
        return sum(max(0.0, min(end, until) - self._began[number]) for number, (end, _) in self._ended.items())

    def until(self, loss: float) -> float:
        """Seconds of all trials until one has that loss; of all trials if none has."""
        return self.spent(min((at for at, value in self.losses().items() if value <= loss), default=float("inf")))


def searches(output: Output, client: TrainJobClient, home: Path, epoch_seconds: float, **size: int) -> None:
    command = [sys.executable, str(SCRIPT), str(DATA), str(EPOCHS), str(epoch_seconds)]
    sampler = {"name": "random", "seed": 1}
    everything = Search(client, home, "random", command, sampler=sampler, **size)
    asha = Search(client, home, "asha", command, sampler=sampler, pruner=ASHA, **size)
    best = min(everything.losses().values())
    output.emit("best loss, ASHA beside random", min(asha.losses().values()), "", best)
    reached, peer = asha.until(best * CLOSE), everything.until(best * CLOSE)
    output.emit("trial-seconds until the best loss, ASHA beside random", reached, "s", peer)
    output.emit("trial-seconds of all trials, ASHA beside random", asha.spent(), "s", everything.spent())


def cost(output: Output, client: TrainJobClient, home: Path, number: int) -> None:
    script = home / "nothing.py"
    script.write_text(NOTHING)
    command = [sys.executable, str(script)]
    ours = Search(client, home, "cost", command, max_trials=number)

    def objective(trial: optuna.Trial) -> float:
        environment = {**os.environ, "KUBEFLOW_TRAINER_OPT_RATE": str(trial.suggest_float("rate", 1e-3, 1.0))}
        return float(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    began = time.monotonic()
    optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0)).optimize(objective, n_trials=number)
    peer = (time.monotonic() - began) / number
    ends = sorted(ours.losses())
    seconds = (ends[-1] - ends[0]) / (number - 1)
    output.emit("seconds of a trial that does nothing, beside Optuna and a process", seconds, "s", peer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="configurations of each search (%(default)s); 0: none")
    parser.add_argument("--parallel", type=int, default=8, help="trials at the same time (%(default)s)")
    parser.add_argument("--epoch-seconds", type=float, default=0.3, help="shortest epoch (%(default)s)")
    parser.add_argument("--cost", type=int, default=30, help="trials that do nothing (%(default)s)")
    given = parser.parse_args()
    output = Output("tuning")
    with tempfile.TemporaryDirectory() as home, TrainJobClient(LocalBackend(Path(home)), "default") as client:
        cost(output, client, Path(home), given.cost)
        if given.trials:
            size = {"max_trials": given.trials, "parallel": given.parallel}
            searches(output, client, Path(home), given.epoch_seconds, **size)


if __name__ == "__main__":
    main()
