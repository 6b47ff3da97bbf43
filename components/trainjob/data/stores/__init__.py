"""Stores, a module or package for each kind: `base` is what all of them do, `opening` chooses the one of a location."""
