"""A real Kubernetes cluster with Kubeflow Trainer on this machine, built from pinned public Go modules.

Layers, from the lowest: `golang`, `manifests` and `build` (programs and manifests), `api` (a small client), `nodes` and
`kueue` (simulated nodes, queues), `components` with `files/` (flags and configuration of each program), `images`,
`step_image` and `image_store` (images of real pods), `access` (the interface of any cluster for tests), `real_node`
with `relay` (a node that runs real pods), `control_plane` with `webhooks` and `status_api` (`Cluster`: the cluster that
runs on this machine), `slow_webhook` (slows changes of TrainJobs). From `tests` it imports only `processes` and
`certificates`. docs/development/test-cluster.md describes its use.
"""
