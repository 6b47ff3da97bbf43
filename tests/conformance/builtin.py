"""Calls with BuiltinTrainer and with initializers."""

from __future__ import annotations

from tests.conformance.row import AS_WRITTEN, BY_REFERENCE, WHERE_THE_DATA_IS, Row

_TUNE = 'runtime="torchtune-llama3.2-1b"'

ROWS = (
    Row("torchtune", f"{_TUNE}, trainer=BuiltinTrainer(config=TorchTuneConfig())", f"{_TUNE}, torchtune={{}}"),
    Row(
        "torchtune-settings",
        f"{_TUNE}, trainer=BuiltinTrainer(config=TorchTuneConfig(dtype=DataType.BF16, batch_size=4, epochs=2, "
        'loss=Loss.CEWithChunkedOutputLoss, num_nodes=1, resources_per_node={"gpu": 2, "memory": "64Gi"}))',
        f'{_TUNE}, torchtune={{"dtype": "bf16", "batch_size": 4, "epochs": 2, '
        '"loss": "torchtune.modules.loss.CEWithChunkedOutputLoss"}, num_nodes=1, '
        'resources_per_node={"gpu": 2, "memory": "64Gi"}',
    ),
    Row(
        "lora",
        f"{_TUNE}, trainer=BuiltinTrainer(config=TorchTuneConfig(peft_config=LoraConfig()))",
        f'{_TUNE}, torchtune={{"peft_config": {{}}}}',
    ),
    Row(
        "lora-settings",
        'runtime="torchtune-llama3.2-3b", trainer=BuiltinTrainer(config=TorchTuneConfig(epochs=1, '
        "peft_config=LoraConfig(apply_lora_to_mlp=True, apply_lora_to_output=False, "
        'lora_attn_modules=["q_proj", "k_proj"], lora_rank=8, lora_alpha=16, lora_dropout=0.1, quantize_base=False, '
        "use_dora=False)))",
        'runtime="torchtune-llama3.2-3b", torchtune={"epochs": 1, "peft_config": {"apply_lora_to_mlp": True, '
        '"apply_lora_to_output": False, "lora_attn_modules": ["q_proj", "k_proj"], "lora_rank": 8, "lora_alpha": 16, '
        '"lora_dropout": 0.1, "quantize_base": False, "use_dora": False}}',
    ),
    Row(
        "qlora",
        f"{_TUNE}, trainer=BuiltinTrainer(config=TorchTuneConfig(peft_config=LoraConfig(quantize_base=True), "
        'resources_per_node={"gpu": 1}))',
        f'{_TUNE}, torchtune={{"peft_config": {{"quantize_base": True}}}}, resources_per_node={{"gpu": 1}}',
    ),
    Row(
        "dora",
        'runtime="torchtune-qwen2.5-1.5b", trainer=BuiltinTrainer(config=TorchTuneConfig('
        "peft_config=LoraConfig(use_dora=True)))",
        'runtime="torchtune-qwen2.5-1.5b", torchtune={"peft_config": {"use_dora": True}}',
    ),
    Row(
        "torchtune-on-several-nodes",
        'runtime="torchtune-llama3.3-70b", trainer=BuiltinTrainer(config=TorchTuneConfig(num_nodes=4, '
        'resources_per_node={"gpu": 8}))',
        'runtime="torchtune-llama3.3-70b", torchtune={}, num_nodes=4, resources_per_node={"gpu": 8}',
    ),
    Row(
        "instruct-dataset",
        f"{_TUNE}, trainer=BuiltinTrainer(config=TorchTuneConfig(dataset_preprocess_config=TorchTuneInstructDataset("
        'source=DataFormat.PARQUET, split="train[:10%]", train_on_input=False, '
        'new_system_prompt="You answer briefly.", column_map={"input": "question", "output": "answer"})))',
        f'{_TUNE}, torchtune={{"dataset_preprocess_config": {{"source": "parquet", "split": "train[:10%]", '
        '"train_on_input": False, "new_system_prompt": "You answer briefly.", '
        '"column_map": {"input": "question", "output": "answer"}}}',
    ),
    Row(
        "a-prompt-that-looks-like-more-than-text",
        f"{_TUNE}, trainer=BuiltinTrainer(config=TorchTuneConfig(dataset_preprocess_config=TorchTuneInstructDataset("
        'new_system_prompt="Price: $(HOME)")))',
        f'{_TUNE}, torchtune={{"dataset_preprocess_config": {{"new_system_prompt": "Price: $(HOME)"}}}}',
        {"node: containers.node.args": AS_WRITTEN},
    ),
    Row(
        "hugging-face",
        f'{_TUNE}, initializer=Initializer(dataset=HuggingFaceDatasetInitializer(storage_uri="hf://tatsu-lab/alpaca"), '
        'model=HuggingFaceModelInitializer(storage_uri="hf://meta-llama/Llama-3.2-1B-Instruct")), '
        "trainer=BuiltinTrainer(config=TorchTuneConfig(epochs=1))",
        f'{_TUNE}, initializer={{"dataset": "hf://tatsu-lab/alpaca", '
        '"model": "hf://meta-llama/Llama-3.2-1B-Instruct"}, torchtune={"epochs": 1}',
    ),
    Row(
        "hugging-face-directory",
        f"{_TUNE}, initializer=Initializer(dataset=HuggingFaceDatasetInitializer("
        'storage_uri="hf://tatsu-lab/alpaca/data", ignore_patterns=["*.md", "*.json"])), '
        "trainer=BuiltinTrainer(config=TorchTuneConfig())",
        f'{_TUNE}, initializer={{"dataset": {{"storage_uri": "hf://tatsu-lab/alpaca/data", '
        '"ignore_patterns": ["*.md", "*.json"]}}, torchtune={}',
    ),
    Row(
        "hugging-face-file",
        f"{_TUNE}, initializer=Initializer(dataset=HuggingFaceDatasetInitializer("
        'storage_uri="hf://tatsu-lab/alpaca/data/train.parquet")), trainer=BuiltinTrainer(config=TorchTuneConfig())',
        f'{_TUNE}, initializer={{"dataset": "hf://tatsu-lab/alpaca/data/train.parquet"}}, torchtune={{}}',
    ),
    Row(
        "hugging-face-token",
        f"{_TUNE}, initializer=Initializer(model=HuggingFaceModelInitializer("
        'storage_uri="hf://meta-llama/Llama-3.2-1B-Instruct", ignore_patterns=None, '
        'access_token="not-a-real-token")), trainer=BuiltinTrainer(config=TorchTuneConfig())',
        f'{_TUNE}, initializer={{"model": {{"storage_uri": "hf://meta-llama/Llama-3.2-1B-Instruct", '
        '"ignore_patterns": [], "access_token": {"secretKeyRef": {"name": "hub", "key": "token"}}}}, torchtune={}',
        {"model-initializer: containers.model-initializer.env.ACCESS_TOKEN.*": BY_REFERENCE},
    ),
    Row(
        "s3",
        f'{_TUNE}, initializer=Initializer(dataset=S3DatasetInitializer(storage_uri="s3://bucket/alpaca", '
        'endpoint="https://s3.example", access_key_id="not-a-real-id", secret_access_key="not-a-real-key", '
        'region="eu-west-1"), model=S3ModelInitializer(storage_uri="s3://bucket/llama", '
        'role_arn="arn:aws:iam::123456789012:role/reader")), trainer=BuiltinTrainer(config=TorchTuneConfig())',
        f'{_TUNE}, initializer={{"dataset": {{"storage_uri": "s3://bucket/alpaca", "endpoint": "https://s3.example", '
        '"secret_ref": "s3-keys", "region": "eu-west-1"}, "model": {"storage_uri": "s3://bucket/llama", '
        '"role_arn": "arn:aws:iam::123456789012:role/reader"}}, torchtune={}',
        {
            "dataset-initializer: containers.dataset-initializer.env.*ACCESS_KEY*": BY_REFERENCE,
            "dataset-initializer: containers.dataset-initializer.envFrom": BY_REFERENCE,
            "node: containers.node.args": WHERE_THE_DATA_IS,
        },
    ),
    Row(
        "data-cache",
        'runtime="conformance-cache", initializer=Initializer(dataset=DataCacheInitializer('
        'storage_uri="cache://schema/table", metadata_loc="s3://bucket/metadata.json", num_data_nodes=4, head_cpu="1", '
        'head_mem="1Gi", worker_cpu="2", worker_mem="4Gi", iam_role="arn:aws:iam::123456789012:role/reader")), '
        'trainer=CustomTrainerContainer(image="registry.example/train:1", num_nodes=2)',
        'runtime="conformance-cache", initializer={"dataset": {"storage_uri": "cache://schema/table", '
        '"metadata_loc": "s3://bucket/metadata.json", "num_data_nodes": 4, "head_cpu": "1", "head_mem": "1Gi", '
        '"worker_cpu": "2", "worker_mem": "4Gi", "iam_role": "arn:aws:iam::123456789012:role/reader"}}, '
        'image="registry.example/train:1", num_nodes=2',
    ),
)
