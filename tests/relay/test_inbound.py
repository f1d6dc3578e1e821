import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from proxy.errors import RequestRefused
from proxy.relay.inbound import read_body, while_connected


def channel(messages: Iterable[dict[str, Any]]) -> Receive:
    """A client that sends these and is then silent."""
    left = iter(messages)

    async def receive() -> dict[str, Any]:
        for message in left:
            return message
        await asyncio.Event().wait()
        raise AssertionError

    return receive


def part(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


GONE = {"type": "http.disconnect"}


def scope() -> dict[str, Any]:
    return {"type": "http", "headers": []}


async def test_a_body_is_joined_from_its_parts() -> None:
    receive = channel([part(b"ab"), part(b""), part(b"c", more=False)])
    assert await read_body(receive, 3) == b"abc"


async def test_a_body_declared_too_large_is_refused_unread() -> None:
    with pytest.raises(RequestRefused) as refusal:
        await read_body(channel([]), 3, 4)
    assert (refusal.value.status, refusal.value.code) == (413, "request_too_large")


async def test_a_body_that_grows_too_large_is_refused() -> None:
    with pytest.raises(RequestRefused):
        await read_body(channel([part(b"ab"), part(b"cd")]), 3)


async def test_a_client_that_leaves_while_sending_is_noticed() -> None:
    with pytest.raises(ClientDisconnect):
        await read_body(channel([part(b"ab"), GONE]), 3)


async def test_a_client_that_leaves_cancels_the_block_where_it_waits() -> None:
    reached = []

    async def block() -> None:
        async with while_connected(scope(), channel([part(b"", more=False), GONE])):
            try:
                await asyncio.Event().wait()
            finally:
                reached.append("cleanup")

    with pytest.raises(ClientDisconnect):
        await block()
    assert reached == ["cleanup"]


async def test_a_block_that_ends_first_leaves_no_task_behind() -> None:
    before = asyncio.all_tasks()
    async with while_connected(scope(), channel([])):
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_a_timeout_within_the_block_is_not_taken_for_a_departure() -> None:
    with pytest.raises(TimeoutError):
        async with while_connected(scope(), channel([])):
            raise TimeoutError


async def test_cancellation_from_outside_stays_a_cancellation() -> None:
    async def block() -> None:
        async with while_connected(scope(), channel([])):
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_departure_is_looked_for_only_after_the_body_was_read() -> None:
    ended = asyncio.Event()
    async with while_connected(scope(), channel([GONE]), ended):
        await asyncio.sleep(0.01)
    ended.set()
