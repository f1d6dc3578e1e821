"""Implements the demo provider: an ASGI app that serves Chat Completions, for the demo and for tests.

The provider validates requests as OpenAI does, counts tokens with a real tokenizer, refuses prompts that
exceed its context window, streams responses, and logs requests for chat completions. It serves `POST
…/chat/completions` and `GET …/models` under any path prefix, and `GET /__log`. Equal requests get equal
responses, except for `id`, `created`, the number of cached tokens, and the ids of tool calls outside the
script.
"""

import asyncio
import json
import logging
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from compaction_proxy.cli.demo import chat, replies, validation
from compaction_proxy.cli.demo.chat import JsonObject, Reply
from compaction_proxy.cli.demo.validation import Refusal
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.providers.types import TokenCounter
from compaction_proxy.replay.provider import (
    TARGET_TOKENS,
    ProviderPrompt,
    SimulatedProvider,
    extract_text,
    is_aligned_call,
    write_summary,
)
from compaction_proxy.telemetry import logs
from compaction_proxy.wires.json.slices import DECODER
from compaction_proxy.wires.json.values import encode_json

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

AGENT_MODEL = "demo-agent"
SUMMARY_MODEL = "demo-summary"
RULE = "*" * 72
BANNER = f"""\
{RULE}
* DEMO PROVIDER: its answers are scripted, and it calls no model.
* It accepts any key. Do not use it in production.
{RULE}"""


class ClientDepartedError(Exception):
    """Reports that the client has disconnected."""


class DemoClient:
    """The connection to the client of one request. The client may disconnect before the response is complete.

    Attributes:
        headers: Header fields that are added to the response.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.headers: tuple[tuple[bytes, bytes], ...] = ((b"openai-version", b"2020-10-01"),)

    async def read_body(self) -> bytes:
        """Reads the whole request body.

        Raises:
            ClientDepartedError: If the client disconnects before the body is complete.
        """
        parts = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDepartedError
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)

    async def start(self, status: int, kind: bytes, length: int | None = None) -> None:
        """Sends the status and the headers of the response.

        Args:
            status: HTTP status.
            kind: Content type.
            length: Size of the body in bytes. None sends a chunked body.
        """
        headers = [(b"content-type", kind), *self.headers]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, data: bytes, *, more: bool = False) -> None:
        """Sends a part of the response body. `more` says whether further parts follow."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def send_json(self, status: int, data: bytes) -> None:
        """Sends a whole response whose body is JSON."""
        await self.start(status, b"application/json", len(data))
        await self.send(data)

    async def send_stream(self, events: Iterable[bytes]) -> None:
        """Sends server-sent events as a stream."""
        await self.start(200, b"text/event-stream; charset=utf-8")
        for event in events:
            await self.send(event, more=True)
        await self.send(b"")


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request as the provider received it, and the outcome.

    Attributes:
        number: Number of the request, from 1.
        path: Path of the request.
        headers: Header fields in the order of the request, with names in lower case.
        body: Bytes of the body.
        model: The requested model. Empty if the request was refused before the model was read.
        prompt_tokens: Tokens of the prompt. 0 if the request was refused before its tokens were counted.
        output_tokens: The requested limit of output tokens. 0 if the request has no limit.
        cached_tokens: Tokens of the prompt that were read from the prompt cache.
        status: Status of the response. 0 if there was no response.
        code: Error code of the response. Empty without an error.
    """

    number: int
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    model: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    status: int = 0
    code: str = ""

    def parse_messages(self) -> list[JsonObject]:
        """Parses the body and returns the messages of the request."""
        messages: list[JsonObject] = json.loads(self.body)["messages"]
        return messages


def to_log_fields(seen: SeenRequest) -> JsonObject:
    """Returns the fields of a request that `GET /__log` shows.

    The headers are left out, because they contain credentials.
    """
    return {
        "number": seen.number,
        "path": seen.path,
        "model": seen.model,
        "prompt_tokens": seen.prompt_tokens,
        "output_tokens": seen.output_tokens,
        "cached_tokens": seen.cached_tokens,
        "status": seen.status,
        "code": seen.code,
        "body": seen.body.decode("utf-8", "replace"),
    }


@dataclass(frozen=True, slots=True)
class DemoProviderSettings:
    """Settings of the demo provider.

    Attributes:
        counter: Counts tokens.
        window: Maximum sum of prompt tokens and requested output tokens.
        models: Names of the offered models. A model with `summary` in its name writes summaries.
        log_records: Maximum number of requests in the log. Beyond it, the provider drops the oldest request.
    """

    counter: TokenCounter
    window: int = 8192
    models: tuple[str, ...] = (AGENT_MODEL, SUMMARY_MODEL)
    log_records: int = 1000


class DemoProvider:
    """The demo provider as an ASGI app.

    Attributes:
        meter: Counts tokens and simulates the prompt cache.
    """

    def __init__(self, settings: DemoProviderSettings) -> None:
        self._settings = settings
        self.meter = SimulatedProvider(settings.counter)
        self._log: deque[SeenRequest] = deque(maxlen=settings.log_records)
        self._count = 0
        self._answers = 0  # without summaries, so that summaries do not change the ids of tool calls

    @property
    def log(self) -> tuple[SeenRequest, ...]:
        """The logged requests for chat completions, oldest first.

        The provider logs a request after it has read the request, and before it responds.
        """
        return tuple(self._log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one HTTP request, or the lifespan events of the server."""
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})
        elif scope["type"] == "http":
            with suppress(ClientDepartedError):
                await self._route_request(scope, DemoClient(receive, send))

    async def _route_request(self, scope: Scope, client: DemoClient) -> None:
        match scope["method"], scope["path"].rstrip("/").rsplit("/", 2)[1:]:
            case "POST", ["chat", "completions"]:
                await self._serve_completion(scope, client)
            case "GET", [*_, "models"]:
                window = self._settings.window
                row = {"object": "model", "created": 0, "owned_by": "demo", "context_window": window}
                rows = [{"id": name, **row} for name in self._settings.models]
                await client.send_json(200, encode_json({"object": "list", "data": rows}))
            case "GET", ["__log"]:
                await client.send_json(200, encode_json([to_log_fields(seen) for seen in self._log]))
            case method, _:
                refusal = Refusal(f"Unknown request URL: {method} {scope['path']}.", status=404)
                await client.send_json(refusal.status, refusal.to_bytes())

    async def _serve_completion(self, scope: Scope, client: DemoClient) -> None:
        seen = await self._read_request(scope, client)
        body, refusal = parse_body(seen.body)
        refusal = refusal or validation.validate_request(body)
        if not refusal:
            seen, refusal = self._check_prompt(body, seen)
        await self._answer_request(body, seen, refusal, client)

    async def _answer_request(
        self, body: JsonObject, seen: SeenRequest, refusal: Refusal | None, client: DemoClient
    ) -> None:
        """Logs a request, and sends the refusal or else the response."""
        self._log_request(seen, refusal)
        if refusal:
            await client.send_json(refusal.status, refusal.to_bytes())
        else:
            await self._send_completion(body, seen, client)

    async def _read_request(self, scope: Scope, client: DemoClient) -> SeenRequest:
        """Reads the body of a request. Returns the request, which gets the next number."""
        body = await client.read_body()
        self._count += 1
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        return SeenRequest(self._count, scope["path"], headers, body)

    def _check_prompt(self, body: JsonObject, seen: SeenRequest) -> tuple[SeenRequest, Refusal | None]:
        seen = replace(seen, model=body["model"], output_tokens=_get_output_tokens(body))
        if seen.model not in self._settings.models:
            return seen, validation.refuse_unknown_model(seen.model)
        prompt = ProviderPrompt.from_body(body)
        seen = replace(seen, prompt_tokens=self.meter.count_prompt_tokens(prompt))
        refusal = validation.check_overflow(self._settings.window, seen.prompt_tokens, seen.output_tokens)
        if not refusal:
            seen = replace(seen, cached_tokens=self.meter.count_and_cache_prompt(prompt))
        return seen, refusal

    def _log_request(self, seen: SeenRequest, refusal: Refusal | None) -> None:
        status, code = (refusal.status, refusal.code or "") if refusal else (200, "")
        self._log.append(replace(seen, status=status, code=code))

    async def _send_completion(self, body: JsonObject, seen: SeenRequest, client: DemoClient) -> None:
        reply = self._compose_reply(body, seen)
        envelope = chat.Envelope(f"chatcmpl-{seen.number:029d}", int(time.time()), seen.model)
        usage = chat.DemoUsage(
            seen.prompt_tokens, self._count_reply_tokens(reply, seen.model), seen.cached_tokens
        )
        if not body.get("stream"):
            await client.send_json(200, chat.encode_completion(envelope, reply, usage))
            return
        includes_usage = (body.get("stream_options") or {}).get("include_usage")
        await client.send_stream(chat.encode_stream(envelope, reply, usage if includes_usage else None))

    def _count_reply_tokens(self, reply: Reply, model: str) -> int:
        texts = [reply.text, *(part for call in reply.calls for part in (call.name, call.arguments))]
        return sum(self.meter.count_text_tokens(text, model) for text in texts)

    def _compose_reply(self, body: JsonObject, seen: SeenRequest) -> Reply:
        messages = body["messages"]
        if "summary" in seen.model or is_aligned_call(extract_text(messages[-1])):
            raw_messages = [encode_json(message) for message in messages]
            limit = seen.output_tokens or TARGET_TOKENS
            text = write_summary(
                raw_messages, limit, lambda text: self.meter.count_text_tokens(text, seen.model)
            )
            reply = Reply(text)
        else:
            self._answers += 1
            reply = replies.compose_reply(body, replies.load_script(), self._answers)
        return self._shorten_reply(reply, seen)

    def _shorten_reply(self, reply: Reply, seen: SeenRequest) -> Reply:
        """Cuts the text of a reply to the requested limit of output tokens.

        Returns the reply unchanged if it has tool calls or if there is no limit.
        """
        limit = seen.output_tokens
        if not limit or reply.calls or self._count_reply_tokens(reply, seen.model) <= limit:
            return reply
        pieces, tokens = [], 0
        for piece in chat.split_words(reply.text):
            tokens += self.meter.count_text_tokens(piece, seen.model)
            if tokens > limit:
                break
            pieces.append(piece)
        return Reply("".join(pieces), finish_reason="length")


def parse_body(raw: bytes) -> tuple[JsonObject, Refusal | None]:
    """Parses a request body. Returns the JSON object and None.

    If the body is not a JSON object, returns an empty object and the refusal to send.
    """
    try:
        body = DECODER.decode(raw.decode())
    except (ValueError, RecursionError):
        return {}, validation.UNPARSED
    return (body, None) if isinstance(body, dict) else ({}, validation.UNPARSED)


def _get_output_tokens(body: JsonObject) -> int:
    tokens = body.get("max_completion_tokens") or body.get("max_tokens") or 0
    return tokens if isinstance(tokens, int) else 0


async def serve_provider(host: str, port: int, window: int) -> None:
    """Serves the demo provider until SIGINT or SIGTERM.

    Args:
        host: Address to listen on.
        port: TCP port. 0 takes a free port.
        window: Maximum sum of prompt tokens and requested output tokens.

    Raises:
        ConfigError: If the provider cannot listen on the address.
    """
    logs.configure_logging("console", logging.WARNING)
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    settings = DemoProviderSettings(TiktokenCounter(lambda line: print(line, file=sys.stderr)), window=window)
    async with serve_embedded(DemoProvider(settings), host, port) as url:
        print(BANNER)
        print(f"demo provider listens on {url}/v1, models {', '.join(settings.models)}", flush=True)
        await stopping.wait()
