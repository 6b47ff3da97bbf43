"""`TrainJobSpec` -> TrainJob object, and what its labels, annotations and checkpoints mean to later attempts. Pure.

Imports specs, diagnoses and what is below them; no backend.
"""
