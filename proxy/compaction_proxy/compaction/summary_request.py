"""Defines summary requests, the models to which they may be sent, and the token usage of their calls.

The module also shortens or splits the messages to summarise, so that they fit the context window of a summary
model. It measures messages by the number of characters that they take in the transcript. Callers convert
limits from tokens to characters.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from compaction_proxy.compaction.message_reader import CountingOptions
from compaction_proxy.core.ledger.frontier import StatementStatus
from compaction_proxy.core.message import Message, iter_units
from compaction_proxy.core.strategies import SummaryShape
from compaction_proxy.core.summary.call import SummaryCall
from compaction_proxy.core.summary.prompt import build_prompt
from compaction_proxy.recall.round_detail import MAX_PROMPTS, SummaryPrompt
from compaction_proxy.support.offload import run_in_worker
from compaction_proxy.wires.body import RequestBody
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.summary_call import accepts_prompt_cache_key
from compaction_proxy.wires.wire import Wire

# To make a transcript shorter, its messages are cut, but never to fewer characters than this.
SMALLEST_CUT = 40
# Approximate number of characters that a transcript adds around each message.
ENTRY_CHARACTERS = 24

Group = tuple[Message, ...]


def _count_characters(message: Message) -> int:
    calls = sum(len(call.name) + len(call.arguments) + 10 for call in message.calls)
    parts = sum(len(part.kind) + 3 for part in message.parts)
    return len(message.text) + len(message.refusal) + calls + parts


def count_shown_characters(messages: Sequence[Message], shape: SummaryShape) -> int:
    """Counts the characters that the messages take in a transcript.

    A message that is longer than the limit in `shape` counts with this limit.
    """
    return sum(
        min(
            _count_characters(each),
            shape.tool_characters if each.answered_call_ids else shape.message_characters,
        )
        + ENTRY_CHARACTERS
        for each in messages
    )


def shrink_shape_to_fit(messages: Sequence[Message], shape: SummaryShape, characters: float) -> SummaryShape:
    """Returns a shape with lower size limits, so that the transcript has at most `characters` characters.

    The limit for tool results is lowered first, because their text is the least valuable. The limit for the
    other messages is lowered only if that is not enough. No limit is lowered below `SMALLEST_CUT` characters,
    even if the transcript is then too long.
    """
    for name in ("tool_characters", "message_characters"):
        is_for_results = name == "tool_characters"
        affected = [each for each in messages if bool(each.answered_call_ids) is is_for_results]
        others = [each for each in messages if bool(each.answered_call_ids) is not is_for_results]
        room = characters - count_shown_characters(others, shape) - ENTRY_CHARACTERS * len(affected)
        size = min(
            _find_cut_length([_count_characters(each) for each in affected], room), getattr(shape, name)
        )
        shape = replace(shape, **{name: max(SMALLEST_CUT, size)})
    return shape


def _find_cut_length(lengths: Sequence[int], room: float) -> int:
    """Returns the length to which longer texts must be cut so that all texts together fit into `room`.

    `lengths` are the lengths of the texts, in characters. `room` is the largest sum of the lengths after the
    cut. If no text must be cut, returns the largest length, or `SMALLEST_CUT` if there are no texts.
    """
    ordered = sorted(lengths)
    for index, length in enumerate(ordered):
        share = room / (len(ordered) - index)
        if length > share:
            return max(0, int(share))
        room -= length
    return ordered[-1] if ordered else SMALLEST_CUT


def split_into_portions(
    messages: Sequence[Message], shape: SummaryShape, characters: float
) -> tuple[Group, ...]:
    """Splits the messages into consecutive portions, which consist of whole units.

    Each portion has at most `characters` characters in a transcript of this shape. A single unit that has
    more becomes a portion of its own.
    """
    portions: list[list[Message]] = []
    last_size = 0
    for start, stop in iter_units(messages):
        unit = list(messages[start:stop])
        size = count_shown_characters(unit, shape)
        if portions and last_size + size <= characters:
            portions[-1] += unit
            last_size += size
        else:
            portions.append(unit)
            last_size = size
    return tuple(map(tuple, portions))


def split_into_halves(
    groups: Sequence[Group], shape: SummaryShape
) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """Splits a list of groups into two lists of similar size in characters, each with at least one group.

    There must be at least two groups.
    """
    half = sum(count_shown_characters(group, shape) for group in groups) / 2
    stop, first_half_size = 0, 0
    while stop < len(groups) - 1 and (
        stop == 0 or first_half_size + count_shown_characters(groups[stop], shape) <= half
    ):
        first_half_size += count_shown_characters(groups[stop], shape)
        stop += 1
    return tuple(groups[:stop]), tuple(groups[stop:])


# Approximate number of characters per token in a summary.
SUMMARY_CHARACTERS = 3.5

# A function that returns the price of a call in dollars; None if the price is unknown or not yet loaded. Its
# arguments are the model, the URL of the model, the number of prompt tokens, how many of these the provider
# read from its cache, and the number of completion tokens.
PriceLookup = Callable[[str, str, int, int, int], float | None]


class CallUsage(NamedTuple):
    """The tokens of one summary call, as the `usage` in the response reports them."""

    model: str
    url: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class SummaryUsage:
    """The calls that were made for one summary request so far, including those that failed.

    Attributes:
        calls: Number of calls that were made.
        answered_calls: The token usage of each call that the model has answered.
        prompts: The newest prompts, at most `MAX_PROMPTS`, each shortened to a limited size. A prompt that
            was sent several times is listed once.
    """

    calls: int = 0
    answered_calls: list[CallUsage] = field(default_factory=list)
    prompts: deque[SummaryPrompt] = field(default_factory=lambda: deque(maxlen=MAX_PROMPTS), compare=False)

    @property
    def prompt_tokens(self) -> int:
        """Input tokens of all answered calls."""
        return sum(each.prompt_tokens for each in self.answered_calls)

    @property
    def cached_tokens(self) -> int:
        """Number of those input tokens of all answered calls that the provider read from its cache."""
        return sum(each.cached_tokens for each in self.answered_calls)

    @property
    def completion_tokens(self) -> int:
        """Output tokens of all answered calls."""
        return sum(each.completion_tokens for each in self.answered_calls)

    def compute_cost_usd(self, price: PriceLookup) -> float | None:
        """Returns the cost of all answered calls in dollars; None if the cost of any of them is unknown.

        It is unknown if the price is, or if the response did not report how many tokens the call took.
        """
        costs = [price(*each) if each.prompt_tokens else None for each in self.answered_calls]
        known_costs = [cost for cost in costs if cost is not None]
        return sum(known_costs) if len(known_costs) == len(costs) else None


@dataclass(frozen=True, slots=True)
class SummaryRoute:
    """A summary model, and the endpoint at which it can be called.

    Attributes:
        url: Absolute URL of the endpoint.
        headers: Credentials and other headers that the call needs.
        model: The name of the model.
        window: Context window of the model, in tokens.
        wire: The wire of the endpoint.
    """

    url: str
    headers: Mapping[str, str] = field(repr=False)
    model: str
    window: int
    wire: Wire = CHAT


@dataclass(frozen=True, slots=True)
class AlignedConversation:
    """The conversation that a summary call in the aligned form sends to the model, before the prompt.

    Attributes:
        body: The body of the client's request.
        messages: The messages as they would be forwarded, with the replacements of earlier compactions. Tool
            calls without a result, and results without a call, are repaired.
    """

    body: RequestBody = field(repr=False)
    messages: tuple[Message, ...] = field(repr=False)


# A response may take at most this share of the summary model's context window. If a summary of the planned
# size could exceed this share, a smaller summary is requested.
ANSWER_SHARE = 0.25
# A call and its response together may take at most this share of the summary model's context window, because
# their sizes are estimates. If they would take more, the messages in the call are shortened.
WINDOW_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class SummaryRequest:
    """A request for all summaries of a compaction, or for some of them.

    The properties and methods concern a call in the transcript form to the first of the routes.

    Attributes:
        shape: The form and the size limits of the summary, as the strategy sets them.
        instructions: System prompt of each call.
        groups: The messages to summarise. One summary is written for each group.
        task: The user's task, or an excerpt from it; empty if the prompt does not show it.
        earlier: Summaries of earlier compactions, oldest first.
        language: English name of the language to write in; empty if it is not known.
        tokens: Size that is requested for all summaries together, in tokens.
        routes: The routes to try, in order. The next route is tried only if the provider does not know the
            model of the previous one.
        counting_options: How tokens are counted.
        calibration_ratio: Calibrated tokens per counted token.
        tenant: The tenant that pays for the calls.
        calls_per_hour: How many calls the tenant may make in an hour; 0 for no limit.
        aligned: The conversation itself, if the aligned form may be used; else None. It is sent only to the
            first route, and only if that route uses the conversation's own model.
        deadline_s: Seconds after which the caller cancels the request; 0 if unknown.
        usage: The calls made so far, including failed and cancelled ones, and their tokens.
        user_messages: All user messages of the conversation. A summary may state only what is supported by
            these messages, the groups and earlier summaries.
        states: The state of each request of the user, such as open or done (`core.ledger.frontier`).
    """

    shape: SummaryShape
    instructions: str = field(repr=False)
    groups: tuple[Group, ...] = field(repr=False)
    task: str = field(repr=False)
    earlier: tuple[str, ...] = field(repr=False)
    language: str
    tokens: int
    routes: tuple[SummaryRoute, ...]
    counting_options: CountingOptions
    calibration_ratio: float
    tenant: str
    calls_per_hour: int
    aligned: AlignedConversation | None
    deadline_s: float = 0.0
    usage: SummaryUsage = field(default_factory=SummaryUsage, compare=False)
    user_messages: tuple[Message, ...] = field(default=(), repr=False)
    states: Mapping[tuple[int, str], StatementStatus] = field(default_factory=dict, repr=False)

    @property
    def max_characters(self) -> int:
        """Largest allowed size of all summaries together, in characters."""
        return int(self.shape.compute_max_tokens(self.tokens) * SUMMARY_CHARACTERS)

    @property
    def answer_tokens(self) -> int:
        """Largest size of a response in tokens, including the allowance for the model's thinking."""
        route = self.routes[0]
        thinking = route.wire.summary_call_format.get_thinking_allowance(route.model, None)
        return self.shape.compute_max_tokens(self.tokens) + thinking

    @property
    def max_input_tokens(self) -> float:
        """Largest size of `instructions` and prompt together, in counted tokens.

        A safety margin (`WINDOW_SHARE`) is already subtracted, because sizes are estimates.
        """
        return (WINDOW_SHARE * self.routes[0].window - self.answer_tokens) / self.calibration_ratio

    def select_route(self, route: SummaryRoute) -> "SummaryRequest":
        """Returns the request with `route` as its only route.

        If the context window of the route's model is small, the new request asks for a smaller summary
        (`ANSWER_SHARE`).
        """
        max_tokens = int(route.window * ANSWER_SHARE) * self.shape.tokens // self.shape.max_tokens
        return replace(self, routes=(route,), tokens=max(1, min(self.tokens, max_tokens)))

    async def build_prompt(self) -> str:
        """Builds the prompt of a call, in a worker thread, because the prompt may be megabytes long."""
        return await run_in_worker(
            partial(
                build_prompt,
                self.groups,
                self.shape,
                task=self.task,
                earlier_summaries=self.earlier,
                language=self.language,
                max_tokens=self.tokens,
            )
        )

    def build_call(self, prompt_text: str) -> SummaryCall:
        """Builds a call to the first route with this prompt."""
        route = self.routes[0]
        return SummaryCall(
            url=route.url,
            headers=route.headers,
            model=route.model,
            system=self.instructions,
            prompt=prompt_text,
            max_tokens=self.shape.compute_max_tokens(self.tokens),
            temperature=self.shape.temperature,
            wire=route.wire.name,
            cache_key=_build_cache_key(self) if accepts_prompt_cache_key(route.url) else "",
        )


def _build_cache_key(summary_request: SummaryRequest) -> str:
    """Builds the `prompt_cache_key` of a summary call from the tenant and the name of the prompt file.

    With this key, the provider keeps the cached prompts of summary calls separate from those of
    conversations.
    """
    tenant_digest = hashlib.sha256(summary_request.tenant.encode()).hexdigest()[:16]
    return f"compaction-{summary_request.shape.prompt_name}-{tenant_digest}"
