"""Train on handwritten digits with JAX, data-parallel over processes.

One process, or as many as Trainer's ``jax-distributed`` runtime starts::

    python digits_jax.py --dataset ../data --output $HOME/digits
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# (JAX's own functions are typed only in part)

from __future__ import annotations

import os

import digits  # type: ignore[import-not-found]
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P


def join() -> tuple[int, int]:
    """Connect to the other processes; return this process's rank and the number of processes."""
    # Processes on one machine must not each use all its cores, and layers of this size gain nothing from threads.
    # XLA reads this at the first computation.
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false " + os.environ.get("XLA_FLAGS", "")
    world = int(os.environ.get("JAX_NUM_PROCESSES", "1"))
    if world > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # JAX itself reads only the address. Without "deactivate" it would look for Slurm, MPI and GKE first.
        jax.distributed.initialize(
            coordinator_address=os.environ["JAX_COORDINATOR_ADDRESS"],
            num_processes=world,
            process_id=int(os.environ["JAX_PROCESS_ID"]),
            cluster_detection_method="deactivate",
        )
        digits.end_at_sigterm()  # again: JAX has set a handler that only records the signal
    return jax.process_index(), jax.process_count()


def logits(weights, images):
    hidden = jax.nn.relu(images @ weights["hidden.weight"].T + weights["hidden.bias"])
    return hidden @ weights["output.weight"].T + weights["output.bias"]


def mean_loss(weights, images, labels):
    log_probabilities = jax.nn.log_softmax(logits(weights, images))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[:, None], axis=1))


def train_epoch(weights, velocity, images, labels, rates):
    """SGD with momentum over (steps, batch, …); each device sees its part of every batch."""

    def step(state, batch):
        weights, velocity = state
        images, labels, rate = batch
        loss, gradient = jax.value_and_grad(mean_loss)(weights, images, labels)
        loss, gradient = jax.lax.pmean((loss, gradient), "data")  # the all-reduce
        velocity = jax.tree.map(lambda v, g: digits.MOMENTUM * v + g, velocity, gradient)
        weights = jax.tree.map(lambda w, v: w - rate * v, weights, velocity)
        return (weights, velocity), loss

    (weights, velocity), losses = jax.lax.scan(step, (weights, velocity), (images, labels, rates))
    return weights, velocity, losses.mean()


def train() -> None:
    options = digits.arguments()
    rank, world = join()
    run = digits.Run(options, rank, world)
    data = digits.load(options.dataset)

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    everywhere, by_batch = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "data"))
    # check_vma would add an all-reduce to the gradient of replicated values; `train_epoch` already does it.
    split = P(None, "data")
    epoch_of = jax.jit(
        jax.shard_map(train_epoch, mesh=mesh, in_specs=(P(), P(), split, split, P()), out_specs=P(), check_vma=False)
    )

    @jax.jit
    def accuracy_of(weights):
        return jnp.mean(logits(weights, data.test_images).argmax(axis=1) == data.test_labels)

    first, continued = digits.first_weights(options)
    first_accuracy = float(accuracy_of(jax.device_put(first, everywhere)))
    checkpoint = digits.Checkpoint(options, data)
    state = checkpoint.load(first)
    if world > 1:
        state = multihost_utils.broadcast_one_to_all(state)  # from rank 0, so that all resume from the same epoch
    done, *trained = state
    run.resume(int(done))
    weights, velocity = jax.device_put(trained, everywhere)
    accuracy = float(accuracy_of(weights))
    steps = len(data.train_labels) // options.batch_size
    rates = digits.learning_rates(options, steps).reshape(options.epochs, steps)

    for epoch in range(int(done) + 1, options.epochs + 1):
        run.begin(epoch)
        mine = digits.batches(len(data.train_labels), options, epoch, rank, world)
        images = jax.make_array_from_process_local_data(by_batch, data.train_images[mine])
        labels = jax.make_array_from_process_local_data(by_batch, data.train_labels[mine])
        weights, velocity, loss = epoch_of(weights, velocity, images, labels, rates[epoch - 1])
        accuracy = float(accuracy_of(weights))
        run.end(epoch, float(loss), accuracy)
        if rank == 0:
            checkpoint.save(epoch, *jax.tree.map(np.asarray, (weights, velocity)))

    if continued and accuracy < first_accuracy:
        weights, accuracy = first, first_accuracy
    run.finish(jax.tree.map(np.asarray, weights), accuracy, "jax", data)
    if world > 1:
        # No rank may exit with success before the model is saved.
        multihost_utils.sync_global_devices("saved")
    if rank == 0:
        checkpoint.remove()


if __name__ == "__main__":
    digits.main(train)
