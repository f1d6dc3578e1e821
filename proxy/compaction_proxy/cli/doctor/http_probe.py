"""One question to a provider, and what came back: for diagnosis, over httpx."""

import asyncio
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import NamedTuple

import httpx

from compaction_proxy.core.errors import UpstreamError

# A list of models may be long; what is beyond this is not read, in bytes.
MAX_BODY_BYTES = 4 * 1_048_576
_UNREACHABLE, _LATE = 502, 504


class ProbeResponse(NamedTuple):
    """An answer.

    Attributes:
        status: Its status code.
        body: As much of it as is read.
        clock_s: The provider's clock less ours, in seconds; None if it does not say what time it is.
        took_s: How long it took, in seconds.
    """

    status: int
    body: bytes
    clock_s: float | None
    took_s: float


async def send_probe(
    transport: httpx.AsyncBaseTransport, url: str, headers: Mapping[str, str], deadline_s: float
) -> ProbeResponse:
    """The answer to a GET; redirects are answers, so that a key goes nowhere else.

    Raises:
        UpstreamError: Nobody answered (502), or not in time (504); the message has the kind of trouble.
    """
    begun = time.monotonic()
    sent = {"accept": "application/json", "accept-encoding": "identity", **headers}
    # The client would close the transport with itself, which is the caller's.
    client = httpx.AsyncClient(transport=transport, timeout=None)  # noqa: S113 - the deadline is around it
    try:
        async with asyncio.timeout(deadline_s), client.stream("GET", url, headers=sent) as response:
            clock_s = _parse_clock_offset_s(response.headers.get("date", ""))
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    break
            return ProbeResponse(response.status_code, bytes(body), clock_s, time.monotonic() - begun)
    except TimeoutError:
        raise UpstreamError(_LATE, f"no answer in {deadline_s:g} s", "upstream_timeout") from None
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeEncodeError) as error:
        cause = str(error) or type(error).__name__
        raise UpstreamError(
            _UNREACHABLE, f"{type(error).__name__}: {cause}", "upstream_unreachable"
        ) from None


def _parse_clock_offset_s(date: str) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None
