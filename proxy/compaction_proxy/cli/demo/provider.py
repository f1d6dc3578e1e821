"""Implements the demo provider: an ASGI app that speaks Chat Completions, for the demo and for tests.

It validates requests as OpenAI does, counts tokens with a real tokenizer, refuses prompts that exceed its
context window, streams answers, and logs the requests that it receives. It serves `POST …/chat/completions`
and `GET …/models` under any prefix, and `GET /__log`. Equal requests get equal answers, except for `id`, ids
of unscripted tool calls, `created` and the count of cached tokens.
"""

import json
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from compaction_proxy.cli.demo import chat, replies, script, validation
from compaction_proxy.cli.demo.chat import JsonObject, Reply
from compaction_proxy.cli.demo.client import ClientDepartedError, DemoClient, Receive, Scope, Send
from compaction_proxy.cli.demo.faults import FAULT_HEADER, NO_FAULT, Fault, parse_fault
from compaction_proxy.cli.demo.prompt import PrefixCache, TokenMeter
from compaction_proxy.cli.demo.seen import SeenRequest, to_log_fields
from compaction_proxy.cli.demo.validation import Refusal
from compaction_proxy.providers.types import TokenCounter
from compaction_proxy.replay import summarizer
from compaction_proxy.replay.transcript import is_summary_request

AGENT_MODEL = "demo-agent"
SUMMARY_MODEL = "demo-summary"
GARBAGE = b'\x00\xff{"choices":[{"delta":\xfe'


@dataclass(frozen=True, slots=True)
class DemoProviderSettings:
    """Settings of the provider.

    Attributes:
        counter: Counts tokens.
        window: Largest sum of prompt and requested output, in tokens.
        models: Names of the offered models. A model with `summary` in its name writes summaries.
        faults: Faults by model name. The name `*` is for all models without a fault of their own. A request's
            header `x-demo-fault` adds further faults.
        log_records: Largest number of requests in the log. The newest are kept.
    """

    counter: TokenCounter
    window: int = 8192
    models: tuple[str, ...] = (AGENT_MODEL, SUMMARY_MODEL)
    faults: Mapping[str, Fault] = field(default_factory=dict)
    log_records: int = 1000


class DemoProvider:
    """The provider as an ASGI app.

    `log` holds the requests that it received. `departure_count` is the number of clients that disconnected
    before their answer was complete.
    """

    def __init__(self, settings: DemoProviderSettings) -> None:
        self._settings = settings
        self._meter = TokenMeter(settings.counter)
        self._cache = PrefixCache(self._meter)
        self._log: deque[SeenRequest] = deque(maxlen=settings.log_records)
        self._count = 0
        self._answers = 0  # without summaries, so that summaries do not change the ids of tool calls
        self.departure_count = 0

    @property
    def log(self) -> tuple[SeenRequest, ...]:
        """The logged requests, oldest first. A request is added just before its answer begins."""
        return tuple(self._log)

    @property
    def meter(self) -> TokenMeter:
        """The token meter of the provider."""
        return self._meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI connection scope."""
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})
        elif scope["type"] == "http":
            try:
                await self._route_request(scope, DemoClient(receive, send))
            except ClientDepartedError:
                self.departure_count += 1

    async def _route_request(self, scope: Scope, client: DemoClient) -> None:
        match scope["method"], scope["path"].rstrip("/").rsplit("/", 2)[1:]:
            case "POST", ["chat", "completions"]:
                await self._serve_completion(scope, client)
            case "GET", [*_, "models"]:
                await client.send_json(200, _encode_models(self._settings.models, self._settings.window))
            case "GET", ["__log"]:
                await client.send_json(200, chat.encode_json([to_log_fields(seen) for seen in self._log]))
            case method, _:
                refusal = Refusal(f"Unknown request URL: {method} {scope['path']}.", status=404)
                await client.send_json(refusal.status, refusal.to_bytes())

    async def _serve_completion(self, scope: Scope, client: DemoClient) -> None:
        seen = await self._read_request(scope, client)
        body, refusal = parse_body(seen.body)
        refusal = refusal or validation.validate_request(body)
        if not refusal:
            seen, refusal = self._check_prompt(body, seen)
        fault, refusal = await self._begin_answer(seen, refusal, scope, client)
        if refusal:
            await client.send_json(refusal.status, refusal.to_bytes())
        else:
            await self._send_completion(body, seen, fault, client)

    async def _read_request(self, scope: Scope, client: DemoClient) -> SeenRequest:
        """Reads the body and gives the request its number."""
        body = await client.read_body()
        self._count += 1
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        return SeenRequest(self._count, scope["path"], headers, body)

    def _check_prompt(self, body: JsonObject, seen: SeenRequest) -> tuple[SeenRequest, Refusal | None]:
        seen = replace(seen, model=body["model"], output_tokens=_get_output_tokens(body))
        if seen.model not in self._settings.models:
            return seen, validation.refuse_unknown_model(seen.model)
        seen = replace(seen, prompt_tokens=self._meter.count_prompt(body))
        refusal = validation.check_overflow(self._settings.window, seen.prompt_tokens, seen.output_tokens)
        if not refusal:
            seen = replace(seen, cached_tokens=self._cache.match_prompt(body))
        return seen, refusal

    async def _begin_answer(
        self, seen: SeenRequest, refusal: Refusal | None, scope: Scope, client: DemoClient
    ) -> tuple[Fault, Refusal | None]:
        """Logs the request, and waits if a fault delays the answer.

        Returns:
            The fault to produce, and the refusal to send. A request that is refused anyway has no fault.
        """
        fault = self._settings.faults.get(seen.model) or self._settings.faults.get("*") or NO_FAULT
        try:
            fault = parse_fault(get_header(scope, FAULT_HEADER).decode("latin-1"), fault)
        except ValueError as error:
            refusal = refusal or Refusal(f"Invalid x-demo-fault: {error}")
        if refusal:
            fault = NO_FAULT
        elif fault.status:
            refusal = _build_fault_refusal(fault.status)
        status = refusal.status if refusal else 0 if fault.hang else 200
        self._log.append(replace(seen, status=status, code=(refusal.code or "") if refusal else ""))
        await client.wait(None if fault.hang else fault.first_byte_s)
        return fault, refusal

    async def _send_completion(
        self, body: JsonObject, seen: SeenRequest, fault: Fault, client: DemoClient
    ) -> None:
        reply = self._compose_reply(body, seen)
        envelope = chat.Envelope(f"chatcmpl-{seen.number:029d}", int(time.time()), seen.model)
        usage = chat.DemoUsage(
            seen.prompt_tokens, self._meter.count_reply(reply, seen.model), seen.cached_tokens
        )
        if not body.get("stream"):
            await send_body(client, chat.encode_completion(envelope, reply, usage), fault)
            return
        includes_usage = (body.get("stream_options") or {}).get("include_usage")
        events = chat.encode_stream(envelope, reply, usage if includes_usage else None)
        await send_stream(client, (chat.DONE,) if fault.empty else events, fault)

    def _compose_reply(self, body: JsonObject, seen: SeenRequest) -> Reply:
        if "summary" not in seen.model and not is_summary_request(body["messages"]):
            self._answers += 1
            reply = replies.compose_reply(body, script.load_script(), self._answers)
        else:
            budget = min(summarizer.TARGET_TOKENS, seen.output_tokens or summarizer.TARGET_TOKENS)
            reply = Reply(
                summarizer.summarize_messages(
                    body["messages"], budget, lambda text: self._settings.counter.count(text, seen.model)
                )
            )
        return _shorten_reply(reply, seen, self._meter)


def create_provider(settings: DemoProviderSettings) -> DemoProvider:
    """Creates a provider as an ASGI app without any logged requests."""
    return DemoProvider(settings)


def parse_body(raw: bytes) -> tuple[JsonObject, Refusal | None]:
    """Parses a request body. Returns an empty object and a refusal if it is no JSON object."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return {}, validation.UNPARSED
    return (body, None) if isinstance(body, dict) else ({}, validation.UNPARSED)


def get_header(scope: Scope, name: bytes) -> bytes:
    """Returns the values of a request header, joined by commas."""
    return b",".join(value for own, value in scope["headers"] if own == name)


def _get_output_tokens(body: JsonObject) -> int:
    tokens = body.get("max_completion_tokens") or body.get("max_tokens") or 0
    return tokens if isinstance(tokens, int) else 0


def _encode_models(names: Iterable[str], window: int) -> bytes:
    """Encodes the list of models. `window` is the context window of all models, in tokens."""
    row: JsonObject = {"object": "model", "created": 0, "owned_by": "demo", "context_window": window}
    return chat.encode_json({"object": "list", "data": [{"id": name, **row} for name in names]})


def _build_fault_refusal(status: int) -> Refusal:
    code = "rate_limit_exceeded" if status == 429 else None
    message = f"The demo provider was told to answer {status}."
    return Refusal(message, code=code, status=status, kind="server_error")


def _shorten_reply(reply: Reply, seen: SeenRequest, meter: TokenMeter) -> Reply:
    """Cuts the reply's text to the requested limit of output tokens. A reply with tool calls is not cut."""
    limit = seen.output_tokens
    if not limit or reply.calls or meter.count_reply(reply, seen.model) <= limit:
        return reply
    pieces, tokens = [], 0
    for piece in chat.split_words(reply.text):
        tokens += meter.count_reply(Reply(piece), seen.model)
        if tokens > limit:
            break
        pieces.append(piece)
    return Reply("".join(pieces), finish_reason="length")


async def send_stream(client: DemoClient, events: Iterable[bytes], fault: Fault) -> None:
    """Streams the events. If a fault cuts the stream, the body is unfinished, so the server disconnects."""
    await client.start(200, b"text/event-stream; charset=utf-8")
    for index, event in enumerate(events):
        if index == fault.cut_after:
            return
        await client.wait(fault.chunk_s if index else 0)
        await client.send(GARBAGE if fault.garbage else event, more=True)
    await client.send(b"")


async def send_body(client: DemoClient, data: bytes, fault: Fault) -> None:
    """Sends an answer that is not streamed. If a fault cuts it, only half of it is sent."""
    if fault.garbage:
        data = GARBAGE
    if fault.empty:
        data = b""
    if fault.cut_after is None:
        await client.send_json(200, data)
        return
    await client.start(200, b"application/json", len(data))
    await client.send(data[: len(data) // 2], more=True)
