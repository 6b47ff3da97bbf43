"""Moving datasets and models between locations: the steps around training.

May import `registry`, and the layers below.

The functions are listed in ``__init__.pyi`` and imported when they are first used: copying needs neither registries nor
specs. The same steps as programs: ``python -m trainjob.data``.
"""

from trainjob._support.lazy import lazy

__getattr__, __dir__ = lazy(__name__, __file__)
