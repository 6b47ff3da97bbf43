"""Calls that both reject."""

from __future__ import annotations

from tests.conformance.options import ours, patch
from tests.conformance.row import Row

_TUNE = 'runtime="torchtune-llama3.2-1b"'

ROWS = (
    Row(
        "torchtune-on-too-many-nodes",
        f"{_TUNE}, trainer=BuiltinTrainer(config=TorchTuneConfig(num_nodes=2))",
        f"{_TUNE}, torchtune={{}}, num_nodes=2",
        refused="must be 1 for llama3_2/1B model",
        sooner="torchtune trains llama3.2-1b on one node only",
    ),
    Row(
        "lora-on-several-nodes",
        'runtime="torchtune-llama3.3-70b", trainer=BuiltinTrainer(config=TorchTuneConfig(num_nodes=2, '
        "peft_config=LoraConfig()))",
        'runtime="torchtune-llama3.3-70b", torchtune={"peft_config": {}}, num_nodes=2',
        refused="LoRA fine-tuning is not supported for multi-node training",
        sooner="is LoRA on 2 nodes",
    ),
    Row(
        "qlora-on-several-gpus",
        f"{_TUNE}, trainer=BuiltinTrainer(config=TorchTuneConfig(peft_config=LoraConfig(quantize_base=True), "
        'resources_per_node={"gpu": 2}))',
        f'{_TUNE}, torchtune={{"peft_config": {{"quantize_base": True}}}}, resources_per_node={{"gpu": 2}}',
        refused="when using QLoRA",
        sooner="on a single GPU only",
    ),
    Row(
        "torchtune-of-another-runtime",
        'runtime="torch-distributed", trainer=BuiltinTrainer(config=TorchTuneConfig())',
        'runtime="torch-distributed", torchtune={}',
        refused="BuiltinTrainer can't be used with",
        sooner="does not name a model of Trainer's torchtune plugin",
    ),
    Row(
        "variables-of-the-runtime",
        'runtime="torch-distributed", trainer=CustomTrainerContainer(image="registry.example/train:1", '
        'env={"PET_NNODES": "2"})',
        'runtime="torch-distributed", image="registry.example/train:1", env={"PET_NNODES": "2"}',
        refused="must not have reserved envs",
        sooner="is set by Trainer's torch runtimes",
    ),
    Row(
        "env-by-a-patch",
        'runtime="torch-distributed", options=['
        + patch(
            "JobTemplatePatch(spec=JobSpecPatch(template=PodTemplatePatch(spec=PodSpecPatch(containers=["
            'ContainerPatch(name="node", env=[{"name": "A", "value": "1"}])]))))'
        )
        + "]",
        'runtime="torch-distributed", '
        + ours('{"spec": {"template": {"spec": {"containers": [{"name": "node", "env": {"A": "1"}}]}}}}'),
        refused="must not have envs for the dataset-initializer, model-initializer, node containers",
        sooner="Trainer refuses env here for node",
    ),
    Row(
        "initializer-that-the-runtime-has-not",
        'runtime="torch-distributed", initializer=Initializer(dataset=S3DatasetInitializer('
        'storage_uri="s3://bucket/data"))',
        'runtime="torch-distributed", initializer={"dataset": "s3://bucket/data"}',
        refused="must have dataset-initializer job",
    ),
)
