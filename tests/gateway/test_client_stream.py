import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from compaction_proxy.core.errors import OverloadedError, RequestRefusedError
from compaction_proxy.gateway.body_budget import SMALL_BYTES, BodyBudget
from compaction_proxy.gateway.client_stream import DEPARTURE, NOTICE, read_body, while_connected


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


def scope(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http", "headers": list(headers)}


async def test_a_body_is_joined_from_its_parts() -> None:
    receive = channel([part(b"ab"), part(b""), part(b"c", more=False)])
    assert await read_body(scope(), receive, 3, BodyBudget().open_hold()) == b"abc"


async def test_a_body_declared_too_large_is_refused_unread() -> None:
    with pytest.raises(RequestRefusedError) as refusal:
        await read_body(scope((b"content-length", b"4")), channel([]), 3, BodyBudget().open_hold())
    assert (refusal.value.status, refusal.value.code) == (413, "request_too_large")


async def test_a_body_that_grows_too_large_is_refused() -> None:
    with pytest.raises(RequestRefusedError):
        await read_body(scope(), channel([part(b"ab"), part(b"cd")]), 3, BodyBudget().open_hold())


async def test_a_client_that_leaves_while_sending_is_noticed() -> None:
    with pytest.raises(ClientDisconnect):
        await read_body(scope(), channel([part(b"ab"), GONE]), 3, BodyBudget().open_hold())


async def test_a_budget_below_the_limit_is_the_limit_of_a_body() -> None:
    with pytest.raises(RequestRefusedError, match="larger than 3 bytes"):
        await read_body(scope((b"content-length", b"4")), channel([]), 10, BodyBudget(3).open_hold())


async def test_no_memory_for_a_body_is_answered_with_503() -> None:
    async def receive() -> dict[str, Any]:
        raise MemoryError

    with pytest.raises(OverloadedError) as refused:
        await read_body(scope(), receive, 10, BodyBudget().open_hold())
    assert (refused.value.status, refused.value.retry_after_s) == (503, 5)


async def test_a_client_that_leaves_while_its_body_waits_for_room_is_noticed() -> None:
    notices: list[Callable[[], None] | None] = []
    told = {**scope(), "extensions": {DEPARTURE: {NOTICE: notices.append}}}
    budget = BodyBudget(2 * SMALL_BYTES, wait_s=600)
    other, hold = budget.open_hold(), budget.open_hold()
    other.add_bytes(3 * SMALL_BYTES)
    piece = bytes(SMALL_BYTES + 1)
    reading = asyncio.create_task(read_body(told, channel([part(piece)]), SMALL_BYTES * 2, hold))
    await asyncio.sleep(0)
    (leave,) = notices
    assert leave is not None
    leave()
    with pytest.raises(ClientDisconnect):
        await reading
    hold.release()
    assert budget.used_bytes == other.size_bytes


async def test_room_set_aside_for_a_body_without_a_length_is_given_back_with_its_end() -> None:
    budget = BodyBudget(10 * SMALL_BYTES, wait_s=600)
    other, hold = budget.open_hold(), budget.open_hold()
    other.add_bytes(11 * SMALL_BYTES)
    other.add_bytes(1)
    parts = [part(bytes(SMALL_BYTES + 1)), part(b"end", more=False)]
    reading = asyncio.create_task(read_body(scope(), channel(parts), 5 * SMALL_BYTES, hold))
    await asyncio.sleep(0)
    other.release()
    assert budget.used_bytes == 5 * SMALL_BYTES
    assert len(await reading) == budget.used_bytes == SMALL_BYTES + 4


class Departure:
    """A server's notice of a client that leaves."""

    def __init__(self) -> None:
        self._callback: Callable[[], None] | None = None
        self.scope = {**scope(), "extensions": {DEPARTURE: {NOTICE: self._set_callback}}}

    def _set_callback(self, callback: Callable[[], None] | None) -> None:
        self._callback = callback

    def announce(self) -> None:
        assert self._callback is not None
        self._callback()


async def test_a_client_that_leaves_cancels_the_block_where_it_waits() -> None:
    reached, departure = [], Departure()
    asyncio.get_running_loop().call_soon(departure.announce)

    async def run_block() -> None:
        with while_connected(departure.scope):
            try:
                await asyncio.Event().wait()
            finally:
                reached.append("cleanup")

    with pytest.raises(ClientDisconnect):
        await run_block()
    assert reached == ["cleanup"]


async def test_a_server_without_notices_lets_the_block_end() -> None:
    with while_connected(scope()):
        await asyncio.sleep(0)


async def test_a_timeout_within_the_block_is_not_taken_for_a_departure() -> None:
    with pytest.raises(TimeoutError), while_connected(Departure().scope):
        raise TimeoutError


async def test_cancellation_from_outside_stays_a_cancellation() -> None:
    async def run_block() -> None:
        with while_connected(Departure().scope):
            await asyncio.Event().wait()

    task = asyncio.create_task(run_block())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
