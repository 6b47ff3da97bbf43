"""The Kubernetes backend: TrainJobs of a cluster, over one small HTTP client.

Layers, from below: `credentials` (the ``kubernetes`` package finds them), `errors` (replies as a tree), `client` (the
wire: requests as data), `mirror` (LIST and WATCH that survive everything), `hub` (one mirror for many waiters), `logs`
and `evidence` (pods), `schema` (what the served API knows), `backend` (what `trainjob.launch` talks to).
"""
