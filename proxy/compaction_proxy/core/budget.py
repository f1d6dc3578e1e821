"""Computes the token budget of a request: the sizes that limit it, from the model's context window."""

from dataclasses import dataclass

# Reserves take at most the context window divided by this number (a quarter of the window), so that small
# windows work too (DESIGN.md §5.5). A compaction also makes room for at most that much output. If a request
# asks for more output, the proxy lowers the output limit in the request; otherwise it would have to compact
# every few requests.
RESERVE_DIVISOR = 4
# The proxy does not lower an output limit below this number of tokens.
MIN_OUTPUT_TOKENS = 1_024
# Some upstreams refuse a request if prompt and requested output together exceed the context window. There,
# a prompt must leave at least this many tokens free: the least output, and a margin for the error of
# estimates.
RESERVED_OUTPUT_TOKENS = MIN_OUTPUT_TOKENS + 256


@dataclass(frozen=True, slots=True)
class Reserves:
    """Tokens of the context window that a strategy keeps free.

    Attributes:
        system: Tokens for the system prompt and tools.
        output: Tokens for the answer, unless the request asks for more.
        safety: Tokens for the error of estimates.
    """

    system: int
    output: int
    safety: int


@dataclass(frozen=True, slots=True)
class Budget:
    """The sizes that limit one request, in tokens.

    Some upstreams add the requested output to the prompt: they refuse a request if both together exceed the
    context window.

    Attributes:
        window: Largest input that the model takes.
        usable: The context window less the reserves. Percentages refer to it.
        compaction_limit: A request larger than this is compacted. It is the context window less the safety
            reserve and the requested output. These two together count as at most a quarter of the window.
        input_limit: The context window less the safety reserve. If the upstream adds the requested output to
            the prompt, at least the requested output stays free, up to `RESERVED_OUTPUT_TOKENS`. Content is
            cut without a summary only if a request is larger than this.
        sum_limit: The context window less the safety reserve and all of the requested output. The upstream
            may refuse a larger request. None if the upstream does not add the output to the prompt.
        min_output_tokens: The proxy does not lower the output limit below this. 0 if the upstream does not
            add the output to the prompt.
    """

    window: int
    usable: int
    compaction_limit: int
    input_limit: int
    sum_limit: int | None = None
    min_output_tokens: int = 0

    @property
    def output_compaction_limit(self) -> int | None:
        """The size above which a compaction has to make room for the requested output.

        None if the upstream does not add the output to the prompt.
        """
        if self.sum_limit is None:
            return None
        return max(self.sum_limit, self.window - self.window // RESERVE_DIVISOR)

    @property
    def prompt_limit(self) -> int:
        """The size above which the upstream refuses a prompt, however little output is requested."""
        return self.window - self.min_output_tokens


def compute_budget(
    window: int, reserves: Reserves, max_output: int | None, *, adds_output: bool = False
) -> Budget:
    """Computes the budget of a request that asks for up to `max_output` tokens (None if it names no limit).

    If the reserves together would take more than a quarter of the context window, they shrink in proportion.
    The requested output is an upper limit that most answers do not reach. So a compaction makes room for
    output of at most a quarter of the window, and content is cut only to make room for
    `RESERVED_OUTPUT_TOKENS`. `adds_output` says that the upstream refuses a request if prompt and requested
    output together exceed the window.
    """
    requested, max_reserve = max_output or 0, window // RESERVE_DIVISOR
    reserve = min(reserves.system + max(reserves.output, requested) + reserves.safety, max_reserve)
    total = reserves.system + reserves.output + reserves.safety
    safety = reserves.safety * min(total, max_reserve) // total if total else 0
    least_output = min(requested, MIN_OUTPUT_TOKENS) if adds_output else 0
    reserved = min(requested, RESERVED_OUTPUT_TOKENS) if adds_output else 0
    return Budget(
        window=window,
        usable=window - reserve,
        compaction_limit=window - min(requested + safety, max_reserve),
        input_limit=window - max(safety, reserved),
        sum_limit=window - safety - requested if adds_output else None,
        min_output_tokens=least_output,
    )
