"""A trial of tests/bench/tuning.py: trains a network with one hidden layer on the digits. NumPy only.

``digits_trial.py DATA EPOCHS EPOCH_SECONDS``

The learning rate and the weight decay are parameters of the study. A pause in each epoch stands for a larger training:
it leaves the cores to the trials that run at the same time.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from trainjob import progress

HIDDEN, BATCH = 32, 32


def main(data: str, epochs: int, epoch_seconds: float) -> None:
    rate, decay = (float(os.environ[f"KUBEFLOW_TRAINER_OPT_{name}"]) for name in ("RATE", "DECAY"))
    table = np.loadtxt(data, delimiter=",", dtype=np.float32)
    order = np.random.default_rng(0).permutation(len(table))
    images, labels = table[order, :64] / 16, table[order, 64].astype(int)
    test, training = slice(0, 360), np.arange(360, len(table))
    rng = np.random.default_rng(1)
    weights = [rng.normal(0, 0.2, (64, HIDDEN)), np.zeros(HIDDEN), rng.normal(0, 0.2, (HIDDEN, 10)), np.zeros(10)]
    for epoch in range(1, epochs + 1):
        began = time.monotonic()
        for batch in np.array_split(rng.permutation(training), len(training) // BATCH):
            hidden = np.maximum(images[batch] @ weights[0] + weights[1], 0)
            scores = hidden @ weights[2] + weights[3]
            error = np.exp(scores - scores.max(1, keepdims=True))
            error /= error.sum(1, keepdims=True)
            error[np.arange(len(batch)), labels[batch]] -= 1
            error /= len(batch)
            back = (error @ weights[2].T) * (hidden > 0)
            gradients = [images[batch].T @ back, back.sum(0), hidden.T @ error, error.sum(0)]
            weights = [w - rate * (g + decay * w) for w, g in zip(weights, gradients, strict=True)]
        hidden = np.maximum(images[test] @ weights[0] + weights[1], 0)
        scores = hidden @ weights[2] + weights[3]
        scores -= scores.max(1, keepdims=True)
        chosen = scores[np.arange(360), labels[test]] - np.log(np.exp(scores).sum(1))
        loss = float(-chosen.mean())
        progress.report(step=epoch, total_steps=epochs, metrics={"loss": loss if np.isfinite(loss) else 1e9})
        time.sleep(max(0.0, epoch_seconds - (time.monotonic() - began)))


if __name__ == "__main__":
    with np.errstate(all="ignore"):  # a learning rate that is too high
        main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
