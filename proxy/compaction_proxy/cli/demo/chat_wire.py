"""The chat completions wire of the demo provider: `POST …/chat/completions`."""

from collections.abc import Iterator

from compaction_proxy.cli.demo import chat, validation
from compaction_proxy.cli.demo.chat import Answer, Asked, JsonObject
from compaction_proxy.cli.demo.format import Format, Headers
from compaction_proxy.cli.demo.validation import Refusal

VERSION: Headers = ((b"openai-version", b"2020-10-01"),)


def _output_tokens(body: JsonObject) -> int:
    asked = body.get("max_completion_tokens") or body.get("max_tokens") or 0
    return asked if isinstance(asked, int) else 0


def _read(body: JsonObject) -> Asked:
    return Asked(body, body, _output_tokens(body), bool(body.get("stream")))


def _envelope(answer: Answer) -> chat.Envelope:
    return chat.Envelope(f"chatcmpl-{answer.number:029d}", answer.created, answer.model)


def _whole(answer: Answer) -> bytes:
    return chat.completion(_envelope(answer), answer.reply, answer.usage)


def _events(answer: Answer) -> Iterator[bytes]:
    include = bool((answer.asked.body.get("stream_options") or {}).get("include_usage"))
    return chat.stream(_envelope(answer), answer.reply, answer.usage if include else None)


def _late(_answer: Answer, wrong: Refusal, _how: str) -> Iterator[bytes]:
    yield b"data: " + wrong.as_bytes() + b"\n\n"


CHAT = Format(
    judge=validation.judge,
    read=_read,
    overflow=validation.overflow,
    whole=_whole,
    events=_events,
    refused=lambda wrong, _number: wrong.as_bytes(),
    late=_late,
    headers=lambda _number: VERSION,
    empty=(chat.DONE,),
)
