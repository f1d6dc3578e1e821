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
    includes_usage = bool((answer.asked.body.get("stream_options") or {}).get("include_usage"))
    return chat.encode_stream(_build_envelope(answer), answer.reply, answer.usage if includes_usage else None)


def _encode_late_error(_answer: DemoAnswer, wrong: Refusal, _how: str) -> Iterator[bytes]:
    yield b"data: " + wrong.to_bytes() + b"\n\n"


CHAT = DemoWire(
    judge=validation.judge_request,
    read=_read_request,
    overflow=validation.check_overflow,
    whole=_encode_answer,
    events=_encode_events,
    refused=lambda wrong, _number: wrong.to_bytes(),
    late=_encode_late_error,
    headers=lambda _number: VERSION,
    empty=(chat.DONE,),
)
