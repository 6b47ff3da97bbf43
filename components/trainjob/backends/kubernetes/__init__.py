"""The Kubernetes backend: TrainJobs of a cluster, over one small HTTP client.

Layers, from below: `credentials` (the ``kubernetes`` package finds them), `errors` (replies as a tree), `client` (the
wire: requests as data), `served` (what the cluster's Trainer can take), `mirror` (LIST and WATCH that survive
everything), `pods` (logs, crashes), `surroundings` (what keeps jobs from running), `hub` (one mirror for one waiter or
for many), `backend` (what `trainjob.launch` and `trainjob.waiting` talk to).
"""
