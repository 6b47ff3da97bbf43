"""Forms of files that cannot run code when they are loaded, recognized by name and content.

`allowed.refusals` is the decision for the files of a model. The other modules check one kind of form each: `texts`,
`tensors`, `tables`, `wires`; `pickled` recognizes pickles whatever they are called.
"""
