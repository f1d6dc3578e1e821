"""The proxy between the official SDKs and an upstream that answers as told, all on real sockets.

The servers run in a thread of their own, so that blocking clients can be tested too. Each test has a key of
its own, which makes it a tenant of its own and finds its requests, summary calls included.
"""

import asyncio
import base64
import contextlib
import gzip
import json
import struct
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from anyio.from_thread import start_blocking_portal
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import SecretStr

from compaction_proxy.app import create_app
from compaction_proxy.cli.demo import chat
from compaction_proxy.cli.demo import replies as script
from compaction_proxy.cli.demo.provider import (
    AGENT_MODEL,
    SUMMARY_MODEL,
    ClientDepartedError,
    DemoProvider,
    DemoProviderSettings,
    Receive,
    Scope,
    Send,
)
from compaction_proxy.config.config import Config
from compaction_proxy.config.sections import (
    CompactionSection,
    ModelSection,
    ServerSection,
    StoreSection,
    SummarySection,
    UpstreamSection,
)
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.wires.json.values import encode_json
from tests.doubles.faulty_provider import FaultyClient
from tests.helpers.free_ports import find_free_port

WINDOW_TOKENS = 8192
HELD_SUMMARY_MODEL = "held-summary"
MODELS = (AGENT_MODEL, SUMMARY_MODEL, HELD_SUMMARY_MODEL, "finish-agent", "cancel-agent", "shadow-agent")
ENVELOPE = chat.Envelope("chatcmpl-scripted", 1_700_000_000, AGENT_MODEL)
USAGE = chat.DemoUsage(9, 12, 0)
GREETING = (
    "Grüezi 🌍! 你好, 世界 — עברית, \u202egespiegelt\u202c, 👩\u200d👩\u200d👧, e\u0301 and \u2028 a line."
)
CITY = '{"city":"Zürich","degrees":21}'
JSON = ("content-type", "application/json")
NO_TLS = False  # reading the certificates of this machine for each client would take most of the time
EVENTS = ("content-type", "text/event-stream; charset=utf-8")


@dataclass(frozen=True)
class Answer:
    """What the upstream says.

    `ending` is `whole`, `cut`, `hang` (no answer at all) or `forever` (the last chunk, again and again).
    """

    status: int = 200
    fields: tuple[tuple[str, str], ...] = (JSON,)
    chunks: tuple[bytes, ...] = ()
    ending: str = "whole"


def error(status: int, code: str | None, *fields: tuple[str, str]) -> Answer:
    told = {"message": f"Scripted {status}.", "type": "scripted", "param": "messages", "code": code}
    return Answer(status, (JSON, *fields), (json.dumps({"error": told}).encode(),))


def plain(text: str) -> bytes:
    return chat.encode_completion(ENVELOPE, chat.Reply(text), USAGE)


def events(text: str) -> tuple[bytes, ...]:
    return tuple(chat.encode_stream(ENVELOPE, chat.Reply(text), USAGE))


def sliced(data: bytes, size: int) -> tuple[bytes, ...]:
    return tuple(data[at : at + size] for at in range(0, len(data), size))


ERROR_FRAME = b'data: {"error":{"message":"Scripted trouble.","type":"server_error","code":"overloaded"}}\n\n'
ZIPPED = ("content-encoding", "gzip")
ZIPPED_EVENTS = gzip.compress(b"".join(events(GREETING)))
ANSWERS = {
    "bad-request": error(400, "scripted_code", ("x-request-id", "req_400")),
    "unauthorized": error(401, "invalid_api_key", ("www-authenticate", "Bearer")),
    "not-found": error(404, "model_not_found"),
    "limited": error(429, "rate_limit_exceeded", ("retry-after", "1")),
    "server-error": error(500, None),
    "not-json": Answer(503, (("content-type", "text/html"),), (b"<h1>Down</h1>",)),
    "cookies": Answer(
        fields=(
            JSON,
            ("set-cookie", "a=1; Path=/"),
            ("set-cookie", "b=2; Path=/"),
            ("x-request-id", "req_200"),
            ("x-ratelimit-remaining-tokens", "149"),
        ),
        chunks=(plain(GREETING),),
    ),
    "unicode": Answer(fields=(EVENTS,), chunks=sliced(b"".join(events(GREETING)), 7)),
    "zipped": Answer(fields=(JSON, ZIPPED), chunks=(gzip.compress(plain(GREETING)),)),
    "zipped-stream": Answer(fields=(EVENTS, ZIPPED), chunks=sliced(ZIPPED_EVENTS, 50)),
    "city": Answer(chunks=(plain(CITY),)),
    "city-stream": Answer(fields=(EVENTS,), chunks=events(CITY)),
    "cut": Answer(fields=(JSON, ("content-length", "999")), chunks=(plain("Half")[:90],), ending="cut"),
    "cut-stream": Answer(fields=(EVENTS,), chunks=events(GREETING)[:3], ending="cut"),
    "error-frame": Answer(fields=(EVENTS,), chunks=(*events(GREETING)[:3], ERROR_FRAME)),
    "hang": Answer(ending="hang"),
    "forever": Answer(fields=(EVENTS,), chunks=events("on and on")[:2], ending="forever"),
}  # fmt: skip


@dataclass
class Seen:
    """One request at the upstream. `departed` tells whether it was hung up on, once it has `ended`."""

    method: str
    target: str
    fields: list[tuple[str, str]]
    body: bytes
    departed: bool = False
    ended: bool = False

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.fields if key == name]

    def json(self) -> Any:
        return json.loads(self.body)


def listing(*floats: float) -> bytes:
    packed = base64.b64encode(struct.pack(f"<{len(floats)}f", *floats)).decode()
    rows = [{"object": "embedding", "index": 0, "embedding": packed}]
    usage = {"prompt_tokens": 1, "total_tokens": 1}
    return encode_json({"object": "list", "data": rows, "model": "embedder", "usage": usage})


def stored_file(body: bytes) -> bytes:
    fields = {"id": "file-1", "object": "file", "filename": "notes.jsonl", "purpose": "batch"}
    return encode_json({**fields, "bytes": len(body), "created_at": 1, "status": "processed"})


@dataclass
class Upstream:
    """The demo provider; a request with an `x-answer` header gets that answer instead."""

    provider: DemoProvider
    requests: list[Seen] = field(default_factory=list)
    released: set[str] = field(default_factory=set)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.provider(scope, receive, send)
            return
        client = FaultyClient(receive, send)
        body = await client.read_body()
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        fields = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        seen = Seen(scope["method"], target.decode(), fields, body)
        self.requests.append(seen)
        try:
            await self._answer(seen, client, scope, receive, send)
        except ClientDepartedError:
            seen.departed = True
        finally:
            seen.ended = True

    async def _answer(
        self, seen: Seen, client: FaultyClient, scope: Scope, receive: Receive, send: Send
    ) -> None:
        path, named = scope["path"], seen.all("x-answer")
        if named == ["limited-once"]:
            named = ["limited"] if seen.all("x-stainless-retry-count") == ["0"] else ["cookies"]
        if named:
            await scripted(ANSWERS[named[0]], client, send)
        elif path.endswith("/embeddings"):
            await client.send_json(200, listing(0.5, -1.0))
        elif path.endswith("/content"):
            await scripted(Answer(chunks=(b"{}\n" * 20_000,)), client, send)
        elif path.endswith("/files"):
            await client.send_json(200, stored_file(seen.body))
        else:
            if HELD_SUMMARY_MODEL.encode() in seen.body:
                await self._held(seen, client)
            await self.provider(scope, replayed(seen.body, receive), send)

    async def _held(self, seen: Seen, client: FaultyClient) -> None:
        """Wait until the summaries of this key are released."""
        while not self.released.intersection(seen.all("authorization")):
            await client.wait(0.01)


def replayed(body: bytes, receive: Receive) -> Receive:
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def again() -> Any:
        return next(messages, None) or await receive()

    return again


async def scripted(answer: Answer, client: FaultyClient, send: Send) -> None:
    if answer.ending == "hang":
        await client.wait(None)
    fields = [(name.encode(), value.encode()) for name, value in answer.fields]
    await send({"type": "http.response.start", "status": answer.status, "headers": fields})
    for chunk in answer.chunks:
        await client.send(chunk, more=True)
        await client.wait(0.001)  # so that each chunk goes over the wire by itself
    while answer.ending == "forever":
        await client.send(answer.chunks[-1], more=True)
        await client.wait(0.01)
    if answer.ending == "whole":
        await client.send(b"")


def held(on_disconnect: Any) -> ModelSection:
    return ModelSection(
        window=WINDOW_TOKENS,
        summary=SummarySection(model=HELD_SUMMARY_MODEL),
        compaction=CompactionSection(on_disconnect=on_disconnect),
    )


def config(upstream: UpstreamSection) -> Config:
    return Config(
        server=ServerSection(port=0, secret=SecretStr("test")),
        upstream=upstream,
        store=StoreSection(url="memory://"),
        summary=SummarySection(model=SUMMARY_MODEL),
        models={
            "finish-*": held("finish"),
            "cancel-*": held("cancel"),
            "shadow-*": ModelSection(window=WINDOW_TOKENS, compaction=CompactionSection(mode="shadow")),
            "*": ModelSection(window=WINDOW_TOKENS),
        },
    )


def provider(window: int) -> DemoProvider:
    return DemoProvider(DemoProviderSettings(TiktokenCounter(lambda _: None), window=window, models=MODELS))


@dataclass(frozen=True)
class Stack:
    """An upstream (`direct` is its URL) and the proxy before it (`root` is its URL, `url` that with /v1)."""

    upstream: Upstream
    direct: str
    root: str

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    def seen(self, key: str) -> list[Seen]:
        """The requests made with a key, oldest first."""
        return [
            seen
            for seen in self.upstream.requests
            if {f"Bearer {key}", key} & set(dict(seen.fields).values())
        ]


@contextlib.asynccontextmanager
async def running(
    make: Callable[[str], UpstreamSection], window: int = WINDOW_TOKENS
) -> AsyncIterator[Stack]:
    upstream = Upstream(provider(window))
    async with serve_embedded(upstream) as direct, serve_embedded(create_app(config(make(direct)))) as root:
        yield Stack(upstream, direct, root)


@contextlib.contextmanager
def stack_of(make: Callable[[str], UpstreamSection], window: int = WINDOW_TOKENS) -> Iterator[Stack]:
    """A stack in a thread of its own; `make` is given the upstream's URL."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(running(make, window)) as stack:
        yield stack


@pytest.fixture(scope="session")
def stacks() -> Callable[..., contextlib.AbstractContextManager[Stack]]:
    return stack_of


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    with stack_of(lambda url: UpstreamSection(base_url=f"{url}/v1")) as running_stack:
        yield running_stack


@pytest.fixture(scope="session")
def unreachable() -> Iterator[Stack]:
    """A proxy whose upstream is not there."""
    port = find_free_port()
    with stack_of(lambda _: UpstreamSection(base_url=f"http://127.0.0.1:{port}/v1")) as running_stack:
        yield running_stack


@pytest.fixture
def key() -> str:
    return f"sk-{uuid.uuid4()}"


@pytest.fixture
def client(stack: Stack, key: str) -> Iterator[openai.OpenAI]:
    http = openai.DefaultHttpxClient(trust_env=False, verify=NO_TLS)
    with openai.OpenAI(base_url=stack.url, api_key=key, max_retries=0, http_client=http) as made:
        yield made


@pytest.fixture
async def aclient(stack: Stack, key: str) -> AsyncIterator[openai.AsyncOpenAI]:
    http = openai.DefaultAsyncHttpxClient(trust_env=False, verify=NO_TLS)
    async with openai.AsyncOpenAI(base_url=stack.url, api_key=key, max_retries=0, http_client=http) as made:
        yield made


@dataclass(frozen=True)
class Sdk:
    """Both clients behind one face; `chosen` says which of them is asked."""

    chosen: str
    client: openai.OpenAI
    aclient: openai.AsyncOpenAI

    async def create(self, **options: Any) -> ChatCompletion:
        given = {"model": AGENT_MODEL, **options}
        if self.chosen == "sync":
            made: ChatCompletion = self.client.chat.completions.create(**given)
        else:
            made = await self.aclient.chat.completions.create(**given)
        return made

    async def stream(self, **options: Any) -> list[ChatCompletionChunk]:
        given = {"model": AGENT_MODEL, "stream": True, **options}
        if self.chosen == "sync":
            return list(self.client.chat.completions.create(**given))
        return [chunk async for chunk in await self.aclient.chat.completions.create(**given)]

    async def fields(self, **options: Any) -> tuple[Any, list[tuple[str, str]]]:
        """What came, and the header fields, through `with_raw_response`."""
        given = {"model": AGENT_MODEL, **options}
        if self.chosen == "sync":
            raw = self.client.chat.completions.with_raw_response.create(**given)
            parsed = raw.parse()
            came = list(parsed) if given.get("stream") else parsed
        else:
            araw = await self.aclient.chat.completions.with_raw_response.create(**given)
            raw, parsed = araw, araw.parse()
            came = [chunk async for chunk in parsed] if given.get("stream") else parsed
        return came, raw.headers.multi_items()


@pytest.fixture(params=["sync", "async"])
def sdk(request: pytest.FixtureRequest, client: openai.OpenAI, aclient: openai.AsyncOpenAI) -> Sdk:
    return Sdk(request.param, client, aclient)


@pytest.fixture(scope="session")
def greeting() -> str:
    return GREETING


def told(count: int, words: int = 300) -> list[Mapping[str, str]]:
    """A conversation of `count` messages of about `words` tokens, and a short last question."""
    roles = ("user", "assistant")
    filler = "alpha beta gamma delta " * (words // 4)
    earlier = [{"role": roles[at % 2], "content": f"Step {at}: {filler}"} for at in range(count)]
    return [*earlier, {"role": "user", "content": "What now?"}]


@pytest.fixture(scope="session")
def conversation() -> Callable[..., list[Mapping[str, str]]]:
    return told


@pytest.fixture(scope="session")
def whole_history() -> list[chat.JsonObject]:
    """The scripted conversation as a client has it at the end, if its model forgot nothing."""
    scripted_talk = script.load_script()
    history: list[chat.JsonObject] = [{"role": "system", "content": scripted_talk.system}]
    for turn in scripted_talk.turns:
        history.append({"role": "user", "content": turn.user})
        for step in turn.steps:
            text = step.text
            for name, fact in scripted_talk.facts.items():
                text = text.replace("{" + name + "}", fact)
            said = chat.build_message(chat.Reply(text, step.calls))
            history.append({name: value for name, value in said.items() if value is not None})
            history += [
                {"role": "tool", "tool_call_id": call.id, "content": scripted_talk.results[call.id]}
                for call in step.calls
            ]
    return history


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    async def waiting(holds: Callable[[], object]) -> None:
        async with asyncio.timeout(100):
            while not holds():  # noqa: ASYNC110 - it is about another thread's state
                await asyncio.sleep(0.005)

    return waiting
