"""Measures hyperparameter searches: what pruning saves, the cost of one trial, and many trials on an API server.

::

    python tests/bench/tuning.py [--trials N] [--parallel N] [--epoch-seconds S] [--cost N] [--cluster N]

* Random search and ASHA (successive halving) over the same 100 configurations of a real training on the digits, and a
  grid of 100 over the same ranges: trial-seconds until the best loss of random search is reached, within 5 %, and in
  total. One order of the configurations is luck, so the learning curves of the random search are also replayed in 200
  orders: then seconds are epochs, without the start of a process. Where ASHA prunes all configurations that are good
  enough, the epochs of a random search in the same order are added.
* The seconds of a trial that does nothing, one at a time: Optuna that runs the same script in a process is the peer.
* A study on the test cluster's API server, without controllers: clients/trials.py writes the status that Trainer would
  write. Requests are counted in the audit log; memory and CPU are those of ``trainjob tune``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import psutil
import yaml

from trainjob import TrainJobClient, TrainJobSpec
from trainjob._backends.local.backend import LocalBackend
from trainjob.job import key_hash
from trainjob.tuning import Study, Trial, tune
from trainjob.tuning.journal import open_journal
from trainjob.tuning.sampling import Sampling

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
CLIENTS = Path(__file__).parent / "clients"
DATA = ROOT / "dags_examples" / "data" / "digits.csv.gz"
EPOCHS, CLOSE, ORDERS = 27, 1.05, 200
RATE = {"type": "float", "low": 1e-3, "high": 1.0, "log": True}
DECAY = {"type": "float", "low": 1e-5, "high": 1e-1, "log": True}
ASHA = {"name": "successive_halving", "options": {"min_resource": 1, "reduction_factor": 4}}
"""4 is Optuna's default. With 3 and a first rung of 1, ASHA prunes all good configurations in 57 of 100 orders."""


def emit(metric: str, value: float | None, unit: str = "", peer: float | None = None) -> None:
    ratio = round(value / peer, 3) if value is not None and peer else None
    shown = None if value is None else round(value, 4)
    line = {"bench": "tuning", "metric": metric, "value": shown, "unit": unit, "peer": peer and round(peer, 4)}
    print(json.dumps({**line, "ratio": ratio}), flush=True)


# ---------------------------------------------------------------- searches


@dataclass
class Search:
    """A study, and when its trials ran."""

    client: TrainJobClient
    home: Path
    parallel: int
    epoch_seconds: float
    began: dict[int, float] = field(default_factory=dict)
    ended: dict[int, tuple[float, Trial]] = field(default_factory=dict)

    def run(self, name: str, trials: int, **fields: Any) -> Search:
        script = [sys.executable, str(CLIENTS / "digits_trial.py"), "--data", str(DATA)]
        command = [*script, "--epochs", str(EPOCHS), "--epoch-seconds", str(self.epoch_seconds)]
        env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        template = TrainJobSpec.parse({"runtime": "trainjob-step", "command": command, "env": env})
        given = {"space": {"rate": RATE, "decay": DECAY}, "metric": "loss", "direction": "minimize"}
        study = Study.read({**given, "max_trials": trials, "parallel": self.parallel, **fields})
        with open_journal((self.home / "journals" / name).as_uri()) as journal:
            self.client.call(
                lambda: tune(
                    self.client.backend, study, template, name, journal, namespace="default", on_change=self._change
                )
            )
        return self

    def _change(self, trials: Sequence[Trial]) -> None:
        now = time.monotonic()
        for trial in trials:
            if trial.job and trial.number not in self.began:
                self.began[trial.number] = now
            if trial.ended and trial.number not in self.ended:
                self.ended[trial.number] = (now, trial)

    @property
    def best(self) -> float:
        return min(t.value for _, t in self.ended.values() if t.state == "complete" and t.value is not None)

    def spent(self, until: float = float("inf")) -> float:
        """Seconds of all trials until a moment."""
        return sum(max(0.0, min(end, until) - self.began[number]) for number, (end, _) in self.ended.items())

    def until(self, value: float) -> float | None:
        """Seconds of all trials until one has that loss; None if none has."""
        moments = [
            moment
            for moment, trial in self.ended.values()
            if trial.state == "complete" and trial.value is not None and trial.value <= value
        ]
        return self.spent(min(moments)) if moments else None


def replayed(curves: Sequence[Sequence[float]], seed: int, pruner: Mapping[str, Any]) -> tuple[int, bool]:
    """Epochs until the best loss is reached, or all, and whether it is, if the curves come in another order."""
    order = random.Random(seed).sample(range(len(curves)), len(curves))
    best = min(curve[-1] for curve in curves) * CLOSE
    space = {"rate": RATE}
    given = {"space": space, "metric": "loss", "direction": "minimize", "max_trials": len(curves)}
    sampling = Sampling(Study.read({**given, "sampler": {"name": "random"}, "pruner": pruner}))
    epochs = 0
    for number, which in enumerate(order):
        parameters, state, value = sampling.ask(number), "complete", curves[which][-1]
        for step, loss in enumerate(curves[which], 1):
            epochs += 1
            if sampling.report(number, step, loss) and step < EPOCHS:
                state, value = "pruned", loss
                break
        if state == "complete" and value <= best:
            return epochs, True
        sampling.end(Trial(number, parameters, state, value), sampling.rungs(number))
    return epochs, False


def searches(client: TrainJobClient, home: Path, trials: int, parallel: int, epoch_seconds: float) -> None:
    def search(name: str, **fields: Any) -> Search:
        return Search(client, home, parallel, epoch_seconds).run(name, trials, **fields)

    sampler = {"name": "random", "seed": 1}
    everything = search("random", sampler=sampler)
    asha = search("asha", sampler=sampler, pruner=ASHA)
    steps = [round(10 ** (-3 + 3 * i / 9), 6) for i in range(10)]
    decays = [round(10 ** (-5 + 4 * i / 9), 8) for i in range(10)]
    choices = {"rate": steps, "decay": decays}
    space = {name: {"type": "categorical", "choices": values} for name, values in choices.items()}
    grid = search("grid", space=space, sampler={"name": "grid", "seed": 1})
    goal = everything.best * CLOSE
    emit("best loss, random search", everything.best)
    emit("best loss, ASHA", asha.best, "", everything.best)
    emit("best loss, grid", grid.best, "", everything.best)
    for name, found in (("ASHA", asha), ("grid", grid)):
        emit(f"trial-seconds until the best loss, {name} beside random", found.until(goal), "s", everything.until(goal))
        emit(f"trial-seconds of all trials, {name} beside random", found.spent(), "s", everything.spent())
    emit("trials that ASHA pruned", sum(trial.state == "pruned" for _, trial in asha.ended.values()))
    curves = [[value for _, value in t.values] for _, t in everything.ended.values() if len(t.values) == EPOCHS]
    emit("learning curves that are replayed", len(curves))
    if len(curves) > 1:
        none = [replayed(curves, seed, {})[0] for seed in range(ORDERS)]
        halving = [replayed(curves, seed, ASHA) for seed in range(ORDERS)]
        emit("orders in which ASHA reaches the best loss", sum(reached for _, reached in halving) / ORDERS)
        spent = [epochs + (0 if reached else more) for (epochs, reached), more in zip(halving, none, strict=True)]
        for metric, of in (("mean", statistics.mean), ("median", statistics.median)):
            name = f"epochs until the best loss, {metric} of {ORDERS} orders, ASHA beside random"
            emit(name, of(spent), "", of(none))


# ---------------------------------------------------------------- cost of a trial


def cost(client: TrainJobClient, home: Path, number: int) -> None:
    script = home / "nothing.py"
    script.write_text(
        "import os\nfrom trainjob import progress\n"
        "x = float(os.environ['KUBEFLOW_TRAINER_OPT_X'])\n"
        "progress.report(metrics={'loss': x * x})\nprint(x * x)\n"
    )
    study = Study.read(
        {
            "space": {"x": {"type": "float", "low": -1, "high": 1}},
            "metric": "loss",
            "direction": "minimize",
            "max_trials": number,
        }
    )
    template = TrainJobSpec.parse({"runtime": "trainjob-step", "command": [sys.executable, str(script)]})
    times: dict[int, float] = {}

    def change(trials: Sequence[Trial]) -> None:
        times.setdefault(sum(trial.ended for trial in trials), time.monotonic())

    with open_journal((home / "journals" / "cost").as_uri()) as journal:
        client.call(
            lambda: tune(client.backend, study, template, "cost", journal, namespace="default", on_change=change)
        )
    ours = (times[number] - times[0]) / number

    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", -1, 1)
        environment = {**os.environ, "KUBEFLOW_TRAINER_OPT_X": str(x)}
        done = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True
        )
        return float(done.stdout)

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    began = time.monotonic()
    optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0)).optimize(objective, n_trials=number)
    emit(
        "seconds of a trial that does nothing, beside Optuna and a process",
        ours,
        "s",
        (time.monotonic() - began) / number,
    )


# ---------------------------------------------------------------- many trials on a cluster


def cluster(trials: int) -> None:
    from tests.bench.waiting import POLICY, Bench
    from tests.testcluster.control_plane import Cluster

    parallel = max(1, min(100, trials // 2))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        policy, audit_log = directory / "policy.yaml", directory / "audit.log"
        policy.write_text(yaml.safe_dump(POLICY))
        flags = (f"--audit-policy-file={policy}", f"--audit-log-path={audit_log}")
        running = stack.enter_context(Cluster(kueue=False, controllers=False, api_server_flags=flags))
        bench = Bench(running, audit_log, 0, 0)
        study = {
            "space": {"x": {"type": "float", "low": -1, "high": 1}, "n": {"type": "int", "low": 1, "high": 9}},
            "metric": "loss",
            "direction": "minimize",
            "max_trials": trials,
            "parallel": parallel,
            "template": {"runtime": "torch-distributed", "command": ["torchrun", "train.py"], "num_nodes": 4},
        }
        (directory / "study.yaml").write_text(yaml.safe_dump(study))
        driver = subprocess.Popen([sys.executable, str(CLIENTS / "trials.py"), *bench.driver, "default"])
        stack.callback(driver.wait)
        stack.callback(driver.terminate)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "KUBECONFIG": str(bench.kubeconfig),
            "TRAINJOB_HOME": str(directory),
            "TRAINJOB_BACKEND": "kubernetes",
            "TRAINJOB_NAMESPACE": "default",
        }
        program = "from trainjob.cli import main; main()"
        words = [sys.executable, "-c", program, "tune", str(directory / "study.yaml"), "--key", "bench", "--json"]
        began = time.time()
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
        memory, processor = 0.0, 0.0
        ended: dict[int, float] = {}
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "trial" and event["state"] != "running":
                ended.setdefault(event["number"], time.time())
                if len(ended) % 20 == 0 or len(ended) == trials:
                    watched = psutil.Process(process.pid)
                    memory = max(memory, watched.memory_info().rss / 1e6)
                    processor = sum(watched.cpu_times()[:2])
        if process.wait() != 0:
            raise SystemExit(f"trainjob tune ended with {process.returncode}")
        last = max(ended.values())
        emit(f"{trials} trials, {parallel} at once: seconds", last - began, "s")
        emit(f"{trials} trials: requests of the launcher for each trial", bench.requests("ours", began, last) / trials)
        emit(f"{trials} trials: most memory of the launcher, RSS", memory, "MB")
        emit(f"{trials} trials: CPU time of the launcher for each trial", processor / trials * 1000, "ms")
        emit(
            f"{trials} trials: files of the journal",
            sum(1 for _ in (directory / "studies" / key_hash("bench")).rglob("*.json")),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="configurations of each search (%(default)s); 0: none")
    parser.add_argument("--parallel", type=int, default=8, help="trials at the same time (%(default)s)")
    parser.add_argument("--epoch-seconds", type=float, default=0.3, help="shortest epoch (%(default)s)")
    parser.add_argument("--cost", type=int, default=30, help="trials that do nothing (%(default)s); 0: none")
    parser.add_argument("--cluster", type=int, default=1000, help="trials on the API server (%(default)s); 0: none")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home, TrainJobClient(LocalBackend(Path(home)), "default") as client:
        if given.cost:
            cost(client, Path(home), given.cost)
        if given.trials:
            searches(client, Path(home), given.trials, given.parallel, given.epoch_seconds)
    if given.cluster:
        cluster(given.cluster)


if __name__ == "__main__":
    main()
