"""Builds parts of summary calls for all wires, and finds the member of a call that a provider refuses.

A summary call is a request of the proxy to the summary model. It contains either only messages that the proxy
has written, or the client's messages followed by the proxy's prompt. In the second form, the tools and all
other members that affect the prompt keep exactly the client's bytes, so that the provider's prompt cache
applies.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from compaction_proxy.core.message import Message
from compaction_proxy.core.summary.call import ContinuedConversation, SummaryAnswer, SummaryCall
from compaction_proxy.wires.json.slices import find_members
from compaction_proxy.wires.json.values import as_object, parse_json
from compaction_proxy.wires.usage import UsageFormat, as_token_count

# If a conversation ends with tool results, a summary call adds this message before the user message with the
# prompt, because a user message may not directly follow tool results.
ACKNOWLEDGEMENT: Final = Message(role="assistant", text="Understood.")
# Matches the names of OpenAI's reasoning models. These models accept no temperature, expect the output limit
# in `max_completion_tokens`, and count thinking tokens towards this limit.
_REASONING: Final = re.compile(r"(?:^|/)(?:o\d|gpt-5(?!.*chat)|gpt-[6-9])", re.IGNORECASE)
# The number of tokens for thinking that a summary call to a reasoning model adds to its output limit, if the
# call does not continue the client's conversation.
REASONING_ALLOWANCE_TOKENS: Final = 2_000
# The number of tokens for thinking that a summary call to a reasoning model adds to its output limit, if the
# call continues the client's conversation. Such a call keeps the client's reasoning effort, because the
# prompt cache depends on it. This effort may be high, so the number is larger than
# `REASONING_ALLOWANCE_TOKENS`.
CLIENT_EFFORT_ALLOWANCE_TOKENS: Final = 8_000
_CACHE_KEY_HOSTS: Final = re.compile(r"api\.openai\.com|.+\.openai\.azure\.com")
# The fields of a provider's error that may contain the name of a refused parameter. The proxy ignores other
# fields, because they may quote the request.
_ERROR_FIELDS: Final = frozenset(
    {"error", "errors", "param", "message", "detail", "details", "msg", "loc", "code"}
)
_MAX_WORDS: Final = 64
_MAX_WORD_CHARACTERS: Final = 2_000
_MAX_INPUT_CHARACTERS: Final = 32


@dataclass(frozen=True, slots=True)
class SummaryCallFormat:
    """The format of the proxy's own summary calls on a wire.

    Attributes:
        path: The path to append to a provider's base URL, such as `/chat/completions`.
        get_thinking_allowance: Returns how many tokens a model may use for thinking, in addition to its
            output limit. The arguments are the model's name, and the conversation that the call continues or
            None.
        build_own_members: Builds those members of a call's body that some providers refuse. The second
            argument names the members that this provider has already refused. The result lacks them.
        build_request: Builds the body of a call from the call and the result of `build_own_members`.
        parse_answer: Parses the body of a successful response. Raises `SummaryError` with the reason
            `garbage` if the body does not have the form of a response.
        headers: Headers that a call needs in addition to the credential. The proxy does not add a header that
            the client's request already has.
    """

    path: str
    get_thinking_allowance: Callable[[str, ContinuedConversation | None], int]
    build_own_members: Callable[[SummaryCall, frozenset[str]], dict[str, Any]]
    build_request: Callable[[SummaryCall, Mapping[str, Any]], bytes]
    parse_answer: Callable[[bytes], SummaryAnswer]
    headers: Mapping[str, str] = field(default_factory=dict)


def is_reasoning_model(model: str) -> bool:
    """Returns whether this is the name of an OpenAI reasoning model."""
    return _REASONING.search(model) is not None


def get_thinking_allowance(model: str, conversation: ContinuedConversation | None = None) -> int:
    """Returns how many tokens a model may use for thinking, in addition to its output limit.

    Args:
        model: The summary model.
        conversation: The client's conversation, if the summary call continues it.
    """
    if conversation is None:
        return REASONING_ALLOWANCE_TOKENS if is_reasoning_model(model) else 0
    budget = as_token_count(read_client_object(conversation, "thinking").get("budget_tokens"))
    return budget or (CLIENT_EFFORT_ALLOWANCE_TOKENS if is_reasoning_model(model) else 0)


def accepts_prompt_cache_key(url: str) -> bool:
    """Returns whether the provider at this URL is known to accept `prompt_cache_key`.

    Other providers may refuse a request that has this member.
    """
    return _CACHE_KEY_HOSTS.fullmatch(urlsplit(url).hostname or "") is not None


def read_client_members(conversation: ContinuedConversation | None) -> dict[str, bytes]:
    """Returns the JSON of each member of the client's body, by name; an empty dict without a conversation."""
    if conversation is None:
        return {}
    raw = conversation.raw_body
    return {name: raw[place.start : place.stop] for name, place in find_members(raw).items()}


def read_client_object(conversation: ContinuedConversation | None, name: str) -> dict[str, Any]:
    """Returns the member `name` of the client's body; an empty dict if it is absent or not an object."""
    return as_object(parse_json(read_client_members(conversation).get(name, b"")))


def has_tools(client_members: Mapping[str, bytes], name: str = "tools") -> bool:
    """Returns whether the client's body has tools in the member of this name."""
    return client_members.get(name, b"[]").strip() not in {b"[]", b"null"}


def append_prompt(conversation: ContinuedConversation, prompt: str) -> tuple[Message, ...]:
    """Returns the messages of a conversation, followed by a user message with the prompt.

    If the conversation ends with a tool result, `ACKNOWLEDGEMENT` comes before the prompt.
    """
    messages = conversation.messages
    acknowledgements = (ACKNOWLEDGEMENT,) if messages and messages[-1].answered_call_ids else ()
    return (*messages, *acknowledgements, Message(role="user", text=prompt))


def continue_client_body(
    conversation: ContinuedConversation,
    dropped: frozenset[str],
    replaced: Mapping[str, bytes],
    own_members: Mapping[str, Any],
) -> bytes:
    """Returns the client's body with some members removed, added or replaced.

    Args:
        conversation: The conversation with the client's body.
        dropped: The names of the client's members to remove.
        replaced: Members to add or replace, as JSON, by name.
        own_members: Further members to add or replace, as Python values, by name.
    """
    fields = {
        name: value
        for name, value in read_client_members(conversation).items()
        if name not in dropped and name not in own_members
    }
    fields |= replaced
    fields |= {name: json.dumps(value).encode() for name, value in own_members.items()}
    return b"{" + b",".join(json.dumps(name).encode() + b":" + fields[name] for name in fields) + b"}"


def build_summary_answer(
    usage_format: UsageFormat,
    payload: dict[str, Any],
    text: str,
    finish_reason: str,
    *,
    called_tools: bool,
    refused: bool,
) -> SummaryAnswer:
    """Builds a `SummaryAnswer` from its other fields and the usage in `payload`, the decoded response.

    The token counts are 0 if the payload has no plausible usage.
    """
    usage = usage_format.parse_counts(payload.get("usage"))
    return SummaryAnswer(
        text=text,
        finish_reason=finish_reason,
        called_tools=called_tools,
        refused=refused,
        prompt_tokens=usage.prompt_tokens if usage else 0,
        completion_tokens=usage.completion_tokens if usage else 0,
        cached_tokens=usage.cached_tokens if usage else 0,
    )


def find_refused_member(body: bytes, own_members: Mapping[str, Any]) -> str | None:
    """Returns the name of the member that a provider refuses in a summary call; None if its error names none.

    If the error names both `reasoning_effort` and the requested value, the provider refuses only this value.
    The result then also contains the value, for example `reasoning_effort=minimal`.

    Args:
        body: The body of the provider's error.
        own_members: The members that `build_own_members` returned for the refused call.
    """
    words = _collect_words(parse_json(body) or body[:_MAX_WORD_CHARACTERS].decode("utf-8", "replace"))
    joined = "\n".join(words)
    places = {name: re.search(rf"\b{name}\b", joined) for name in own_members}
    mentioned = sorted((place.start(), name) for name, place in places.items() if place)
    name = next((word for word in words if word in own_members), mentioned[0][1] if mentioned else None)
    if name == "reasoning_effort" and re.search(rf"\b{own_members[name]}\b", joined):
        return f"{name}={own_members[name]}"
    return name


def _collect_words(root: Any) -> list[str]:
    """Returns the texts of an error that may name a refused parameter, outermost first.

    These are the texts in `_ERROR_FIELDS` at any depth, and the short texts in fields named `input`.
    """
    words: list[str] = []
    nodes = deque([root])
    while nodes and len(words) < _MAX_WORDS:
        node = nodes.popleft()
        if isinstance(node, dict):
            nodes.extend(value for key, value in node.items() if key in _ERROR_FIELDS)
            input_value = node.get("input")
            if isinstance(input_value, str) and len(input_value) <= _MAX_INPUT_CHARACTERS:
                nodes.append(input_value)
        elif isinstance(node, list):
            nodes.extend(node[:_MAX_WORDS])
        elif isinstance(node, str):
            words.append(node[:_MAX_WORD_CHARACTERS])
    return words
