"""Evaluate a digits model on the held-out images: `python evaluate_digits.py MODEL DATASET SCORES`. NumPy only.

For `ModelEvaluationOperator`, `evaluate_model` and `python -m trainjob.data evaluate`, which run it once for the new
model and once for the champion. The held-out images are 180 images of the dataset that the training scripts do not use.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from digits import DIGITS, first_weights, held_out  # type: ignore[import-not-found] # beside this script
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def predict(weights: dict[str, Floats], images: Floats) -> Floats:
    """Logarithms of the probabilities of the digits: (images, 10)."""
    hidden = np.maximum(images @ weights["hidden.weight"].T + weights["hidden.bias"], 0)
    logits = hidden @ weights["output.weight"].T + weights["output.bias"]
    logits -= logits.max(axis=1, keepdims=True)
    result: Floats = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return result


def evaluate(model: str, dataset: str) -> dict[str, Any]:
    """The scores of a model: of each image, of each digit, and which digits it confuses."""
    images, labels = held_out(dataset)
    weights, _ = first_weights(argparse.Namespace(model=model))
    predicted = predict(weights, images)
    right = predicted.argmax(axis=1) == labels
    losses = -predicted[np.arange(len(labels)), labels]
    counts = np.zeros((DIGITS, DIGITS), dtype=int)
    np.add.at(counts, (labels, predicted.argmax(axis=1)), 1)
    return {
        "metrics": {"accuracy": float(right.mean()), "loss": float(losses.mean())},
        "scores": {"accuracy": right.astype(int).tolist(), "loss": losses.astype(float).tolist()},
        "slice_of": {"digit": labels.tolist()},
        "confusion": {"labels": [str(digit) for digit in range(DIGITS)], "counts": counts.tolist()},
    }


def main(model: str, dataset: str, scores: str) -> None:
    found = evaluate(model, dataset)
    Path(scores).write_text(json.dumps(found), encoding="utf-8")
    print("accuracy {accuracy:.4f} loss {loss:.4f}".format(**found["metrics"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
