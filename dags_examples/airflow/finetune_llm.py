"""Fine-tune a language model with LoRA and without a training script, by one of Trainer's torchtune runtimes.

Trainer's initializers download dataset and model to a volume before the GPUs are needed. The volume belongs to the job;
the adapters are in ``output`` on it when the job has ended. The cluster needs:

* the runtime ``torchtune-llama3.2-1b`` of Trainer, and a storage class for its volume;
* in the namespace of the jobs, a Secret ``hugging-face`` with the key ``ACCESS_TOKEN``, because the model is gated.

Do not use a queue: Kueue suspends jobs at their creation, and Trainer 2.3 with JobSet 0.12 cannot resume such a job of
these runtimes. See docs/how-to/runtimes.md.
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
        # Changes of torchtune's recipe; `args` takes options without a field here.
        torchtune={
            "epochs": "{{ params.epochs }}",
            "batch_size": 4,
            "dtype": "bf16",
            "peft_config": {"lora_rank": "{{ params.lora_rank }}", "lora_alpha": 16, "lora_dropout": 0.05},
            "dataset_preprocess_config": {"source": "parquet", "split": "train[:95%]"},
        },
        resources_per_node={"gpu": 2},
        deferrable=True,  # waits for hours without a worker
        execution_timeout=timedelta(hours=12),
        retries=2,
    )
