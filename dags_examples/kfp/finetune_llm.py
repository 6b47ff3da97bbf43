"""Fine-tune a language model with LoRA, without a training script: torchtune, on a runtime that Trainer ships.

::

    python dags_examples/kfp/finetune_llm.py --compile finetune_llm.yaml

One step: Trainer's initializers bring dataset and model onto a volume before the GPUs are needed; the volume belongs to
the job, and the adapters are in ``output`` on it when the job has ended. What the cluster needs:

* the runtime ``torchtune-llama3.2-1b`` of Trainer, and a storage class that gives it a volume;
* in the namespace of the jobs a Secret ``hugging-face`` with the key ``ACCESS_TOKEN``, since the model is gated.

No queue: Trainer 2.3 with JobSet 0.12 cannot resume a job of these runtimes that was created suspended, which is what
Kueue does. See docs/runtimes.md.
"""

import argparse

from kfp import compiler, dsl

from trainjob_kfp import retry, train


@dsl.pipeline(name="finetune-llm", description="LoRA on Llama 3.2 1B, by torchtune.")  # type: ignore[untyped-decorator]
def finetune_llm(
    dataset: str = "hf://tatsu-lab/alpaca/data",
    epochs: int = 1,
    lora_rank: int = 8,
) -> None:
    finetune = train(
        runtime="torchtune-llama3.2-1b",
        resources_per_node={"gpu": 2},
        # What has no parameter of its own is a field of the TrainJobSpec; all that the Kubeflow SDK knows: docs/sdk.md.
        spec={
            "initializer": {
                "dataset": dataset,
                "model": {"storage_uri": "hf://meta-llama/Llama-3.2-1B-Instruct", "secret_ref": "hugging-face"},
            },
            # What changes of torchtune's recipe; `args` takes anything that has no name here.
            "torchtune": {
                "epochs": epochs,
                "batch_size": 4,
                "dtype": "bf16",
                "peft_config": {"lora_rank": lora_rank, "lora_alpha": 16, "lora_dropout": 0.05},
                "dataset_preprocess_config": {"source": "parquet", "split": "train[:95%]"},
            },
            # Whatever becomes of the pipeline, the GPUs are free after half a day.
            "active_deadline_seconds": 12 * 3600,
        },
        fail_fast=True,
    )
    retry(finetune, times=2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a language model with Kubeflow Pipelines.")
    parser.add_argument("--compile", metavar="FILE", required=True, help="compile it for a Kubeflow Pipelines backend")
    compiler.Compiler().compile(finetune_llm, parser.parse_args().compile)


if __name__ == "__main__":
    main()
