"""The SDK's arguments in a spec: class -> (section with fields of the same names, other fields)."""

from __future__ import annotations

PLACES: dict[str, tuple[str, dict[str, str]]] = {
    "TrainerClient.train": ("", {"trainer": "", "options": ""}),
    "CustomTrainer": ("", {}),
    "CustomTrainerContainer": ("", {}),
    "BuiltinTrainer": ("", {"config": "torchtune"}),
    "TorchTuneConfig": ("torchtune", {"num_nodes": "num_nodes", "resources_per_node": "resources_per_node"}),
    "LoraConfig": ("torchtune.peft_config", {}),
    "TorchTuneInstructDataset": ("torchtune.dataset_preprocess_config", {}),
    "Initializer": ("initializer", {}),
    "HuggingFaceDatasetInitializer": ("initializer.dataset", {}),
    "S3DatasetInitializer": ("initializer.dataset", {}),
    "DataCacheInitializer": ("initializer.dataset", {}),
    "HuggingFaceModelInitializer": ("initializer.model", {}),
    "S3ModelInitializer": ("initializer.model", {}),
    "Name": ("", {"name": ""}),
    "Labels": ("", {}),
    "Annotations": ("", {}),
    "TrainerCommand": ("", {}),
    "TrainerArgs": ("", {}),
    "ActiveDeadlineSeconds": ("", {"seconds": "active_deadline_seconds"}),
}
_PATCH = (
    ("RuntimePatch", "runtime_patches"),
    ("TrainingRuntimeSpecPatch", "training_runtime_spec"),
    ("JobSetTemplatePatch", "template"),
    ("JobSetSpecPatch", "spec"),
    ("ReplicatedJobPatch", "replicated_jobs"),
    ("JobTemplatePatch", "template"),
    ("JobSpecPatch", "spec"),
    ("PodTemplatePatch", "template"),
    ("PodSpecPatch", "spec"),
    ("ContainerPatch", "containers"),
)
for depth, (owner, _) in enumerate(_PATCH):
    PLACES[owner] = (".".join(field for _, field in _PATCH[: depth + 1]), {})


def place(owner: str, name: str) -> str:
    """Path in a spec; empty if the class itself or the key of the launch replaces the argument."""
    part, others = PLACES[owner]
    return others[name] if name in others else f"{part}.{name}".lstrip(".")
