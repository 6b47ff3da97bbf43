"""Shared by both digits trainings: arguments, data, the shape of the model, files, reports. NumPy only.

The tensors have the same names and layout in both frameworks, so that each can continue to train a model of the other.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

try:
    from trainjob.progress import flush, report
except ImportError:  # an image without trainjob: the script trains without reports

    def report(**_: Any) -> None:  # type: ignore[misc]
        pass

    def flush() -> None:
        pass


Floats = NDArray[np.float32]
Labels = NDArray[np.int32]
Weights = dict[str, Floats]

PIXELS, HIDDEN, DIGITS = 64, 256, 10
SHAPES = {
    "hidden.weight": (HIDDEN, PIXELS),
    "hidden.bias": (HIDDEN,),
    "output.weight": (DIGITS, HIDDEN),
    "output.bias": (DIGITS,),
}
MOMENTUM = 0.9

# Not --seed: a model that is trained further with another seed would be tested on images that it was trained on.
SPLIT_SEED = 20
HELD_OUT_IMAGES = 180
"""Images that no training reads; `evaluate_digits.py` evaluates models on them."""
TEST_IMAGES = 180
"""Images on which the trainings measure the accuracy, and by which a further training decides which weights to keep."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network to read handwritten digits.")
    parser.add_argument("--dataset", required=True, help="digits.csv.gz, or a directory that contains it")
    parser.add_argument(
        "--model", default="", help="output of an earlier run, to train its model further (default: none)"
    )
    parser.add_argument("--output", required=True, help="directory for model.safetensors and config.json")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, in all processes together")
    parser.add_argument("--learning-rate", type=float, default=0.1, help="rate of the first step; decays to 0 (cosine)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first weights and of the order of images")
    parser.add_argument("--epoch-seconds", type=float, default=0, help="pause before each epoch, to watch the training")
    parser.add_argument("--fail-at-epoch", type=int, default=0, help="fail at the start of this epoch (for tests)")
    parser.add_argument("--fail-rank", type=int, default=0, help="rank that fails")
    parser.add_argument("--exit-code", type=int, default=1, help="exit code of the failing rank")
    return parser.parse_args(argv)


def local(location: str) -> Path:
    """Convert a path or ``file://`` URI to a path."""
    if "://" not in location:
        return Path(location)
    parts = urlsplit(location)
    if parts.scheme != "file" or parts.netloc not in {"", "localhost"}:
        raise SystemExit(
            f"{location} is not a local path: start this script by `trainjob exec -- …`, which downloads inputs, "
            "uploads outputs and passes local paths"
        )
    return Path(unquote(parts.path))


def write_line(line: str) -> None:
    """Print with one write: unbuffered, `print` makes two, and the processes of torchrun share one pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class Data:
    """Images as (n, 64) float32 in 0..1, labels as (n,) int32 in 0..9."""

    train_images: Floats
    train_labels: Labels
    test_images: Floats
    test_labels: Labels
    sha256: str


def load(dataset: str) -> Data:
    """The images for training and for its accuracy, without the held-out images."""
    images, labels, sha256 = _read(dataset)
    test, training = slice(HELD_OUT_IMAGES, HELD_OUT_IMAGES + TEST_IMAGES), slice(HELD_OUT_IMAGES + TEST_IMAGES, None)
    return Data(images[training], labels[training], images[test], labels[test], sha256)


def held_out(dataset: str) -> tuple[Floats, Labels]:
    """Images and labels that no training reads."""
    images, labels, _ = _read(dataset)
    return images[:HELD_OUT_IMAGES], labels[:HELD_OUT_IMAGES]


def _read(dataset: str) -> tuple[Floats, Labels, str]:
    """All images and labels in the order of the split, and the SHA-256 of the file."""
    path = local(dataset)
    packed = (path / "digits.csv.gz" if path.is_dir() else path).read_bytes()
    rows = np.loadtxt(io.BytesIO(gzip.decompress(packed)), delimiter=",", dtype=np.int32)
    rows = np.random.default_rng(SPLIT_SEED).permutation(rows)
    return (rows[:, :PIXELS] / 16).astype(np.float32), rows[:, PIXELS], hashlib.sha256(packed).hexdigest()


def batches(count: int, options: argparse.Namespace, epoch: int, rank: int, world: int) -> NDArray[np.intp]:
    """Indexes of the images of this rank in each step of an epoch: (steps, batch size / world).

    All ranks draw the same order, and each uses its part of every batch. Remaining images are not used in this epoch.
    """
    size = options.batch_size
    if size % world or not 0 < size <= count:
        raise SystemExit(f"--batch-size {size} must be 1 to {count} and a multiple of the {world} processes")
    order = np.random.default_rng([options.seed, epoch]).permutation(count)
    steps = count // size
    return order[: steps * size].reshape(steps, size)[:, rank::world]


def learning_rates(options: argparse.Namespace, steps: int) -> Floats:
    """One rate per step of the training: cosine from --learning-rate to 0."""
    total = max(options.epochs * steps, 1)
    rates: Floats = (options.learning_rate * 0.5 * (1 + np.cos(np.pi * np.arange(total) / total))).astype(np.float32)
    return rates


# --- weights -------------------------------------------------------------------------------------------------------


def first_weights(options: argparse.Namespace) -> tuple[Weights, bool]:
    """Initial weights, the same on every rank, and whether they are from an earlier run."""
    if not options.model:
        rng = np.random.default_rng(options.seed)
        fresh = {
            name: (
                rng.normal(0, (2 / shape[-1]) ** 0.5, shape).astype(np.float32)
                if len(shape) == 2
                else np.zeros(shape, np.float32)
            )
            for name, shape in SHAPES.items()
        }
        return fresh, False
    path = local(options.model) / "model.safetensors"
    with safe_open(path, framework="numpy") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    if {name: array.shape for name, array in weights.items()} != SHAPES:
        raise SystemExit(f"{path} is not a model of this script")
    return weights, True


def write(weights: Weights, *, accuracy: float, framework: str, data: Data, options: argparse.Namespace) -> str:
    """Write model.safetensors and config.json; return the URI of their directory."""
    directory = local(options.output).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architecture": "mlp",
        "layers": [PIXELS, HIDDEN, DIGITS],
        "activation": "relu",
        "framework": framework,
        "accuracy": accuracy,
        "dataset_sha256": data.sha256,
        "epochs": options.epochs,
        "batch_size": options.batch_size,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "continued": bool(options.model),
    }
    _replace(directory / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    # Last, because readers wait for this file.
    metadata = {"format": "np", "framework": framework, "accuracy": f"{accuracy:.4f}", "dataset_sha256": data.sha256}
    contiguous = {name: np.ascontiguousarray(array) for name, array in weights.items()}
    _replace(directory / "model.safetensors", save(contiguous, metadata))
    return directory.as_uri()


def digest(weights: Weights) -> str:
    """Hash of the weights, to compare ranks."""
    sha256 = hashlib.sha256()
    for name in SHAPES:
        sha256.update(weights[name].tobytes())
    return sha256.hexdigest()[:16]


def _replace(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers see the old or the new content, also after a crash of process or machine."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


# --- checkpoints ---------------------------------------------------------------------------------------------------


class Checkpoint:
    """The state from which an interrupted training resumes: one file, which rank 0 replaces after each epoch.

    ``TRAINJOB_CHECKPOINT`` is its directory, the same for all attempts of one task with the same arguments. Without it
    there are no checkpoints.
    """

    def __init__(self, options: argparse.Namespace, data: Data) -> None:
        location = os.environ.get("TRAINJOB_CHECKPOINT", "")
        if "://" in location:
            raise SystemExit(f"this script writes checkpoints to directories, not to {location}: use pvc:// or file://")
        self._path = Path(location, "checkpoint.safetensors") if location else None
        shaping = ("epochs", "batch_size", "learning_rate", "seed", "model")
        self._training = json.dumps({name: getattr(options, name) for name in shaping} | {"dataset": data.sha256})

    def load(self, first: Weights) -> tuple[int, Weights, Weights]:
        """Finished epochs, weights and the optimizer's momentum; 0, `first` and zeros if there is no checkpoint."""
        if self._path is not None and self._path.exists():
            with safe_open(self._path, framework="numpy") as file:
                if file.metadata()["training"] == self._training:
                    weights = {name: file.get_tensor(name) for name in SHAPES}
                    return int(file.metadata()["epoch"]), weights, {n: file.get_tensor(f"velocity.{n}") for n in SHAPES}
            write_line(f"{self._path} is from a training with other arguments or data; this training starts from zero")
        return 0, first, {name: np.zeros_like(array) for name, array in first.items()}

    def save(self, epoch: int, weights: Weights, velocity: Weights) -> None:
        """Save after an epoch; called on rank 0."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            tensors = weights | {f"velocity.{name}": array for name, array in velocity.items()}
            contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
            _replace(self._path, save(contiguous, {"epoch": str(epoch), "training": self._training}))

    def remove(self) -> None:
        """Remove the checkpoint once the model is saved, so that a later run of the same task trains again."""
        if self._path is not None:
            unfinished = self._path.parent.glob(f".{self._path.name}.*")  # of killed processes, see `_replace`
            for path in (self._path, *unfinished):
                path.unlink(missing_ok=True)


# --- one run -------------------------------------------------------------------------------------------------------


class Run:
    """Reports the progress of a training, and fails it on request."""

    def __init__(self, options: argparse.Namespace, rank: int, world: int) -> None:
        self.options, self.rank = options, rank
        self._first = (0, 0.0)  # first epoch of this process, and the time of its end
        write_line(f"rank {rank} of {world} starts, process {os.getpid()}")

    def resume(self, epoch: int) -> None:
        """Report that the training resumes, if an earlier attempt finished `epoch` epochs."""
        if epoch:
            write_line(f"rank {self.rank} resumes after epoch {epoch}")
            report(metrics={"resumed_after_epoch": epoch})

    def begin(self, epoch: int) -> None:
        """Start an epoch; the first one is 1."""
        if epoch == self.options.fail_at_epoch and self.rank == self.options.fail_rank:
            write_line(f"rank {self.rank} fails at epoch {epoch} as requested, exit code {self.options.exit_code}")
            # Like a crash, without exit handlers, which would wait for the other ranks.
            os._exit(self.options.exit_code)
        time.sleep(self.options.epoch_seconds)

    def end(self, epoch: int, loss: float, accuracy: float) -> None:
        if self.rank != 0:
            return
        write_line(f"epoch {epoch}/{self.options.epochs} loss {loss:.4f} accuracy {accuracy:.4f}")
        # The first epoch includes compilation, so it is no measure of the others.
        first, ended = self._first
        if not first:
            self._first = (epoch, time.monotonic())
            remaining = None
        else:
            per_epoch = (time.monotonic() - ended) / (epoch - first)
            remaining = per_epoch * (self.options.epochs - epoch)
        report(
            progress=100 * epoch / self.options.epochs,
            metrics={"loss": loss, "accuracy": accuracy, "epoch": epoch},
            remaining_seconds=remaining,
        )

    def finish(self, weights: Weights, accuracy: float, framework: str, data: Data) -> None:
        """Print the hash of the weights, which must be the same on all ranks; rank 0 saves them."""
        write_line(f"rank {self.rank} ends with weights {digest(weights)}")
        if self.rank != 0:
            return
        uri = write(weights, accuracy=accuracy, framework=framework, data=data, options=self.options)
        report(progress=100, metrics={"accuracy": accuracy}, outputs={"model": uri})
        write_line(f"saved {uri} accuracy {accuracy:.4f}")


SECONDS_BEFORE_EXIT = 5.0
"""How long a failed rank waits, so that Kubernetes records the exit code of a killed rank first."""


def main(train: Callable[[], None]) -> None:
    """Run a training so that one failing rank ends the others within seconds.

    After an exception, exit handlers would wait for the other ranks (JAX: up to 300 s), which in turn wait for this one
    in an all-reduce. A process that exits without them closes its sockets, and the others notice.

    Perhaps this rank failed because another one was killed. Kubernetes decides about a restart by the first exit code
    that it records, and a node may record one seconds late. So this rank waits before it exits, unless it is alone.
    """
    end_at_sigterm()
    try:
        train()
    except Exception:  # noqa: BLE001 - the other ranks must notice any error
        traceback.print_exc()
        if any(os.environ.get(name, "1") != "1" for name in ("WORLD_SIZE", "JAX_NUM_PROCESSES")):
            time.sleep(SECONDS_BEFORE_EXIT)
        leave(1)


def end_at_sigterm() -> None:
    """Exit at SIGTERM, which PID 1 of a container ignores without a handler: a preemption would take 30 s longer."""
    signal.signal(signal.SIGTERM, lambda number, _: leave(128 + number))


def leave(code: int) -> NoReturn:
    """Exit without exit handlers, after flushing reports and output."""
    try:
        flush()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # `flush` of a file fails in a signal handler that has interrupted a write to it
        os._exit(code)
