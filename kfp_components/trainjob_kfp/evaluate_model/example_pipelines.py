"""Export the trained model only if it is better than the champion on a held-out dataset."""

from kfp import dsl

from trainjob_kfp import evaluate_model, export_model, train


@dsl.pipeline(name="evaluate-model-example")
def example_pipeline(test_data: str, models: str, registry: str, image: str) -> None:
    """The image has trainjob and evaluate.py, which writes the scores of one model as JSON."""
    trained = train(runtime="torch-distributed", command=["trainjob", "exec", "--", "torchrun", "train.py"])
    evaluated = evaluate_model(
        candidate=trained.outputs["model_uri"],
        champion="models:/digits@champion",
        dataset=test_data,
        command=["python", "evaluate.py", "{model}", "{dataset}", "{scores}"],
        gate={"metrics": {"accuracy": {"min_improvement": 0, "min": 0.9}}},
        image=image,
        registry=registry,
    )
    with dsl.If(evaluated.outputs["passed"] == True):
        export_model(
            source=trained.outputs["model_uri"],
            name="digits",
            target=models,
            metrics=trained.outputs["result"],
            evaluation=evaluated.outputs["evaluation"],
            alias="champion",
            registry=registry,
        )
