"""One exchange with the upstream: open it, look at the answer if need be, relay it back byte for byte.

The transport is called directly, without an `httpx.AsyncClient` on the hot path.
"""

import functools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import httpx
import structlog
from starlette.types import Scope, Send

from proxy.errors import RequestRefused, UpstreamError, openai_error
from proxy.guard import contained
from proxy.logs import TAP_FAILED
from proxy.relay.headers import Headers, to_client, to_upstream
from proxy.relay.paths import join

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Upstream:
    """Where requests go, and how.

    Attributes:
        base_url: Absolute; the client's path is appended to it (`relay.paths.join`).
        api_key: The proxy's own key, which replaces the client's credentials; empty to pass theirs on.
        hop: The mark of this installation, 16 hex digits, by which a loop is noticed.
        transport: What sends.
        connect_timeout_s: Seconds until a connection must stand.
        read_timeout_s: Seconds that the upstream may be silent, before the first byte or later.
    """

    base_url: str
    api_key: str
    hop: str
    transport: httpx.AsyncBaseTransport
    connect_timeout_s: float
    read_timeout_s: float


@functools.lru_cache(maxsize=64)
def _origin_url(origin: str) -> httpx.URL:
    return httpx.URL(origin)  # parsing costs more than the rest of a request


def build_request(
    upstream: Upstream, scope: Scope, body: bytes | AsyncIterator[bytes], length: int | None = None
) -> httpx.Request:
    """The client's request as it goes to the upstream.

    Args:
        upstream: Where it goes.
        scope: The client's request (ASGI).
        body: The body to send; a stream is sent as it comes and cannot be replayed.
        length: Declared length of a stream in bytes; None sends it chunked.
    """
    origin, target = join(upstream.base_url, scope["raw_path"], scope["query_string"])
    headers = to_upstream(scope["headers"], api_key=upstream.api_key, hop=upstream.hop)
    if isinstance(body, bytes):
        length = len(body) or None
    if length is not None:
        headers.append((b"content-length", b"%d" % length))
    timeout = {"connect": upstream.connect_timeout_s, "read": upstream.read_timeout_s}
    build = functools.partial(
        httpx.Request,
        scope["method"],
        _origin_url(origin),
        headers=headers,
        extensions={"target": target, "timeout": timeout},
    )
    if isinstance(body, bytes):  # `content=` would cost four times as much
        return build(stream=httpx.ByteStream(body))
    return build(content=body)


class Answer:
    """An upstream's answer whose beginning may have been looked at. Close it, or relay it back.

    Attributes:
        response: Status and headers; its stream belongs to this record.
    """

    __slots__ = ("_chunks", "_cut", "_seen", "response")

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._seen: list[bytes] = []
        self._cut: httpx.TransportError | None = None
        self._chunks = _stream(response)

    async def peek(self, limit: int) -> bytes:
        """The beginning of the body: at least `limit` bytes if it has as many, else all there is.

        What was read is still relayed. A cut is not reported here but where the body is relayed.
        """
        size = sum(map(len, self._seen))
        try:
            while size < limit and (chunk := await anext(self._chunks, None)):
                self._seen.append(chunk)
                size += len(chunk)
        except httpx.TransportError as error:
            self._cut = error
        return b"".join(self._seen)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The whole body, as it came; raises `httpx.TransportError` where the upstream was cut."""
        for chunk in self._seen:
            yield chunk
        if self._cut is not None:
            raise self._cut
        async for chunk in self._chunks:
            yield chunk

    async def aclose(self) -> None:
        """End the exchange; if the body is not at its end, the upstream sees a hang-up."""
        await self.response.aclose()


def _stream(response: httpx.Response) -> AsyncIterator[bytes]:
    if not isinstance(response.stream, httpx.AsyncByteStream):
        raise TypeError("an asynchronous transport gives an asynchronous stream")
    return aiter(response.stream)


async def open_answer(upstream: Upstream, request: httpx.Request) -> Answer:
    """Send a request and wait for status and headers of the answer.

    Raises:
        UpstreamError: 502 `upstream_unreachable` or `upstream_protocol_error`, 504 `upstream_timeout`.
    """
    try:
        response = await upstream.transport.handle_async_request(request)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise UpstreamError(502, "The upstream cannot be reached.", "upstream_unreachable") from error
    except httpx.TimeoutException as error:
        raise UpstreamError(504, "The upstream did not answer in time.", "upstream_timeout") from error
    except httpx.TransportError as error:
        message = "The upstream ended the connection without a valid answer."
        raise UpstreamError(502, message, "upstream_protocol_error") from error
    if not 200 <= response.status_code <= 599:  # an upgrade nobody asked for, or no HTTP status at all
        await response.aclose()
        raise UpstreamError(502, "The upstream's status is not valid.", "upstream_protocol_error")
    return Answer(response)


def _tap_failed(error: BaseException) -> None:
    _log.warning(TAP_FAILED, error=type(error).__name__)


async def relay_back(
    answer: Answer,
    send: Send,
    *,
    extra: Sequence[tuple[bytes, bytes]] = (),
    tap: Callable[[bytes], None] | None = None,
) -> bool:
    """Relay an answer to the client as it comes, and close it.

    Returns whether it was whole. If the upstream was cut, so is the client: the response is left without
    its end, and the server closes the connection.

    Args:
        answer: What `open_answer` gave.
        send: The client's ASGI channel.
        extra: Header fields of ours, appended to the upstream's.
        tap: Sees each chunk after it was sent; its failure is logged and does no harm.
    """
    response = answer.response
    headers = to_client(response.status_code, response.headers.raw) + list(extra)
    try:
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        async for chunk in answer.chunks():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if tap is not None:
                with contained(_tap_failed):
                    tap(chunk)
    except httpx.TransportError:
        return False
    finally:
        await answer.aclose()
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    return True


async def send_error(
    send: Send, error: RequestRefused | UpstreamError, extra: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """Answer the client with an error of ours, in OpenAI's shape."""
    body = openai_error(error)
    headers: Headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *extra,
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
