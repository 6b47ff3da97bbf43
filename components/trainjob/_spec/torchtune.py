"""Fine-tuning without a script: configures Trainer's torchtune runtimes (the Kubeflow SDK's ``BuiltinTrainer``).

Renders the arguments of ``tune run``. Trainer's torch plugin adds the recipe and the settings of the runtime
(``pkg/runtime/framework/plugins/torch/torchtune.go``). The rules of its webhook are checked here first.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlparse

import yaml
from pydantic import Field

from trainjob._spec.base import Part
from trainjob.errors import Problem

COMMAND = ["tune", "run"]
"""The command by which Trainer detects torchtune."""

_DATASET = "/workspace/dataset"
_KNOWN = ("llama3.2-1b", "llama3.2-3b", "llama3.3-70b", "qwen2.5-1.5b")
_SEVERAL_NODES = "llama3.3-70b"
_NUMBER = re.compile(r"[-+.\d_]+(e[-+]?\d+)?", re.IGNORECASE)  # OmegaConf reads 1e3 as a number, PyYAML does not
_BY_RUNTIME = {"output_dir", "tokenizer.path", "checkpointer.checkpoint_dir", "tokenizer.merges_file"}

Projection = Literal["q_proj", "k_proj", "v_proj", "output_proj"]
_ADAPTED: tuple[Projection, ...] = ("q_proj", "v_proj", "output_proj")


class LoraConfig(Part):
    """Low-rank adaptation: LoRA, QLoRA (``quantize_base``) or DoRA (``use_dora``)."""

    apply_lora_to_mlp: bool | None = None
    apply_lora_to_output: bool | None = None
    lora_attn_modules: Annotated[list[Projection], Field(min_length=1)] = Field(default_factory=lambda: [*_ADAPTED])
    """Adapted projections of each attention layer. Trainer detects LoRA by this argument."""

    lora_rank: Annotated[int, Field(ge=1)] | None = None
    lora_alpha: Annotated[int, Field(ge=1)] | None = None
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    quantize_base: bool | None = None
    use_dora: bool | None = None

    def args(self) -> list[str]:
        """Arguments of ``tune run``."""
        names = ("apply_lora_to_mlp", "apply_lora_to_output", "lora_rank", "lora_alpha", "lora_dropout")
        given = ((name, getattr(self, name)) for name in (*names, "quantize_base", "use_dora"))
        modules = f"model.lora_attn_modules=[{','.join(self.lora_attn_modules)}]"
        return [*(f"model.{name}={value}" for name, value in given if value is not None), modules]


class TorchTuneInstructDataset(Part):
    """Conversion of dataset rows to prompts and answers (``torchtune.datasets.instruct_dataset``)."""

    source: Literal["json", "csv", "parquet", "arrow", "text", "xml"] | None = None
    """Format of the files."""

    split: str | None = None
    """Part of the dataset: ``train``, ``train[:10%]``, …"""

    train_on_input: bool | None = None
    new_system_prompt: str | None = None
    column_map: dict[Literal["input", "output"], str] | None = None
    """The dataset's names for the columns ``input`` and ``output``."""

    def args(self) -> list[str]:
        """Arguments of ``tune run``."""
        args = ["dataset=torchtune.datasets.instruct_dataset"]
        if self.source:
            args.append(f"dataset.source={self.source}")
        if self.split:
            args.append(f"dataset.split={_text(self.split)}")
        if self.train_on_input is not None:
            args.append(f"dataset.train_on_input={self.train_on_input}")
        if self.new_system_prompt:
            args.append(f"dataset.new_system_prompt={_text(self.new_system_prompt)}")
        if self.column_map:
            columns = ", ".join(f"{_quoted(name)}: {_quoted(column)}" for name, column in self.column_map.items())
            args.append(f"dataset.column_map={{{columns}}}".replace("$", "$$"))
        return args


class TorchTuneConfig(Part):
    """Changes to torchtune's recipe for the runtime's model. ``args`` of the spec can change all other settings.

    Nodes and resources are set in the spec: ``num_nodes``, ``resources_per_node``.
    """

    dtype: Literal["bf16", "fp32"] | None = None
    batch_size: Annotated[int, Field(ge=1)] | None = None
    """Samples in a batch."""

    epochs: Annotated[int, Field(ge=1)] | None = None
    """Passes over the dataset."""

    loss: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")] | None = None
    """Class of the loss, e.g. ``torchtune.modules.loss.CEWithChunkedOutputLoss``."""

    peft_config: LoraConfig | None = None
    dataset_preprocess_config: TorchTuneInstructDataset | None = None

    def args(self, dataset: str | None) -> list[str]:
        """Arguments of ``tune run``.

        Args:
            dataset: URI of Trainer's dataset initializer, if any.
        """
        given = [(name, getattr(self, name)) for name in ("dtype", "batch_size", "epochs", "loss")]
        return [
            *(f"{name}={value}" for name, value in given if value is not None),
            *([_files(dataset)] if dataset is not None and not dataset.startswith("cache://") else []),
            *(self.peft_config.args() if self.peft_config else []),
            *(self.dataset_preprocess_config.args() if self.dataset_preprocess_config else []),
        ]


def _files(dataset: str) -> str:
    """Path of the downloaded dataset: a directory, or a file if the last part of the URI has a suffix."""
    uri = urlparse(dataset)
    if uri.scheme != "hf":  # for S3, the initializer downloads the content of the prefix
        return f"dataset.data_dir={_DATASET}"
    _, _, inside = uri.path.strip("/").partition("/")
    kind = "data_files" if "." in inside else "data_dir"
    return f"dataset.{kind}={posixpath.join(_DATASET, inside or '.')}"


def _text(value: str) -> str:
    """`value`, escaped for torchtune, which reads it as YAML, and for the pod, which expands ``$(NAME)``."""
    try:
        plain = yaml.safe_load(value) == value and "${" not in value and not _NUMBER.fullmatch(value)
    except yaml.YAMLError:
        plain = False
    return (value if plain else _quoted(value)).replace("$", "$$")


def _quoted(value: str) -> str:
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # OmegaConf's interpolation
    plain = value.isprintable() and not set(value) & {"'", "\\"}
    if plain:
        return f"'{value}'"
    return yaml.safe_dump(value, default_style='"', allow_unicode=True, width=math.inf).rstrip("\n")


def problems(
    runtime: str, trainer: Mapping[str, Any], args: Sequence[str], paths: Mapping[str, str]
) -> Iterator[Problem]:
    """Problems that Trainer's webhook would find in ``tune run``.

    Args:
        runtime: Name of the runtime, which contains that of the model.
        trainer: numNodes, numProcPerNode and resourcesPerNode, as in the API.
        args: Arguments, first those of the author.
        paths: Paths of runtime, num_nodes, args and lora in the author's spec.
    """
    _, _, model = runtime.partition("-")
    if model not in _KNOWN:
        known = ", ".join(f"torchtune-{each}" for each in _KNOWN)
        message = f"{runtime!r} does not name a model of Trainer's torchtune plugin"
        yield Problem(paths["runtime"], message, f"use {known}, or a custom runtime with such a name")
    nodes = trainer.get("numNodes")
    nodes = nodes if isinstance(nodes, int) else 1
    quantized = _enabled(args, "model.quantize_base") and not _enabled(args, "model.use_dora")
    if nodes > 1 and model != _SEVERAL_NODES:
        instead = f"use 1 node with more GPUs; only {_SEVERAL_NODES} supports several nodes"
        yield Problem(paths["num_nodes"], f"is {nodes}, but torchtune trains {model} on one node only", instead)
    if nodes > 1 and (quantized or any("model.lora_attn_modules" in arg for arg in args)):
        yield Problem(
            paths["lora"],
            f"is LoRA on {nodes} nodes, which torchtune does not support",
            "set num_nodes: 1, or remove LoRA",
        )
    if quantized and model == "qwen2.5-1.5b":
        yield Problem(paths["lora"], "is QLoRA, which torchtune does not support for qwen2.5", "remove quantize_base")
    elif quantized and model in ("llama3.2-1b", "llama3.2-3b") and _single_device(trainer) is False:
        instead = "set num_proc_per_node: 1, or resources_per_node with one GPU"
        yield Problem(paths["lora"], f"is QLoRA, which torchtune supports for {model} on a single GPU only", instead)
    for i, arg in enumerate(args):
        name = arg.partition("=")[0]
        if name in _BY_RUNTIME:
            yield Problem(f"{paths['args']}[{i}]", f"sets {name}, which the runtime sets", "remove it")


def _enabled(args: Sequence[str], name: str) -> bool:
    pairs = (arg.partition("=") for arg in args)
    return any(name in key and value.strip().lower() == "true" for key, _, value in pairs)


def _single_device(trainer: Mapping[str, Any]) -> bool | None:
    """Whether a node has one device; None if the runtime decides, which is unknown here."""
    if trainer.get("numProcPerNode") == 1:
        return True
    resources = trainer.get("resourcesPerNode")
    if not resources:
        return None
    amounts = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return any(str(amount) == "1" for name, amount in amounts.items() if "gpu" in name.lower())
