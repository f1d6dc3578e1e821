"""Calls of our own on the Responses wire: a summary request's body, and what its answer says.

A call is instructions and one input of ours, or the client's own request continued: then everything that a
provider reads before the input, and with it its prompt cache, stays as it is, byte for byte.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from compaction_proxy.core.errors import SummaryFailed
from compaction_proxy.core.message import Message
from compaction_proxy.core.summary.call import Conversation, SummaryAnswer, SummaryCall
from compaction_proxy.wires.chat.summary_call import ACKNOWLEDGEMENT, allowance_tokens
from compaction_proxy.wires.json.slices import members
from compaction_proxy.wires.responses.items import ANSWER_OF
from compaction_proxy.wires.responses.messages import joined, kind_of
from compaction_proxy.wires.usage import believed, mapping, parsed

# The lowest that all models take which can reason: newer ones take no `minimal`, and older ones no `none`.
EFFORT: Final = "low"

# What a client's request says about its own answer, which a continuation of it must not.
_OF_THE_ANSWER: Final = frozenset(
    {"stream", "stream_options", "max_output_tokens", "max_tool_calls", "text", "top_logprobs", "include"}
    | {"temperature", "top_p", "tool_choice", "metadata", "store", "background", "background_options"}
    | {"truncation", "input", "previous_response_id", "conversation", "context_management", "moderation"}
)
# Why an answer was cut, by the names that every wire has for it here.
_REASONS: Final[Mapping[str, str]] = {"max_output_tokens": "length", "content_filter": "content_filter"}


def own_members(call: SummaryCall, refused: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The members of the body that a provider may refuse, without those that it has refused before.

    Args:
        call: What to ask.
        refused: Names of members.
    """
    client = _client_members(call.conversation) if call.conversation else {}
    reasoning = allowance_tokens(call.model) > 0
    limit = call.max_tokens + allowance_tokens(call.model, call.conversation)
    fields: dict[str, Any] = {"max_output_tokens": limit, "store": False}
    if not reasoning and call.temperature is not None:
        fields["temperature"] = call.temperature
    if reasoning and call.conversation is None:
        fields["reasoning"] = {"effort": EFFORT}
    if call.cache_key:
        fields["prompt_cache_key"] = call.cache_key
    if client.get("tools", b"[]").strip() not in {b"[]", b"null"}:
        fields["tool_choice"] = "none"
    return {name: value for name, value in fields.items() if name not in refused}


def request_body(call: SummaryCall, own: Mapping[str, Any]) -> bytes:
    """The body of a summary call.

    Args:
        call: What to ask.
        own: Its `own_members`.
    """
    if call.conversation is not None:
        return _continued(call.conversation, call.prompt, own)
    asked = {"model": call.model, "instructions": call.system, "input": call.prompt}
    return json.dumps({**asked, **own}).encode()


def _continued(conversation: Conversation, prompt: str, own: Mapping[str, Any]) -> bytes:
    """The client's body with another input; what is about its answer is ours."""
    listed = conversation.messages
    acknowledged = (ACKNOWLEDGEMENT,) if listed and listed[-1].answers else ()
    fields = {
        name: value
        for name, value in _client_members(conversation).items()
        if name not in _OF_THE_ANSWER and name not in own
    }
    fields["input"] = b"[%b]" % joined((*listed, *acknowledged, Message(role="user", text=prompt)))
    fields |= {name: json.dumps(value).encode() for name, value in own.items()}
    return b"{" + b",".join(json.dumps(name).encode() + b":" + fields[name] for name in fields) + b"}"


def _client_members(conversation: Conversation) -> dict[str, bytes]:
    raw = conversation.raw
    return {name: raw[place.start : place.stop] for name, place in members(raw).items()}


def answer(body: bytes) -> SummaryAnswer:
    """What an answer says.

    Raises:
        SummaryFailed: `garbage`; the body is none, or it failed.
    """
    told = mapping(parsed(body))
    output = told.get("output")
    if not isinstance(output, list) or told.get("status") == "failed":
        raise SummaryFailed("garbage")
    items = [mapping(each) for each in output]
    parts = [part for item in items if item.get("type") == "message" for part in _parts(item)]
    usage = mapping(told.get("usage"))
    cached = mapping(usage.get("input_tokens_details")).get("cached_tokens")
    counts = believed(usage.get("input_tokens"), usage.get("output_tokens"), cached)
    return SummaryAnswer(
        text="".join(_texts(parts)),
        finish_reason=_finish_reason(told),
        called_tools=any(kind_of(item) in ANSWER_OF for item in items),
        refused=any(part.get("type") == "refusal" for part in parts),
        prompt_tokens=counts.prompt_tokens if counts else 0,
        completion_tokens=counts.completion_tokens if counts else 0,
        cached_tokens=counts.cached_tokens if counts else 0,
    )


def _parts(item: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    content = item.get("content")
    yield from map(mapping, content if isinstance(content, list) else ())


def _texts(parts: Iterable[Mapping[str, object]]) -> Iterator[str]:
    for part in parts:
        text = part.get("text")
        if part.get("type") == "output_text" and isinstance(text, str):
            yield text


def _finish_reason(told: Mapping[str, object]) -> str:
    reason = mapping(told.get("incomplete_details")).get("reason")
    status = told.get("status")
    if isinstance(reason, str):
        return _REASONS.get(reason, reason)
    return "stop" if status == "completed" else status if isinstance(status, str) else ""
