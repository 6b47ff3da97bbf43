"""`TrainJobSpec` -> TrainJob object, and what its labels, annotations and checkpoints mean to later attempts. Pure.

May import `settings`, and the layers below.
"""
