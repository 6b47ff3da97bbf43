"""Airflow provider for Kubeflow TrainJobs."""
