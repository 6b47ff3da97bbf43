"""Train on handwritten digits with PyTorch, data-parallel over processes (DDP).

One process, or as many as torchrun starts::

    torchrun --nproc-per-node 2 digits_torch.py --dataset ../data --output $HOME/digits
"""

from __future__ import annotations

import os
from collections import OrderedDict

import digits  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def join() -> tuple[int, int]:
    """Connect to the other processes; return this process's rank and the number of processes."""
    # Processes on one machine must not each use all its cores, and layers of this size gain nothing from threads.
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def network() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            hidden=nn.Linear(digits.PIXELS, digits.HIDDEN),
            relu=nn.ReLU(),
            output=nn.Linear(digits.HIDDEN, digits.DIGITS),
        )
    )


def fill(model: nn.Module, weights: digits.Weights) -> None:
    model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})


def accuracy_on(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def resume(
    checkpoint: digits.Checkpoint, first: digits.Weights, model: nn.Module, optimizer: torch.optim.Optimizer, world: int
) -> int:
    """Load the checkpoint of an earlier attempt; return the number of its finished epochs."""
    state = [checkpoint.load(first)]
    if world > 1:
        dist.broadcast_object_list(state)  # from rank 0, so that all resume from the same epoch
    done, weights, velocity = state[0]
    fill(model, weights)
    for name, parameter in model.named_parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.from_numpy(velocity[name])
    return int(done)


def save_checkpoint(
    checkpoint: digits.Checkpoint, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    parameters = dict(model.named_parameters())
    weights = {name: parameter.detach().numpy() for name, parameter in parameters.items()}
    buffers = {name: optimizer.state[parameter]["momentum_buffer"] for name, parameter in parameters.items()}
    checkpoint.save(epoch, weights, {name: buffer.numpy() for name, buffer in buffers.items()})


def train() -> None:
    options = digits.arguments()
    rank, world = join()
    run = digits.Run(options, rank, world)
    data = digits.load(options.dataset)
    train_images, train_labels = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels).long()
    test = torch.from_numpy(data.test_images), torch.from_numpy(data.test_labels).long()

    first, continued = digits.first_weights(options)
    model = network()
    fill(model, first)
    first_accuracy = accuracy_on(model, *test)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=digits.MOMENTUM)
    checkpoint = digits.Checkpoint(options, data)
    done = resume(checkpoint, first, model, optimizer, world)
    run.resume(done)
    accuracy = accuracy_on(model, *test)
    parallel = DistributedDataParallel(model) if world > 1 else model
    steps = len(train_labels) // options.batch_size
    rates = iter(digits.learning_rates(options, steps)[done * steps :])

    for epoch in range(done + 1, options.epochs + 1):
        run.begin(epoch)
        total = torch.zeros(())
        mine = torch.from_numpy(digits.batches(len(train_labels), options, epoch, rank, world))
        for batch in mine:
            optimizer.param_groups[0]["lr"] = float(next(rates))
            loss = nn.functional.cross_entropy(parallel(train_images[batch]), train_labels[batch])
            optimizer.zero_grad()
            loss.backward()  # DDP averages the gradients of all ranks here
            optimizer.step()
            total += loss.detach()
        if world > 1:
            dist.all_reduce(total)
        accuracy = accuracy_on(model, *test)
        run.end(epoch, float(total) / len(mine) / world, accuracy)
        if rank == 0:
            save_checkpoint(checkpoint, epoch, model, optimizer)

    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if continued and accuracy < first_accuracy:
        weights, accuracy = first, first_accuracy
    run.finish(weights, accuracy, "torch", data)
    if world > 1:
        dist.barrier()  # no rank may exit with success before the model is saved
    if rank == 0:
        checkpoint.remove()
    if world > 1:
        dist.destroy_process_group()
        # Gloo's threads outlive the group, and sometimes (2 of 36 runs, PyTorch 2.15) one drops a tensor while the
        # interpreter shuts down, which aborts the process: pytorch/pytorch#179291.
        digits.leave(0)


if __name__ == "__main__":
    digits.main(train)
