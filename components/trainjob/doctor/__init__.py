"""``trainjob doctor``: what stands in the way of jobs before there are any.

::

    findings.py   what a check says
    cluster.py    the checks of a cluster, each by itself
    server.py     whether it can be reached
    admission.py  whether TrainJobs would be let in, by dry runs
    rights.py     what may be done, and what does not work without it
    queues.py     Kueue
    secrets.py    Secrets that jobs name
    pipelines.py  Kubeflow Pipelines
    local.py      the checks of this machine, for the local backend

Nothing is created or changed, and no secret is in what is said.
"""

from trainjob.doctor.findings import Finding, Level

__all__ = ["Finding", "Level"]
