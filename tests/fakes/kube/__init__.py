"""A Kubernetes API server with Trainer, JobSet, a kubelet and Kueue, in this process."""
