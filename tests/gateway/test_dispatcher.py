"""Which handler gets a request, and what a client is told where it gets none or the handler fails."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from compaction_proxy.core.errors import OverloadedError, RequestRefusedError, UpstreamError
from compaction_proxy.gateway.client_auth import ALLOW_ALL_CLIENTS, ClientAuthenticator
from compaction_proxy.gateway.dispatcher import Dispatcher, RelayHandler
from compaction_proxy.gateway.headers import HOP_HEADER
from compaction_proxy.gateway.sse_keepalive import KeepaliveChannel
from compaction_proxy.storage.deletions import DeletionFence

MARK = "0123456789abcdef"
REFUSED = RequestRefusedError(404, "no", "none")


@dataclass
class Endpoint:
    """Keeps the scopes that it gets, and raises an error if there is one."""

    error: BaseException | None = None
    scopes: list[Any] = field(default_factory=list)
    channels: list[Any] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        self.channels.append(send)
        if self.error is not None:
            raise self.error


def scope(path: str = "/v1/chat/completions", method: str = "POST", *fields: tuple[bytes, bytes]) -> Any:
    return {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": list(fields),
    }  # fmt: skip


async def call(app: Any, made: Any) -> list[dict[str, Any]]:
    """Returns what is sent to the client."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(dict(message))

    await app(made, None, send)
    return sent


def read_error(sent: Sequence[dict[str, Any]]) -> tuple[int, Any]:
    """Returns the status and the body."""
    return sent[0]["status"], json.loads(sent[1]["body"])


ENDPOINTS = ("chat", "messages", "responses", "compact", "passthrough", "own", "admin", "lifespan")


class Bench:
    """A dispatcher with an endpoint for each purpose."""

    def __init__(self, base_path: str = "") -> None:
        self.all = {name: Endpoint() for name in ENDPOINTS}
        self.fence = DeletionFence()
        self.dispatcher = Dispatcher(
            wire_endpoints={name: self.all[name] for name in ENDPOINTS[:3]},
            post_endpoints={b"/responses/compact": self.all["compact"]},
            passthrough=self.all["passthrough"],
            own_endpoints={base_path + "/mcp": self.all["own"]},
            admin=self.all["admin"],
            base_path=base_path,
            lifespan=self.all["lifespan"],
            deletion_fence=self.fence,
        )

    async def find(self, made: Any) -> list[str]:
        """Returns the names of the endpoints that get a request."""
        assert await call(self.dispatcher, made) == []
        return [name for name, endpoint in self.all.items() if endpoint.scopes]


@pytest.mark.parametrize(
    ("path", "method", "expected"),
    [
        ("/v1/chat/completions", "POST", "chat"),
        ("/any/prefix/v1/messages", "POST", "messages"),
        ("/v1/responses", "POST", "responses"),
        ("/v1/responses/compact", "POST", "compact"),
        ("/v1/responses/compact", "GET", "passthrough"),
        ("/v1/chat/completions", "GET", "passthrough"),
        ("/v1/models", "GET", "passthrough"),
        ("/mcp", "POST", "own"),
        ("/admin/conversations", "GET", "admin"),
        ("/metrics", "GET", "admin"),
    ],
)
async def test_a_request_gets_to_the_endpoint_of_its_path_and_method(
    path: str, method: str, expected: str
) -> None:
    assert await Bench().find(scope(path, method)) == [expected]


@pytest.mark.parametrize(
    ("path", "expected"), [("/proxy/metrics", "admin"), ("/proxy/mcp", "own"), ("/metrics", "passthrough")]
)
async def test_below_a_base_path_only_paths_that_begin_with_it_are_our_own(path: str, expected: str) -> None:
    assert await Bench("/proxy").find(scope(path, "GET")) == [expected]


@pytest.mark.parametrize(
    ("method", "path", "accept", "expected"),
    [
        ("GET", "/proxy/", b"*/*;q=0.1, Text/HTML;q=0.9", "/proxy/ui"),
        ("GET", "/proxy", b"text/html", "/proxy/ui"),
        ("GET", "/", b"text/html", None),
        ("HEAD", "/proxy/", b"text/html", None),
        ("GET", "/proxy/", b"*/*", None),
    ],
)
async def test_only_a_browser_on_the_start_page_is_redirected_to_the_dashboard(
    method: str, path: str, accept: bytes, expected: str | None
) -> None:
    bench = Bench("/proxy")
    sent = await call(bench.dispatcher, scope(path, method, (b"accept", accept)))
    found = dict(sent[0]["headers"]).get(b"location", b"").decode() if sent else None
    assert (found, len(bench.all["passthrough"].scopes)) == (expected, 0 if expected else 1)


async def test_events_of_the_server_get_to_the_lifespan_and_a_websocket_is_closed() -> None:
    bench = Bench()
    assert await bench.find({"type": "lifespan"}) == ["lifespan"]
    assert await call(bench.dispatcher, {"type": "websocket"}) == [{"type": "websocket.close"}]


async def test_a_request_writes_nothing_that_is_deleted_after_it_began() -> None:
    bench = Bench()
    bench.fence.add_deletion("a")
    with bench.fence.scoped_start_mark():
        await bench.find(scope())
        bench.fence.add_deletion("b")
        assert (bench.fence.is_deleted("a"), bench.fence.is_deleted("b")) == (False, True)


async def test_an_admitted_request_gets_to_the_endpoint_with_the_credential_that_was_checked() -> None:
    endpoint = Endpoint()
    handler = RelayHandler(endpoint, MARK, ClientAuthenticator(["k"]))
    given = [(b"authorization", b"Bearer k"), (b"x-api-key", b"other"), (b"x-a", b"1")]
    assert await call(handler, scope("/v1/models", "GET", *given)) == []
    [seen] = endpoint.scopes
    assert sorted(seen["headers"]) == [(b"authorization", b"Bearer k"), (b"x-a", b"1")]


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ([(b"authorization", b"Bearer x")], 401, "invalid_api_key"),
        ([(b"authorization", b"Bearer k"), (HOP_HEADER, MARK.encode())], 508, "loop_detected"),
        ([(b"authorization", b"Bearer k"), (b"upgrade", b"h2c, WebSocket")], 426, "websocket_not_supported"),
    ],
)
async def test_a_stranger_a_loop_and_a_websocket_are_refused_before_the_endpoint(
    fields: list[tuple[bytes, bytes]], status: int, code: str
) -> None:
    endpoint = Endpoint()
    sent = await call(
        RelayHandler(endpoint, MARK, ClientAuthenticator(["k"])), scope("/v1/x", "GET", *fields)
    )
    found, body = read_error(sent)
    assert (found, body["error"]["code"], endpoint.scopes) == (status, code, [])


@pytest.mark.parametrize("method", ["TRACE", "CONNECT"])
async def test_a_method_that_shows_the_provider_key_or_opens_a_tunnel_is_refused(method: str) -> None:
    endpoint = Endpoint()
    sent = await call(RelayHandler(endpoint, MARK), scope("/v1/models", method))
    found, body = read_error(sent)
    assert (found, body["error"]["code"], endpoint.scopes) == (405, "method_not_allowed", [])
    assert dict(sent[0]["headers"])[b"allow"] == b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"


async def test_the_mark_of_another_installation_is_no_loop() -> None:
    endpoint = Endpoint()
    await call(RelayHandler(endpoint, MARK), scope("/v1/x", "GET", (HOP_HEADER, b"f" * 16)))
    assert len(endpoint.scopes) == 1


async def test_a_websocket_is_told_to_use_http() -> None:
    [head, _] = await call(RelayHandler(Endpoint(), MARK), scope("/v1/x", "GET", (b"upgrade", b"websocket")))
    assert {(b"upgrade", b"HTTP/1.1"), (b"connection", b"upgrade")} <= set(head["headers"])


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (REFUSED, 404, "none"),
        (OverloadedError(7), 503, "overloaded"),
        (UpstreamError(504, "late", "upstream_timeout"), 504, "upstream_timeout"),
    ],
)
async def test_an_error_of_the_endpoint_is_answered(error: Exception, status: int, code: str) -> None:
    found, body = read_error(await call(RelayHandler(Endpoint(error), MARK), scope()))
    assert (found, body["error"]["code"]) == (status, code)


@pytest.mark.parametrize("fields", [(), ((b"upgrade", b"websocket"),)])
async def test_an_error_is_in_the_format_of_the_wire(fields: tuple[tuple[bytes, bytes], ...]) -> None:
    asked = scope("/v1/messages", "POST", *fields)
    _, body = read_error(await call(RelayHandler(Endpoint(REFUSED), MARK), asked))
    assert body["type"] == "error"


async def test_a_client_that_left_is_answered_nothing_and_a_fault_of_ours_is_passed_on() -> None:
    assert await call(RelayHandler(Endpoint(ClientDisconnect()), MARK), scope()) == []
    for fault in (ZeroDivisionError, MemoryError):  # the server answers them
        with pytest.raises(fault):
            await call(RelayHandler(Endpoint(fault()), MARK), scope())


@pytest.mark.parametrize("keep_alive_s", [0.0, 15.0])
async def test_silence_is_filled_where_the_configuration_says_so(keep_alive_s: float) -> None:
    endpoint = Endpoint()
    await call(RelayHandler(endpoint, MARK, ALLOW_ALL_CLIENTS, keep_alive_s), scope())
    assert isinstance(endpoint.channels[0], KeepaliveChannel) is (keep_alive_s > 0)
