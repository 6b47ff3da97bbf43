"""File formats that cannot run code when they are loaded, recognized by name and content.

`allowed.refusals` decides about the files of a model. `texts`, `tensors`, `tables` and `wires` check one group of
formats each; `pickled` recognizes pickles under any name.
"""
