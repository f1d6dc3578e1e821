"""Computes the token budget of a request: the sizes that limit it, given the model's context window."""

from dataclasses import dataclass

# Reserves are tokens of the context window that a strategy keeps free. They count as at most the context
# window divided by this number: a quarter of the window. Larger reserves would leave too little of a small
# window to the conversation. A compaction makes room for requested output of at most the same quarter. If a
# request asks for more output, the proxy lowers the output limit in the request. Otherwise the proxy would
# have to compact the conversation every few requests.
RESERVE_DIVISOR = 4
# If the proxy lowers the output limit in a request, it does not go below this number of tokens.
MIN_OUTPUT_TOKENS = 1_024
# Some upstreams refuse a request if its prompt and its requested output together exceed the context window.
# For such an upstream, a prompt must leave this many tokens of the window free: `MIN_OUTPUT_TOKENS`, and a
# margin for the error of estimates. If the request asks for less output than that, only the requested number
# of tokens must stay free.
RESERVED_OUTPUT_TOKENS = MIN_OUTPUT_TOKENS + 256


@dataclass(frozen=True, slots=True)
class Reserves:
    """Tokens of the context window that a strategy keeps free.

    Attributes:
        system: Tokens for the system prompt and tools.
        output: Tokens for the output of the model. If a request asks for more output, the requested number
            counts instead.
        safety: Tokens that cover the error of size estimates.
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
        window: Context window of the model.
        usable: The context window less the reserves. Percentages refer to this size.
        compaction_limit: The proxy compacts a request that is larger than this. The limit is the context
            window less the safety reserve and the requested output, which together count as at most a quarter
            of the window.
        input_limit: The proxy cuts content without a summary only if a request is larger than this. The limit
            is the context window less the safety reserve. If the upstream adds the requested output to the
            prompt, the limit leaves at least the requested output free, up to `RESERVED_OUTPUT_TOKENS`.
        sum_limit: The upstream may refuse a request that is larger than this. The limit is the context window
            less the safety reserve and all of the requested output. None if the upstream does not add the
            output to the prompt.
        min_output_tokens: The proxy does not lower the output limit of the request below this number. 0 if
            the upstream does not add the output to the prompt, or if the request names no output limit.
    """

    window: int
    usable: int
    compaction_limit: int
    input_limit: int
    sum_limit: int | None = None
    min_output_tokens: int = 0

    @property
    def output_compaction_limit(self) -> int | None:
        """The size, in tokens, above which a compaction has to make room for the requested output.

        None if the upstream does not limit the sum of prompt and requested output.
        """
        if self.sum_limit is None:
            return None
        return max(self.sum_limit, self.window - self.window // RESERVE_DIVISOR)

    @property
    def prompt_limit(self) -> int:
        """The largest prompt, in tokens, that fits if the proxy lowers the output limit to its minimum.

        The minimum is `min_output_tokens`. The upstream refuses a larger prompt.
        """
        return self.window - self.min_output_tokens


def compute_budget(
    window: int, reserves: Reserves, max_output: int | None, *, adds_output: bool = False
) -> Budget:
    """Computes the budget of a request.

    The reserves count as at most a quarter of the context window. Requested output that is larger than the
    output reserve counts in its place. If the strategy's own reserves together exceed a quarter of the
    window, the safety reserve shrinks in proportion. The requested output is an upper limit that most replies
    do not reach. So a compaction makes room for output of at most a quarter of the window. The proxy cuts
    content without a summary only to make room for at most `RESERVED_OUTPUT_TOKENS` tokens of output.

    Args:
        window: Context window of the model, in tokens.
        reserves: Tokens that the strategy keeps free.
        max_output: Limit of the output that the request asks for, in tokens; None if the request names no
            limit.
        adds_output: Whether the upstream refuses a request if its prompt and its requested output together
            exceed the context window.
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
