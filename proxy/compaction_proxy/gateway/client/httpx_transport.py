"""Lets httpx send the proxy's own calls (summaries, probes, discovery) through an `HttpEngine`."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from compaction_proxy.gateway.client.types import HttpEngine, HttpRequest, HttpResponse

# The `HttpEngine` writes these header fields itself, so they are not copied from httpx's request.
_FRAMING = frozenset({b"host", b"connection", b"content-length", b"transfer-encoding"})


class _ResponseStream(httpx.AsyncByteStream):
    def __init__(self, response: HttpResponse) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while chunk := await self._response.read():
            yield chunk

    async def aclose(self) -> None:
        await self._response.aclose()


class EngineTransport(httpx.AsyncBaseTransport):
    """Lets an `httpx.AsyncClient` send its requests through an `HttpEngine`.

    Two of httpx's `request.extensions` have an effect. `target` is the request target, as bytes. `timeout` is
    a dictionary in which `connect` and `read` are seconds or None.

    Args:
        engine: Sends the requests. `aclose` of this transport also closes the engine.
    """

    def __init__(self, engine: HttpEngine) -> None:
        self._engine = engine

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Sends the request. Returns before the body of the response is read.

        Raises:
            httpx.TransportError: Under the conditions that `types.HttpEngine.send` documents.
        """
        response = await self._engine.send(_to_http_request(request))
        return httpx.Response(
            response.status,
            headers=list(response.headers),
            stream=_ResponseStream(response),
            extensions={"reason_phrase": response.reason},
            request=request,
        )

    async def aclose(self) -> None:
        """Closes the engine."""
        await self._engine.aclose()


def _to_http_request(request: httpx.Request) -> HttpRequest:
    url, stream = request.url, request.stream
    limits: Mapping[str, Any] = request.extensions.get("timeout", {})
    if not isinstance(stream, httpx.AsyncByteStream):
        raise TypeError("an asynchronous transport takes an asynchronous stream")
    declared = request.headers.get("content-length")
    return HttpRequest(
        method=request.method,
        origin=f"{url.scheme}://{url.netloc.decode('ascii')}",
        target=request.extensions.get("target", url.raw_path),
        headers=[(name, held) for name, held in request.headers.raw if name.lower() not in _FRAMING],
        body=b"".join(stream) if isinstance(stream, httpx.ByteStream) else aiter(stream),
        body_length=int(declared) if declared is not None else None,
        connect_timeout_s=limits.get("connect"),
        silence_timeout_s=limits.get("read"),
    )
