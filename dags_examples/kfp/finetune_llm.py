"""Fine-tune a language model with LoRA and without a training script, by one of Trainer's torchtune runtimes.

::

    python dags_examples/kfp/finetune_llm.py --compile finetune_llm.yaml

The pipeline has one step. Trainer's initializers download dataset and model to a volume before the GPUs are needed. The
volume belongs to the job; the adapters are in ``output`` on it when the job has ended. The cluster needs:

* the runtime ``torchtune-llama3.2-1b`` of Trainer, and a storage class for its volume;
* in the namespace of the jobs, a Secret ``hugging-face`` with the key ``ACCESS_TOKEN``, because the model is gated.

Do not use a queue: Kueue suspends jobs at their creation, and Trainer 2.3 with JobSet 0.12 cannot resume such a job of
these runtimes. See docs/how-to/runtimes.md.
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
        # Options without a parameter are fields of the TrainJobSpec; docs/how-to/kubeflow-sdk.md lists all that the
        # Kubeflow SDK has.
        spec={
            "initializer": {
                "dataset": dataset,
                "model": {"storage_uri": "hf://meta-llama/Llama-3.2-1B-Instruct", "secret_ref": "hugging-face"},
            },
            # Changes of torchtune's recipe; `args` takes options without a field here.
            "torchtune": {
                "epochs": epochs,
                "batch_size": 4,
                "dtype": "bf16",
                "peft_config": {"lora_rank": lora_rank, "lora_alpha": 16, "lora_dropout": 0.05},
                "dataset_preprocess_config": {"source": "parquet", "split": "train[:95%]"},
            },
            # Frees the GPUs after half a day, also if the pipeline itself was lost.
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
