"""Strategies as data: each is one row over one planner and one renderer."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from proxy.core.budget import Reserves
from proxy.core.trigger import Row

StandInRole = Literal["user", "assistant", "system"]


@dataclass(frozen=True, slots=True)
class SummaryShape:
    """What a strategy asks of the summary model.

    Attributes:
        prompt: Name of the prompt file that holds the instructions.
        tokens: Size asked for.
        max_tokens: Size allowed.
        temperature: 0..2, or None to leave it to the provider.
        tool_characters: Characters of a tool result that enter the transcript.
        message_characters: Characters of any other message that enter the transcript.
    """

    prompt: str
    tokens: int
    max_tokens: int
    temperature: float | None
    tool_characters: int
    message_characters: int


@dataclass(frozen=True, slots=True)
class Policy:
    """A strategy.

    Attributes:
        name: As the configuration names it.
        trigger: Rows of which one must fire.
        reserves: Tokens kept free of a window.
        keep_messages: Newest messages of the effective list that stay; with only one more than these
            there is nothing to take.
        stand_in_role: Role of the message put where a span was.
        heading: First line of the stand-in; `{round}` is the round's number.
        task_tokens: Tokens of the first user message kept verbatim; a longer one keeps its head and tail.
        summary: The summary call.
    """

    name: str
    trigger: tuple[Row, ...]
    reserves: Reserves
    keep_messages: int
    stand_in_role: StandInRole
    heading: str
    task_tokens: int
    summary: SummaryShape


CHAINED = Policy(
    name="chained",
    trigger=(Row(percent=80),),
    reserves=Reserves(system=2_000, output=4_000, safety=5_000),
    keep_messages=10,
    stand_in_role="assistant",
    heading="## Session Summary (Compaction Round {round})",
    task_tokens=2_000,
    summary=SummaryShape(
        prompt="chained",
        tokens=800,
        max_tokens=1_000,
        temperature=0.3,
        tool_characters=500,
        message_characters=2_000,
    ),
)

STRATEGIES: Mapping[str, Policy] = MappingProxyType({policy.name: policy for policy in (CHAINED,)})

# The windows that the `chained` seed names, in tokens; any other model has the fallback until an error or
# the configuration says otherwise.
KNOWN_WINDOWS: Mapping[str, int] = MappingProxyType(
    {
        "gpt-4o": 128_000,
        "gpt-4-turbo": 128_000,
        "gpt-4": 8_192,
        "claude-3-5-sonnet-20240620": 200_000,
        "claude-3-haiku-20240307": 200_000,
    }
)
FALLBACK_WINDOW = 128_000


def known_window(model: str) -> int:
    """The window of a model by its name alone, in tokens."""
    return KNOWN_WINDOWS.get(model, FALLBACK_WINDOW)
