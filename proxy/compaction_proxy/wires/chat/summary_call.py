"""Calls of our own on the chat completions wire: a summary request's body, and what its answer says.

A call is two messages of ours, or the client's own request continued: then everything that a provider reads
before the messages, and with it its prompt cache, stays as it is, byte for byte.
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

# Models that think before they answer: they take no temperature and name their output limit differently, and
# what they think counts towards it.
_REASONING = re.compile(r"(?:^|/)(?:o\d|gpt-5(?!.*chat)|gpt-[6-9])", re.IGNORECASE)
REASONING_ALLOWANCE_TOKENS = 2_000
# Where the client's own effort must stay, because the provider's cache knows the prompt with it.
CLIENT_EFFORT_ALLOWANCE_TOKENS = 8_000
# Lowest first; no model takes both of the first two.
EFFORTS = ("minimal", "none", "low")
# What a list that ends in tool results needs before a user message may follow.
ACKNOWLEDGEMENT = Message(role="assistant", text="Understood.")

# What a client's request says about its own answer, which a continuation of it must not.
_OF_THE_ANSWER = frozenset(
    {"stream", "stream_options", "n", "stop", "response_format", "max_tokens", "max_completion_tokens"}
    | {"logprobs", "top_logprobs", "logit_bias", "audio", "modalities", "prediction", "metadata", "store"}
    | {"tool_choice", "function_call", "temperature", "top_p", "frequency_penalty", "presence_penalty"}
    | {"web_search_options", "messages"}
)
_CACHE_KEY_HOSTS = re.compile(r"api\.openai\.com|.+\.openai\.azure\.com")
# The fields in which errors name a parameter; others may echo the request.
_ERROR_FIELDS = frozenset({"error", "errors", "param", "message", "detail", "details", "msg", "loc", "code"})
_MAX_WORDS = 64
_MAX_WORD_CHARACTERS = 2_000
_MAX_INPUT_CHARACTERS = 32
_MAX_COUNT = 1_000_000_000


def get_thinking_allowance(model: str, conversation: ContinuedConversation | None = None) -> int:
    """Tokens that a model may think before its answer, on top of what the answer may take."""
    reasoning = _REASONING.search(model) is not None
    if conversation is None:
        return REASONING_ALLOWANCE_TOKENS if reasoning else 0
    thinking = _read_client_members(conversation).get("thinking")
    budget = _as_count(_as_mapping(_parse_json(thinking)).get("budget_tokens")) if thinking else 0
    return budget or (CLIENT_EFFORT_ALLOWANCE_TOKENS if reasoning else 0)


def takes_cache_key(url: str) -> bool:
    """Whether the provider is known to take `prompt_cache_key`; others may refuse what they do not know."""
    return _CACHE_KEY_HOSTS.fullmatch(urlsplit(url).hostname or "") is not None


def build_own_members(call: SummaryCall, refused: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The members of the body that a provider may refuse, without those that it has refused before.

    Args:
        call: What to ask.
        refused: What `find_refused_member` has found.
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
        efforts = [each for each in EFFORTS if f"reasoning_effort={each}" not in refused]
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
    """The body of a summary call.

    Args:
        call: What to ask.
        own_members: Its `build_own_members`.
    """
    if call.conversation is not None:
        return _continue_conversation(call.conversation, call.prompt, own_members)
    messages = [{"role": "system", "content": call.system}, {"role": "user", "content": call.prompt}]
    return json.dumps({"model": call.model, "messages": messages, **own_members}).encode()


def _continue_conversation(
    conversation: ContinuedConversation, prompt: str, own_members: Mapping[str, Any]
) -> bytes:
    """The client's body with other messages; what is about its answer is ours."""
    listed = conversation.messages
    acknowledged = (ACKNOWLEDGEMENT,) if listed and listed[-1].answers else ()
    asked = (*listed, *acknowledged, Message(role="user", text=prompt))
    fields = {
        name: value
        for name, value in _read_client_members(conversation).items()
        if name not in _OF_THE_ANSWER and name not in own_members
    }
    fields["messages"] = b"[" + b",".join(each.raw or encode_message(each) for each in asked) + b"]"
    fields |= {name: json.dumps(value).encode() for name, value in own_members.items()}
    return b"{" + b",".join(json.dumps(name).encode() + b":" + fields[name] for name in fields) + b"}"


def _read_client_members(conversation: ContinuedConversation) -> dict[str, bytes]:
    raw = conversation.raw
    return {name: raw[place.start : place.stop] for name, place in find_members(raw).items()}


def find_refused_member(body: bytes, own_members: Mapping[str, Any]) -> str | None:
    """Which of our members an error says the provider does not take, or None.

    Where the error names the effort that was asked for, only this effort is refused:
    `reasoning_effort=minimal`.
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
    """What an error of any shape says, outermost first."""
    found: list[str] = []
    nodes = deque([root])
    while nodes and len(found) < _MAX_WORDS:
        node = nodes.popleft()
        if isinstance(node, dict):
            nodes.extend(value for key, value in node.items() if key in _ERROR_FIELDS)
            given = node.get("input")
            nodes.extend([given] if isinstance(given, str) and len(given) <= _MAX_INPUT_CHARACTERS else [])
        elif isinstance(node, list):
            nodes.extend(node[:_MAX_WORDS])
        elif isinstance(node, str):
            found.append(node[:_MAX_WORD_CHARACTERS])
    return found


def parse_answer(body: bytes) -> SummaryAnswer:
    """What a chat completion says.

    Raises:
        SummaryFailed: `garbage`; the body is none.
    """
    completion = _as_mapping(_parse_json(body))
    choices = completion.get("choices")
    choice = _as_mapping(choices[0]) if isinstance(choices, list) and choices else None
    if not choice or not isinstance(choice.get("message"), Mapping):
        raise SummaryError("garbage")
    said = choice["message"]
    usage = _as_mapping(completion.get("usage"))
    reason = choice.get("finish_reason")
    return SummaryAnswer(
        text=_join_text(said.get("content")),
        finish_reason=reason if isinstance(reason, str) else "",
        called_tools=bool(said.get("tool_calls") or said.get("function_call")),
        refused=bool(said.get("refusal")),
        prompt_tokens=_as_count(usage.get("prompt_tokens")),
        completion_tokens=_as_count(usage.get("completion_tokens")),
        cached_tokens=_get_cached_tokens(usage),
    )


def _get_cached_tokens(usage: Mapping[str, Any]) -> int:
    """Cached tokens of the input; providers name them in one of three ways."""
    details = _as_mapping(usage.get("prompt_tokens_details"))
    told = (details.get("cached_tokens"), usage.get("prompt_cache_hit_tokens"), usage.get("cached_tokens"))
    return next((count for count in map(_as_count, told) if count), 0)


def _parse_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _join_text(content: Any) -> str:
    """The text of a content; what a model shows of its thoughts is none."""
    if isinstance(content, list):
        parts = (_as_mapping(each) for each in content)
        texts = (part.get("text") for part in parts if part.get("type") in {None, "text", "output_text"})
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _as_count(value: Any) -> int:
    return value if type(value) is int and 0 <= value <= _MAX_COUNT else 0
