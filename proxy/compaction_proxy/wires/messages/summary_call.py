"""Calls of our own on the Messages wire: a summary request's body, and what its answer says.

A call is a system prompt and a message of ours, or the client's own request continued: then all that a
provider reads before the messages stays as it is, byte for byte.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from compaction_proxy.core.errors import SummaryFailed
from compaction_proxy.core.message import Message
from compaction_proxy.core.model_names import bare_name, is_new_claude
from compaction_proxy.core.summary.call import Conversation, SummaryAnswer, SummaryCall
from compaction_proxy.wires.json.slices import elements, members
from compaction_proxy.wires.messages.alternation import joined
from compaction_proxy.wires.messages.blocks import pieces
from compaction_proxy.wires.messages.thinking import suited
from compaction_proxy.wires.messages.usage import usage_tap
from compaction_proxy.wires.usage import mapping, parsed

# What a model may think where nobody has said how much: on its own account, and as the client has it think,
# which has to stay because the provider's cache knows the prompt with it.
UNASKED_ALLOWANCE_TOKENS: Final = 2_000
CLIENT_ALLOWANCE_TOKENS: Final = 8_000

# What a client's request says about its own answer, which a continuation of it must not.
_OF_THE_ANSWER: Final = frozenset(
    {"stream", "stop_sequences", "max_tokens", "temperature", "top_p", "top_k", "tool_choice", "metadata"}
    | {"output_config", "output_format", "diagnostics", "messages"}
)
_NO_TOOLS: Final = frozenset({b"[]", b"null", b""})
# What a request says of thinking that has none; `None` where it says nothing.
_UNTHINKING: Final = frozenset({"None", "disabled"})
# What says on this wire alone that an answer is unfinished, in the words of another.
_REASONS: Final = {"model_context_window_exceeded": "length"}


def allowance_tokens(model: str, conversation: Conversation | None = None) -> int:
    """Tokens that a model may think before its answer, on top of what the answer may take."""
    thinking = _thinking(conversation)
    if thinking.get("type") == "disabled":
        return 0
    budget = thinking.get("budget_tokens")
    if type(budget) is int and budget > 0:
        return budget
    if thinking:
        return CLIENT_ALLOWANCE_TOKENS
    return UNASKED_ALLOWANCE_TOKENS if is_new_claude(bare_name(model)) else 0


def _thinking(conversation: Conversation | None) -> Mapping[str, Any]:
    raw = _client_members(conversation).get("thinking", b"") if conversation else b""
    return mapping(parsed(raw)) if raw else {}


def own_members(call: SummaryCall, refused: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The members of the body that a provider may refuse, without those that it has refused before.

    Args:
        call: What to ask.
        refused: Names of such members.
    """
    fields: dict[str, Any] = {}
    if call.temperature is not None and str(_thinking(call.conversation).get("type")) in _UNTHINKING:
        fields["temperature"] = call.temperature
    if call.conversation and _client_members(call.conversation).get("tools", b"").strip() not in _NO_TOOLS:
        fields["tool_choice"] = {"type": "none"}
    return {name: value for name, value in fields.items() if name not in refused}


def request_body(call: SummaryCall, own: Mapping[str, Any]) -> bytes:
    """The body of a summary call.

    Args:
        call: What to ask.
        own: Its `own_members`.
    """
    limit = {"max_tokens": call.max_tokens + allowance_tokens(call.model, call.conversation)}
    if call.conversation is not None:
        return _continued(call.conversation, call.prompt, limit | dict(own))
    messages = [{"role": "user", "content": call.prompt}]
    said = {"model": call.model, "system": call.system, "messages": messages}
    return json.dumps({**said, **limit, **own}).encode()


def _continued(conversation: Conversation, prompt: str, own: Mapping[str, Any]) -> bytes:
    """The client's body with other messages; what is about its answer is ours."""
    own_list = pieces(elements(memoryview(_client_members(conversation)["messages"])))
    listed: Sequence[Message] = conversation.messages
    if [each.raw for each in listed] != list(own_list):
        suits = suited(conversation.raw, listed)
        listed, own = (
            suits.messages,
            {**own, **{name: json.loads(raw) for name, raw in suits.members.items()}},
        )
    asked = (*listed, Message(role="user", text=prompt))
    held = _client_members(conversation)
    fields = {name: value for name, value in held.items() if name not in _OF_THE_ANSWER and name not in own}
    effort = mapping(parsed(held.get("output_config", b"{}"))).get("effort")
    if isinstance(effort, str):
        fields["output_config"] = json.dumps({"effort": effort}).encode()
    fields["messages"] = b"[" + joined(asked) + b"]"
    fields |= {name: json.dumps(value).encode() for name, value in own.items()}
    return b"{" + b",".join(json.dumps(name).encode() + b":" + fields[name] for name in fields) + b"}"


def _client_members(conversation: Conversation) -> dict[str, bytes]:
    raw = conversation.raw
    return {name: raw[place.start : place.stop] for name, place in members(raw).items()}


def answer(body: bytes) -> SummaryAnswer:
    """What a message says.

    Raises:
        SummaryFailed: `garbage`; the body is none.
    """
    told = mapping(parsed(body))
    content = told.get("content")
    if not isinstance(content, list):
        raise SummaryFailed("garbage")
    blocks = [mapping(each) for each in content]
    texts = (each.get("text") for each in blocks if each.get("type") == "text")
    tap = usage_tap("application/json")
    tap.feed(body)
    usage, reason = tap.result(), told.get("stop_reason")
    reason = reason if isinstance(reason, str) else ""
    return SummaryAnswer(
        text="".join(each for each in texts if isinstance(each, str)),
        finish_reason=_REASONS.get(reason, reason),
        called_tools=any(str(each.get("type")).endswith("tool_use") for each in blocks),
        refused=reason == "refusal",
        prompt_tokens=usage.prompt_tokens if usage else 0,
        completion_tokens=usage.completion_tokens if usage else 0,
        cached_tokens=usage.cached_tokens if usage else 0,
    )
