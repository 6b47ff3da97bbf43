"""Moving datasets and models between locations.

The steps are in `trainjob.data.steps` (functions) and ``python -m trainjob.data`` (programs); `copy` is what they move
bytes with.
"""
