"""A real Kubernetes cluster with Kubeflow Trainer on this machine, built from pinned public Go modules.

Layers, from below: `golang`, `manifests` and `build` (programs and manifests), `api` (a small client), `nodes` and
`kueue` (what is simulated, what is queued), `components` with `status_api` (the command line of each program),
`images`, `step_image` and `image_store` (what real pods run), `access` (what tests use of any cluster), `real_node`
with `node_files` and `relay` (a node that runs real pods), `control_plane` with `webhooks` (`Cluster`: the one that is
started here), `slow_webhook` (slow changes of TrainJobs). Of `tests` it imports `processes` and `certificates` only.
docs/cluster.md says how to use it.
"""
