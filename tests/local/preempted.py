"""A training for `tests.local.test_preemptions`: the model and the data of the digits examples, with NumPy alone.

It starts in a fraction of the time of JAX or PyTorch. Its ranks average their gradients through rank 0. It writes a
checkpoint every `EVERY` steps, slowly, so that preemptions at random instants find half-written ones.

::

    python preempted.py digits|trainjob --dataset DIRECTORY --output DIRECTORY --epochs 3

The first argument is what saves the checkpoints: the class of the digits examples, or `trainjob.checkpoints`.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import IO, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "dags_examples" / "training"))
import digits  # type: ignore[import-not-found]
from safetensors.numpy import load_file, save

from trainjob import checkpoints, progress

DATA = Path(__file__).parents[2] / "dags_examples" / "data"
EVERY = 5
"""Steps from one checkpoint to the next."""

STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0.005"))
PIECE_SECONDS, PIECES = 0.004, 10


class Slowly:
    """A file that is written in `PIECES` pieces, with a pause after each."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def __enter__(self) -> Slowly:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, content: bytes) -> None:
        size = len(content) // PIECES + 1
        for start in range(0, len(content), size):
            self._file.write(content[start : start + size])
            self._file.flush()
            time.sleep(PIECE_SECONDS)


def write_slowly() -> None:
    """Let every file that `Path.open` opens for writing be written slowly."""
    opened = Path.open

    def slowly(path: Path, mode: str = "r", **options: Any) -> Any:
        file = opened(path, mode, **options)
        return Slowly(file) if mode == "wb" else file

    Path.open = slowly  # type: ignore[method-assign, assignment]


def join() -> tuple[int, int, list[Connection]]:
    """Rank, number of ranks, and connections: of rank 0 to all others, of the others to rank 0."""
    rank, world = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAX_NUM_PROCESSES"])
    host, port = os.environ["JAX_COORDINATOR_ADDRESS"].split(":")
    while True:
        try:
            if rank != 0:
                return rank, world, [Client((host, int(port)))]
            with Listener((host, int(port))) as listener:
                return rank, world, [listener.accept() for _ in range(world - 1)]
        except OSError:  # rank 0 does not listen, or the name of its pod is not known yet
            time.sleep(0.01)


def from_rank_0(rank: int, peers: list[Connection], value: Any) -> Any:
    if rank != 0:
        return peers[0].recv()
    for peer in peers:
        peer.send(value)
    return value


def mean_of(rank: int, peers: list[Connection], gradient: digits.Weights) -> digits.Weights:
    """The average of all ranks, added in the order of the ranks."""
    if rank != 0:
        peers[0].send(gradient)
    else:
        for peer in peers:
            others = peer.recv()
            gradient = {name: array + others[name] for name, array in gradient.items()}
        gradient = {name: array / np.float32(len(peers) + 1) for name, array in gradient.items()}
    return from_rank_0(rank, peers, gradient)


def gradient_of(weights: digits.Weights, images: digits.Floats) -> digits.Weights:
    """Depends on the weights and on the batch, as the gradient of a loss does."""
    return {name: np.tanh(array + images.mean()) for name, array in weights.items()}


class Checkpoint:
    """Checkpoints of two files by `trainjob.checkpoints`, with the methods of `digits.Checkpoint`."""

    def load(self, first: digits.Weights) -> tuple[int, digits.Weights, digits.Weights]:
        found = checkpoints.latest()
        if found is None:
            return 0, first, {name: np.zeros_like(array) for name, array in first.items()}
        step, directory = found
        return step, load_file(directory / "weights.safetensors"), load_file(directory / "velocity.safetensors")

    def save(self, step: int, weights: digits.Weights, velocity: digits.Weights) -> None:
        def write(directory: Path) -> None:
            for name, tensors in (("weights", weights), ("velocity", velocity)):
                with (directory / f"{name}.safetensors").open("wb") as file:
                    file.write(save({name: np.ascontiguousarray(array) for name, array in tensors.items()}))

        checkpoints.save(step, write)

    def remove(self) -> None:
        checkpoints.clear()


def show_life() -> None:
    """Set the time of the log to now, 20 times a second: in the end it says until when this process lived."""

    def touch() -> None:
        while True:
            os.utime(sys.stdout.fileno())
            time.sleep(0.05)

    if stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode):
        threading.Thread(target=touch, daemon=True).start()


def train() -> None:
    """Train. A rank that waits for one that is gone waits until it is terminated, as with NCCL."""
    show_life()
    try:
        _train()
    except (EOFError, ConnectionError):
        time.sleep(600)


def _train() -> None:
    options = digits.arguments(sys.argv[2:])
    rank, world, peers = join()
    run = digits.Run(options, rank, world)
    data = digits.load(options.dataset)
    write_slowly()
    first, _ = digits.first_weights(options)
    checkpoint = digits.Checkpoint(options, data) if sys.argv[1] == "digits" else Checkpoint()
    done, weights, velocity = from_rank_0(rank, peers, checkpoint.load(first))
    per_epoch = len(data.train_labels) // options.batch_size
    rates = digits.learning_rates(options, per_epoch)
    if rank == 0:
        digits.write_line(f"resumes after step {done}")
    for step in range(done, len(rates)):
        if rank == 0:
            digits.write_line(f"step {step + 1} at {time.time():.3f}")
        epoch, number = divmod(step, per_epoch)
        mine = digits.batches(len(data.train_labels), options, epoch + 1, rank, world)[number]
        gradient = mean_of(rank, peers, gradient_of(weights, data.train_images[mine]))
        velocity = {name: digits.MOMENTUM * array + gradient[name] for name, array in velocity.items()}
        weights = {name: array - rates[step] * velocity[name] for name, array in weights.items()}
        time.sleep(STEP_SECONDS)
        saves = rank == 0 and (step + 1) % EVERY == 0
        if saves:
            checkpoint.save(step + 1, weights, velocity)
        if rank == 0:
            slope = {"slope": float(np.abs(gradient["output.bias"]).max())}
            progress.report(step=step + 1, total_steps=len(rates), metrics=slope, checkpoint=saves)
    run.finish(weights, 0, "numpy", data)
    if rank == 0:
        checkpoint.remove()
    from_rank_0(rank, peers, "saved")  # no rank may exit with success before that


if __name__ == "__main__":
    digits.main(train)
