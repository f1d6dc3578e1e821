"""What the demo provider says, whichever wire it says it on, and the chat completions format as bytes."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

JsonObject = dict[str, Any]

PIECE_WORDS = 3
ARGUMENT_PIECE_CHARACTERS = 16
FINGERPRINT = "fp_demo"
DONE = b"data: [DONE]\n\n"

_WORD = re.compile(r"\s*\S+\s*?(?=\s|$)|\s+")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the model makes; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model says: text, tool calls, or both; before them a thought, on wires that have a place."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    thought: str = ""


@dataclass(frozen=True, slots=True)
class DemoUsage:
    """Tokens of one exchange, as the provider bills them.

    Attributes:
        prompt: All that were read.
        completion: All that were written, those of the thought included.
        cached: Of the prompt, those that were known.
        written: Of the prompt, those that have been remembered where a client marked them.
        thought: Of the completion, those of the thought.
    """

    prompt: int
    completion: int
    cached: int
    written: int = 0
    thought: int = 0

    def to_json(self) -> JsonObject:
        """The `usage` object of a chat completion."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
        }


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """A valid request as the provider understands it, whichever wire it came by.

    Attributes:
        body: In its own wire.
        prompt: The same as a chat request: `model`, `messages` and `tools`.
        output_tokens: What it asks for at most; 0 when it does not say.
        streamed: Whether the answer is to be.
        thinks: Whether the reply has a thought.
        cached_messages: How many messages from the first the prompt cache knows or learns; None for all.
        counts_only: Whether nothing but the size of the prompt is wanted.
    """

    body: JsonObject
    prompt: JsonObject
    output_tokens: int
    streamed: bool
    thinks: bool = False
    cached_messages: int | None = None
    counts_only: bool = False


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """A reply and what stands around it.

    Attributes:
        asked: What it answers.
        number: Of the request, from 1.
        created: Seconds since the epoch.
        mark: Hexadecimal digits that stand for the prompt; ids of what is said are made of them.
        reply: What is said.
        usage: What it costs.
    """

    asked: DemoRequest
    number: int
    created: int
    mark: str
    reply: Reply
    usage: DemoUsage

    @property
    def model(self) -> str:
        """The name of the model that was asked."""
        return str(self.asked.prompt["model"])


@dataclass(frozen=True, slots=True)
class Envelope:
    """What stands around every answer: its id, its time in seconds since the epoch, and the model's name."""

    id: str
    created: int
    model: str

    def wrap_fields(self, kind: str, fields: JsonObject) -> JsonObject:
        """`fields` inside an object of the named kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "service_tier": "default",
            "system_fingerprint": FINGERPRINT,
            **fields,
        }


def encode_json(value: object) -> bytes:
    """Compact JSON in UTF-8. A lone surrogate, which a client may send escaped, stays escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def split_words(text: str) -> list[str]:
    """The text cut into runs of a few words, as a model's stream arrives. Joined they are the text."""
    words = _WORD.findall(text)
    return ["".join(words[at : at + PIECE_WORDS]) for at in range(0, len(words), PIECE_WORDS)]


def _to_call_json(call: ToolCall) -> JsonObject:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def build_message(reply: Reply) -> JsonObject:
    """The reply as an assistant message, as a client would put it into its history."""
    message: JsonObject = {"role": "assistant", "content": reply.text or None}
    if reply.calls:
        message["tool_calls"] = [_to_call_json(call) for call in reply.calls]
    return message


def encode_completion(envelope: Envelope, reply: Reply, usage: DemoUsage) -> bytes:
    """A whole answer that is not streamed."""
    message = {**build_message(reply), "refusal": None, "annotations": []}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}
    return encode_json(
        envelope.wrap_fields("chat.completion", {"choices": [choice], "usage": usage.to_json()})
    )


def _iter_call_deltas(index: int, call: ToolCall) -> Iterator[JsonObject]:
    head = {"index": index, **_to_call_json(ToolCall(call.id, call.name, ""))}
    yield {"tool_calls": [head]}
    for at in range(0, len(call.arguments), ARGUMENT_PIECE_CHARACTERS):
        piece = call.arguments[at : at + ARGUMENT_PIECE_CHARACTERS]
        yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _iter_deltas(reply: Reply) -> Iterator[JsonObject]:
    yield {"role": "assistant", "content": None if reply.calls and not reply.text else "", "refusal": None}
    for piece in split_words(reply.text):
        yield {"content": piece}
    for index, call in enumerate(reply.calls):
        yield from _iter_call_deltas(index, call)


def encode_stream(envelope: Envelope, reply: Reply, usage: DemoUsage | None) -> Iterator[bytes]:
    """The answer as server-sent events, `[DONE]` included.

    With `usage` every chunk has the field, null but in an extra last chunk without choices.
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
