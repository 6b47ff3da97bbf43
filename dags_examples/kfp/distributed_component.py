"""A custom component on several nodes: the pipeline ``distributed_component``.

On this machine, with kfp.local and the local backend (no cluster, no Docker)::

    python dags_examples/kfp/distributed_component.py --local

For a cluster, as a file to upload to Kubeflow Pipelines::

    python dags_examples/kfp/distributed_component.py --compile distributed_component.yaml

``fit`` is a normal lightweight component: it has typed inputs and outputs and artifacts, and KFP sends its source.
``distributed`` turns it into a component with the same inputs and outputs whose function runs on all ranks of a
TrainJob. The step's outputs are what rank 0 returns, logs and writes. On a cluster it runs in the component's image,
which needs the function's imports, KFP, and this package for the artifacts; that of docs/how-to/cluster.md has all.
"""

# mypy: allow-untyped-calls
# (JAX's own functions are typed only in part)

import argparse
import os
import warnings
from pathlib import Path

from kfp import compiler, dsl, local

from trainjob_kfp import distributed, initialize_dataset

EXAMPLES = Path(__file__).resolve().parents[1]
# The path on the nodes: on a cluster, the path of this directory in their image.
ON_NODES = Path(os.environ.get("TRAINJOB_EXAMPLES", EXAMPLES))
IMAGE = os.environ.get("TRAINJOB_EXAMPLES_IMAGE", "registry.example/digits:1")


@dsl.component(base_image=IMAGE, install_kfp_package=False)  # type: ignore[untyped-decorator]
def fit(
    epochs: int,
    dataset: dsl.Input[dsl.Dataset],
    model: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
) -> float:
    """Softmax regression on the digits. Each rank has a part of the images; all ranks have the same weights."""
    import os
    from pathlib import Path

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    rank, world = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAX_NUM_PROCESSES"])
    if world > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            os.environ["JAX_COORDINATOR_ADDRESS"], world, rank, cluster_detection_method="deactivate"
        )

    rows = np.loadtxt(Path(dataset.path, "digits.csv.gz"), delimiter=",", dtype=np.float32)
    rows = np.random.default_rng(0).permutation(rows)
    images, labels = rows[:, :64] / 16, rows[:, 64].astype(int)
    mine = slice(rank, 1500, world)

    def loss(weights: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(images[mine] @ weights)
        return -jnp.mean(scores[jnp.arange(len(scores)), labels[mine]])

    step = jax.jit(jax.value_and_grad(loss))
    weights = np.zeros((64, 10), np.float32)
    for epoch in range(1, epochs + 1):
        value, gradient = step(weights)
        if world > 1:
            value, gradient = (each.mean(axis=0) for each in process_allgather((value, gradient)))
        weights -= 0.5 * np.asarray(gradient)
        if epoch % 20 == 0:
            print(f"rank {rank} of {world}, epoch {epoch}: loss {float(value):.4f}", flush=True)

    accuracy = float(np.mean((images[1500:] @ weights).argmax(axis=1) == labels[1500:]))
    print(f"rank {rank} of {world} ends with accuracy {accuracy:.4f}", flush=True)
    if rank == 0:  # on one machine all ranks share the path
        metrics.log_metric("accuracy", accuracy)
        with Path(model.path).open("wb") as file:
            np.save(file, weights)
    return accuracy


fit_on_all = distributed(fit, runtime=os.environ.get("TRAINJOB_RUNTIME", "jax-distributed"), num_nodes=2)


@dsl.pipeline(  # type: ignore[untyped-decorator]
    name="distributed-component", description="A lightweight component, run by all ranks of a TrainJob."
)
def distributed_component(dataset: str = (ON_NODES / "data" / "digits.csv.gz").as_uri(), epochs: int = 100) -> None:
    data = initialize_dataset(source=dataset)
    fit_on_all(dataset=data.outputs["dataset"], epochs=epochs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a component on several nodes with Kubeflow Pipelines.")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--local", action="store_true", help="run it on this machine")
    how.add_argument("--compile", metavar="FILE", help="compile it for a Kubeflow Pipelines backend")
    given = parser.parse_args()
    if given.compile:
        compiler.Compiler().compile(distributed_component, given.compile)
        return
    os.environ.setdefault("TRAINJOB_BACKEND", "local")
    # kfp.local warns that the steps run in this environment and not in their image.
    warnings.filterwarnings("ignore", message=".*non-Python base image", category=RuntimeWarning)
    local.init(local.SubprocessRunner(use_venv=False))
    distributed_component()


if __name__ == "__main__":
    main()
