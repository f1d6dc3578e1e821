"""A TCP proxy that does harm: it stands between the product and an upstream, or between it and Redis.

    async with FaultTcp(upstream.port) as between:
        between.back = Faults(end_after=300, end="reset")
        ...  # whatever connects to `between.port` has its 300 bytes, and then a reset

What is set holds at once, for open connections too. It runs on the test's own event loop.
"""

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self, cast

READ_BYTES = 65_536
_RESET = struct.pack("ii", 1, 0)  # closing sends no FIN but RST, and drops what was not sent


@dataclass(frozen=True, slots=True)
class Faults:
    """What happens to the bytes of one direction; offsets count from the start of each connection.

    Attributes:
        delay_s: How much later each piece goes on.
        bytes_per_s: The rate, None for as fast as it goes.
        slices: Written in pieces of 1 to so many bytes, None for as they came.
        flip_at: The offset of a byte that goes on with all its bits turned.
        end_after: How many bytes go on before `end`; 0: it ends instead of the first.
        end: Both sides closed; both reset; only this direction ended; or nothing more passes this way.
    """

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    slices: int | None = None
    flip_at: int | None = None
    end_after: int | None = None
    end: Literal["close", "reset", "half-close", "stall"] = "close"


class FaultTcp:
    """Passes connections on to a port of this host, with faults.

    Attributes:
        port: Where it listens, on the loopback interface; the same after `refuse` and `listen`.
        forth, back: What happens to bytes on their way to the target, and back.
        accepted, open: Connections taken so far, and those that are open now.
        passed: Bytes that went on so far, by direction.
    """

    def __init__(self, target: int, *, seed: int = 0) -> None:
        self.port = 0
        self.target = target
        self.forth = Faults()
        self.back = Faults()
        self.accepted = 0
        self.passed = {"forth": 0, "back": 0}
        self._rng = random.Random(seed)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._listener: asyncio.Server | None = None
        self._tasks: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}

    @property
    def open(self) -> int:
        return len(self._tasks)

    async def listen(self) -> None:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        """Let the kernel refuse new connections; open ones go on."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def blackhole(self) -> None:
        """Let nothing pass any more, either way; connections are still taken, and nothing is lost."""
        self._flowing.clear()

    def release(self) -> None:
        """End a black hole: what was held goes on."""
        self._flowing.set()

    def cut(self, *, reset: bool = False) -> None:
        """End all open connections now."""
        for task, writers in self._tasks.items():
            for writer in writers:
                _close(writer, reset=reset)
            task.cancel()

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.refuse()
        tasks = list(self._tasks)
        self.cut(reset=True)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())  # never outside of one
        self.accepted += 1
        self._tasks[task] = [writer]
        with contextlib.suppress(asyncio.CancelledError):  # by `cut`; the loop would log it
            await self._joined(reader, writer, self._tasks[task])
        del self._tasks[task]

    async def _joined(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, writers: list[asyncio.StreamWriter]
    ) -> None:
        """Pass on what comes from both sides until both have ended."""
        broken = True
        try:
            await self._flowing.wait()
            beyond, target = await asyncio.open_connection("127.0.0.1", self.target)
            writers.append(target)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump("forth", reader, target, writers))
                group.create_task(self._pump("back", beyond, writer, writers))
            broken = False
        except (OSError, BaseExceptionGroup):
            pass  # one side has reset, or is not there
        finally:
            for each in writers:
                _close(each, reset=broken)

    async def _pump(
        self,
        direction: Literal["forth", "back"],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        writers: list[asyncio.StreamWriter],
    ) -> None:
        writer.transport.set_write_buffer_limits(high=0)  # drained means: the kernel has it
        passed = 0
        while data := await reader.read(READ_BYTES):
            await self._flowing.wait()
            faults = self.forth if direction == "forth" else self.back
            left = len(data) if faults.end_after is None else faults.end_after - passed
            await self._write(writer, _flipped(data[: max(left, 0)], passed, faults.flip_at), faults)
            gone = min(len(data), max(left, 0))
            passed += gone
            self.passed[direction] += gone
            if passed == faults.end_after:
                await _end(faults.end, reader, writer, writers)
                return
        await self._flowing.wait()
        _end_writing(writer)

    async def _write(self, writer: asyncio.StreamWriter, data: bytes, faults: Faults) -> None:
        await asyncio.sleep(faults.delay_s)
        for piece in self._pieces(data, faults.slices):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(len(piece) / faults.bytes_per_s if faults.bytes_per_s else 0)

    def _pieces(self, data: bytes, most: int | None) -> Iterator[bytes]:
        start = 0
        while start < len(data):
            stop = len(data) if most is None else start + self._rng.randint(1, most)
            yield data[start:stop]
            start = stop


def _flipped(data: bytes, passed: int, flip_at: int | None) -> bytes:
    at = -1 if flip_at is None else flip_at - passed
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :] if 0 <= at < len(data) else data


async def _end(
    end: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, writers: list[asyncio.StreamWriter]
) -> None:
    if end == "half-close":
        _end_writing(writer)
    if end in {"half-close", "stall"}:
        while await reader.read(READ_BYTES):  # so that the sender goes on, unheard
            pass
        return
    for each in writers:
        _close(each, reset=end == "reset")


def _end_writing(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        if not writer.is_closing():
            writer.write_eof()


def _close(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    held = writer.get_extra_info("socket")
    if reset and not writer.is_closing():
        held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()
    writer.close()
