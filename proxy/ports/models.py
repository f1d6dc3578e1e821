"""What is asked of models, and about them: counts of tokens, summaries, windows, prices."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from proxy.core.message import Message
from proxy.core.price import Price


class TokenCounter(Protocol):
    """Counts the tokens of a text. Never fails: what cannot be counted is estimated from its length."""

    def count(self, text: str, model: str) -> int:
        """Tokens of `text` for `model`, before calibration. Thread-safe; about one second per megabyte."""
        ...

    def count_each(self, texts: Sequence[str], model: str) -> list[int]:
        """Tokens of each text, exactly as `count` gives them, at a lower price beside busy threads."""
        ...


@dataclass(frozen=True, slots=True)
class Conversation:
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
    conversation: Conversation | None = None
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


class SummaryModel(Protocol):
    """A model that writes summaries."""

    async def ask(self, call: SummaryCall) -> SummaryAnswer:
        """One answer, without retries beyond those for refused parameters. The deadline is the caller's.

        Raises:
            SummaryFailed: The model could not be asked, or what came back is no answer. Its
                `reason` is one of `http-NNN`, `overflow`, `unknown-model`, `unreachable`, `garbage`; with
                `http-429` and `http-503` it may say when to ask again.
        """
        ...


class Discovery(Protocol):
    """Asks an upstream what it says of itself."""

    async def window(self, base_url: str, headers: Mapping[str, str], model: str) -> int | None:
        """The largest input of a model, in tokens; None if the upstream does not say, or not in time."""
        ...


class Prices(Protocol):
    """Knows what models cost."""

    def of(self, model: str, origin: str) -> Price | None:
        """The price of a model at an upstream; None where it is not known, or not yet."""
        ...

    def settled(self, model: str, origin: str) -> bool:
        """Whether `of` tells all that will be known for now."""
        ...

    async def ready(self, names: Iterable[tuple[str, str]]) -> None:
        """Come back when the prices of models at upstreams are known, or cannot be."""
        ...
