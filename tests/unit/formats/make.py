"""Write the samples beside this file with the libraries that define the formats.

    uv venv forms
    uv pip install --python forms/bin/python catboost flax gguf lightgbm onnx orbax-checkpoint pyarrow sentencepiece \
        tensorboardX xgboost-cpu
    forms/bin/python tests/unit/formats/make.py

Made with catboost 1.2.10, flax 0.12.8, gguf 0.19.0, lightgbm 4.7.0, onnx 1.23.2, orbax-checkpoint 0.12.8, pyarrow
26.0.1, sentencepiece 0.2.3, tensorboardX 2.6.5 and xgboost 3.2.0.
"""

# mypy: ignore-errors
# No environment of this repository has these libraries.

import shutil
import tempfile
from pathlib import Path

import catboost
import jax.numpy
import lightgbm
import numpy
import onnx
import orbax.checkpoint
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import sentencepiece
import tensorboardX
import xgboost
from flax import serialization
from gguf import GGUFWriter
from onnx import helper, numpy_helper

HERE = Path(__file__).parent
GOOD, PICKLED = HERE / "good", HERE / "pickled"
NUMBERS = numpy.ones((8, 16), "float32")


def onnx_models() -> None:
    weights = numpy_helper.from_array(NUMBERS, "w")
    ends = [helper.make_tensor_value_info("x", 1, [1, 8])], [helper.make_tensor_value_info("y", 1, [1, 16])]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", *ends, [weights])
    onnx.save(helper.make_model(graph), GOOD / "small.onnx")
    outside = {"save_as_external_data": True, "location": "large.onnx.data", "size_threshold": 0}
    onnx.save(helper.make_model(graph), GOOD / "large.onnx", **outside)
    python = helper.make_node("PyOp", ["x"], ["y"], domain="pyopmulti", module="os", class_name="system")
    inner = helper.make_graph([python], "then", [], ends[1])
    choice = helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner)
    onnx.save(helper.make_model(helper.make_graph([choice], "g", *ends)), PICKLED / "python-operator.onnx")


def language_models() -> None:
    writer = GGUFWriter(GOOD / "model.gguf", "llama")
    writer.add_block_count(2)
    writer.add_token_list(["a", "b", "<s>"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_chat_template("{% for message in messages %}{{ message }}{% endfor %}")
    writer.add_tensor("t", NUMBERS)
    writer.add_tensor("u", numpy.ones(3, "float16"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text")
        text.write_text("\n".join(f"this is a sentence number {number} with words" for number in range(500)))
        sentencepiece.SentencePieceTrainer.train(
            input=text, model_prefix=GOOD / "tokenizer", vocab_size=60, normalization_rule_name="identity"
        )


def trees() -> None:
    values = numpy.random.default_rng(0).random((50, 4))
    labels = (values[:, 0] > 0.5).astype(int)
    boosted = xgboost.train({"objective": "binary:logistic"}, xgboost.DMatrix(values, labels), 2)
    boosted.save_model(GOOD / "xgboost.ubj")
    boosted.save_model(GOOD / "xgboost.json")
    lightgbm.train({"objective": "binary", "verbose": -1}, lightgbm.Dataset(values, labels), 2).save_model(
        GOOD / "lightgbm.txt"
    )
    with tempfile.TemporaryDirectory() as folder:
        model = catboost.CatBoostClassifier(iterations=1, depth=2, verbose=0, train_dir=folder)
        model.fit(values, labels)
        model.save_model(str(GOOD / "catboost.cbm"))


def tables() -> None:
    table = pyarrow.table({"a": [1, 2, 3], "b": ["x", "y", "z"]})
    named = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": b"cos\nsystem\n(S'id'\ntR."}
    pickled = table.cast(pyarrow.schema([pyarrow.field("a", "int64", metadata=named), ("b", "string")]))
    for folder, content in ((GOOD, table), (PICKLED, pickled)):
        pyarrow.parquet.write_table(content, folder / "table.parquet")
        pyarrow.feather.write_feather(content, folder / "table.feather")
        path = str(folder / "stream.arrow")
        with pyarrow.OSFile(path, "wb") as file, pyarrow.ipc.new_stream(file, content.schema) as writer:
            writer.write_table(content)
    with tensorboardX.SummaryWriter(GOOD / "runs") as summary:
        summary.add_scalar("loss", 0.5, 1)


def checkpoints() -> None:
    tree = {"layer": {"w": jax.numpy.asarray(NUMBERS)}, "step": jax.numpy.array(3)}
    orbax.checkpoint.Checkpointer(orbax.checkpoint.StandardCheckpointHandler()).save(GOOD / "orbax", tree)
    zarr = orbax.checkpoint.PyTreeCheckpointHandler(use_ocdbt=False)
    orbax.checkpoint.Checkpointer(zarr).save(GOOD / "orbax-zarr", tree)
    values = {"params": {"w": NUMBERS, "number": 1, "none": None, "complex": 2 + 1j}}
    (GOOD / "flax_model.msgpack").write_bytes(serialization.to_bytes(values))


if __name__ == "__main__":
    for directory in (GOOD, PICKLED):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
    onnx_models()
    language_models()
    trees()
    tables()
    checkpoints()
