"""The proxy between clients and a provider that answers as scripted, on real sockets.

The servers run in a thread of their own, so that blocking clients can be tested, too. Each test scripts the
answers of the requests that it makes, told apart by its key.
"""

import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
from anyio.from_thread import start_blocking_portal

from compaction_proxy.app import create_app
from compaction_proxy.cli.demo import chat as wire
from compaction_proxy.cli.demo.provider import ClientDepartedError, Receive, Scope, Send
from compaction_proxy.config.config import Config
from compaction_proxy.core.search_tool import TOOL_NAME
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.wires.chat.search_tool import SEARCH_TOOL
from compaction_proxy.wires.registry import WIRES as DIALECTS
from tests.doubles.faulty_provider import FaultyClient
from tests.doubles.messages_wire import MESSAGES
from tests.doubles.provider_wire import ProviderWire, WireAnswer, WireReply, WireRequest, WireUsage
from tests.doubles.responses_wire import RESPONSES

EVENTS = ("content-type", "text/event-stream; charset=utf-8")
JSON = ("content-type", "application/json")
HELLO = [{"role": "user", "content": "What was the budget?"}]
# A tool of the client's.
TOOLS = [
    {"type": "function", "function": {"name": "open", "parameters": {"type": "object", "properties": {}}}}
]


def recall(number: int = 1, arguments: str = '{"query":"budget"}') -> wire.ToolCall:
    return wire.ToolCall(f"call_r{number}", TOOL_NAME, arguments)


def opened(number: int = 1) -> wire.ToolCall:
    return wire.ToolCall(f"call_o{number}", "open", f'{{"path":"{number}.py"}}')


def said(text: str = "", *calls: wire.ToolCall, reason: str | None = None) -> WireReply:
    """What the model says in one answer."""
    return WireReply(text, calls, reason or ("tool_calls" if calls else "stop"))


@dataclass(frozen=True)
class Raw:
    """An answer as it stands on the wire; `ending` is `whole`, `cut` or `open` (nothing more comes)."""

    chunks: Sequence[bytes] = ()
    status: int = 200
    fields: Sequence[tuple[str, str]] = (EVENTS,)
    ending: str = "whole"
    gap_s: float = 0.001


@dataclass
class Asked:
    """A request at the provider."""

    raw: bytes
    fields: dict[str, str]
    departed: bool = False
    wrong: str = ""  # what a provider of this wire would refuse

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    @property
    def tools(self) -> list[str]:
        return [tool.get("function", tool)["name"] for tool in self.body.get("tools", ())]

    @property
    def messages(self) -> Any:
        return listed(self.body)


def listed(body: Any) -> Any:
    """The conversation of a request body, on any wire."""
    return body["messages"] if "messages" in body else body["input"]


@dataclass(frozen=True)
class Wire:
    """What tests of one wire send.

    Attributes:
        path: Where conversations are posted.
        request: Members of every request beside the model, tools of the client among them.
        format: Writes the provider's answers; None: chat completions.
    """

    path: str
    request: dict[str, Any]
    format: ProviderWire | None = None


CHAT_WIRE = Wire("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS})
WIRES = {
    "chat": CHAT_WIRE,
    "messages": Wire(
        "/v1/messages",
        {
            "messages": HELLO,
            "max_tokens": 500,
            "tools": [{"name": "open", "input_schema": {"type": "object"}}],
        },
        MESSAGES,
    ),
    "responses": Wire(
        "/v1/responses",
        {"input": HELLO, "store": False, "tools": [{"type": "function", "name": "open", "parameters": {}}]},
        RESPONSES,
    ),
}


# An answer, or what makes one of the request's body.
Scripted = WireReply | Raw | Callable[[Any], WireReply]


@dataclass
class Provider:
    """Gives each key the answers that were scripted for it, one after another, the last one for ever."""

    scripts: dict[str, list[Scripted]] = field(default_factory=dict)
    asked: dict[str, list[Asked]] = field(default_factory=dict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})
            return
        client = FaultyClient(receive, send)
        raw = await client.read_body()
        fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        key = fields.get("x-api-key") or fields.get("authorization", "").removeprefix("Bearer ")
        wire = next(each for each in WIRES.values() if scope["path"].endswith(each.path))
        seen = Asked(raw, fields)
        before = self.asked.setdefault(key, [])
        before.append(seen)
        script = self.scripts[key]
        try:
            answer = script[min(len(before), len(script)) - 1]
            await self._answer(answer, seen, len(before), client, send, wire)
        except ClientDepartedError:
            seen.departed = True

    async def _answer(
        self, answer: Scripted, seen: Asked, number: int, client: FaultyClient, send: Send, wire: Wire
    ) -> None:
        wrong = wire.format.validate(seen.body) if wire.format else None
        seen.wrong = wrong.message if wrong else ""
        reply = answer(seen.body) if callable(answer) else answer
        told = reply if isinstance(reply, Raw) else self.written(reply, seen.body, number, wire)
        fields = [(name.encode(), value.encode()) for name, value in told.fields]
        fields.append((b"x-request-id", b"req_%d" % number))
        await send({"type": "http.response.start", "status": told.status, "headers": fields})
        for chunk in told.chunks:
            await client.send(chunk, more=True)
            await client.wait(told.gap_s)
        if told.ending == "open":
            await client.wait(None)
        if told.ending == "whole":
            await client.send(b"")

    def written(self, reply: WireReply, body: Any, number: int, told: Wire = CHAT_WIRE) -> Raw:
        """The reply as a body asks for it. Its prompt has 100 tokens for each message, its output 10."""
        usage = WireUsage(100 * len(listed(body)), 10, 50)
        if told.format is not None:
            prompt = {"model": f"m-{number}"}
            asked = WireRequest(body, prompt, 0, streamed=bool(body.get("stream")))
            answer = WireAnswer(asked, number, 1_700_000_000 + number, f"{number:02x}", reply, usage)
            if not asked.streamed:
                return Raw((told.format.encode_answer(answer),), fields=(JSON,))
            return Raw(tuple(told.format.encode_events(answer)))
        envelope = wire.Envelope(f"chatcmpl-{number}", 1_700_000_000 + number, f"m-{number}")
        if not body.get("stream"):
            return Raw((wire.encode_completion(envelope, reply, usage),), fields=(JSON,))
        wanted = (body.get("stream_options") or {}).get("include_usage")
        return Raw(tuple(wire.encode_stream(envelope, reply, usage if wanted else None)))


@dataclass
class Stack:
    """The provider, the proxy's URL, and one conversation with it, whose id is the key unless it is given."""

    provider: Provider
    url: str
    key: str = ""
    session: str | None = None
    on: Wire = CHAT_WIRE

    def script(self, *answers: Scripted) -> None:
        self.provider.scripts[self.key] = list(answers)

    @property
    def asked(self) -> list[Asked]:
        return self.provider.asked.get(self.key, [])

    @property
    def fields(self) -> dict[str, str]:
        named = self.key if self.session is None else self.session
        fields = {"authorization": f"Bearer {self.key}", "idempotency-key": uuid.uuid4().hex}
        return {**fields, "x-session-id": named} if named else fields

    def written(self, reply: WireReply, number: int = 1, **body: Any) -> bytes:
        """The bytes in which the provider writes a reply."""
        asked = {**self.on.request, **body}
        return b"".join(self.provider.written(reply, asked, number, self.on).chunks)

    async def post(self, **body: Any) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=100) as client:
            given = {"model": "always", **self.on.request, **body}
            return await client.post(f"{self.url}{self.on.path}", json=given, headers=self.fields)


def config(base_url: str) -> Config:
    """Models that are offered the tool always, or once something is removed; one that is told unasked."""
    return Config.model_validate(
        {
            "server": {"port": 0, "secret": "test", "admin_key": "none"},
            "upstream": {"base_url": f"{base_url}/v1"},
            "store": {"url": "memory://"},
            "summary": {"model": "none"},
            "models": {
                "always": {"window": 128_000, "recall": {"tool": "always"}, "tools": True},
                "short": {"window": 128_000, "recall": {"tool": "always", "max_hops": 1}, "tools": True},
                "inject": {"window": 6_000, "recall": {"tool": "inject"}, "tools": True},
                "reminded": {"window": 6_000, "recall": {"auto": "inject"}},
                "*": {"window": 128_000},
            },
        }
    )


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Stack]:
    provider = Provider()
    async with serve_embedded(provider) as direct, serve_embedded(create_app(config(direct))) as url:
        yield Stack(provider, url)


@pytest.fixture(scope="session")
def servers() -> Iterator[Stack]:
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(running()) as stack:
        yield stack


@pytest.fixture(scope="session")
def new_stack(servers: Stack) -> Callable[[], Stack]:
    """Makes the servers known with a key of its own."""
    return lambda: Stack(servers.provider, servers.url, f"sk-{uuid.uuid4()}")


@pytest.fixture
def stack(new_stack: Callable[[], Stack]) -> Stack:
    """The servers, with a key of the test's own."""
    return new_stack()


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    http = openai.DefaultHttpxClient(trust_env=False, verify=False)
    given = {"base_url": f"{stack.url}/v1", "api_key": stack.key, "default_headers": stack.fields}
    with openai.OpenAI(**given, max_retries=0, http_client=http) as made:  # type: ignore[arg-type]
        yield made


@pytest.fixture
async def aclient(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    http = openai.DefaultAsyncHttpxClient(trust_env=False, verify=False)
    given = {"base_url": f"{stack.url}/v1", "api_key": stack.key, "default_headers": stack.fields}
    async with openai.AsyncOpenAI(**given, max_retries=0, http_client=http) as made:  # type: ignore[arg-type]
        yield made


@dataclass(frozen=True)
class Script:
    """What tests write scripts with, without an import between test files."""

    @property
    def definitions(self) -> dict[str, Any]:
        """The tool as it is offered, by the name of the wire."""
        tools = {name: wire.search_tool for name, wire in DIALECTS.items()}
        return {name: json.loads(tool.definition_json) for name, tool in tools.items() if tool}

    said = staticmethod(said)
    recall = staticmethod(recall)
    opened = staticmethod(opened)
    Raw = Raw
    EVENTS = EVENTS
    JSON = JSON
    tools = TOOLS
    hello = HELLO
    tool = json.loads(SEARCH_TOOL.definition_json)
    wires = WIRES


@pytest.fixture(scope="session")
def s() -> Script:
    return Script()
