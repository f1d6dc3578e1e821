"""Summary calls on the Chat Completions wire: builds the request body and parses the answer.

The body of a call holds either two messages that the proxy writes, or the client's conversation followed by
the prompt. In the second form, tools and other members that a provider puts before the messages stay the same
byte for byte, so the provider's prompt cache still applies.
"""

import json
import re
from collections import deque
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.message import Message
from compaction_proxy.core.summary.call import ContinuedConversation, SummaryAnswer, SummaryCall
from compaction_proxy.wires.chat.messages import encode_message
from compaction_proxy.wires.json.slices import find_members

# Matches the names of reasoning models. They accept no temperature, use another name for the output limit,
# and count their thinking towards that limit.
_REASONING = re.compile(r"(?:^|/)(?:o\d|gpt-5(?!.*chat)|gpt-[6-9])", re.IGNORECASE)
# Tokens added to the output limit for thinking, if the call does not continue the client's conversation.
REASONING_ALLOWANCE_TOKENS = 2_000
# Tokens added for thinking, if the call continues the client's conversation. Such a call keeps the client's
# reasoning effort, because the prompt cache depends on it.
CLIENT_EFFORT_ALLOWANCE_TOKENS = 8_000
# The reasoning efforts to try, in this order. No model accepts both `minimal` and `none`.
REASONING_EFFORTS = ("minimal", "none", "low")
# Added after tool results at the end of a conversation, because the user message with the prompt may not
# directly follow tool results.
ACKNOWLEDGEMENT = Message(role="assistant", text="Understood.")

# Members of a client's request that affect only its answer, and the messages. A summary call that continues
# the client's conversation does not copy them.
_ANSWER_MEMBERS = frozenset(
    {"stream", "stream_options", "n", "stop", "response_format", "max_tokens", "max_completion_tokens"}
    | {"logprobs", "top_logprobs", "logit_bias", "audio", "modalities", "prediction", "metadata", "store"}
    | {"tool_choice", "function_call", "temperature", "top_p", "frequency_penalty", "presence_penalty"}
    | {"web_search_options", "messages"}
)
_CACHE_KEY_HOSTS = re.compile(r"api\.openai\.com|.+\.openai\.azure\.com")
# The fields in which errors name a parameter. Other fields are ignored, because they may echo the request.
_ERROR_FIELDS = frozenset({"error", "errors", "param", "message", "detail", "details", "msg", "loc", "code"})
_MAX_WORDS = 64
_MAX_WORD_CHARACTERS = 2_000
_MAX_INPUT_CHARACTERS = 32
_MAX_COUNT = 1_000_000_000


def get_thinking_allowance(model: str, conversation: ContinuedConversation | None = None) -> int:
    """Returns how many tokens a model may use for thinking, in addition to the limit of its answer.

    Args:
        model: The summary model.
        conversation: The client's conversation, if the summary call continues it.
    """
    reasoning = _REASONING.search(model) is not None
    if conversation is None:
        return REASONING_ALLOWANCE_TOKENS if reasoning else 0
    thinking = _read_client_members(conversation).get("thinking")
    budget = _as_count(_as_mapping(_parse_json(thinking)).get("budget_tokens")) if thinking else 0
    return budget or (CLIENT_EFFORT_ALLOWANCE_TOKENS if reasoning else 0)


def accepts_prompt_cache_key(url: str) -> bool:
    """Returns whether the provider at this URL is known to accept `prompt_cache_key`.

    Other providers may refuse a request that has this member.
    """
    return _CACHE_KEY_HOSTS.fullmatch(urlsplit(url).hostname or "") is not None


def build_own_members(call: SummaryCall, refused: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Builds the members of a summary call that some providers refuse.

    Args:
        call: The summary call.
        refused: The results of `find_refused_member` for earlier calls to this provider. These members are
            left out.
    """
    client = _read_client_members(call.conversation) if call.conversation else {}
    reasoning = _REASONING.search(call.model) is not None
    limit = call.max_tokens + get_thinking_allowance(call.model, call.conversation)
    names = ["max_tokens", "max_completion_tokens"]
    if reasoning or "max_completion_tokens" in client:
        names.reverse()
    fields: dict[str, Any] = dict.fromkeys([name for name in names if name not in refused][:1], limit)
    if not reasoning and call.temperature is not None:
        fields["temperature"] = call.temperature
    if reasoning and call.conversation is None:
        efforts = [each for each in REASONING_EFFORTS if f"reasoning_effort={each}" not in refused]
        fields |= {"reasoning_effort": efforts[0]} if efforts else {}
    if call.cache_key:
        fields["prompt_cache_key"] = call.cache_key
    fields |= {
        choice: "none"
        for offered, choice in (("tools", "tool_choice"), ("functions", "function_call"))
        if client.get(offered, b"[]").strip() not in {b"[]", b"null"}
    }
    return {name: value for name, value in fields.items() if name not in refused}


def build_request_body(call: SummaryCall, own_members: Mapping[str, Any]) -> bytes:
    """Builds the body of a summary call.

    Args:
        call: The summary call.
        own_members: The result of `build_own_members`.
    """
    if call.conversation is not None:
        return _continue_conversation(call.conversation, call.prompt, own_members)
    messages = [{"role": "system", "content": call.system}, {"role": "user", "content": call.prompt}]
    return json.dumps({"model": call.model, "messages": messages, **own_members}).encode()


def _continue_conversation(
    conversation: ContinuedConversation, prompt: str, own_members: Mapping[str, Any]
) -> bytes:
    """Returns the client's body with the prompt after its messages.

    The members in `_ANSWER_MEMBERS` are left out, and `own_members` are added.
    """
    messages = conversation.messages
    acknowledgements = (ACKNOWLEDGEMENT,) if messages and messages[-1].answered_call_ids else ()
    all_messages = (*messages, *acknowledgements, Message(role="user", text=prompt))
    fields = {
        name: value
        for name, value in _read_client_members(conversation).items()
        if name not in _ANSWER_MEMBERS and name not in own_members
    }
    fields["messages"] = b"[" + b",".join(each.raw or encode_message(each) for each in all_messages) + b"]"
    fields |= {name: json.dumps(value).encode() for name, value in own_members.items()}
    return b"{" + b",".join(json.dumps(name).encode() + b":" + fields[name] for name in fields) + b"}"


def _read_client_members(conversation: ContinuedConversation) -> dict[str, bytes]:
    raw = conversation.raw_body
    return {name: raw[place.start : place.stop] for name, place in find_members(raw).items()}


def find_refused_member(body: bytes, own_members: Mapping[str, Any]) -> str | None:
    """Returns the name of the member that a provider refuses according to its error; None if unknown.

    If the error names the requested reasoning effort, the provider refuses only this effort. The result then
    contains it: `reasoning_effort=minimal`.

    Args:
        body: The body of the error.
        own_members: The members of the refused call that `build_own_members` returned.
    """
    text = body[:_MAX_WORD_CHARACTERS].decode("utf-8", "replace")
    words = _collect_words(_parse_json(body) or text)
    joined = "\n".join(words)
    places = {name: re.search(rf"\b{name}\b", joined) for name in own_members}
    mentioned = sorted((place.start(), name) for name, place in places.items() if place)
    name = next((word for word in words if word in own_members), mentioned[0][1] if mentioned else None)
    if name == "reasoning_effort" and re.search(rf"\b{own_members[name]}\b", joined):
        return f"{name}={own_members[name]}"
    return name


def _collect_words(root: Any) -> list[str]:
    """Returns the texts in an error of any shape, outermost first."""
    words: list[str] = []
    nodes = deque([root])
    while nodes and len(words) < _MAX_WORDS:
        node = nodes.popleft()
        if isinstance(node, dict):
            nodes.extend(value for key, value in node.items() if key in _ERROR_FIELDS)
            input_value = node.get("input")
            nodes.extend(
                [input_value]
                if isinstance(input_value, str) and len(input_value) <= _MAX_INPUT_CHARACTERS
                else []
            )
        elif isinstance(node, list):
            nodes.extend(node[:_MAX_WORDS])
        elif isinstance(node, str):
            words.append(node[:_MAX_WORD_CHARACTERS])
    return words


def parse_answer(body: bytes) -> SummaryAnswer:
    """Parses a chat completion.

    Raises:
        SummaryError: `garbage`: the body is not a chat completion.
    """
    completion = _as_mapping(_parse_json(body))
    choices = completion.get("choices")
    choice = _as_mapping(choices[0]) if isinstance(choices, list) and choices else None
    if not choice or not isinstance(choice.get("message"), Mapping):
        raise SummaryError("garbage")
    message = choice["message"]
    usage = _as_mapping(completion.get("usage"))
    reason = choice.get("finish_reason")
    return SummaryAnswer(
        text=_join_text(message.get("content")),
        finish_reason=reason if isinstance(reason, str) else "",
        called_tools=bool(message.get("tool_calls") or message.get("function_call")),
        refused=bool(message.get("refusal")),
        prompt_tokens=_as_count(usage.get("prompt_tokens")),
        completion_tokens=_as_count(usage.get("completion_tokens")),
        cached_tokens=_get_cached_tokens(usage),
    )


def _get_cached_tokens(usage: Mapping[str, Any]) -> int:
    """Returns the cached tokens of the input; 0 if unknown. Providers report them in one of three places."""
    details = _as_mapping(usage.get("prompt_tokens_details"))
    counts = (details.get("cached_tokens"), usage.get("prompt_cache_hit_tokens"), usage.get("cached_tokens"))
    return next((count for count in map(_as_count, counts) if count), 0)


def _parse_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _join_text(content: Any) -> str:
    """Returns the text of a message's content, without the thinking that some models put into the content."""
    if isinstance(content, list):
        parts = (_as_mapping(each) for each in content)
        texts = (part.get("text") for part in parts if part.get("type") in {None, "text", "output_text"})
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _as_count(value: Any) -> int:
    return value if type(value) is int and 0 <= value <= _MAX_COUNT else 0
