"""Defines data classes for a request to a summary model and for its reply."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from compaction_proxy.core.message import Message


@dataclass(frozen=True, slots=True)
class ContinuedConversation:
    """The conversation to summarise, for a summary call in the form `aligned`, which continues it.

    Attributes:
        raw_body: The client's request body. The call copies from it the other fields on which the provider's
            cached prefix depends, such as the tools.
        messages: The messages as they would be forwarded. They form a valid message list.
    """

    raw_body: bytes = field(repr=False)
    messages: tuple[Message, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class SummaryCall:
    """One request to a summary model.

    Attributes:
        url: Absolute URL of the endpoint.
        headers: Credentials and other headers that the call needs.
        model: The model's name.
        system: The instructions, which are the same bytes in every call of a strategy, so that the provider
            finds them in its cache. Not used if there is a `conversation`.
        prompt: The data to summarise, between tags. If there is a `conversation`, the instructions that
            follow it.
        max_tokens: Maximum tokens of the summary, not counting the model's reasoning.
        temperature: Temperature of the model, 0..2; None leaves it out of the request.
        cache_key: Key for the provider's prompt cache; empty leaves it out of the request.
        conversation: The conversation that the call continues. None if the call consists of `system` and
            `prompt` alone.
        wire: The name of the wire that the endpoint uses.
    """

    url: str
    headers: Mapping[str, str] = field(repr=False)
    model: str
    system: str = field(repr=False)
    prompt: str = field(repr=False)
    max_tokens: int
    temperature: float | None
    cache_key: str = ""
    conversation: ContinuedConversation | None = None
    wire: str = "chat"


@dataclass(frozen=True, slots=True)
class SummaryAnswer:
    """The reply of a summary model, not yet validated.

    Attributes:
        text: The text of the reply; empty if there was none.
        finish_reason: The finish reason as the provider named it; empty if it named none.
        called_tools: Whether the model tried to call a tool.
        refused: Whether the response contained a refusal outside the text.
        prompt_tokens: Input tokens from `usage`; 0 if unknown.
        completion_tokens: Output tokens from `usage`; 0 if unknown.
        cached_tokens: Input tokens that the provider had cached, from `usage`; 0 if unknown.
    """

    text: str
    finish_reason: str = ""
    called_tools: bool = False
    refused: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
