"""Sends single GET requests to a provider with httpx, for the checks of `doctor`."""

import asyncio
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import NamedTuple

import httpx

from compaction_proxy.core.errors import UpstreamError

# Reading of a body stops after this many bytes. It is large because a list of models may be long.
MAX_BODY_BYTES = 4 * 1_048_576
_UNREACHABLE, _LATE = 502, 504


class ProbeResponse(NamedTuple):
    """A provider's response to a request by `send_probe`.

    Attributes:
        status: The status code.
        body: The body. It is incomplete if it is longer than `MAX_BODY_BYTES`.
        clock_offset_s: The provider's clock minus the local clock, in seconds. None without a valid `date`
            header.
        duration_s: Duration of the request, in seconds.
    """

    status: int
    body: bytes
    clock_offset_s: float | None
    duration_s: float


async def send_probe(
    transport: httpx.AsyncBaseTransport, url: str, headers: Mapping[str, str], deadline_s: float
) -> ProbeResponse:
    """Sends a GET request and returns the response.

    Redirects are not followed, so that the key is never sent to another server.

    Raises:
        UpstreamError: The provider did not answer (502), or not in time (504). The message names the cause.
    """
    started_at = time.monotonic()
    fields = {"accept": "application/json", "accept-encoding": "identity", **headers}
    # The client is not closed, because it would close the transport, which belongs to the caller.
    client = httpx.AsyncClient(transport=transport, timeout=None)  # noqa: S113 - asyncio.timeout sets the deadline
    try:
        async with asyncio.timeout(deadline_s), client.stream("GET", url, headers=fields) as response:
            clock_s = _parse_clock_offset_s(response.headers.get("date", ""))
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    break
            return ProbeResponse(response.status_code, bytes(body), clock_s, time.monotonic() - started_at)
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
