"""Implements the demo provider: an ASGI app that speaks three wires, for the demo and for tests.

It validates requests as OpenAI and Anthropic do, counts tokens with a real tokenizer, refuses prompts that
exceed its context window, streams answers, and logs the requests that it receives. It serves these paths
under any prefix: `POST …/chat/completions`, `POST …/responses`, `POST …/messages`, `POST
…/messages/count_tokens` and `GET …/models`. It also serves `GET /__log`. Equal requests get equal answers,
except for `id`, ids of unscripted tool calls, `created` and the count of cached tokens.
"""

import hashlib
import json
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from compaction_proxy.cli.demo import chat, models, replies, script, validation
from compaction_proxy.cli.demo.chat import DemoAnswer, DemoRequest, JsonObject, Reply
from compaction_proxy.cli.demo.chat_wire import CHAT
from compaction_proxy.cli.demo.client import ClientDepartedError, DemoClient, Receive, Scope, Send
from compaction_proxy.cli.demo.faults import FAULT_HEADER, NO_FAULT, Fault, parse_fault
from compaction_proxy.cli.demo.format import OVERFLOW, DemoWire
from compaction_proxy.cli.demo.messages_wire import COUNT_TOKENS, MESSAGES, VERSION_HEADER
from compaction_proxy.cli.demo.prompt import PrefixCache, TokenMeter
from compaction_proxy.cli.demo.responses_wire import RESPONSES, format_response_id, iter_output_items
from compaction_proxy.cli.demo.seen import SeenRequest, to_log_fields
from compaction_proxy.cli.demo.stored import ResponseStore
from compaction_proxy.providers.types import TokenCounter
from compaction_proxy.replay import summarizer
from compaction_proxy.replay.prompt_size import round_down_to_cache_blocks
from compaction_proxy.replay.transcript import is_summary_request

AGENT_MODEL = "demo-agent"
SUMMARY_MODEL = "demo-summary"
GARBAGE = b'\x00\xff{"choices":[{"delta":\xfe'
MARK_DIGITS = 12


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
        self._stored = ResponseStore()
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
                await self._serve_request(CHAT, scope, client)
            case "POST", [*_, "responses"]:
                await self._serve_request(RESPONSES, scope, client)
            case "POST", [*_, "messages"]:
                await self._serve_request(MESSAGES, scope, client)
            case "POST", ["messages", "count_tokens"]:
                await self._serve_request(COUNT_TOKENS, scope, client)
            case "GET", [*_, "models"]:
                encode_models = (
                    models.encode_anthropic_models
                    if _get_header(scope, VERSION_HEADER)
                    else models.encode_openai_models
                )
                await client.send_json(200, encode_models(self._settings.models, self._settings.window))
            case "GET", ["__log"]:
                await client.send_json(200, chat.encode_json([to_log_fields(seen) for seen in self._log]))
            case method, _:
                refusal = validation.Refusal(f"Unknown request URL: {method} {scope['path']}.", status=404)
                await client.send_json(refusal.status, refusal.to_bytes())

    async def _serve_request(self, wire: DemoWire, scope: Scope, client: DemoClient) -> None:
        raw_body = await client.read_body()
        self._count += 1
        client.headers = wire.build_headers(self._count)
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        seen = SeenRequest(self._count, scope["path"], headers, raw_body)
        body, refused = _parse_body(raw_body)
        if wire.required_header and not _get_header(scope, wire.required_header):
            refused = validation.Refusal(f"{wire.required_header.decode()}: header is required")
        body = self._stored.expand_references(body) if wire is RESPONSES else body
        refused = refused or wire.validate(body)
        request = None if refused else wire.read_request(body)
        if request:
            seen, refused = self._check_prompt(wire, request, seen)
        fault, refused = self._choose_fault(seen.model, _get_header(scope, FAULT_HEADER), refused)
        is_late = request is not None and request.streamed and fault.late != "" and _is_overflow(refused)
        status = 200 if is_late else refused.status if refused else 0 if fault.hang else 200
        seen = replace(seen, status=status, code=(refused.code or "") if refused else "")
        self._log.append(seen)
        await client.wait(None if fault.hang else fault.first_byte_s)
        if request and refused and is_late:
            answer = self._build_answer(request, seen, Reply())
            await _send_stream(client, wire.encode_late_error(answer, refused, fault.late), fault)
        elif refused:
            await client.send_json(refused.status, wire.encode_refusal(refused, seen.number))
        elif request:
            await self._send_answer(wire, request, seen, fault, client)

    def _check_prompt(
        self, wire: DemoWire, request: DemoRequest, seen: SeenRequest
    ) -> tuple[SeenRequest, validation.Refusal | None]:
        model = request.prompt["model"]
        seen = replace(seen, model=model, output_tokens=request.output_tokens)
        if model not in self._settings.models:
            return seen, wire.build_model_refusal(model)
        seen = replace(seen, prompt_tokens=self._meter.count_prompt(request.prompt))
        refusal = wire.check_overflow(self._settings.window, seen.prompt_tokens, seen.output_tokens)
        if refusal:
            return seen, refusal
        cached, written = self._update_cache(request)
        return replace(seen, cached_tokens=cached, written_tokens=written), None

    def _update_cache(self, request: DemoRequest) -> tuple[int, int]:
        """Returns how many tokens of the prompt were read from the cache, and how many are written to it.

        Then the prefixes of the prompt are in the cache. Written tokens are counted only on the wire on which
        clients mark what to cache; the other wires return 0.
        """
        if request.cached_messages is None:
            return self._cache.match_prompt(request.prompt), 0
        if not request.cached_messages:
            return 0, 0
        marked_prompt = {**request.prompt, "messages": request.prompt["messages"][: request.cached_messages]}
        cached = self._cache.match_prompt(marked_prompt)
        return cached, max(0, round_down_to_cache_blocks(self._meter.count_prompt(marked_prompt)) - cached)

    def _choose_fault(
        self, model: str, fault_header: bytes, refusal: validation.Refusal | None
    ) -> tuple[Fault, validation.Refusal | None]:
        """Returns the fault to produce and the refusal to send.

        If the request is refused anyway, the only fault that still counts is `late`, which says how the
        refusal is reported.
        """
        base = self._settings.faults.get(model) or self._settings.faults.get("*") or NO_FAULT
        try:
            fault = parse_fault(fault_header.decode("latin-1"), base)
        except ValueError as error:
            return base, refusal or validation.Refusal(f"Invalid x-demo-fault: {error}")
        if refusal:
            return Fault(late=fault.late), refusal
        return fault, _build_fault_refusal(fault.status) if fault.status else None

    def _build_answer(self, request: DemoRequest, seen: SeenRequest, reply: Reply) -> DemoAnswer:
        usage = chat.DemoUsage(
            seen.prompt_tokens,
            self._meter.count_reply(reply, seen.model),
            seen.cached_tokens,
            seen.written_tokens,
            self._meter.count_reply(Reply(reply.thought), seen.model),
        )
        return DemoAnswer(request, seen.number, int(time.time()), _compute_prompt_mark(request), reply, usage)

    async def _send_answer(
        self, wire: DemoWire, request: DemoRequest, seen: SeenRequest, fault: Fault, client: DemoClient
    ) -> None:
        answer = self._build_answer(
            request, seen, Reply() if request.counts_only else self._compose_reply(request, seen)
        )
        if wire is RESPONSES:
            self._stored.keep_response(format_response_id(answer), request.body, iter_output_items(answer))
        if request.streamed:
            await _send_stream(
                client, wire.empty_events if fault.empty else wire.encode_events(answer), fault
            )
        else:
            await _send_plain(client, wire.encode_answer(answer), fault)

    def _compose_reply(self, request: DemoRequest, seen: SeenRequest) -> Reply:
        messages = request.prompt["messages"]
        if "summary" not in seen.model and not is_summary_request(messages):
            self._answers += 1
            reply = replies.compose_reply(request.prompt, script.load_script(), self._answers)
        else:
            budget = min(summarizer.TARGET_TOKENS, seen.output_tokens or summarizer.TARGET_TOKENS)
            reply = Reply(
                summarizer.summarize_messages(
                    messages, budget, lambda text: self._settings.counter.count(text, seen.model)
                )
            )
        reply = _shorten_reply(reply, seen, self._meter)
        return replace(reply, thought=replies.compose_thought(messages)) if request.thinks else reply


def create_provider(settings: DemoProviderSettings) -> DemoProvider:
    """Creates a provider as an ASGI app without any logged requests."""
    return DemoProvider(settings)


def _parse_body(raw: bytes) -> tuple[JsonObject, validation.Refusal | None]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return {}, validation.UNPARSED
    return (body, None) if isinstance(body, dict) else ({}, validation.UNPARSED)


def _get_header(scope: Scope, name: bytes) -> bytes:
    """Returns the values of a request header, joined by commas."""
    return b",".join(value for own, value in scope["headers"] if own == name)


def _is_overflow(refusal: validation.Refusal | None) -> bool:
    return refusal is not None and refusal.code == OVERFLOW


def _compute_prompt_mark(request: DemoRequest) -> str:
    """Returns hexadecimal digits that identify the messages of a prompt."""
    return hashlib.sha256(chat.encode_json(request.prompt["messages"])).hexdigest()[:MARK_DIGITS]


def _build_fault_refusal(status: int) -> validation.Refusal:
    code = "rate_limit_exceeded" if status == 429 else None
    message = f"The demo provider was told to answer {status}."
    return validation.Refusal(message, code=code, status=status, kind="server_error")


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


async def _send_stream(client: DemoClient, events: Iterable[bytes], fault: Fault) -> None:
    """Streams the events. If a fault cuts the stream, the body is unfinished, so the server disconnects."""
    await client.start(200, b"text/event-stream; charset=utf-8")
    for index, event in enumerate(events):
        if index == fault.cut_after:
            return
        await client.wait(fault.chunk_s if index else 0)
        await client.send(GARBAGE if fault.garbage else event, more=True)
    await client.send(b"")


async def _send_plain(client: DemoClient, data: bytes, fault: Fault) -> None:
    if fault.garbage:
        data = GARBAGE
    if fault.empty:
        data = b""
    if fault.cut_after is None:
        await client.send_json(200, data)
        return
    await client.start(200, b"application/json", len(data))
    await client.send(data[: len(data) // 2], more=True)
