"""Defines the replies of the demo provider, and encodes them as Chat Completions responses."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from compaction_proxy.wires.json.values import encode_json

JsonObject = dict[str, Any]

PIECE_WORDS = 3
ARGUMENT_PIECE_CHARACTERS = 16
FINGERPRINT = "fp_demo"
DONE = b"data: [DONE]\n\n"

_WORD = re.compile(r"\s*\S+\s*?(?=\s|$)|\s+")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model. `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of the demo model: text, tool calls or both."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"


@dataclass(frozen=True, slots=True)
class DemoUsage:
    """Token counts of one exchange, as the provider bills them.

    Attributes:
        prompt_tokens: All input tokens.
        completion_tokens: All output tokens.
        cached_tokens: Input tokens that were read from the prompt cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def to_json(self) -> JsonObject:
        """Returns the object for the field `usage` of a chat completion."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
        }


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that every JSON object of a response has. `created` is in seconds since the epoch."""

    id: str
    created: int
    model: str

    def wrap_fields(self, kind: str, fields: JsonObject) -> JsonObject:
        """Returns a JSON object with the fields of the envelope and the fields `fields`.

        `kind` is the type of the object, such as `chat.completion`.
        """
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "service_tier": "default",
            "system_fingerprint": FINGERPRINT,
            **fields,
        }


def split_words(text: str) -> list[str]:
    """Splits a text into pieces of up to `PIECE_WORDS` words. The concatenated pieces are the whole text.

    In a streamed response, the provider sends each piece in a chunk of its own.
    """
    words = _WORD.findall(text)
    return ["".join(words[start : start + PIECE_WORDS]) for start in range(0, len(words), PIECE_WORDS)]


def _to_call_json(call: ToolCall) -> JsonObject:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def build_message(reply: Reply) -> JsonObject:
    """Builds the assistant message of a reply, as a client adds it to its history."""
    message: JsonObject = {"role": "assistant", "content": reply.text or None}
    if reply.calls:
        message["tool_calls"] = [_to_call_json(call) for call in reply.calls]
    return message


def encode_completion(envelope: Envelope, reply: Reply, usage: DemoUsage) -> bytes:
    """Encodes a reply as the body of a response that is not streamed."""
    message = {**build_message(reply), "refusal": None, "annotations": []}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}
    return encode_json(
        envelope.wrap_fields("chat.completion", {"choices": [choice], "usage": usage.to_json()})
    )


def _iter_call_deltas(index: int, call: ToolCall) -> Iterator[JsonObject]:
    head = {"index": index, **_to_call_json(ToolCall(call.id, call.name, ""))}
    yield {"tool_calls": [head]}
    for start in range(0, len(call.arguments), ARGUMENT_PIECE_CHARACTERS):
        piece = call.arguments[start : start + ARGUMENT_PIECE_CHARACTERS]
        yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _iter_deltas(reply: Reply) -> Iterator[JsonObject]:
    yield {"role": "assistant", "content": None if reply.calls and not reply.text else "", "refusal": None}
    for piece in split_words(reply.text):
        yield {"content": piece}
    for index, call in enumerate(reply.calls):
        yield from _iter_call_deltas(index, call)


def encode_stream(envelope: Envelope, reply: Reply, usage: DemoUsage | None) -> Iterator[bytes]:
    """Yields the server-sent events of a streamed reply: the chunks, and then `[DONE]`.

    If `usage` is given, every chunk has a field `usage`. The field is null in the chunks of the reply. A
    further chunk after them has no choices, and contains the usage.
    """
    extra = {} if usage is None else {"usage": None}

    def encode_event(choices: list[JsonObject], more: JsonObject) -> bytes:
        return (
            b"data: "
            + encode_json(envelope.wrap_fields("chat.completion.chunk", {"choices": choices, **more}))
            + b"\n\n"
        )

    def build_choices(delta: JsonObject, finish_reason: str | None) -> list[JsonObject]:
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]

    for delta in _iter_deltas(reply):
        yield encode_event(build_choices(delta, None), extra)
    yield encode_event(build_choices({}, reply.finish_reason), extra)
    if usage is not None:
        yield encode_event([], {"usage": usage.to_json()})
    yield DONE
