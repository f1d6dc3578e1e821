"""What a client is run against: the three-wire provider, alone or behind the proxy.

Each has a socket of its own. Every run has its own, so that two runs of one client see the same ids, counts
and caches. Both write down each request that reaches them.
"""

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any

from anyio.from_thread import start_blocking_portal
from pydantic import SecretStr
from starlette.types import ASGIApp, Receive, Scope, Send

from compaction_proxy.app import create_app
from compaction_proxy.cli.demo.provider import (
    AGENT_MODEL,
    SUMMARY_MODEL,
    DemoProviderSettings,
)
from compaction_proxy.cli.demo.provider import DemoClient as Asking
from compaction_proxy.config.config import Config
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import TiktokenCounter
from tests.doubles.three_wire_provider import ThreeWireProvider

MODEL = AGENT_MODEL
WIDE_WINDOW_TOKENS = 1_000_000
NARROW_WINDOW_TOKENS = 3_000
# A row of counts keeps the gate from passing requests on unread; the number is out of reach.
NEVER = [{"messages": 1_000_000}]


class Way(StrEnum):
    """How a client is run."""

    DIRECT = "direct"  # against the provider itself
    PROXY = "proxy"  # through the proxy, which reads every body and has no reason to change one
    COMPACTED = "compacted"  # through the proxy, to a provider that refuses more than a small window


@dataclass
class Request:
    """A request as a server got it, and how it was answered.

    Attributes:
        target: Method, path and query.
        headers: In order, names in lower case.
        body: The very bytes.
        status: Of the answer; 0 while there is none.
        compaction: The answer's `x-compaction-status`, which the proxy gives; empty for none.
    """

    target: str
    headers: list[tuple[str, str]]
    body: bytes
    status: int = 0
    compaction: str = ""

    def json(self) -> Any:
        """The body; None for none."""
        return json.loads(self.body) if self.body else None

    @property
    def is_own(self) -> bool:
        """Whether it is the proxy that asks here, for models and windows."""
        return self.target.startswith("GET ") and dict(self.headers).get("user-agent", "").startswith(
            "compaction-proxy/"
        )

    @property
    def summarises(self) -> bool:
        """Whether it is the proxy that asks here, for a summary."""
        return bool(self.body) and self.json().get("model") == SUMMARY_MODEL


class Recorder:
    """An application whose requests are written down."""

    def __init__(self, app: ASGIApp) -> None:
        self.requests: list[Request] = []
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        target = f"{scope['method']} {(scope['raw_path'] + query).decode()}"
        request = Request(target, headers, await Asking(receive, send).read_body())
        if not request.is_own:
            self.requests.append(request)
        await self._app(scope, _replayed(request.body, receive), _noting(request, send))


def _replayed(body: bytes, receive: Receive) -> Receive:
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def again() -> Any:
        return next(messages, None) or await receive()

    return again


def _noting(request: Request, send: Send) -> Send:
    async def noted(message: Any) -> None:
        if message["type"] == "http.response.start":
            request.status = message["status"]
            request.compaction = dict(message["headers"]).get(b"x-compaction-status", b"").decode()
        await send(message)

    return noted


@dataclass(frozen=True)
class Stage:
    """Servers that are up.

    Attributes:
        url: What the client is told, without a path.
        provider: What reaches the provider.
        proxy: What reaches the proxy; nothing when there is none.
    """

    url: str
    provider: list[Request]
    proxy: list[Request] = field(default_factory=list)


@cache
def _counter() -> TiktokenCounter:
    return TiktokenCounter(lambda _: None)


def _config(upstream: str, way: Way) -> Config:
    narrow = {"window": NARROW_WINDOW_TOKENS}
    wide = {"window": WIDE_WINDOW_TOKENS, "compaction": {"trigger": NEVER}}
    return Config.model_validate(
        {
            "server": {"port": 0, "secret": SecretStr("test")},
            "upstream": {"base_url": f"{upstream}/v1"},
            "store": {"url": "memory://"},
            "summary": {"model": SUMMARY_MODEL},
            "models": {"*": narrow if way is Way.COMPACTED else wide},
        }
    )


@contextlib.asynccontextmanager
async def _running(way: Way) -> AsyncIterator[Stage]:
    window = NARROW_WINDOW_TOKENS if way is Way.COMPACTED else WIDE_WINDOW_TOKENS
    provider = Recorder(ThreeWireProvider(DemoProviderSettings(_counter(), window=window)))
    async with serve_embedded(provider) as direct:
        if way is Way.DIRECT:
            yield Stage(direct, provider.requests)
            return
        proxy = Recorder(create_app(_config(direct, way)))
        async with serve_embedded(proxy) as url:
            yield Stage(url, provider.requests, proxy.requests)


@contextlib.contextmanager
def stage(way: Way) -> Iterator[Stage]:
    """Servers of one run, in a thread of their own."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(_running(way)) as ready:
        yield ready
