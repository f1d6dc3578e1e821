"""An OpenAI-compatible provider in one ASGI app: the demo's upstream and the tests' double.

It judges requests as OpenAI does, counts real tokens, refuses what does not fit its window, streams, and
remembers what it was sent. Served: `POST …/chat/completions` under any prefix, `GET …/models`, `GET /__log`.
The same request gets the same bytes but for `id`, `created` and the count of cached tokens.
"""

import json
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from proxy.demo import brain, refusal, script, wire
from proxy.demo.client import Client, DepartedError, Receive, Scope, Send
from proxy.demo.faults import FAULT_HEADER, NO_FAULT, Fault, parse_fault
from proxy.demo.prompt import Meter, PrefixCache
from proxy.demo.seen import Seen, outline
from proxy.demo.wire import JsonObject, Reply
from proxy.ports import TokenCounter
from proxy.rehearsal import summariser
from proxy.rehearsal.transcript import aligned

AGENT_MODEL = "demo-agent"
SUMMARY_MODEL = "demo-summary"
GARBAGE = b'\x00\xff{"choices":[{"delta":\xfe'


@dataclass(frozen=True, slots=True)
class Settings:
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


class Provider:
    """The ASGI app; `log` and `departures` tell what happened to it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._meter = Meter(settings.counter)
        self._cache = PrefixCache(self._meter)
        self._log: deque[Seen] = deque(maxlen=settings.log_records)
        self._count = 0
        self.departures = 0

    @property
    def log(self) -> tuple[Seen, ...]:
        """The requests so far, oldest first; a request appears when its answer begins."""
        return tuple(self._log)

    @property
    def meter(self) -> Meter:
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
                await self._route(scope, Client(receive, send))
            except DepartedError:
                self.departures += 1

    async def _route(self, scope: Scope, client: Client) -> None:
        match scope["method"], scope["path"].rstrip("/").rsplit("/", 2)[1:]:
            case "POST", ["chat", "completions"]:
                await self._chat(scope, client)
            case "GET", [*_, "models"]:
                await client.json(200, _models(self._settings))
            case "GET", ["__log"]:
                await client.json(200, wire.dumps([outline(seen) for seen in self._log]))
            case method, _:
                unknown = refusal.Refusal(f"Unknown request URL: {method} {scope['path']}.", status=404)
                await client.json(unknown.status, unknown.as_bytes())

    async def _chat(self, scope: Scope, client: Client) -> None:
        raw = await client.body()
        self._count += 1
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        seen = Seen(self._count, scope["path"], headers, raw)
        body, refused = _read(raw)
        if refused is None:
            seen, refused = self._judge(body, seen)
        fault = NO_FAULT
        if refused is None:
            fault, refused = self._fault(body["model"], scope["headers"])
        if fault.status:
            refused = _broken(fault.status)
        status = refused.status if refused else 0 if fault.hang else 200
        seen = replace(seen, status=status, code=(refused.code or "") if refused else "")
        self._log.append(seen)
        await client.wait(None if fault.hang else fault.first_byte_s)
        if refused:
            await client.json(refused.status, refused.as_bytes())
        else:
            await self._answer(body, seen, fault, client)

    def _judge(self, body: JsonObject, seen: Seen) -> tuple[Seen, refusal.Refusal | None]:
        wrong = refusal.judge(body)
        if wrong:
            return seen, wrong
        model = body["model"]
        seen = replace(seen, model=model, output_tokens=_output(body))
        if model not in self._settings.models:
            return seen, refusal.unknown_model(model)
        seen = replace(seen, prompt_tokens=self._meter.prompt(body))
        wrong = refusal.overflow(self._settings.window, seen.prompt_tokens, seen.output_tokens)
        if wrong:
            return seen, wrong
        return replace(seen, cached_tokens=self._cache.hit(body)), None

    def _fault(
        self, model: str, headers: Iterable[tuple[bytes, bytes]]
    ) -> tuple[Fault, refusal.Refusal | None]:
        base = self._settings.faults.get(model) or self._settings.faults.get("*") or NO_FAULT
        asked = ",".join(value.decode("latin-1") for name, value in headers if name == FAULT_HEADER)
        try:
            return parse_fault(asked, base), None
        except ValueError as error:
            return base, refusal.Refusal(f"Invalid x-demo-fault: {error}")

    async def _answer(self, body: JsonObject, seen: Seen, fault: Fault, client: Client) -> None:
        reply = self._reply(body, seen)
        usage = wire.Usage(seen.prompt_tokens, self._meter.reply(reply, seen.model), seen.cached_tokens)
        envelope = wire.Envelope(f"chatcmpl-{seen.number:029d}", int(time.time()), seen.model)
        if body.get("stream"):
            include = bool((body.get("stream_options") or {}).get("include_usage"))
            events = wire.stream(envelope, reply, usage if include else None)
            await _stream(client, events, fault)
        else:
            await _plain(client, wire.completion(envelope, reply, usage), fault)

    def _reply(self, body: JsonObject, seen: Seen) -> Reply:
        if "summary" not in seen.model and not aligned(body["messages"]):
            reply = brain.answer(body, script.load())
        else:
            budget = min(summariser.TARGET_TOKENS, seen.output_tokens or summariser.TARGET_TOKENS)
            reply = Reply(
                summariser.summarise(
                    body["messages"], budget, lambda text: self._settings.counter.count(text, seen.model)
                )
            )
        return _shortened(reply, seen, self._meter)


def create_provider(settings: Settings) -> Provider:
    """A provider as an ASGI app, with nothing seen yet."""
    return Provider(settings)


def _read(raw: bytes) -> tuple[JsonObject, refusal.Refusal | None]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return {}, refusal.UNPARSED
    return (body, None) if isinstance(body, dict) else ({}, refusal.UNPARSED)


def _output(body: JsonObject) -> int:
    asked = body.get("max_completion_tokens") or body.get("max_tokens") or 0
    return asked if isinstance(asked, int) else 0


def _broken(status: int) -> refusal.Refusal:
    code = "rate_limit_exceeded" if status == 429 else None
    message = f"The demo provider was told to answer {status}."
    return refusal.Refusal(message, code=code, status=status, kind="server_error")


def _shortened(reply: Reply, seen: Seen, meter: Meter) -> Reply:
    """The reply, cut where it exceeds the tokens asked for at most."""
    limit = seen.output_tokens
    if not limit or reply.calls or meter.reply(reply, seen.model) <= limit:
        return reply
    kept, used = [], 0
    for piece in wire.pieces(reply.text):
        used += meter.reply(Reply(piece), seen.model)
        if used > limit:
            break
        kept.append(piece)
    return Reply("".join(kept), finish_reason="length")


def _models(settings: Settings) -> bytes:
    rows = [
        {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "demo",
            "context_window": settings.window,
        }
        for name in settings.models
    ]
    return wire.dumps({"object": "list", "data": rows})


async def _stream(client: Client, events: Iterable[bytes], fault: Fault) -> None:
    """Stream the events. A cut leaves the body unfinished, upon which the server drops the connection."""
    if fault.empty:
        events = [wire.DONE]
    await client.start(200, b"text/event-stream; charset=utf-8")
    for index, event in enumerate(events):
        if index == fault.cut_after:
            return
        await client.wait(fault.chunk_s if index else 0)
        await client.send(GARBAGE if fault.garbage else event, more=True)
    await client.send(b"")


async def _plain(client: Client, data: bytes, fault: Fault) -> None:
    if fault.garbage:
        data = GARBAGE
    if fault.empty:
        data = b""
    if fault.cut_after is None:
        await client.json(200, data)
        return
    await client.start(200, b"application/json", len(data))
    await client.send(data[: len(data) // 2], more=True)
