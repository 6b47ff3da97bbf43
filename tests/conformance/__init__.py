"""Calls of the Kubeflow SDK, and what it sends for them.

docs/how-to/kubeflow-sdk.md has the calls, each beside the equivalent `TrainJobSpec`; `page` reads them. `record` makes
them in a separate environment and writes the SDK's requests to recorded.json. tests/unit/test_sdk.py compares these
with the TrainJobs of the specs.
"""
