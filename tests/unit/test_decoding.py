"""Pages of lists, whose decoding blocks the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.client import PAGE, ApiClient, Request, parts_of
from trainjob._backends.kubernetes.errors import ServerError
from trainjob._backends.kubernetes.reflector import Reflector

LIST = Request("GET", "/x")


class Collection(ApiClient):
    """A collection of so many objects, which a server sends in pages of the requested size."""

    def __init__(self, size: int) -> None:
        super().__init__(Credentials(host="https://unused"))
        self.size = size
        self.limits: list[str] = []

    async def send(self, request: Request) -> dict[str, Any]:
        self.limits.append(request.params["limit"])
        begin = int(request.params.get("continue", 0))
        end = min(begin + int(request.params["limit"]), self.size)
        items = [{"metadata": {"uid": str(number)}} for number in range(begin, end)]
        return {"items": items, "metadata": {"continue": str(end) if end < self.size else "", "resourceVersion": "7"}}


async def listed(client: ApiClient) -> list[Any]:
    return await client.items("/x", {})


async def reflected(client: ApiClient) -> list[Any]:
    return [item async for item in Reflector(client, "/x", {})._list()]


@pytest.mark.parametrize("size", [0, 1, PAGE, PAGE + 1, 10 * PAGE])
@pytest.mark.parametrize("read", [listed, reflected])
def test_a_list_of_any_size_is_read_in_small_pages(read: Any, size: int) -> None:
    client = Collection(size)
    found = asyncio.run(read(client))
    assert [each["metadata"]["uid"] for each in found] == [str(number) for number in range(size)]
    assert client.limits == ["250"] * max(1, -(-size // 250))


@pytest.mark.parametrize("page", [{}, {"items": None, "metadata": None}, {"items": []}])
def test_a_page_may_be_empty(page: dict[str, Any]) -> None:
    assert parts_of(LIST, page) == ([], {})


@pytest.mark.parametrize("page", [{"items": [1]}, {"items": {"a": 1}}, {"items": [{}, None]}, {"metadata": "x"}])
def test_a_reply_that_is_no_page_counts_as_a_failed_request(page: dict[str, Any]) -> None:
    with pytest.raises(ServerError, match="GET /x: the reply is not a list of objects"):
        parts_of(LIST, page)
