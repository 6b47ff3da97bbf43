"""The Kubernetes backend: TrainJobs of a cluster, over one small HTTP client.

Modules, from below: `credentials` (how a client authenticates), `errors` (HTTP replies as exceptions), `client`
(requests and connections), `compat` (fields that the cluster's Trainer supports), `reflector` (LIST and WATCH, and how
they recover), `pods` (logs, terminations), `blockers` (why jobs wait), `shared_watch`, `job_watch` and `pod_watch` (one
reflector shared by many listeners), `prepared` (requests that are sent while a process is terminated), `backend` (the
`Backend` that `trainjob._jobs.launching` and `trainjob._jobs.waiting` use).
"""
