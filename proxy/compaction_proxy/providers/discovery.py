"""Asking an upstream for a model's window, over httpx: best effort, bounded in time and bytes."""

import asyncio
from collections.abc import Mapping, Sequence
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from compaction_proxy.providers.discovery_formats import local_urls, model_urls, told_window

# A list of models beyond this is not read, in bytes; the model is then asked for alone.
MAX_BODY_BYTES = 1_048_576
# All questions together take at most this long, in seconds.
DEADLINE_S = 3.0


class HttpDiscovery:
    """`ports.Discovery` over HTTP.

    Nothing is followed elsewhere: the credential that comes along goes to the upstream's origin only.

    Args:
        transport: The upstream's.
        deadline_s: Seconds that all questions about a model may take.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, deadline_s: float = DEADLINE_S) -> None:
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))  # one tenant's must not reach another
        self._client = httpx.AsyncClient(transport=transport, cookies=no_cookies, timeout=None)  # noqa: S113
        self._deadline_s = deadline_s

    async def window(self, base_url: str, headers: Mapping[str, str], model: str) -> int | None:
        """What the upstream says the model takes, in tokens; None if it does not say, or not in time."""
        urls = model_urls(base_url, model)
        if not urls:
            return None
        found: list[int] = []
        try:
            async with asyncio.timeout(self._deadline_s):
                found += await self._first(urls, headers, model)
                # A list may name a window that several slots share: the smaller one is a request's.
                found += await self._first(local_urls(base_url), headers, model)
        except TimeoutError:
            pass
        return min(found, default=None)

    async def _first(self, urls: Sequence[str], headers: Mapping[str, str], model: str) -> list[int]:
        """What the first of these pages tells that tells anything."""
        for url in urls:
            told = await asyncio.to_thread(told_window, await self._page(url, headers), model)
            if told is not None:
                return [told]
        return []

    async def _page(self, url: str, headers: Mapping[str, str]) -> bytes:
        """A page; empty if there is none, or it is too large."""
        wanted = {"accept": "application/json", "accept-encoding": "identity", **headers}
        fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in wanted.items()]
        body = bytearray()
        try:
            async with self._client.stream("GET", url, headers=fields) as response:
                if response.status_code != httpx.codes.OK:
                    return b""
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > MAX_BODY_BYTES:
                        return b""
        except (httpx.HTTPError, httpx.InvalidURL):
            return b""
        return bytes(body)
