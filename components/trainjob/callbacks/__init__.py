"""Callbacks that report the progress and the metrics of a training loop that a library runs.

Imports `progress` and the libraries that they serve.

`trainjob.callbacks.huggingface` needs ``transformers``, `trainjob.callbacks.lightning` needs ``lightning``. Of this
package they need `trainjob.progress`, and none of its dependencies.
"""
