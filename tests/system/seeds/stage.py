"""Conversations for tests of the seeds, and a provider that the test speaks for."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import httpx

from compaction_proxy.cli.demo.provider import DemoClient, Receive, Scope, Send
from tests.helpers.summaries import put_as_asked

JsonObject = dict[str, Any]

MODEL = "gpt-4o"
SUMMARY_MODEL = "summary-small"  # as in tests/conftest.py
DIGEST = "I read src/app.py, found the missing guard in `load`, added it, and all the tests pass now."
# What only our summary calls hold: the aligned form, and the two forms of a transcript.
CALL_MARKS = (
    "The conversation is everything above this message.",
    "## Messages to Summarize",
    "## Runs to Summarize",
)
PROBE_TOKENS = 16
# How near to a trigger a request is brought from either side, in tokens.
NEAR_TOKENS = 3


def user(text: str) -> JsonObject:
    return {"role": "user", "content": text}


def said(text: str) -> JsonObject:
    return {"role": "assistant", "content": text}


def system(text: str = "You build things.") -> JsonObject:
    return {"role": "system", "content": text}


def calling(number: int, name: str = "read", text: str | None = None) -> JsonObject:
    function = {"name": name, "arguments": json.dumps({"path": f"src/part_{number}.py"})}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": text, "tool_calls": [call]}


def result(number: int, text: str = "") -> JsonObject:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text or f"line {number}; " * 60}


def loop(count: int, first: int = 0) -> list[JsonObject]:
    """So many iterations, each a call and its result of about 200 tokens."""
    return [each for k in range(first, first + count) for each in (calling(k), result(k))]


def talk(count: int, words: int) -> list[JsonObject]:
    """So many messages in turn that hold so many words together, the first one a user's."""
    shares = [words // count + (k < words % count) for k in range(count)]
    return [(user if k % 2 == 0 else said)(f"{k}:" + " word" * share) for k, share in enumerate(shares)]


def of_tools(count: int = 1) -> list[JsonObject]:
    return [
        {"type": "function", "function": {"name": f"tool_{k}", "parameters": {"type": "object"}}}
        for k in range(count)
    ]


@dataclass
class Provider:
    """Answers every request, and summarises as it is told.

    Attributes:
        summary: What a summary call gets: a text, the status of an error, or what a function makes of it.
        prompt_tokens: What `usage` says of a request of the conversation; 0: nothing.
        held: What probes wait for.
        probed: Set once a probe has come.
        seen: The bodies of all requests, oldest first.
        keys: The credentials that came with them.
    """

    summary: str | int | Callable[[JsonObject], str] = DIGEST
    prompt_tokens: int = 0
    held: asyncio.Event | None = None
    probed: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[JsonObject] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        client = DemoClient(receive, send)
        raw = await client.read_body()
        if scope["method"] != "POST":  # somebody asks for windows
            await client.send_json(404, b"{}")
            return
        body = json.loads(raw)
        self.seen.append(body)
        self.keys.append(dict(scope["headers"]).get(b"authorization", b"").decode())
        if is_probe(body) and self.held is not None:
            self.probed.set()
            await self.held.wait()
        text = self._summary(body) if is_summary(body) else "All right."
        if isinstance(text, int):
            await client.send_json(text, b'{"error":{"message":"scripted","type":"scripted"}}')
            return
        message = {"role": "assistant", "content": text}
        answer: JsonObject = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        if self.prompt_tokens and not is_summary(body):
            answer["usage"] = {"prompt_tokens": self.prompt_tokens, "completion_tokens": 3}
        await client.send_json(200, json.dumps(answer).encode())

    def _summary(self, body: JsonObject) -> str | int:
        """The same text for each run, where several are asked for."""
        asked = body["messages"][-1]["content"]
        marks = [line for line in asked.splitlines() if line.startswith("=== RUN ")]
        summary = self.summary(body) if callable(self.summary) else self.summary
        if isinstance(summary, int):
            return summary
        if not marks:
            return put_as_asked(summary, *(str(each["content"]) for each in body["messages"]))
        return "\n".join(f"{mark}\n{summary}" for mark in marks)

    @property
    def summaries(self) -> list[JsonObject]:
        """The summary calls."""
        return [body for body in self.seen if is_summary(body)]

    @property
    def probes(self) -> list[JsonObject]:
        """The requests that only count."""
        return [body for body in self.seen if is_probe(body)]

    @property
    def forwarded(self) -> list[JsonObject]:
        """The requests of the conversation."""
        return [body for body in self.seen if not is_summary(body) and not is_probe(body)]

    @property
    def sent(self) -> list[JsonObject]:
        """The messages of the latest one."""
        messages: list[JsonObject] = self.forwarded[-1]["messages"]
        return messages


def is_summary(body: JsonObject) -> bool:
    last = body["messages"][-1]["content"]
    return isinstance(last, str) and any(mark in last for mark in CALL_MARKS)


def is_probe(body: JsonObject) -> bool:
    return PROBE_TOKENS in {body.get("max_tokens"), body.get("max_completion_tokens")}


@dataclass
class Place:
    """The proxy before its provider.

    Attributes:
        client: Asks the proxy.
        provider: What stands behind it.
    """

    client: httpx.AsyncClient
    provider: Provider

    async def ask(self, messages: list[JsonObject], name: str = "one", **more: Any) -> httpx.Response:
        """One request of a session. `headers` are added; all else becomes a member of the body."""
        headers = {"x-session-id": name, **more.pop("headers", {})}
        body = {"model": MODEL, "messages": messages, **more}
        answer = await self.client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    async def force(self, messages: list[JsonObject], **more: Any) -> httpx.Response:
        """A request that is to be compacted."""
        return await self.ask(messages, headers={"x-compaction": "force"}, **more)

    async def sizes(self, make: Callable[[int], list[JsonObject]], tokens: int) -> tuple[int, int]:
        """Words for `make` by which a request is just below so many tokens, and just at them."""
        words, below = tokens, 0
        for _ in range(8):
            answer = await self.ask(make(words), "sizing", headers={"x-compaction": "shadow"})
            size = int(answer.headers["x-compaction-tokens-before"])
            if tokens - NEAR_TOKENS <= size < tokens:
                below = words
                break
            step = int((tokens - 1 - size) / 1.03)
            words += step or (1 if size < tokens else -1)
        self.provider.seen.clear()
        return below, below + NEAR_TOKENS

    async def events(self, answer: httpx.Response) -> list[JsonObject]:
        """What the admin API tells of the conversation that an answer belongs to; rounds are `compacted`."""
        name = answer.headers["x-compaction-session"]
        told = await self.client.get(f"/admin/v1/conversations/{name}/events")
        assert told.status_code == 200, told.text
        events: list[JsonObject] = told.json()["events"]
        return events


def report(answer: httpx.Response, *names: str) -> list[str | None]:
    """These of our header fields."""
    return [answer.headers.get(f"x-compaction-{name}") for name in names]


Placed = Callable[..., AbstractAsyncContextManager[Place]]
