"""Summary calls on the Messages wire: builds the request body and parses the answer.

The body of a call holds either a system prompt and a message that the proxy writes, or the client's
conversation followed by the prompt. In the second form, tools and other members that a provider puts before
the messages stay the same byte for byte, so the provider's prompt cache still applies.
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
from compaction_proxy.wires.messages.blocks import group_into_pieces
from compaction_proxy.wires.messages.thinking import adapt_for_provider
from compaction_proxy.wires.messages.usage import open_usage_tap
from compaction_proxy.wires.usage import as_mapping, parse_json

# Tokens added to the output limit for thinking, if the client has set no thinking budget.
# `CLIENT_ALLOWANCE_TOKENS` applies if the call continues a client's request that has the member `thinking`,
# and `DEFAULT_ALLOWANCE_TOKENS` in other cases. A call keeps the client's `thinking`, because the prompt
# cache depends on it.
DEFAULT_ALLOWANCE_TOKENS: Final = 2_000
CLIENT_ALLOWANCE_TOKENS: Final = 8_000

# Members of a client's request that affect only its answer, and the messages. A summary call that continues
# the client's conversation does not copy them.
_ANSWER_MEMBERS: Final = frozenset(
    {"stream", "stop_sequences", "max_tokens", "temperature", "top_p", "top_k", "tool_choice", "metadata"}
    | {"output_config", "output_format", "diagnostics", "messages"}
)
_EMPTY_TOOLS: Final = frozenset({b"[]", b"null", b""})
# Values of `thinking.type` that mean that thinking is off. `None` means that the request has no such member.
_NO_THINKING_TYPES: Final = frozenset({"None", "disabled"})
# Translates stop reasons of this wire into the finish reasons of the Chat Completions wire.
_FINISH_REASONS: Final = {"model_context_window_exceeded": "length"}


def get_thinking_allowance(model: str, conversation: ContinuedConversation | None = None) -> int:
    """Returns how many tokens a model may use for thinking, in addition to the limit of its answer.

    Args:
        model: The summary model.
        conversation: The client's conversation, if the summary call continues it.
    """
    thinking = _read_thinking(conversation)
    if thinking.get("type") == "disabled":
        return 0
    budget = thinking.get("budget_tokens")
    if type(budget) is int and budget > 0:
        return budget
    if thinking:
        return CLIENT_ALLOWANCE_TOKENS
    return DEFAULT_ALLOWANCE_TOKENS if is_new_claude(normalize_model_name(model)) else 0


def _read_thinking(conversation: ContinuedConversation | None) -> Mapping[str, Any]:
    raw = _read_client_members(conversation).get("thinking", b"") if conversation else b""
    return as_mapping(parse_json(raw)) if raw else {}


def build_own_members(call: SummaryCall, refused: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Builds the members of a summary call that some providers refuse.

    Args:
        call: The summary call.
        refused: The names of members that this provider has already refused. They are left out.
    """
    fields: dict[str, Any] = {}
    if (
        call.temperature is not None
        and str(_read_thinking(call.conversation).get("type")) in _NO_THINKING_TYPES
    ):
        fields["temperature"] = call.temperature
    if (
        call.conversation
        and _read_client_members(call.conversation).get("tools", b"").strip() not in _EMPTY_TOOLS
    ):
        fields["tool_choice"] = {"type": "none"}
    return {name: value for name, value in fields.items() if name not in refused}


def build_request_body(call: SummaryCall, own_members: Mapping[str, Any]) -> bytes:
    """Builds the body of a summary call.

    Args:
        call: The summary call.
        own_members: The result of `build_own_members`.
    """
    limit = {"max_tokens": call.max_tokens + get_thinking_allowance(call.model, call.conversation)}
    if call.conversation is not None:
        return _continue_conversation(call.conversation, call.prompt, limit | dict(own_members))
    messages = [{"role": "user", "content": call.prompt}]
    fields = {"model": call.model, "system": call.system, "messages": messages}
    return json.dumps({**fields, **limit, **own_members}).encode()


def _continue_conversation(
    conversation: ContinuedConversation, prompt: str, own_members: Mapping[str, Any]
) -> bytes:
    """Returns the client's body with the prompt after its messages.

    The members in `_ANSWER_MEMBERS` are left out, except for the effort, and `own_members` are added.
    """
    own_list = group_into_pieces(split_elements(memoryview(_read_client_members(conversation)["messages"])))
    messages: Sequence[Message] = conversation.messages
    if [each.raw for each in messages] != list(own_list):
        adapted = adapt_for_provider(conversation.raw_body, messages)
        messages, own_members = (
            adapted.messages,
            {**own_members, **{name: json.loads(raw) for name, raw in adapted.members.items()}},
        )
    all_messages = (*messages, Message(role="user", text=prompt))
    client_members = _read_client_members(conversation)
    fields = {
        name: value
        for name, value in client_members.items()
        if name not in _ANSWER_MEMBERS and name not in own_members
    }
    effort = as_mapping(parse_json(client_members.get("output_config", b"{}"))).get("effort")
    if isinstance(effort, str):
        fields["output_config"] = json.dumps({"effort": effort}).encode()
    fields["messages"] = b"[" + join_messages(all_messages) + b"]"
    fields |= {name: json.dumps(value).encode() for name, value in own_members.items()}
    return b"{" + b",".join(json.dumps(name).encode() + b":" + fields[name] for name in fields) + b"}"


def _read_client_members(conversation: ContinuedConversation) -> dict[str, bytes]:
    raw = conversation.raw_body
    return {name: raw[place.start : place.stop] for name, place in find_members(raw).items()}


def parse_answer(body: bytes) -> SummaryAnswer:
    """Parses an answer of the Messages API.

    Raises:
        SummaryError: `garbage`: the body is not an answer of the Messages API.
    """
    payload = as_mapping(parse_json(body))
    content = payload.get("content")
    if not isinstance(content, list):
        raise SummaryError("garbage")
    blocks = [as_mapping(each) for each in content]
    texts = (each.get("text") for each in blocks if each.get("type") == "text")
    tap = open_usage_tap("application/json")
    tap.feed(body)
    usage, reason = tap.result(), payload.get("stop_reason")
    reason = reason if isinstance(reason, str) else ""
    return SummaryAnswer(
        text="".join(each for each in texts if isinstance(each, str)),
        finish_reason=_FINISH_REASONS.get(reason, reason),
        called_tools=any(str(each.get("type")).endswith("tool_use") for each in blocks),
        refused=reason == "refusal",
        prompt_tokens=usage.prompt_tokens if usage else 0,
        completion_tokens=usage.completion_tokens if usage else 0,
        cached_tokens=usage.cached_tokens if usage else 0,
    )
