"""The Messages wire of the demo provider: `POST …/v1/messages` and `…/v1/messages/count_tokens`."""

import json
from collections.abc import Iterator
from dataclasses import replace

from compaction_proxy.cli.demo import messages_reading as reading
from compaction_proxy.cli.demo import messages_refusal
from compaction_proxy.cli.demo.chat import ARGUMENT_PIECE_CHARACTERS, Answer, Asked, JsonObject, dumps, pieces
from compaction_proxy.cli.demo.format import OVERFLOW, Format, Headers
from compaction_proxy.cli.demo.messages_binding import beginning
from compaction_proxy.cli.demo.signing import signature
from compaction_proxy.cli.demo.validation import Refusal

VERSION_HEADER = b"anthropic-version"

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_STOPS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


def _request_id(number: int) -> str:
    return f"req_{number:024d}"


def _headers(number: int) -> Headers:
    return ((b"request-id", _request_id(number).encode()),)


def _error(wrong: Refusal, number: int) -> JsonObject:
    kind = _KINDS.get(wrong.status, "api_error" if wrong.status >= 500 else "invalid_request_error")
    error = {"type": kind, "message": wrong.message}
    return {"type": "error", "error": error, "request_id": _request_id(number)}


def _usage(answer: Answer, output: int) -> JsonObject:
    """What was neither known nor remembered is `input_tokens`."""
    usage = answer.usage
    return {
        "input_tokens": usage.prompt - usage.cached - usage.written,
        "cache_creation_input_tokens": usage.written,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": output,
    }


def _message(answer: Answer, content: list[JsonObject], stop: str | None, output: int) -> JsonObject:
    written = {"ephemeral_5m_input_tokens": answer.usage.written, "ephemeral_1h_input_tokens": 0}
    return {
        "id": f"msg_{answer.number:024d}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": {**_usage(answer, output), "cache_creation": written, "service_tier": "standard"},
    }


def _input(arguments: str) -> JsonObject:
    """The arguments of a call as the object that this wire demands."""
    try:
        found = json.loads(arguments)
    except ValueError:
        found = arguments
    return found if isinstance(found, dict) else {"input": found}


def _content(answer: Answer) -> Iterator[JsonObject]:
    reply = answer.reply
    if reply.thought:
        signed = signature(reply.thought, beginning(answer.asked.body))
        yield {"type": "thinking", "thinking": reply.thought, "signature": signed}
    if reply.text:
        yield {"type": "text", "text": reply.text}
    for call in reply.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}


def _whole(answer: Answer) -> bytes:
    stop = _STOPS[answer.reply.finish_reason]
    return dumps(_message(answer, list(_content(answer)), stop, answer.usage.completion))


def _cut(text: str) -> Iterator[str]:
    for at in range(0, len(text), ARGUMENT_PIECE_CHARACTERS):
        yield text[at : at + ARGUMENT_PIECE_CHARACTERS]


def _deltas(block: JsonObject) -> Iterator[JsonObject]:
    match block["type"]:
        case "thinking":
            for piece in pieces(block["thinking"]):
                yield {"type": "thinking_delta", "thinking": piece}
            yield {"type": "signature_delta", "signature": block["signature"]}
        case "text":
            for piece in pieces(block["text"]):
                yield {"type": "text_delta", "text": piece}
        case _:
            yield {"type": "input_json_delta", "partial_json": ""}
            for piece in _cut(dumps(block["input"]).decode()):
                yield {"type": "input_json_delta", "partial_json": piece}


_EMPTY: dict[str, JsonObject] = {
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "tool_use": {"input": {}},
}


def _block_events(block: JsonObject, index: int) -> Iterator[JsonObject]:
    begun = {**block, **_EMPTY[block["type"]]}
    yield {"type": "content_block_start", "index": index, "content_block": begun}
    if index == 0:
        yield {"type": "ping"}
    for delta in _deltas(block):
        yield {"type": "content_block_delta", "index": index, "delta": delta}
    yield {"type": "content_block_stop", "index": index}


def _start(answer: Answer) -> JsonObject:
    return {"type": "message_start", "message": _message(answer, [], None, 1)}


def _all_events(answer: Answer) -> Iterator[JsonObject]:
    yield _start(answer)
    for index, block in enumerate(_content(answer)):
        yield from _block_events(block, index)
    stop = {"stop_reason": _STOPS[answer.reply.finish_reason], "stop_sequence": None}
    yield {"type": "message_delta", "delta": stop, "usage": _usage(answer, answer.usage.completion)}
    yield {"type": "message_stop"}


def _late_events(answer: Answer, wrong: Refusal, _how: str) -> Iterator[JsonObject]:
    yield _start(answer)
    yield {"type": "ping"}
    yield _error(wrong, answer.number)


def _named(events: Iterator[JsonObject]) -> Iterator[bytes]:
    for event in events:
        yield b"event: " + event["type"].encode() + b"\ndata: " + dumps(event) + b"\n\n"


def overflow(window: int, prompt: int, output: int) -> Refusal | None:
    """400 when `prompt` plus the `output` asked for, in tokens, exceed the window."""
    if prompt > window:
        return Refusal(f"prompt is too long: {prompt} tokens > {window} maximum", code=OVERFLOW)
    if prompt + output > window:
        text = (
            f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {window}, "
            "decrease input length or `max_tokens` and try again"
        )
        return Refusal(text, code=OVERFLOW)
    return None


def _unknown_model(model: str) -> Refusal:
    return Refusal(f"model: {model}", code="model_not_found", status=404)


def _read_counting(body: JsonObject) -> Asked:
    return replace(reading.read(body), streamed=False, remembered=0, counts_only=True)


MESSAGES = Format(
    judge=messages_refusal.judge,
    read=reading.read,
    overflow=overflow,
    whole=_whole,
    events=lambda answer: _named(_all_events(answer)),
    refused=lambda wrong, number: dumps(_error(wrong, number)),
    late=lambda answer, wrong, how: _named(_late_events(answer, wrong, how)),
    headers=_headers,
    unknown_model=_unknown_model,
    needs=VERSION_HEADER,
)
COUNT_TOKENS = replace(
    MESSAGES,
    judge=messages_refusal.judge_counting,
    read=_read_counting,
    overflow=lambda _window, _prompt, _output: None,
    whole=lambda answer: dumps({"input_tokens": answer.usage.prompt}),
)
