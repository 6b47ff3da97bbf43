"""Requests that run at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


async def side_by_side(*requests: Awaitable[Any]) -> list[Any]:
    """The results of `requests`, once all have ended.

    Raises:
        Exception: The first error of a request, in their order; the others have been sent all the same.
    """
    results = await asyncio.gather(*requests, return_exceptions=True)
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return results
