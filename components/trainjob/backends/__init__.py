"""Where TrainJobs run."""
