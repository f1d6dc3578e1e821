"""Decodes request bodies within the body budget. Large bodies are decoded in worker threads."""

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
# The most bodies that one process decodes at once in threads. Each decoder may use 8 MiB of memory that the
# body budget does not count.
WORKERS: Final = 2
# An encoded body of at most this many bytes is first decoded on the event loop, up to `_SMALL_DECODED_BYTES`
# of output.
_SMALL_BYTES: Final = 16_384
_SMALL_DECODED_BYTES: Final = 131_072
# The decoded size is unknown in advance. The first attempt in a thread reserves room for `_USUAL_BYTES`, or
# for `_USUAL_RATIO` times the encoded size if that is more. If the decoded body is larger, it is decoded
# again, with room for the largest body that is allowed.
_USUAL_BYTES: Final = 2 * 1024 * 1024
_USUAL_RATIO: Final = 32

# Decoding has its own thread pool. A thread cannot be stopped, so decoding continues even if the request has
# already ended. With its own pool, it then delays no other kind of work.
_POOL: Final = ThreadPoolExecutor(max_workers=WORKERS, thread_name_prefix="decode")


class OriginalRequest(NamedTuple):
    """A request with an encoded body, as the client sent it.

    Attributes:
        scope: The ASGI scope of the request.
        raw: The encoded body.
    """

    scope: Scope
    raw: bytes


class BodyDecoder:
    """Decodes request bodies on one event loop. At most `WORKERS` large bodies are decoded at once."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(WORKERS)

    async def decode(self, raw: bytes, headers: Headers, hold: BodyHold, limit_bytes: int) -> bytes | None:
        """Returns the decoded body, or `raw` itself if the body is not encoded.

        The hold counts the decoded body in addition to `raw`. Returns None if the body cannot be decoded,
        because its coding is unknown or it is damaged.

        Args:
            raw: The body as the client sent it.
            headers: The header fields of the request.
            hold: Counts the bytes of the request.
            limit_bytes: The most bytes that the decoded body may have. The limit is lower if the budget can
                never have room for this many bytes in addition to `raw`.

        Raises:
            RequestRefusedError: 413, the decoded body is larger than the limit.
            OverloadedError: No room for the decoded body became free in time.
        """
        codings = parse_codings(held for name, held in headers if name == CONTENT_ENCODING)
        if not codings:
            return raw if codings is not None else None
        limit_bytes = min(limit_bytes, hold.limit_bytes, hold.limit_bytes + SMALL_BYTES - len(raw))
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
        """Decodes a body on the event loop or in a thread, first with a low size limit, then with a higher.

        Returns None if the decoded body is longer than `limit_bytes`.

        Raises:
            UnreadableBodyError: The body is damaged or its coding is unknown (`decode_body`).
        """
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
            async with self._turns:  # a request that waits for its turn reserves no room
                if hold.try_reserve_rest(limit_bytes):
                    return await asyncio.get_running_loop().run_in_executor(_POOL, work)
            await hold.wait_for_room(limit_bytes)
