"""Calls with CustomTrainer, CustomTrainerContainer or no trainer, also on custom runtimes."""

from __future__ import annotations

from tests.conformance.row import ALWAYS_A_TRAINER, BY_REFERENCE, EMBEDDED, Row

_FUNCTION = {"node: containers.node.command": EMBEDDED, "node: containers.node.args": EMBEDDED}
_BY_MPI = {"launcher: containers.node.command": EMBEDDED, "launcher: containers.node.args": EMBEDDED}

ROWS = (
    Row(
        "function",
        "trainer=CustomTrainer(func=train_model)",
        'runtime="torch-distributed", func=train_model',
        _FUNCTION,
    ),
    Row(
        "function-with-arguments",
        'runtime="torch-distributed", trainer=CustomTrainer(func=train_model, func_args={"lr": 0.01, "epochs": 3}, '
        "num_nodes=2)",
        'runtime="torch-distributed", func=train_model, func_args={"lr": 0.01, "epochs": 3}, num_nodes=2',
        _FUNCTION,
    ),
    Row(
        "function-with-packages",
        'runtime="torch-distributed", trainer=CustomTrainer(func=train_model, packages_to_install=["numpy==2.0.0"], '
        'pip_index_urls=["https://index.example/simple", "https://more.example/simple"])',
        'runtime="torch-distributed", func=train_model, packages_to_install=["numpy==2.0.0"], '
        'pip_index_urls=["https://index.example/simple", "https://more.example/simple"]',
        _FUNCTION,
    ),
    Row(
        "function-with-image-and-env",
        'runtime="torch-distributed", trainer=CustomTrainer(func=train_model, image="registry.example/train:1", '
        'env={"NCCL_DEBUG": "INFO"}, resources_per_node={"cpu": 4, "memory": "16Gi", "gpu": 2})',
        'runtime="torch-distributed", func=train_model, image="registry.example/train:1", '
        'env={"NCCL_DEBUG": "INFO"}, resources_per_node={"cpu": 4, "memory": "16Gi", "gpu": 2}',
        _FUNCTION,
    ),
    Row(
        "function-on-jax",
        'runtime="jax-distributed", trainer=CustomTrainer(func=train_model, num_nodes=4)',
        'runtime="jax-distributed", func=train_model, num_nodes=4',
        _FUNCTION,
    ),
    Row(
        "function-on-xgboost",
        'runtime="xgboost-distributed", trainer=CustomTrainer(func=train_model, num_nodes=2)',
        'runtime="xgboost-distributed", func=train_model, num_nodes=2',
        _FUNCTION,
    ),
    Row(
        "function-by-mpirun",
        'runtime="deepspeed-distributed", trainer=CustomTrainer(func=train_model, num_nodes=2)',
        'runtime="deepspeed-distributed", func=train_model, num_nodes=2',
        _BY_MPI,
    ),
    Row(
        "container",
        'runtime="torch-distributed", trainer=CustomTrainerContainer(image="registry.example/train:1", num_nodes=2)',
        'runtime="torch-distributed", image="registry.example/train:1", num_nodes=2',
    ),
    Row(
        "container-with-resources",
        'runtime="torch-distributed", trainer=CustomTrainerContainer(image="registry.example/train:1", '
        'resources_per_node={"cpu": 5, "memory": "10G", "gpu": 4})',
        'runtime="torch-distributed", image="registry.example/train:1", '
        'resources_per_node={"cpu": 5, "memory": "10G", "gpu": 4}',
    ),
    Row(
        "container-with-a-slice-of-a-gpu",
        'runtime="torch-distributed", trainer=CustomTrainerContainer(image="registry.example/train:1", '
        'resources_per_node={"mig-1g.5gb": 1, "Memory": "8Gi", "storage": "20Gi", "example.com/Custom-NPU": 1})',
        'runtime="torch-distributed", image="registry.example/train:1", '
        'resources_per_node={"mig-1g.5gb": 1, "Memory": "8Gi", "storage": "20Gi", "example.com/Custom-NPU": 1}',
    ),
    Row(
        "container-with-env",
        'runtime="torch-distributed", trainer=CustomTrainerContainer(image="registry.example/train:1", '
        'env={"NCCL_DEBUG": "INFO", "DATA": "s3://bucket/data"})',
        'runtime="torch-distributed", image="registry.example/train:1", '
        'env={"NCCL_DEBUG": "INFO", "DATA": "s3://bucket/data"}',
    ),
    Row(
        "container-with-a-secret",
        'runtime="torch-distributed", trainer=CustomTrainerContainer(image="registry.example/train:1", '
        'env={"HF_TOKEN": "not-a-real-token"})',
        'runtime="torch-distributed", image="registry.example/train:1", '
        'env={"HF_TOKEN": {"valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}}',
        {"node: containers.node.env.HF_TOKEN.*": BY_REFERENCE},
    ),
    Row(
        "container-with-command-and-args",
        'runtime="torch-distributed", trainer=CustomTrainerContainer(image="registry.example/train:1", num_nodes=2), '
        'options=[TrainerCommand(["torchrun", "train.py"]), TrainerArgs(["--lr", "0.1"])]',
        'runtime="torch-distributed", image="registry.example/train:1", num_nodes=2, '
        'command=["torchrun", "train.py"], args=["--lr", "0.1"]',
    ),
    Row(
        "container-by-mpirun",
        'runtime="mlx-distributed", trainer=CustomTrainerContainer(image="registry.example/train:1", num_nodes=3, '
        'resources_per_node={"cpu": 2}, env={"A": "1"}), options=[TrainerCommand(["mpirun", "python", "train.py"])]',
        'runtime="mlx-distributed", image="registry.example/train:1", num_nodes=3, resources_per_node={"cpu": 2}, '
        'env={"A": "1"}, command=["mpirun", "python", "train.py"]',
    ),
    Row(
        "command-alone",
        'runtime="torch-distributed", options=[TrainerCommand(["torchrun", "train.py"])]',
        'runtime="torch-distributed", command=["torchrun", "train.py"]',
    ),
    Row(
        "runtime-alone",
        'runtime="torch-distributed"',
        'runtime="torch-distributed"',
        {"node: containers.node.env.PET_*": ALWAYS_A_TRAINER, "node: containers.node.ports": ALWAYS_A_TRAINER},
    ),
    Row(
        "as-many-nodes-as-the-runtime-says",
        'runtime="conformance-two-nodes", trainer=CustomTrainerContainer(image="registry.example/train:1")',
        'runtime="conformance-two-nodes", image="registry.example/train:1"',
    ),
    Row(
        "function-on-a-runtime-of-any-name",
        'runtime="conformance-two-nodes", trainer=CustomTrainer(func=train_model)',
        'runtime="conformance-two-nodes", func=train_model',
        _FUNCTION,
    ),
    Row(
        "runtime-of-the-namespace",
        'runtime="conformance-own", trainer=CustomTrainerContainer(image="registry.example/train:1")',
        'runtime={"name": "conformance-own", "kind": "TrainingRuntime"}, image="registry.example/train:1"',
    ),
)
