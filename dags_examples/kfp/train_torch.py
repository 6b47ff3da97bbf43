"""Train with PyTorch on several nodes of GPUs, with the dataset and the checkpoints in the pipeline's workspace.

::

    python dags_examples/kfp/train_torch.py --compile train_torch.yaml

The workspace is a volume that KFP creates for a run, mounts at the same path in every step that uses it, and deletes
with the run. Here the dataset is downloaded to it once, all nodes read it there, and a retried training resumes from
its checkpoint there. The trained model goes to the pipeline's artifact store.

Settings of the task ``train`` apply to each node of its TrainJob: GPUs, memory, node selector, toleration, storage
credentials. The pod of the step itself runs on any node and requests none of them. The cluster needs:

* a storage class with ReadWriteMany (``TRAINJOB_STORAGE_CLASS``), because nodes share the workspace;
* an image with PyTorch, this package and the scripts of dags_examples (``TRAINJOB_EXAMPLES`` is their path in it);
* in the namespace of the runs, ConfigMap and Secret ``trainjob-storage``: docs/how-to/cluster.md, 3.
"""

import argparse
import os

from kfp import compiler, dsl, kubernetes

from trainjob_kfp import cleanup, initialize_dataset, retry, train

EXAMPLES = os.environ.get("TRAINJOB_EXAMPLES", "/opt/dags_examples")
SETTINGS, KEYS = ("AWS_ENDPOINT_URL", "AWS_REGION"), ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
WORKSPACE = dsl.WorkspaceConfig(
    size="100Gi",
    kubernetes=dsl.KubernetesWorkspaceConfig(
        pvcSpecPatch={
            "accessModes": ["ReadWriteMany"],
            "storageClassName": os.environ.get("TRAINJOB_STORAGE_CLASS", "nfs"),
        }
    ),
)
IN_WORKSPACE = f"file://{dsl.WORKSPACE_PATH_PLACEHOLDER}"


@dsl.pipeline(  # type: ignore[untyped-decorator]
    name="train-torch",
    description="PyTorch on several nodes, data and checkpoints in the workspace.",
    pipeline_config=dsl.PipelineConfig(workspace=WORKSPACE),
)
def train_torch(
    image: str,
    dataset: str,
    epochs: int = 20,
) -> None:
    # Stops the jobs however the run ends: Terminate leaves the step itself only 0.03 to 1.7 s for that.
    with dsl.ExitHandler(cleanup(run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER)):
        data = initialize_dataset(source=dataset, target=f"{IN_WORKSPACE}/dataset")

        trained = train(
            runtime="torch-distributed",
            image=image,
            command=["trainjob", "exec", "--", "torchrun", f"{EXAMPLES}/training/digits_torch.py"],
            args=[
                "--dataset=$(TRAINJOB_INPUT_DATASET)",
                "--output=$(TRAINJOB_OUTPUT_MODEL)",
                f"--epochs={epochs}",
            ],
            num_nodes=2,
            inputs={"dataset": data.outputs["uri"]},
            # KFP mounts the workspace because this string contains its placeholder.
            checkpoints=f"{IN_WORKSPACE}/checkpoints",
        )
        # The number of GPUs is not a parameter of the pipeline: the compiler (kfp 2.17) does not pass a parameter into
        # an ExitHandler or a loop if only resources use it.
        trained.set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(8)
        trained.set_cpu_limit("32").set_memory_limit("256Gi")
        kubernetes.add_node_selector(trained, "node.kubernetes.io/instance-type", "gpu-8x")
        kubernetes.add_toleration(trained, key="nvidia.com/gpu", operator="Exists", effect="NoSchedule")
        kubernetes.use_config_map_as_env(trained, "trainjob-storage", {name: name for name in SETTINGS})
        kubernetes.use_secret_as_env(trained, "trainjob-storage", {name: name for name in KEYS})
        # Retries only where a retry can help: after a lost node, not after an error in the script.
        retry(trained, times=3)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on several nodes with Kubeflow Pipelines.")
    parser.add_argument("--compile", metavar="FILE", required=True, help="compile it for a Kubeflow Pipelines backend")
    compiler.Compiler().compile(train_torch, parser.parse_args().compile)


if __name__ == "__main__":
    main()
