"""Sends requests to upstreams, and relays their responses unchanged to the clients.

Callers can inspect the beginning of a response before they relay it. The module calls the HTTP engine
directly, without an `httpx.AsyncClient`, to save time on every request.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import httpx
from starlette.types import Scope, Send

from compaction_proxy.config.config import Config
from compaction_proxy.config.sections import WIRES
from compaction_proxy.core.errors import (
    ClientFacingError,
    OverloadedError,
    RequestRefusedError,
    UpstreamError,
    format_openai_error,
)
from compaction_proxy.core.exchange import FIRST_ERROR_STATUS
from compaction_proxy.core.upstream_failure import OUT_OF_SOCKETS
from compaction_proxy.gateway.client.types import HttpEngine, HttpRequest, HttpResponse
from compaction_proxy.gateway.concurrency_limit import RETRY_AFTER_S
from compaction_proxy.gateway.headers import (
    EVENT_STREAM,
    Headers,
    build_header_map,
    get_content_length,
    get_header,
    to_client_headers,
    to_upstream_headers,
)
from compaction_proxy.gateway.identity import format_origin
from compaction_proxy.gateway.paths import join_upstream_url
from compaction_proxy.gateway.upstream_monitor import UpstreamMonitor
from compaction_proxy.support.log_events import RELAY_TAP_FAILED
from compaction_proxy.telemetry.logs import suppress_and_log
from compaction_proxy.wires import registry
from compaction_proxy.wires.context_errors import find_error_code

# The number of bytes of an error response that the proxy searches for the cause of the error.
PEEK_BYTES = 65_536
# The proxy looks for the provider's own code of an error in bodies of at most this many bytes.
MAX_ERROR_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Upstream:
    """An upstream, and how requests are sent to it.

    Attributes:
        base_url: The absolute base URL, to which the client's path is appended
            (`gateway.paths.join_upstream_url`).
        api_key: The proxy's own key, which replaces the client's credentials. If it is empty, the proxy
            forwards the client's credentials.
        hop_mark: The id of this installation, 16 hex digits. The proxy sends it with each request. If a
            request arrives with this id, the upstream has sent it back to the proxy.
        engine: Sends the requests.
        connect_timeout_s: Seconds within which a connection must be established.
        read_timeout_s: Seconds for which the upstream may send nothing, before the first byte of a response
            or later.
        key_field: The header field for `api_key`; empty for the field in which the client sends its own key.
        monitor: Reports failures of the upstream.
    """

    base_url: str
    api_key: str
    hop_mark: str
    engine: HttpEngine
    connect_timeout_s: float
    read_timeout_s: float
    key_field: bytes = b""
    monitor: UpstreamMonitor = field(default_factory=UpstreamMonitor)

    @property
    def origin(self) -> str:
        """Scheme, host and port of `base_url`. Unlike `base_url`, they cannot contain a secret."""
        return format_origin(self.base_url)


def build_request(
    upstream: Upstream, scope: Scope, body: bytes | AsyncIterator[bytes], length: int | None = None
) -> HttpRequest:
    """Builds the request that the proxy sends to the upstream, from a client's request.

    Args:
        upstream: The upstream to which the request goes.
        scope: The ASGI scope of the client's request.
        body: The body to send. A stream is sent as it arrives and cannot be sent again.
        length: Declared length of a streamed body in bytes. None sends the stream in chunks.
    """
    server, target = join_upstream_url(upstream.base_url, scope["raw_path"], scope["query_string"])
    return HttpRequest(
        scope["method"],
        server,
        target,
        to_upstream_headers(
            scope["headers"],
            api_key=upstream.api_key,
            hop_mark=upstream.hop_mark,
            key_field=upstream.key_field,
        ),
        body,
        length,
        upstream.connect_timeout_s,
        upstream.read_timeout_s,
    )


class UpstreamResponse:
    """An upstream's response whose beginning can be inspected. The caller must close it or relay it.

    A response is cut if the connection fails before the end of the body.

    Args:
        response: The response that the HTTP engine returned.
        upstream: The upstream that sent the response. If the response is cut, the upstream's monitor reports
            this. If `upstream` is None, nobody reports it.

    Attributes:
        response: The response that the HTTP engine returned, for its status and header fields. Only this
            object may read its body.
    """

    __slots__ = ("_coming", "_copy", "_cut", "_is_reported", "_seen", "_upstream", "response")

    def __init__(self, response: HttpResponse, upstream: Upstream | None = None) -> None:
        self.response = response
        self._upstream = upstream
        self._seen: deque[bytes] = deque()
        self._cut: httpx.TransportError | None = None
        # The body of an error, as far as it has passed; only its beginning if it is not small.
        has_failed = upstream is not None and response.status >= FIRST_ERROR_STATUS
        self._copy = bytearray() if has_failed else None
        self._is_reported = False
        self._coming: asyncio.Task[bytes] | None = None  # a read that `peek_with_timeout` has begun

    async def peek(self, limit_bytes: int) -> bytes:
        """Returns at least the first `limit_bytes` bytes of the body, or all that came if they are fewer.

        Later calls of `read` still return these bytes. If the response is cut, this method raises no error,
        but `read` does.
        """
        size = sum(map(len, self._seen))
        try:
            while size < limit_bytes and self._cut is None and (chunk := await self._read_next()):
                self._seen.append(chunk)
                size += len(chunk)
        except httpx.TransportError as error:
            self._cut = error
        return b"".join(self._seen)

    async def peek_next(self) -> bytes:
        """Returns the next chunk of the body that no peek method has returned yet.

        Returns empty bytes at the end of the body, or if the response is cut. Later calls of `read` still
        return this chunk.
        """
        try:
            chunk = b"" if self._cut is not None else await self._read_next()
        except httpx.TransportError as error:
            self._cut = error
            return b""
        if chunk:
            self._seen.append(chunk)
        return chunk

    async def peek_with_timeout(self, limit_bytes: int, timeout_s: float) -> bytes:
        """Returns what `peek` returns, unless nothing new comes within `timeout_s` seconds.

        In that case, returns the bytes that have come so far. `timeout_s` limits only the wait for the first
        new chunk. Later calls of `read` still return all bytes.
        """
        if self._coming is None:
            self._coming = asyncio.create_task(self.response.read())
        done, _ = await asyncio.wait([self._coming], timeout=timeout_s)
        return await self.peek(limit_bytes) if done else b"".join(self._seen)

    async def _read_next(self) -> bytes:
        """Returns the next chunk from the upstream. If `peek_with_timeout` has begun to read, waits for that.

        If the response is cut, reports this to the upstream's monitor and raises the error.
        """
        coming, self._coming = self._coming, None
        try:
            chunk = await (coming or self.response.read())
        except httpx.TransportError as error:
            if self._upstream is not None:
                self._upstream.monitor.record_cut(self._upstream.origin, error)
            raise
        if self._copy is not None:
            self._copy += chunk[: MAX_ERROR_BYTES + 1 - len(self._copy)]
        return chunk

    @property
    def is_cut(self) -> bool:
        """Whether one of the peek methods has found that the response was cut."""
        return self._cut is not None

    async def read(self) -> bytes:
        """Returns the next chunk of the body, unchanged; empty at the end of the body.

        Chunks that a peek method has returned come first.

        Raises:
            httpx.TransportError: If the response was cut.
        """
        if self._seen:
            return self._seen.popleft()
        if self._cut is not None:
            raise self._cut
        return await self._read_next()

    def get_field(self, name: bytes) -> str:
        """Returns the first value of a header field; empty if there is none. `name` is in lower case."""
        return (get_header(self.response.headers, name) or b"").decode("latin-1")

    @property
    def is_stream(self) -> bool:
        """Whether the body is a stream of server-sent events, by the response's `content-type`."""
        return self.get_field(b"content-type").strip().lower().startswith(EVENT_STREAM.decode())

    def find_error_code(self) -> str:
        """Returns what the upstream calls its error; empty if unknown, or if the body has not passed yet."""
        if not self._copy or len(self._copy) > MAX_ERROR_BYTES:
            return ""
        return find_error_code(bytes(self._copy), self.get_field(b"content-encoding"))

    async def aclose(self) -> None:
        """Closes the response. If its body is not complete, the connection to the upstream is closed.

        Reports an error status to the upstream's monitor, with what the upstream calls the error.
        """
        if self._copy is not None and self._upstream is not None and not self._is_reported:
            self._is_reported = True
            self._upstream.monitor.record_status(
                self._upstream.origin, self.response.status, self.find_error_code()
            )
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.gather(self._coming, return_exceptions=True)
        await self.response.aclose()


async def send_request(upstream: Upstream, request: HttpRequest) -> UpstreamResponse:
    """Sends a request, and waits until the status and the header fields of the response have arrived.

    Reports an error of the upstream to the upstream's monitor; an error status when the response is closed.

    Raises:
        OverloadedError: If the system has no resources for another connection. Nothing was sent.
        UpstreamError: If the upstream cannot be reached (502 `upstream_unreachable`), breaks the protocol
            (502 `upstream_protocol_error`) or does not answer in time (504 `upstream_timeout`).
    """
    try:
        response = await upstream.engine.send(request)
    except httpx.TransportError as error:
        raise _build_error(upstream, error) from error
    status, monitor = response.status, upstream.monitor
    if not 200 <= status <= 599:  # a protocol switch that was not requested, or no HTTP status at all
        monitor.record_invalid_status(upstream.origin)
        await response.aclose()
        raise UpstreamError(502, "The upstream returned an invalid status.", "upstream_protocol_error")
    if status < FIRST_ERROR_STATUS and monitor.failure_counts:
        monitor.record_status(upstream.origin, status)
    return UpstreamResponse(response, upstream)


def _build_error(upstream: Upstream, error: httpx.TransportError) -> OverloadedError | UpstreamError:
    """Reports to the upstream's monitor that no response came. Returns the error for the client."""
    cause = upstream.monitor.record_missing_answer(upstream.origin, error)
    if cause == OUT_OF_SOCKETS:
        return OverloadedError(RETRY_AFTER_S)
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return UpstreamError(502, "The upstream cannot be reached.", "upstream_unreachable")
    if isinstance(error, httpx.TimeoutException):
        return UpstreamError(504, "The upstream did not answer in time.", "upstream_timeout")
    message = "The upstream ended the connection without a valid answer."
    return UpstreamError(502, message, "upstream_protocol_error")


async def relay_response(
    answer: UpstreamResponse,
    send: Send,
    *,
    extra_headers: Sequence[tuple[bytes, bytes]] = (),
    tap: Callable[[bytes], None] | None = None,
) -> bool:
    """Relays a response to the client as it arrives, and closes it.

    Returns whether the response was complete. If it was not, the function does not send its end to the client
    either, and the proxy's server closes the client's connection.

    Args:
        answer: The response that `send_request` returned.
        send: The client's ASGI send channel.
        extra_headers: The proxy's own header fields, which are appended to the upstream's.
        tap: Called with each chunk after the chunk was sent. If it raises an error, the error is only logged.
    """
    response = answer.response
    headers = to_client_headers(response.status, response.headers)
    length = get_content_length(headers)
    headers += extra_headers
    try:
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        last = await _relay_chunks(answer, send, tap, length)
    except httpx.TransportError:
        return False
    finally:
        await answer.aclose()
    await send({"type": "http.response.body", "body": last, "more_body": False})
    if last and tap is not None:
        _feed_tap(tap, last)
    return True


async def _relay_chunks(
    answer: UpstreamResponse, send: Send, tap: Callable[[bytes], None] | None, length: int | None
) -> bytes:
    """Relays a body without its last chunk, and returns that chunk.

    The caller sends the last chunk together with the end of the response. The function recognises the last
    chunk by `length`, the declared length in bytes. If `length` is None, or the body has another length, the
    function relays the whole body and returns empty bytes.
    """
    while chunk := await answer.read():
        if length is not None:
            length -= len(chunk)
            if length == 0:
                return chunk
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        if tap is not None:
            _feed_tap(tap, chunk)
    return b""


def _feed_tap(tap: Callable[[bytes], None], chunk: bytes) -> None:
    with suppress_and_log(RELAY_TAP_FAILED):
        tap(chunk)


async def send_error(
    send: Send,
    error: ClientFacingError,
    extra_headers: Sequence[tuple[bytes, bytes]] = (),
    encode_error: Callable[[ClientFacingError], bytes] = format_openai_error,
) -> None:
    """Sends an error of the proxy to the client. `encode_error` returns the error in the wire's format."""
    body = encode_error(error)
    headers: Headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *extra_headers,
    ]
    if isinstance(error, RequestRefusedError):
        headers += error.headers
    if isinstance(error, OverloadedError):
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


CONNECT_TIMEOUT_S = 10.0
# A header field that clients of Anthropic's API send with every request, on every path.
ANTHROPIC_VERSION_HEADER = b"anthropic-version"


def build_upstreams(
    config: Config, engine: HttpEngine, hop_mark: str, monitor: UpstreamMonitor
) -> Mapping[str, Upstream]:
    """Builds an upstream for each wire. The keys of the result are the names of the wires.

    Args:
        config: The configuration.
        engine: Sends the requests.
        hop_mark: The id of this installation, 16 hex digits.
        monitor: Reports failures of the upstreams.
    """
    upstreams: dict[str, Upstream] = {}
    for wire in WIRES:
        base_url, key = config.upstream.get_provider(wire)
        upstreams[wire] = Upstream(
            base_url=base_url,
            api_key=key,
            hop_mark=hop_mark,
            engine=engine,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            read_timeout_s=config.upstream.timeout_s,
            key_field=registry.WIRES[wire].api_key_header,
            monitor=monitor,
        )
    monitor.forget_other_targets({each.origin for each in upstreams.values()})
    return MappingProxyType(upstreams)


def find_wire_name(raw_path: bytes, header_map: Mapping[bytes, bytes]) -> str:
    """Returns the name of the wire to which a request belongs, according to its path and its header fields.

    This is `chat` for every request that belongs neither to `messages` nor to `responses`.

    Args:
        raw_path: The path as the client wrote it.
        header_map: The first value of each header field (`headers.build_header_map`).
    """
    if (
        ANTHROPIC_VERSION_HEADER in header_map
        or b"/v1/messages/" in raw_path
        or raw_path.endswith(b"/v1/messages")
    ):
        return "messages"
    return "responses" if b"/responses/" in raw_path or raw_path.endswith(b"/responses") else "chat"


def find_error_encoder(scope: Scope) -> Callable[[ClientFacingError], bytes]:
    """Returns the function that encodes errors in the format of the wire to which the request belongs."""
    wire = registry.WIRES.get(find_wire_name(scope["raw_path"], build_header_map(scope["headers"])))
    return wire.encode_error if wire else format_openai_error
