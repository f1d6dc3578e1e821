"""Implements the Messages wire: `POST …/messages` and `POST …/messages/count_tokens`."""

import json
from collections.abc import Iterator
from dataclasses import replace

from compaction_proxy.cli.demo.chat import (
    ARGUMENT_PIECE_CHARACTERS,
    JsonObject,
    split_words,
)
from compaction_proxy.cli.demo.validation import OVERFLOW, Refusal
from compaction_proxy.wires.json.values import encode_json
from tests.doubles import messages_request as reading
from tests.doubles import messages_validation
from tests.doubles.provider_wire import Headers, ProviderWire, WireAnswer, WireRequest
from tests.doubles.thought_binding import compute_prefix_digest
from tests.doubles.thought_signature import sign_thought

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


def _format_request_id(number: int) -> str:
    return f"req_{number:024d}"


def _build_headers(number: int) -> Headers:
    return ((b"request-id", _format_request_id(number).encode()),)


def _build_error(refusal: Refusal, number: int) -> JsonObject:
    kind = _KINDS.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
    error = {"type": kind, "message": refusal.message}
    return {"type": "error", "error": error, "request_id": _format_request_id(number)}


def _build_usage(answer: WireAnswer, output: int) -> JsonObject:
    """Builds the `usage` object. `input_tokens` excludes the tokens read from or written to the cache."""
    usage = answer.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.written_tokens,
        "cache_creation_input_tokens": usage.written_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": output,
    }


def _build_message(
    answer: WireAnswer, content: list[JsonObject], stop: str | None, output: int
) -> JsonObject:
    cache_creation = {
        "ephemeral_5m_input_tokens": answer.usage.written_tokens,
        "ephemeral_1h_input_tokens": 0,
    }
    return {
        "id": f"msg_{answer.number:024d}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": {
            **_build_usage(answer, output),
            "cache_creation": cache_creation,
            "service_tier": "standard",
        },
    }


def _parse_arguments(arguments: str) -> JsonObject:
    """Parses the arguments of a call. A value that is no object is wrapped, because this wire needs one."""
    try:
        value = json.loads(arguments)
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"input": value}


def _iter_blocks(answer: WireAnswer) -> Iterator[JsonObject]:
    reply = answer.reply
    if reply.thought:
        signed = sign_thought(reply.thought, compute_prefix_digest(answer.request.body))
        yield {"type": "thinking", "thinking": reply.thought, "signature": signed}
    if reply.text:
        yield {"type": "text", "text": reply.text}
    for call in reply.calls:
        yield {
            "type": "tool_use",
            "id": call.id,
            "name": call.name,
            "input": _parse_arguments(call.arguments),
        }


def _encode_answer(answer: WireAnswer) -> bytes:
    stop = _STOPS[answer.reply.finish_reason]
    return encode_json(
        _build_message(answer, list(_iter_blocks(answer)), stop, answer.usage.completion_tokens)
    )


def _split_json(text: str) -> Iterator[str]:
    for start in range(0, len(text), ARGUMENT_PIECE_CHARACTERS):
        yield text[start : start + ARGUMENT_PIECE_CHARACTERS]


def _iter_deltas(block: JsonObject) -> Iterator[JsonObject]:
    match block["type"]:
        case "thinking":
            for piece in split_words(block["thinking"]):
                yield {"type": "thinking_delta", "thinking": piece}
            yield {"type": "signature_delta", "signature": block["signature"]}
        case "text":
            for piece in split_words(block["text"]):
                yield {"type": "text_delta", "text": piece}
        case _:
            yield {"type": "input_json_delta", "partial_json": ""}
            for piece in _split_json(encode_json(block["input"]).decode()):
                yield {"type": "input_json_delta", "partial_json": piece}


_EMPTY: dict[str, JsonObject] = {
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "tool_use": {"input": {}},
}


def _iter_block_events(block: JsonObject, index: int) -> Iterator[JsonObject]:
    opening = {**block, **_EMPTY[block["type"]]}
    yield {"type": "content_block_start", "index": index, "content_block": opening}
    if index == 0:
        yield {"type": "ping"}
    for delta in _iter_deltas(block):
        yield {"type": "content_block_delta", "index": index, "delta": delta}
    yield {"type": "content_block_stop", "index": index}


def _iter_events(answer: WireAnswer) -> Iterator[JsonObject]:
    yield {"type": "message_start", "message": _build_message(answer, [], None, 1)}
    for index, block in enumerate(_iter_blocks(answer)):
        yield from _iter_block_events(block, index)
    stop = {"stop_reason": _STOPS[answer.reply.finish_reason], "stop_sequence": None}
    yield {
        "type": "message_delta",
        "delta": stop,
        "usage": _build_usage(answer, answer.usage.completion_tokens),
    }
    yield {"type": "message_stop"}


def _encode_events(answer: WireAnswer) -> Iterator[bytes]:
    for event in _iter_events(answer):
        yield b"event: " + event["type"].encode() + b"\ndata: " + encode_json(event) + b"\n\n"


def check_overflow(window: int, prompt: int, output: int) -> Refusal | None:
    """Returns a refusal if `prompt` plus the requested `output`, in tokens, exceed the context window."""
    if prompt > window:
        return Refusal(f"prompt is too long: {prompt} tokens > {window} maximum", code=OVERFLOW)
    if prompt + output > window:
        text = (
            f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {window}, "
            "decrease input length or `max_tokens` and try again"
        )
        return Refusal(text, code=OVERFLOW)
    return None


def _refuse_unknown_model(model: str) -> Refusal:
    return Refusal(f"model: {model}", code="model_not_found", status=404)


def _read_count_request(body: JsonObject) -> WireRequest:
    return replace(reading.read_request(body), streamed=False, cached_messages=0, counts_only=True)


MESSAGES = ProviderWire(
    validate=messages_validation.validate_request,
    read_request=reading.read_request,
    check_overflow=check_overflow,
    encode_answer=_encode_answer,
    encode_events=_encode_events,
    encode_refusal=lambda wrong, number: encode_json(_build_error(wrong, number)),
    build_headers=_build_headers,
    build_model_refusal=_refuse_unknown_model,
    required_header=VERSION_HEADER,
)
COUNT_TOKENS = replace(
    MESSAGES,
    validate=messages_validation.validate_count_request,
    read_request=_read_count_request,
    check_overflow=lambda _window, _prompt, _output: None,
    encode_answer=lambda answer: encode_json({"input_tokens": answer.usage.prompt_tokens}),
)
