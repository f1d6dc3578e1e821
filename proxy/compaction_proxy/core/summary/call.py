"""Data classes for a request to a summary model and its answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from compaction_proxy.core.message import Message


@dataclass(frozen=True, slots=True)
class ContinuedConversation:
    """The conversation to summarise, for a summary call that continues it.

    Attributes:
        raw_body: The client's request body. The call takes from it everything else that the provider's cached
            prefix depends on, such as the tools.
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
        system: The instructions. They are byte-identical in every call of a strategy, so that the provider
            finds them in its cache. They are not used if there is a `conversation`.
        prompt: The data to summarise, between tags. If there is a `conversation`, the instructions that
            follow it.
        max_tokens: Maximum tokens of the answer, not counting the model's reasoning.
        temperature: 0..2, or None to leave it out.
        cache_key: The provider's key for its prompt cache; empty to leave it out.
        conversation: The conversation that the call continues. None if the call consists of `system` and
            `prompt` alone.
        wire: The name of the endpoint's wire.
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
    """An answer of a summary model, not yet validated.

    Attributes:
        text: The answer's text; empty if there was none.
        finish_reason: The finish reason as the provider named it; empty if it named none.
        called_tools: Whether the model tried to call a tool.
        refused: Whether the answer carried a refusal.
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
