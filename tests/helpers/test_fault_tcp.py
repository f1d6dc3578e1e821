"""The harm that tests/helpers/fault_tcp.py promises is done, to the byte."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from tests.helpers.fault_tcp import Faults, FaultTcp

SENT = bytes(range(256)) * 40


@contextlib.asynccontextmanager
async def between() -> AsyncIterator[FaultTcp]:
    """Before a server that sends back what it gets."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with FaultTcp(server.sockets[0].getsockname()[1]) as faulty:
        yield faulty
    server.close()


async def echoed(port: int) -> tuple[bytes, str]:
    """What came back of SENT, and how the connection ended."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    came = b""
    try:
        writer.write(SENT)
        writer.write_eof()
        while data := await reader.read(65_536):
            came += data
    except ConnectionResetError:
        return came, "reset"
    finally:
        writer.close()
    return came, "closed"


@pytest.mark.parametrize(
    "faults", [Faults(), Faults(slices=7), Faults(delay_s=0.05), Faults(bytes_per_s=200_000)]
)
async def test_what_only_delays_changes_no_byte(faults: Faults) -> None:
    async with between() as faulty:
        faulty.forth, faulty.back = faults, Faults(slices=1_000)
        started = time.monotonic()
        assert await echoed(faulty.port) == (SENT, "closed")
        took = time.monotonic() - started
    assert took >= max(faults.delay_s, len(SENT) / faults.bytes_per_s if faults.bytes_per_s else 0)


@pytest.mark.parametrize("end_after", [0, 1, 300, len(SENT)])
async def test_a_cut_comes_after_exactly_so_many_bytes(end_after: int) -> None:
    async with between() as faulty:
        faulty.back = Faults(end_after=end_after)
        assert await echoed(faulty.port) == (SENT[:end_after], "closed")
        faulty.back = Faults(end_after=end_after, slices=64, end="reset")
        assert await echoed(faulty.port) == (SENT[:end_after], "reset")


async def test_a_half_close_ends_one_direction_only() -> None:
    async with between() as faulty:
        faulty.forth = Faults(end_after=5, end="half-close")
        reader, writer = await asyncio.open_connection("127.0.0.1", faulty.port)
        writer.write(b"12345")
        assert await reader.read(-1) == b"12345"  # the server has had its end, and has answered
        writer.close()


async def test_one_byte_is_flipped() -> None:
    async with between() as faulty:
        faulty.back = Faults(flip_at=300, slices=9)
        came, _ = await echoed(faulty.port)
    assert came == SENT[:300] + bytes([SENT[300] ^ 0xFF]) + SENT[301:]


async def test_a_black_hole_holds_everything_until_it_is_released() -> None:
    async with between() as faulty:
        faulty.blackhole()
        asking = asyncio.create_task(echoed(faulty.port))
        await asyncio.sleep(0.05)
        assert (asking.done(), faulty.accepted) == (False, 1)
        faulty.release()
        assert await asking == (SENT, "closed")


async def test_a_stall_keeps_the_connection_and_passes_nothing_more() -> None:
    async with between() as faulty:
        faulty.back = Faults(end_after=5, end="stall")
        reader, writer = await asyncio.open_connection("127.0.0.1", faulty.port)
        writer.write(SENT)
        assert await reader.readexactly(5) == SENT[:5]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await reader.read(1)
        writer.close()


async def test_new_connections_are_refused_open_ones_go_on_until_they_are_cut() -> None:
    async with between() as faulty:
        reader, writer = await asyncio.open_connection("127.0.0.1", faulty.port)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        faulty.refuse()
        with pytest.raises(ConnectionRefusedError):
            await echoed(faulty.port)
        writer.write(b"b")
        assert await reader.readexactly(1) == b"b"
        faulty.cut(reset=True)
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        writer.close()
        await faulty.listen()
        assert await echoed(faulty.port) == (SENT, "closed")
    assert faulty.open == 0
