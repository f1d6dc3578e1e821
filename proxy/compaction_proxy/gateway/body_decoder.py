"""Decodes request bodies within the budget of bodies, large ones beside the event loop."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

from starlette.types import Scope

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.gateway.body_budget import SMALL_BYTES, BodyHold
from compaction_proxy.gateway.client_stream import build_too_large_error
from compaction_proxy.gateway.headers import Headers
from compaction_proxy.wires.content_coding import decode_body, parse_codings

CONTENT_ENCODING: Final = b"content-encoding"
UNDECODABLE: Final = "The body cannot be decoded: its encoding is unknown, or it is damaged."
# Bodies of a process that are decoded at once. Each decoder may hold 8 MiB that no budget counts.
WORKERS: Final = 2
# A smaller body is decoded on the event loop, up to so many bytes.
_SMALL_BYTES: Final = 16_384
_SMALL_DECODED_BYTES: Final = 131_072
# Nobody knows how large a body will be. It is decoded with room for so much; a larger one is decoded once
# more, with room for the largest.
_USUAL_BYTES: Final = 2 * 1024 * 1024
_USUAL_RATIO: Final = 32

# Work of a request that has ended goes on here, and delays no other work than decoding.
_POOL: Final = ThreadPoolExecutor(max_workers=WORKERS, thread_name_prefix="decode")


class OriginalRequest(NamedTuple):
    """A request with an encoded body, as it came.

    Attributes:
        scope: Its head (ASGI).
        raw: Its body.
    """

    scope: Scope
    raw: bytes


class BodyDecoder:
    """Decodes bodies, a few at once, on one event loop."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(WORKERS)

    async def decode(self, raw: bytes, headers: Headers, hold: BodyHold, limit_bytes: int) -> bytes | None:
        """Returns the decoded body, which the hold counts beside `raw`; `raw` itself if it is not encoded.

        None stands for a body that cannot be decoded: its coding is unknown, or it is damaged.

        Args:
            raw: The body as it came.
            headers: The fields of its request.
            hold: Counts the bytes of its request.
            limit_bytes: The most bytes that it may have, unless the budget has no room for so many beside
                `raw`, however long one waits.

        Raises:
            RequestRefused: 413, the decoded body is larger than the limit.
            Overloaded: There was no room for it in time.
        """
        codings = parse_codings(held for name, held in headers if name == CONTENT_ENCODING)
        if not codings:
            return raw if codings is not None else None
        limit_bytes = min(limit_bytes, hold.most_bytes, hold.most_bytes + SMALL_BYTES - len(raw))
        try:
            decoded = await self._decode_with_limit(raw, codings, hold, limit_bytes)
        except UnreadableBodyError:
            return None
        finally:
            hold.release_unused()
        if decoded is None:
            raise build_too_large_error(limit_bytes)
        return decoded

    async def _decode_with_limit(
        self, raw: bytes, codings: Sequence[str], hold: BodyHold, limit_bytes: int
    ) -> bytes | None:
        """Decode, on the event loop or beside it, with no more room than it takes; see `decode_body`."""
        decoded = None
        if len(raw) <= _SMALL_BYTES:
            decoded = decode_body(raw, codings, min(limit_bytes, _SMALL_DECODED_BYTES))
        usual = min(limit_bytes, max(_USUAL_BYTES, _USUAL_RATIO * len(raw)))
        if decoded is None:
            decoded = await self._decode_in_worker(raw, codings, hold, usual)
        if decoded is None and usual < limit_bytes:
            decoded = await self._decode_in_worker(raw, codings, hold, limit_bytes)
        if decoded is not None and not hold.add_bytes(len(decoded)):
            await hold.wait_for_room(0)
        return decoded

    async def _decode_in_worker(
        self, raw: bytes, codings: Sequence[str], hold: BodyHold, limit_bytes: int
    ) -> bytes | None:
        work = partial(decode_body, raw, codings, limit_bytes)
        while True:
            async with self._turns:  # whoever has it not sets no room aside, and has no decoder
                if hold.try_reserve_rest(limit_bytes):
                    return await asyncio.get_running_loop().run_in_executor(_POOL, work)
            await hold.wait_for_room(limit_bytes)
