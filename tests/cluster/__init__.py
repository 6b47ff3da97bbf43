"""A real Kubernetes cluster with Kubeflow Trainer on this machine, built from pinned public Go modules.

Layers, from below: `build` (programs and manifests), `processes` and `certificates`, `api` (a small client),
`components` (the command line of each program), `nodes` and `kueue` (what is simulated, what is queued), `access` (what
tests use of any cluster), `control_plane` (`Cluster`: the one that is started here), `real_node` with `node_init`,
`images` and `relay` (a node that runs real pods). docs/cluster.md says how to use it.
"""
