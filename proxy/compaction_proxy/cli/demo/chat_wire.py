"""Implements the Chat Completions wire of the demo provider: `POST …/chat/completions`."""

from collections.abc import Iterator

from compaction_proxy.cli.demo import chat, validation
from compaction_proxy.cli.demo.chat import DemoAnswer, DemoRequest, JsonObject
from compaction_proxy.cli.demo.format import DemoWire, Headers
from compaction_proxy.cli.demo.validation import Refusal

VERSION: Headers = ((b"openai-version", b"2020-10-01"),)


def _get_output_tokens(body: JsonObject) -> int:
    tokens = body.get("max_completion_tokens") or body.get("max_tokens") or 0
    return tokens if isinstance(tokens, int) else 0


def _read_request(body: JsonObject) -> DemoRequest:
    return DemoRequest(body, body, _get_output_tokens(body), bool(body.get("stream")))


def _build_envelope(answer: DemoAnswer) -> chat.Envelope:
    return chat.Envelope(f"chatcmpl-{answer.number:029d}", answer.created, answer.model)


def _encode_answer(answer: DemoAnswer) -> bytes:
    return chat.encode_completion(_build_envelope(answer), answer.reply, answer.usage)


def _encode_events(answer: DemoAnswer) -> Iterator[bytes]:
    includes_usage = bool((answer.request.body.get("stream_options") or {}).get("include_usage"))
    return chat.encode_stream(_build_envelope(answer), answer.reply, answer.usage if includes_usage else None)


def _encode_late_error(_answer: DemoAnswer, refusal: Refusal, _how: str) -> Iterator[bytes]:
    yield b"data: " + refusal.to_bytes() + b"\n\n"


CHAT = DemoWire(
    validate=validation.validate_request,
    read_request=_read_request,
    check_overflow=validation.check_overflow,
    encode_answer=_encode_answer,
    encode_events=_encode_events,
    encode_refusal=lambda wrong, _number: wrong.to_bytes(),
    encode_late_error=_encode_late_error,
    build_headers=lambda _number: VERSION,
    empty_events=(chat.DONE,),
)
