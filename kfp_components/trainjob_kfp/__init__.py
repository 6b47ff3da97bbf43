"""Kubeflow Pipelines components for TrainJobs."""
