"""httpx without its command line.

Where rich is installed, as it is with trainjob, ``import httpx`` (0.28) imports a command line as well: rich, pygments
and 74 modules in all, 3.3 MB in each process that waits for a job.
"""

from __future__ import annotations

import sys
from typing import Any

_COMMAND_LINE = "httpx._main"

if "httpx" in sys.modules:
    import httpx
else:
    modules: dict[str, Any] = sys.modules
    modules[_COMMAND_LINE] = None  # makes its import fail, for which httpx is prepared
    try:
        import httpx
    finally:
        del sys.modules[_COMMAND_LINE]

__all__ = ["httpx"]
