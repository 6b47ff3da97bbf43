"""Callbacks that report the progress and the metrics of a training loop that a library runs.

`trainjob.callbacks.huggingface` needs ``transformers``, `trainjob.callbacks.lightning` needs ``lightning``. Of this
package they need `trainjob.progress`, and none of its dependencies.
"""
