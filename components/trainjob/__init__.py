"""Launch Kubeflow TrainJobs exactly once, wait for them at almost no cost, and say what went wrong."""

__version__ = "0.1.0"
