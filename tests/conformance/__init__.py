"""Compares the requests of the Kubeflow SDK with those of `TrainJobSpec`.

`table` maps calls, `names` maps arguments. `record` runs `calls` in a separate environment and writes the SDK's
requests to recorded.json. tests/cluster/test_conformance.py compares the objects that the controllers create from
both; docs/how-to/kubeflow-sdk.md shows the table.
"""
