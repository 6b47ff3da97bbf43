"""Fine-tune a language model with LoRA, without a training script: torchtune, on a runtime that Trainer ships.

Trainer's initializers bring dataset and model onto a volume before the GPUs are needed; the volume belongs to the job,
and the adapters are in ``output`` on it when the job has ended. What the cluster needs:

* the runtime ``torchtune-llama3.2-1b`` of Trainer, and a storage class that gives it a volume;
* in the namespace of the jobs a Secret ``hugging-face`` with the key ``ACCESS_TOKEN``, since the model is gated.

No queue: Trainer 2.3 with JobSet 0.12 cannot resume a job of these runtimes that was created suspended, which is what
Kueue does. See docs/runtimes.md.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param

from trainjob_airflow.operators.trainjob import TrainJobOperator

with DAG(
    "finetune_llm",
    schedule=None,
    tags=["trainjob"],
    doc_md=__doc__,
    params={
        "dataset": Param("hf://tatsu-lab/alpaca/data", type="string"),
        "epochs": Param(1, type="integer", minimum=1),
        "lora_rank": Param(8, type="integer", minimum=1),
    },
):
    TrainJobOperator(
        task_id="finetune",
        runtime="torchtune-llama3.2-1b",
        initializer={
            "dataset": "{{ params.dataset }}",
            "model": {"storage_uri": "hf://meta-llama/Llama-3.2-1B-Instruct", "secret_ref": "hugging-face"},
        },
        # What changes of torchtune's recipe; `args` takes anything that has no name here.
        torchtune={
            "epochs": "{{ params.epochs }}",
            "batch_size": 4,
            "dtype": "bf16",
            "peft_config": {"lora_rank": "{{ params.lora_rank }}", "lora_alpha": 16, "lora_dropout": 0.05},
            "dataset_preprocess_config": {"source": "parquet", "split": "train[:95%]"},
        },
        resources_per_node={"gpu": 2},
        deferrable=True,  # for hours, without a worker
        execution_timeout=timedelta(hours=12),
        retries=2,
    )
