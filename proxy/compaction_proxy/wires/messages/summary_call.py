"""Calls of our own on the Messages wire: a summary request's body, and what its answer says.

A call is a system prompt and a message of ours, or the client's own request continued: then all that a
provider reads before the messages stays as it is, byte for byte.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.message import Message
from compaction_proxy.core.model_names import is_new_claude, normalize_model_name
from compaction_proxy.core.summary.call import ContinuedConversation, SummaryAnswer, SummaryCall
from compaction_proxy.wires.json.slices import find_members, split_elements
from compaction_proxy.wires.messages.alternation import join_messages
from compaction_proxy.wires.messages.blocks import to_pieces
from compaction_proxy.wires.messages.thinking import adapt_for_provider
from compaction_proxy.wires.messages.usage import open_usage_tap
from compaction_proxy.wires.usage import as_mapping, parse_json

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


def get_thinking_allowance(model: str, conversation: ContinuedConversation | None = None) -> int:
    """Tokens that a model may think before its answer, on top of what the answer may take."""
    thinking = _read_thinking(conversation)
    if thinking.get("type") == "disabled":
        return 0
    budget = thinking.get("budget_tokens")
    if type(budget) is int and budget > 0:
        return budget
    if thinking:
        return CLIENT_ALLOWANCE_TOKENS
    return UNASKED_ALLOWANCE_TOKENS if is_new_claude(normalize_model_name(model)) else 0


def _read_thinking(conversation: ContinuedConversation | None) -> Mapping[str, Any]:
    raw = _read_client_members(conversation).get("thinking", b"") if conversation else b""
    return as_mapping(parse_json(raw)) if raw else {}


def build_own_members(call: SummaryCall, refused: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The members of the body that a provider may refuse, without those that it has refused before.

    Args:
        call: What to ask.
        refused: Names of such members.
    """
    fields: dict[str, Any] = {}
    if call.temperature is not None and str(_read_thinking(call.conversation).get("type")) in _UNTHINKING:
        fields["temperature"] = call.temperature
    if (
        call.conversation
        and _read_client_members(call.conversation).get("tools", b"").strip() not in _NO_TOOLS
    ):
        fields["tool_choice"] = {"type": "none"}
    return {name: value for name, value in fields.items() if name not in refused}


def build_request_body(call: SummaryCall, own_members: Mapping[str, Any]) -> bytes:
    """The body of a summary call.

    Args:
        call: What to ask.
        own_members: Its `build_own_members`.
    """
    limit = {"max_tokens": call.max_tokens + get_thinking_allowance(call.model, call.conversation)}
    if call.conversation is not None:
        return _continue_conversation(call.conversation, call.prompt, limit | dict(own_members))
    messages = [{"role": "user", "content": call.prompt}]
    said = {"model": call.model, "system": call.system, "messages": messages}
    return json.dumps({**said, **limit, **own_members}).encode()


def _continue_conversation(
    conversation: ContinuedConversation, prompt: str, own_members: Mapping[str, Any]
) -> bytes:
    """The client's body with other messages; what is about its answer is ours."""
    own_list = to_pieces(split_elements(memoryview(_read_client_members(conversation)["messages"])))
    listed: Sequence[Message] = conversation.messages
    if [each.raw for each in listed] != list(own_list):
        adapted = adapt_for_provider(conversation.raw, listed)
        listed, own_members = (
            adapted.messages,
            {**own_members, **{name: json.loads(raw) for name, raw in adapted.members.items()}},
        )
    asked = (*listed, Message(role="user", text=prompt))
    held = _read_client_members(conversation)
    fields = {
        name: value for name, value in held.items() if name not in _OF_THE_ANSWER and name not in own_members
    }
    effort = as_mapping(parse_json(held.get("output_config", b"{}"))).get("effort")
    if isinstance(effort, str):
        fields["output_config"] = json.dumps({"effort": effort}).encode()
    fields["messages"] = b"[" + join_messages(asked) + b"]"
    fields |= {name: json.dumps(value).encode() for name, value in own_members.items()}
    return b"{" + b",".join(json.dumps(name).encode() + b":" + fields[name] for name in fields) + b"}"


def _read_client_members(conversation: ContinuedConversation) -> dict[str, bytes]:
    raw = conversation.raw
    return {name: raw[place.start : place.stop] for name, place in find_members(raw).items()}


def parse_answer(body: bytes) -> SummaryAnswer:
    """What a message says.

    Raises:
        SummaryFailed: `garbage`; the body is none.
    """
    told = as_mapping(parse_json(body))
    content = told.get("content")
    if not isinstance(content, list):
        raise SummaryError("garbage")
    blocks = [as_mapping(each) for each in content]
    texts = (each.get("text") for each in blocks if each.get("type") == "text")
    tap = open_usage_tap("application/json")
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
