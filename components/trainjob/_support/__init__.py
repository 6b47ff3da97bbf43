"""What all other packages stand on and that knows nothing of jobs. Imports nothing of `trainjob`."""
