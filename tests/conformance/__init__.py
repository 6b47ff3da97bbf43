"""What the Kubeflow SDK asks a cluster for, beside what `TrainJobSpec` asks it for.

`table` says it call by call, `names` argument by argument. `record` writes what the SDK sends into recorded.json and
has `calls` make it send that, in an environment of its own. tests/cluster/test_conformance.py compares what the
controllers make of both; docs/how-to/kubeflow-sdk.md shows it.
"""
