"""One request to a summary model, and its answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from compaction_proxy.core.message import Message


@dataclass(frozen=True, slots=True)
class ContinuedConversation:
    """The very conversation that a summary is wanted of, for a call that continues it.

    Attributes:
        raw: The client's request body; all that shapes the provider's cached prefix is taken from it.
        messages: The messages as they would be forwarded, valid as a list.
    """

    raw: bytes = field(repr=False)
    messages: tuple[Message, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class SummaryCall:
    """One request to a summary model.

    Attributes:
        url: Absolute URL of the endpoint.
        headers: Credentials and whatever else the call needs.
        model: The model's name.
        system: Instructions; byte-identical in every call of a strategy, so that the provider's cache hits.
            Without meaning where there is a `conversation`.
        prompt: The data to summarise, fenced; behind a `conversation`, what is wanted of it.
        max_tokens: Upper bound for the answer; what a model thinks before it comes on top.
        temperature: 0..2, or None to leave it out.
        cache_key: The provider's key for its prompt cache; empty to leave it out.
        conversation: What the call continues; None where `system` and `prompt` are all of it.
        wire: The endpoint's dialect, by name.
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
    """What a summary model said, not yet validated.

    Attributes:
        text: The answer's text; empty if there was none.
        finish_reason: As the provider named it; empty if it did not.
        called_tools: Whether it tried to call a tool.
        refused: Whether it carried a refusal.
        prompt_tokens: From `usage`; 0 if unknown.
        completion_tokens: From `usage`; 0 if unknown.
        cached_tokens: From `usage`, those of the prompt that the provider had cached; 0 if unknown.
    """

    text: str
    finish_reason: str = ""
    called_tools: bool = False
    refused: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
