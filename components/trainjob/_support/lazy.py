"""Public names of a module, listed in its stub (``.pyi``) and imported when they are first used. Standard library only.

The stub is the only list of the names, also for type checkers and for the reference. Nothing is imported before it is
used, so that ``import trainjob`` costs a DAG file nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path


@cache
def homes(file: str) -> dict[str, tuple[str, str]]:
    """Public name -> module and name there, by the stub of the module whose ``__file__`` is `file`."""
    import ast  # noqa: PLC0415 - 5 ms, which `import trainjob` alone does not take

    stub = ast.parse(Path(file).with_suffix(".pyi").read_text())
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def lazy(module: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a module whose stub lists its public names (PEP 562).

    Args:
        module: Its ``__name__``.
        file: Its ``__file__``.
    """

    def get(name: str) -> object:
        if name == "__all__":
            return sorted(homes(file))
        if name.startswith("__") or name not in homes(file):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, original = homes(file)[name]
        try:
            return getattr(import_module(home), original)
        except AttributeError:  # a module of the package `home`
            return import_module(f"{home}.{original}")

    return get, lambda: sorted(homes(file))
