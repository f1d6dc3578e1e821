"""A provider that speaks three wires in one ASGI app: the demo's upstream and the tests' double.

It judges requests as OpenAI and Anthropic do, counts real tokens, refuses what does not fit its window,
streams, and remembers what it was sent. Served under any prefix: `POST …/chat/completions`, `POST
…/responses`, `POST …/messages`, `POST …/messages/count_tokens`, `GET …/models`; and `GET /__log`. The same
request gets the same bytes but for `id`, ids of calls that are not of the script, `created` and the count of
cached tokens.
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
from compaction_proxy.replay.prompt_size import count_cached_tokens
from compaction_proxy.replay.transcript import is_summary_request

AGENT_MODEL = "demo-agent"
SUMMARY_MODEL = "demo-summary"
GARBAGE = b'\x00\xff{"choices":[{"delta":\xfe'
MARK_DIGITS = 12


@dataclass(frozen=True, slots=True)
class DemoProviderSettings:
    """How the provider behaves.

    Attributes:
        counter: Counts its tokens.
        window: Largest prompt plus output, in tokens.
        models: The models it offers; a name with `summary` in it summarises.
        faults: Trouble by model name, `*` for all; a request's `x-demo-fault` header adds to it.
        log_records: Number of newest requests remembered.
    """

    counter: TokenCounter
    window: int = 8192
    models: tuple[str, ...] = (AGENT_MODEL, SUMMARY_MODEL)
    faults: Mapping[str, Fault] = field(default_factory=dict)
    log_records: int = 1000


class DemoProvider:
    """The ASGI app; `log` and `departures` tell what happened to it."""

    def __init__(self, settings: DemoProviderSettings) -> None:
        self._settings = settings
        self._meter = TokenMeter(settings.counter)
        self._cache = PrefixCache(self._meter)
        self._stored = ResponseStore()
        self._log: deque[SeenRequest] = deque(maxlen=settings.log_records)
        self._count = 0
        self._answers = 0  # of the conversation model: summaries in between change no id of a call
        self.departures = 0

    @property
    def log(self) -> tuple[SeenRequest, ...]:
        """The requests so far, oldest first; a request appears when its answer begins."""
        return tuple(self._log)

    @property
    def meter(self) -> TokenMeter:
        """How this provider counts."""
        return self._meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})
        elif scope["type"] == "http":
            try:
                await self._route_request(scope, DemoClient(receive, send))
            except ClientDepartedError:
                self.departures += 1

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
                listed = (
                    models.encode_anthropic_models
                    if _get_header(scope, VERSION_HEADER)
                    else models.encode_openai_models
                )
                await client.send_json(200, listed(self._settings.models, self._settings.window))
            case "GET", ["__log"]:
                await client.send_json(200, chat.encode_json([to_log_fields(seen) for seen in self._log]))
            case method, _:
                unknown = validation.Refusal(f"Unknown request URL: {method} {scope['path']}.", status=404)
                await client.send_json(unknown.status, unknown.to_bytes())

    async def _serve_request(self, form: DemoWire, scope: Scope, client: DemoClient) -> None:
        raw = await client.read_body()
        self._count += 1
        client.headers = form.headers(self._count)
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        seen = SeenRequest(self._count, scope["path"], headers, raw)
        body, refused = _parse_body(raw)
        if form.needs and not _get_header(scope, form.needs):
            refused = validation.Refusal(f"{form.needs.decode()}: header is required")
        body = self._stored.expand_references(body) if form is RESPONSES else body
        refused = refused or form.judge(body)
        asked = None if refused else form.read(body)
        if asked:
            seen, refused = self._judge_prompt(form, asked, seen)
        fault, refused = self._choose_fault(seen.model, _get_header(scope, FAULT_HEADER), refused)
        told_late = asked is not None and asked.streamed and fault.late != "" and _is_overflow(refused)
        status = 200 if told_late else refused.status if refused else 0 if fault.hang else 200
        seen = replace(seen, status=status, code=(refused.code or "") if refused else "")
        self._log.append(seen)
        await client.wait(None if fault.hang else fault.first_byte_s)
        if asked and refused and told_late:
            begun = self._build_answer(asked, seen, Reply())
            await _send_stream(client, form.late(begun, refused, fault.late), fault)
        elif refused:
            await client.send_json(refused.status, form.refused(refused, seen.number))
        elif asked:
            await self._send_answer(form, asked, seen, fault, client)

    def _judge_prompt(
        self, form: DemoWire, asked: DemoRequest, seen: SeenRequest
    ) -> tuple[SeenRequest, validation.Refusal | None]:
        model = asked.prompt["model"]
        seen = replace(seen, model=model, output_tokens=asked.output_tokens)
        if model not in self._settings.models:
            return seen, form.unknown_model(model)
        seen = replace(seen, prompt_tokens=self._meter.count_prompt(asked.prompt))
        wrong = form.overflow(self._settings.window, seen.prompt_tokens, seen.output_tokens)
        if wrong:
            return seen, wrong
        known, written = self._update_cache(asked)
        return replace(seen, cached_tokens=known, written_tokens=written), None

    def _update_cache(self, asked: DemoRequest) -> tuple[int, int]:
        """Tokens of the prompt that the cache knew, and those that it was told to learn."""
        if asked.cached_messages is None:
            return self._cache.match_prompt(asked.prompt), 0
        if not asked.cached_messages:
            return 0, 0
        marked = {**asked.prompt, "messages": asked.prompt["messages"][: asked.cached_messages]}
        known = self._cache.match_prompt(marked)
        return known, max(0, count_cached_tokens(self._meter.count_prompt(marked)) - known)

    def _choose_fault(
        self, model: str, asked: bytes, refused: validation.Refusal | None
    ) -> tuple[Fault, validation.Refusal | None]:
        """What goes wrong, and what is refused for it; of a request refused anyway, only when it is told."""
        base = self._settings.faults.get(model) or self._settings.faults.get("*") or NO_FAULT
        try:
            fault = parse_fault(asked.decode("latin-1"), base)
        except ValueError as error:
            return base, refused or validation.Refusal(f"Invalid x-demo-fault: {error}")
        if refused:
            return Fault(late=fault.late), refused
        return fault, _build_fault_refusal(fault.status) if fault.status else None

    def _build_answer(self, asked: DemoRequest, seen: SeenRequest, reply: Reply) -> DemoAnswer:
        usage = chat.DemoUsage(
            seen.prompt_tokens,
            self._meter.count_reply(reply, seen.model),
            seen.cached_tokens,
            seen.written_tokens,
            self._meter.count_reply(Reply(reply.thought), seen.model),
        )
        return DemoAnswer(asked, seen.number, int(time.time()), _compute_mark(asked), reply, usage)

    async def _send_answer(
        self, form: DemoWire, asked: DemoRequest, seen: SeenRequest, fault: Fault, client: DemoClient
    ) -> None:
        answer = self._build_answer(
            asked, seen, Reply() if asked.counts_only else self._compose_reply(asked, seen)
        )
        if form is RESPONSES:
            self._stored.keep_response(format_response_id(answer), asked.body, iter_output_items(answer))
        if asked.streamed:
            await _send_stream(client, form.empty if fault.empty else form.events(answer), fault)
        else:
            await _send_plain(client, form.whole(answer), fault)

    def _compose_reply(self, asked: DemoRequest, seen: SeenRequest) -> Reply:
        messages = asked.prompt["messages"]
        if "summary" not in seen.model and not is_summary_request(messages):
            self._answers += 1
            reply = replies.compose_reply(asked.prompt, script.load_script(), self._answers)
        else:
            budget = min(summarizer.TARGET_TOKENS, seen.output_tokens or summarizer.TARGET_TOKENS)
            reply = Reply(
                summarizer.summarize_messages(
                    messages, budget, lambda text: self._settings.counter.count(text, seen.model)
                )
            )
        reply = _shorten_reply(reply, seen, self._meter)
        return replace(reply, thought=replies.compose_thought(messages)) if asked.thinks else reply


def create_provider(settings: DemoProviderSettings) -> DemoProvider:
    """A provider as an ASGI app, with nothing seen yet."""
    return DemoProvider(settings)


def _parse_body(raw: bytes) -> tuple[JsonObject, validation.Refusal | None]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return {}, validation.UNPARSED
    return (body, None) if isinstance(body, dict) else ({}, validation.UNPARSED)


def _get_header(scope: Scope, name: bytes) -> bytes:
    """The values of a request header, joined by commas."""
    return b",".join(value for own, value in scope["headers"] if own == name)


def _is_overflow(refused: validation.Refusal | None) -> bool:
    return refused is not None and refused.code == OVERFLOW


def _compute_mark(asked: DemoRequest) -> str:
    """Hexadecimal digits that stand for a prompt."""
    return hashlib.sha256(chat.encode_json(asked.prompt["messages"])).hexdigest()[:MARK_DIGITS]


def _build_fault_refusal(status: int) -> validation.Refusal:
    code = "rate_limit_exceeded" if status == 429 else None
    message = f"The demo provider was told to answer {status}."
    return validation.Refusal(message, code=code, status=status, kind="server_error")


def _shorten_reply(reply: Reply, seen: SeenRequest, meter: TokenMeter) -> Reply:
    """The reply, cut where it exceeds the tokens asked for at most."""
    limit = seen.output_tokens
    if not limit or reply.calls or meter.count_reply(reply, seen.model) <= limit:
        return reply
    kept, used = [], 0
    for piece in chat.split_words(reply.text):
        used += meter.count_reply(Reply(piece), seen.model)
        if used > limit:
            break
        kept.append(piece)
    return Reply("".join(kept), finish_reason="length")


async def _send_stream(client: DemoClient, events: Iterable[bytes], fault: Fault) -> None:
    """Stream the events. A cut leaves the body unfinished, upon which the server drops the connection."""
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
