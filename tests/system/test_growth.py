"""What a request costs grows no faster than the request: at every stage of its way, with its worst inputs.

A stage takes an input of `n` pieces. Four times as many may take six times the processor time, as the best of
some measurements, which a busy machine does not disturb. If even the largest input takes hardly any time, a
bound holds, and nothing has to be compared. Most stages send a whole request through the proxy; the others
call a function with a text that is hard to match. A module of the way that no stage enters fails the test.
"""

import asyncio
import contextlib
import gc
import gzip
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import httpx
import pytest

from compaction_proxy.app import create_app
from compaction_proxy.compaction.conversation_index import KEPT_HEADS
from compaction_proxy.config.config import Config
from compaction_proxy.core.digest import compute_message_digest
from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.ledger.actions import read_action
from compaction_proxy.core.ledger.facts import list_message_facts
from compaction_proxy.core.ledger.frontier import read_reply
from compaction_proxy.core.ledger.ledger import parse_ledger
from compaction_proxy.core.ledger.values import find_values
from compaction_proxy.core.masking import format_mask
from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.core.sanitize import sanitize_text
from compaction_proxy.core.strategies import DEFAULT_STRATEGY, STRATEGIES
from compaction_proxy.core.summary.answer import split_run_texts, validate_summary
from compaction_proxy.core.summary.extractive import build_extractive_summary
from compaction_proxy.core.summary.verify import verify_summary
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.recall.fulltext import SqliteTextIndexBuilder
from compaction_proxy.recall.tokenize import parse_query, split_terms
from compaction_proxy.wires.context_errors import parse_overflow
from compaction_proxy.wires.prescan import MentionedNumbers, find_models, may_have_media
from compaction_proxy.wires.sse import EventSplitter
from tests.helpers.summaries import put_as_asked
from tests.system.test_recall_tool import WIRES, Wire

NAME = "compaction_proxy"
PACKAGE = Path(__file__).resolve().parents[2] / "proxy" / NAME
# The packages and modules that a request passes.
WAY = ("gateway", "compaction", "wires", "core", "recall", "storage", "providers.token_counting")
# Modules of the way that no stage enters, each with the reason.
EXEMPT = {
    "compaction.commands": "commands of the admin API",
    "core.cost.optimal_trigger": "figures of prices and growth, whatever the request",
    "core.cost.price": "figures of prices, whatever the request",
    "core.problem": "a record",
    "core.summary.call": "records",
    "gateway.client.dial": "connects, whatever the request",
    "gateway.client.proxies": "read at the start",
    "gateway.client.types": "records and protocols",
    "gateway.provider_models": "asked beside requests: tests/system/test_cost.py",
    "gateway.routes": "describes routes at the start",
    "gateway.server.shutdown": "ends the process",
    "gateway.server.sockets": "listens at the start",
    "gateway.sse_keepalive": "sends a comment in a long silence",
    "gateway.unread_conversations": "reads small bodies only (`MAX_BYTES`)",
    "storage.encrypted": "one call of a library for each record: tests/storage/test_encrypted.py",
    "storage.factory": "opens the store at the start",
    "storage.redis.client": "connects at the start",
    "storage.redis.scripts": "texts of scripts",
    "storage.redis.store": "hands records to a server: tests/storage/redis",
    "storage.redis.url": "read at the start",
    "storage.sqlite.schema": "opens the file at the start",
    "storage.sqlite.store": "hands records to a library: tests/storage/sqlite",
    "storage.store": "records and protocols",
    "storage.store_failure": "texts for a store that fails",
}
MOST_GROWTH = 6.0
# A cost below this many processor seconds shows nothing.
LEAST_S = 0.020
# On a busy machine large bodies cost more for each byte than small ones. A good ratio ends the attempts.
ATTEMPTS = 12
LARGEST_PIECES, LARGEST_TEXT = 100_000, 4_000_000
SUMMARY_MODEL = "summary-small"
FORCE = {"x-compaction": "force"}
CLAUDE_CODE = {"user-agent": "claude-cli/2.0.0 (external, cli)"}
GZIP = {"content-encoding": "gzip"}
SUMMARY = "The user works on the service, and nothing else has been done so far."
CHAT, MESSAGES, RESPONSES = (WIRES[name].path for name in ("chat", "messages", "responses"))
pytestmark = pytest.mark.timeout(600)

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
Json = dict[str, Any]
# Makes messages from a mark and a size.
Make = Callable[[int, int], Sequence[Json]]


class Provider:
    """An upstream that reads nothing of large bodies.

    Attributes:
        answer: Makes status, content type and body of an answer.
    """

    def __init__(self) -> None:
        self.answer: Callable[[str, bytes], tuple[int, str, bytes]] = answer_plainly

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        pieces, more = list[bytes](), True
        while more:
            event = await receive()
            pieces.append(event.get("body", b""))
            more = event.get("more_body", False)
        status, kind, body = (404, "application/json", b"{}")
        if scope["method"] == "POST":
            raw = b"".join(pieces)
            is_summary_call = raw.find(SUMMARY_MODEL.encode(), 0, 10_000) >= 0
            respond = answer_with_summary if is_summary_call else self.answer
            status, kind, body = respond(scope["path"], raw)
        head = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": body})


def answer_plainly(path: str, raw: bytes) -> tuple[int, str, bytes]:
    if path.endswith("count_tokens"):
        return 200, "application/json", b'{"input_tokens": 100000}'
    wire = find_wire(path)
    streamed = raw.find(b'"stream": true', 0, 1_000) >= 0
    kind = "text/event-stream" if streamed else "application/json"
    return 200, kind, wire.answer("All right.", calling=False, streamed=streamed)


def answer_with_summary(_: str, raw: bytes) -> tuple[int, str, bytes]:
    text = put_as_asked(SUMMARY, raw.decode())
    runs = raw.count(b"=== RUN ")
    text = "\n".join(f"=== RUN {k} ===\n{text}" for k in range(1, runs + 1)) if runs else text
    return 200, "application/json", WIRES["chat"].answer(text, calling=False, streamed=False)


def find_wire(path: str) -> Wire:
    return next((wire for wire in WIRES.values() if path.endswith(wire.path)), WIRES["chat"])


def begin() -> float:
    gc.collect()
    gc.freeze()  # so the next collection looks at what is new only
    gc.disable()  # collections cost what everything costs that the process holds
    return time.process_time()


def end(started: float) -> float:
    gc.enable()
    return time.process_time() - started


class Way:
    """The proxy, between a client and a provider in this process.

    Attributes:
        provider: The provider.
        mark: Tells the messages of one measurement from those of all others, so that no cache knows them.
    """

    def __init__(self, client: httpx.AsyncClient, provider: Provider) -> None:
        self._client = client
        self._marks = count(1)
        self.provider = provider
        self.mark = 0
        self.cost_s = 0.0

    async def measure(self, stage: "Stage", size: int) -> float:
        """Returns the processor seconds of a stage with an input of this size."""
        self.mark, self.cost_s = next(self._marks), 0.0
        self.provider.answer = answer_plainly
        await stage.run(self, size)
        return self.cost_s

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str] = NO_HEADERS, *, timed: bool = True
    ) -> httpx.Response:
        fields = {"content-type": "application/json", **headers}
        started = begin()
        answer = await self._client.post(path, content=body, headers=fields)
        await self._settle()
        cost_s = end(started)
        self.cost_s += cost_s if timed else 0.0
        assert answer.status_code == 200, (path, answer.text[:500])
        return answer

    async def _settle(self) -> None:
        """Waits for what follows the answer."""
        while True:
            before = time.process_time()
            await asyncio.sleep(0.03)
            if time.process_time() - before < 0.01:
                return


@asynccontextmanager
async def run_way() -> AsyncIterator[Way]:
    provider = Provider()
    async with serve_embedded(provider) as upstream:
        config = Config.model_validate(
            {
                "upstream": {"base_url": f"{upstream}/v1"},
                "store": {"url": "memory://"},
                "summary": {"model": SUMMARY_MODEL, "timeout_s": 100},
                "compaction": {"max_block_s": 100},
                "recall": {"tool": "inject"},
                "session": {"store_titles": True},
                "observability": {"access_log": "all"},
                "models": {"large": {"window": 100_000_000}, "small": {"window": 16_000, "tools": True}},
            }
        )
        async with (
            serve_embedded(create_app(config)) as url,
            httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client,
        ):
            client.headers["authorization"] = "Bearer sk-test"
            try:
                yield Way(client, provider)
            finally:
                gc.unfreeze()


class Stage(NamedTuple):
    """A part of the way, with one kind of input.

    Attributes:
        run: Sends an input of a size.
        start: The size to begin with.
        limit: The largest size that is tried.
    """

    run: Callable[[Way, int], Awaitable[None]]
    start: int = 200
    limit: int = LARGEST_PIECES


def said(role: str, content: Any) -> Json:
    return {"role": role, "content": content}


def build_body(path: str, messages: Sequence[Json], model: str, **members: Any) -> bytes:
    name = "input" if path.endswith(("/responses", "/responses/compact")) else "messages"
    extra = {"max_tokens": 200} if path.startswith(MESSAGES) else {}
    return json.dumps({"model": model, **extra, **members, name: list(messages)}).encode()


def talk(mark: int, size: int) -> list[Json]:
    return [said("assistant" if k % 2 else "user", f"Say {mark} {k}.") for k in range(size | 1)]


def texts(mark: int, size: int) -> list[Json]:
    text = "So it is said of the house. " * 12
    return [said("assistant" if k % 2 else "user", f"{mark} {k}: {text}") for k in range(size | 1)]


def rules(mark: int, size: int) -> list[Json]:
    words = [
        "".join("bcdfghjkl"[int(digit) % 9] + "ae"[k % 2] for digit in f"{k}{mark}") for k in range(size)
    ]
    return [said("user", "Set it up."), *(said("user", f"Never deploy {word} today.") for word in words)]


def facts(mark: int, size: int) -> list[Json]:
    return [
        said("assistant" if k % 2 else "user", f"Port {k + 1_000} of /srv/{mark}/{k}.py is v1.{k}.{mark}.")
        for k in range(size | 1)
    ]


def same_value(mark: int, size: int) -> list[Json]:
    """One value that very many things have."""
    return [
        said("assistant" if k % 2 else "user", f"The service s{mark}x{k} listens on port 8080.")
        for k in range(size | 1)
    ]


def replaced(mark: int, size: int) -> list[Json]:
    """Each value that the user gives is replaced later."""
    words = [f"w{mark}x{k}" for k in range(size // 2)]
    first = [said("user", f"The server {word} listens on port {k + 1_000}.") for k, word in enumerate(words)]
    later = [
        said("user", f"No, the server {word} listens on port {k + 60_000}.") for k, word in enumerate(words)
    ]
    return [said("user", "Set it up."), *first, *later]


def system_messages(mark: int, size: int) -> list[Json]:
    return [*(said("system", f"Rule {mark} {k} of the house.") for k in range(size)), *talk(mark, 9)]


def calls(mark: int, size: int) -> list[Json]:
    messages = [said("user", f"Read all {mark}.")]
    for k in range(size):
        function = {"name": "read", "arguments": json.dumps({"path": f"src/{mark}/{k}.py"})}
        call = {"id": f"c{k}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{k}", "content": f"line {k}: error {mark}\n" * 9})
    return messages


def call_in_one(mark: int, size: int) -> list[Json]:
    """One answer with very many calls."""
    function = {"name": "read", "arguments": '{"path": "a"}'}
    made = [{"id": f"c{k}", "type": "function", "function": function} for k in range(size)]
    results = [{"role": "tool", "tool_call_id": f"c{k}", "content": f"{mark} {k}"} for k in range(size)]
    return [said("user", "Go."), {"role": "assistant", "content": None, "tool_calls": made}, *results]


def items(mark: int, size: int) -> list[Json]:
    messages = [said("user", f"Read all {mark}.")]
    for k in range(size):
        call = {"type": "function_call", "call_id": f"c{k}", "name": "read", "arguments": '{"path":"a"}'}
        result = {"type": "function_call_output", "call_id": f"c{k}", "output": f"line {mark} {k}\n" * 9}
        messages += call, result
    return messages


def blocks(mark: int, size: int) -> list[Json]:
    reminder = {
        "type": "text",
        "text": "<system-reminder>\nContents of /a.md:\nBe brief.\n</system-reminder>",
    }
    messages = [said("user", [reminder, {"type": "text", "text": f"Read all {mark}."}])]
    for k in range(size):
        call = {"type": "tool_use", "id": f"c{k}", "name": "read", "input": {"path": f"{mark}"}}
        result = {"type": "tool_result", "tool_use_id": f"c{k}", "content": f"line {mark} {k}\n" * 9}
        messages += said("assistant", [call]), said("user", [result])
    return messages


def aider(mark: int, size: int) -> list[Json]:
    files = "I have *added these files to the chat* so you can go ahead and edit them.\n"
    pair = [said("user", f"{files}{mark}"), said("assistant", "Ok, any changes I propose will be to those.")]
    return [said("system", "Act as an expert software developer."), *talk(mark, size), *pair, *talk(mark, 3)]


def one_message(piece: str) -> Callable[[int, int], list[Json]]:
    return lambda mark, size: [*talk(mark, 3), said("user", f"{mark}" + piece * size)]


def one_result(piece: str) -> Callable[[int, int], list[Json]]:
    def make(mark: int, size: int) -> list[Json]:
        *messages, result = calls(mark, 1)
        return [*messages, {**result, "content": f"{mark}" + piece * size}, *talk(mark, 3)]

    return make


def parts(mark: int, size: int) -> list[Json]:
    return [*talk(mark, 3), said("user", [{"type": "text", "text": f"{mark}"}] * size)]


def images(mark: int, size: int) -> list[Json]:
    url = {"url": "data:image/png;base64," + "iVBORw0KGgo" + "A" * 100}
    return [*talk(mark, 3), said("user", [{"type": "image_url", "image_url": url}] * size)]


def nested(mark: int, size: int) -> list[Json]:
    value: Any = f"{mark}"
    for _ in range(80):
        value = [value]
    return [*talk(mark, 3), {**said("user", "Go."), "x": [value] * size}]


def pass_by(
    make: Make, path: str = CHAT, model: str = "large", headers: Mapping[str, str] = NO_HEADERS
) -> Stage:
    """A stage that sends a conversation, and then once more with a further message."""

    async def run(way: Way, size: int) -> None:
        messages = [*make(way.mark, size)]
        await way.post(path, build_body(path, messages, model), headers)
        further = [*messages, said("assistant", "Well."), said("user", "Go on.")]
        await way.post(path, build_body(path, further, model), headers)

    return Stage(run)


def compact(make: Make, path: str = CHAT, strategy: str = "anchored") -> Stage:
    """A stage that makes a round of a conversation."""
    return pass_by(make, path, "small", {**FORCE, "x-compaction-strategy": strategy})


def post_once(path: str, make: Make, encode: Callable[[bytes], bytes] | None = None) -> Stage:
    async def run(way: Way, size: int) -> None:
        body = build_body(path, make(way.mark, size), "small")
        await way.post(path, encode(body) if encode else body, GZIP if encode else NO_HEADERS)

    # Four times as many messages are below 16 MB, so that what is made of them is below 32 MB, too. For a
    # larger block, the C library asks the system for memory each time, so the cost has a step.
    return Stage(run, limit=10_000)


def gzip_in_members(raw: bytes) -> bytes:
    return gzip.compress(raw[:9]) + gzip.compress(raw[9:])


async def send_tools(way: Way, size: int) -> None:
    tool = {"type": "function", "function": {"name": f"f{way.mark}", "description": "does a thing " * 9}}
    await way.post(CHAT, build_body(CHAT, texts(way.mark, 99), "small", tools=[tool] * size))


async def send_branches(way: Way, size: int) -> None:
    """Conversations that begin alike and then differ."""
    start = talk(way.mark, 9)
    for k in range(size):
        await way.post(
            CHAT, build_body(CHAT, [*start, said("assistant", f"{k}"), said("user", f"{k}")], "large")
        )


async def send_refused(way: Way, size: int) -> None:
    """The upstream refuses the request as too long until it is short."""

    def answer(path: str, raw: bytes) -> tuple[int, str, bytes]:
        if len(raw) < 6_000 + 200 * size:
            return answer_plainly(path, raw)
        message = f"This model's maximum context length is {4_000 + 30 * size} tokens."
        error = {"error": {"message": message, "code": "context_length_exceeded"}}
        return 400, "application/json", json.dumps(error).encode()

    way.provider.answer = answer
    await way.post(CHAT, build_body(CHAT, texts(way.mark, size), "large"))


def search(name: str, *, streamed: bool) -> Stage:
    """The model searches what a round has removed, and writes a long answer."""
    wire = WIRES[name]

    async def run(way: Way, size: int) -> None:
        messages = texts(way.mark, 200)
        compacted = build_body(wire.path, messages, "small", stream=streamed)
        await way.post(wire.path, compacted, FORCE, timed=False)

        def answer(path: str, raw: bytes) -> tuple[int, str, bytes]:
            is_told = raw.find(b'"call_1"') >= 0
            kind = "text/event-stream" if streamed else "application/json"
            text = "So it is. " * size
            return 200, kind, wire.answer(text, calling=not is_told, streamed=streamed)

        way.provider.answer = answer
        await way.post(wire.path, build_body(wire.path, messages, "small", stream=streamed))

    return Stage(run)


def stream(name: str) -> Stage:
    """An answer of very many events."""
    wire = WIRES[name]

    async def run(way: Way, size: int) -> None:
        whole = wire.answer("All right.", calling=False, streamed=True)
        head, end, tail = whole.partition(b"\n\n")
        answer = head + end + b': so it goes on\n\ndata: {"type":"ping"}\n\n' * size + tail
        way.provider.answer = lambda *_: (200, "text/event-stream", answer)
        await way.post(wire.path, build_body(wire.path, talk(way.mark, 3), "large", stream=True))

    return Stage(run)


async def search_by_agent(way: Way, size: int) -> None:
    """An agent searches what a round has removed, with a long query."""
    compacted = build_body(CHAT, texts(way.mark, size), "small")
    await way.post(CHAT, compacted, {**FORCE, "x-session-id": f"{way.mark}"}, timed=False)
    arguments = {"query": " ".join(f"house{k}" for k in range(size)), "scope": "tenant"}
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
    body = json.dumps({**call, "params": {"name": "memory_search", "arguments": arguments}}).encode()
    await way.post("/mcp", body, {"accept": "application/json, text/event-stream"})


async def send_items_of_ours(way: Way, size: int) -> None:
    """The proxy makes a compaction item, and reads it in the next request."""
    body = build_body(RESPONSES, [*texts(way.mark, size), {"type": "compaction_trigger"}], "small")
    way.provider.answer = lambda *_: (400, "application/json", b'{"error":{"message":"compaction_trigger"}}')
    made = (await way.post(RESPONSES, body)).json()["output"]
    way.provider.answer = answer_plainly
    await way.post(RESPONSES, build_body(RESPONSES, [*made, *talk(way.mark, 9)], "small"))


def verify(text: str) -> None:
    with contextlib.suppress(SummaryError):
        verify_summary(text, sources=[Message("user", text)], earlier_summaries=(), language="English")


def read_result(text: str) -> None:
    result, call = Message("tool", text, answered_call_ids=("1",)), MessageToolCall("1", "bash", text)
    format_mask(result, call, "m_1")
    list_message_facts(result)
    read_action(call, text)


def validate(text: str) -> None:
    with contextlib.suppress(SummaryError):
        validate_summary(text, "stop", called_tools=False, refused=False)


def search_texts(text: str) -> None:
    index = SqliteTextIndexBuilder().build(text.split("\n"))
    index.search("house server", 5)
    index.close()


READINGS: Mapping[str, Callable[[str], object]] = {
    "digest": lambda text: compute_message_digest(Message("user", text)),
    "verified": verify,
    "result": read_result,
    "extract": lambda text: build_extractive_summary([Message("assistant", text)], 4_000, str),
    "reply": read_reply,
    "values": lambda text: sum(1 for _ in find_values(text)),
    "defanged": sanitize_text,
    "runs": lambda text: split_run_texts(text, 1),
    "summary": validate,
    "ledger": parse_ledger,
    "terms": lambda text: sum(1 for _ in split_terms(text)),
    "query": parse_query,
    "index": search_texts,
    "refusal": lambda text: parse_overflow(400, text.encode()),
    "numbers": lambda text: 17 in MentionedNumbers(text.encode()),
    "models": lambda text: find_models(text.encode()),
    "media": lambda text: may_have_media(text.encode()),
    "events": lambda text: EventSplitter().feed(text.encode()),
}
PIECES = ("the house of 1,234 servers.\n", "\n", '"model":"', "x=1 ", "- ")

STAGES: dict[str, Stage] = {
    **{f"round, {strategy}": compact(texts, strategy=strategy) for strategy in STRATEGIES},
    **{f"calls, {strategy}": compact(calls, strategy=strategy) for strategy in STRATEGIES},
    "messages": pass_by(talk),
    "messages with an id": pass_by(talk, headers={"x-session-id": "one"}),
    "messages of an agent": pass_by(aider),
    "rules": compact(rules),
    "facts": compact(facts),
    "one value of many things": compact(same_value),
    "replaced values": compact(replaced),
    "system messages": compact(system_messages),
    "system messages that exceed": pass_by(
        lambda mark, size: [*system_messages(mark, size), *texts(mark, size)], model="small"
    ),
    "calls": pass_by(calls),
    "calls in one answer": compact(call_in_one),
    "items": compact(items, RESPONSES),
    "blocks": compact(blocks, MESSAGES),
    "blocks of an agent": pass_by(blocks, MESSAGES, "small", CLAUDE_CODE),
    "parts": compact(parts),
    "images": compact(images),
    "nested": pass_by(nested, model="small"),
    "one text": pass_by(one_message("So it is said. ")),
    "one text that is cut": pass_by(one_message("So it is said. "), model="small"),
    "one result": compact(one_result("src/a.py:17: error: no such file\n")),
    "one result of JSON": compact(one_result('{"a": [1, 2, {"b": "c"}]}, ')),
    "escapes": pass_by(one_message('"\n\u00e9\ud83d\ude00'), model="small"),
    "gzip": post_once(CHAT, texts, gzip.compress),
    "gzip in members": post_once(CHAT, texts, gzip_in_members),
    "tools": Stage(send_tools),
    "search of an agent": Stage(search_by_agent, limit=20_000),
    # With fewer, the list of heads is not full, and each request costs more than the one before.
    "branches": Stage(send_branches, start=KEPT_HEADS, limit=KEPT_HEADS),
    "refused": Stage(send_refused),
    "compact": post_once("/v1/compact", texts),
    "compact, responses": post_once("/v1/responses/compact", texts),
    "compaction item": Stage(send_items_of_ours),
    "count of tokens": post_once("/v1/messages/count_tokens", texts),
    "no chat": post_once("/v1/embeddings", texts),
    **{f"stream, {name}": stream(name) for name in WIRES},
    **{f"search, {name}": search(name, streamed=False) for name in WIRES},
    **{f"streamed search, {name}": search(name, streamed=True) for name in WIRES},
}


# Stages that take long, or whose work is that of others on another wire or with another strategy.
SLOW = {
    "branches",
    *(f"calls, {strategy}" for strategy in STRATEGIES.keys() - {DEFAULT_STRATEGY}),
    *(f"search, {name}" for name in WIRES.keys() - {"chat"}),
    *(f"streamed search, {name}" for name in WIRES.keys() - {"messages"}),
}


async def measure_growth(measure: Callable[[int], Awaitable[float]], start: int, limit: int) -> float:
    """Returns how much more an input costs that is four times as large; 0 if all inputs cost little."""
    size, cost_s = start, await measure(start)
    while cost_s < LEAST_S and size < limit:
        size = min(limit, size * math.ceil(min(20, 1.5 * LEAST_S / max(cost_s, 1e-4))))
        cost_s = await measure(size)
    if cost_s < LEAST_S:
        return 0.0
    large_s = await measure(4 * size)
    for _ in range(ATTEMPTS - 1):
        if large_s <= MOST_GROWTH * cost_s:
            break
        cost_s, large_s = min(cost_s, await measure(size)), min(large_s, await measure(4 * size))
    growth = large_s / cost_s
    if growth > MOST_GROWTH and size < limit:  # the cost may have a step, as at the size that is read at all
        growth = min(growth, await measure_growth(measure, min(limit, 4 * size), limit))
    return growth


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in STAGES]
)
async def test_the_cost_of_a_stage_grows_no_faster_than_its_input(name: str) -> None:
    stage = STAGES[name]
    async with run_way() as way:
        await way.measure(stage, 9)  # loads what is loaded late
        growth = await measure_growth(lambda size: way.measure(stage, size), stage.start, stage.limit)
    assert growth <= MOST_GROWTH


@pytest.mark.parametrize("name", READINGS)
async def test_the_cost_of_a_text_grows_no_faster_than_the_text(name: str) -> None:
    async def measure(size: int) -> float:
        text = piece * size
        started = begin()
        READINGS[name](text)
        return end(started)

    for piece in PIECES:
        READINGS[name](piece)
        assert await measure_growth(measure, 1_000, LARGEST_TEXT // len(piece)) <= MOST_GROWTH, piece


def list_way_modules() -> set[str]:
    names = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    return {name for name in names if f"{name}.".startswith(tuple(f"{each}." for each in WAY))}


def list_entered_modules() -> set[str]:
    """Runs all stages with small inputs, in a process of its own, and returns the modules that they enter."""
    command = [sys.executable, "-m", "tests.system.test_growth"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PACKAGE.parents[1])
    return set(ran.stdout.split())


def test_every_module_of_the_way_is_entered_by_a_stage() -> None:
    modules = {name for name in list_way_modules() if not name.endswith("__init__")}
    entered = list_entered_modules()
    assert sorted(modules - entered - EXEMPT.keys()) == []
    assert sorted(EXEMPT.keys() - modules) == []


async def _run_all(files: set[str]) -> None:
    async with run_way() as way:
        files.clear()  # what the start enters shows nothing
        for stage in STAGES.values():
            await way.measure(stage, 9)
        for reading in READINGS.values():
            reading("So it is.")


def main() -> None:
    """Prints the modules that the stages enter."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and not frame.f_code.co_name.startswith("<module"):
            files.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    asyncio.run(_run_all(files))
    sys.setprofile(None)
    own = [Path(file) for file in files if file.startswith(str(PACKAGE))]
    names = [".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in own]
    sys.stdout.write("\n".join(names))


if __name__ == "__main__":
    main()
