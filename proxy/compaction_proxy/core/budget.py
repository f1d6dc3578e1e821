"""Computes the token budget of a request: what it may use of the context window, and what it must fit in."""

from dataclasses import dataclass

# Reserves take at most this fraction (a quarter) of the context window, so that small windows work too
# (DESIGN.md §5.5). Compactions also make room for at most that much output. If a request asks for more, the
# output limit is lowered; otherwise a compaction would follow every few requests.
RESERVE_SHARE = 4
# Output limits are not lowered below this number of tokens.
LEAST_OUTPUT_TOKENS = 1_024
# Some upstreams add the requested output to the prompt. They need at least this many tokens beside a prompt:
# the least output, and a margin for the error of estimates.
RESERVED_OUTPUT_TOKENS = LEAST_OUTPUT_TOKENS + 256


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

    Attributes:
        window: Largest input that the model takes.
        usable: The context window less the reserves. Percentages refer to it.
        limit: The context window less the safety reserve and the requested output, which together count up to
            a quarter of the window. A larger request is compacted.
        input_limit: The context window less the safety reserve. If the upstream adds the requested output to
            the prompt, at least that output's minimum stays free too. Content is cut without a summary only
            if a request is larger than this.
        sum_limit: The context window less the safety reserve and all of the requested output. The upstream
            refuses a larger request. None if the upstream does not add the output to the prompt.
        least_output: Output limits are not lowered below this. 0 if the upstream does not add the output to
            the prompt.
    """

    window: int
    usable: int
    limit: int
    input_limit: int
    sum_limit: int | None = None
    least_output: int = 0

    @property
    def round_limit(self) -> int | None:
        """The size above which a request needs a compaction to make room for its output; else None."""
        if self.sum_limit is None:
            return None
        return max(self.sum_limit, self.window - self.window // RESERVE_SHARE)

    @property
    def prompt_limit(self) -> int:
        """The size above which the upstream refuses a prompt, however little output is requested."""
        return self.window - self.least_output


def compute_budget(
    window: int, reserves: Reserves, max_output: int | None, *, adds_output: bool = False
) -> Budget:
    """Computes the budget of a request that asks for up to `max_output` tokens (None if it names no limit).

    If the reserves together would take more than a quarter of the context window, they shrink in proportion.
    The requested output is a ceiling, not a need. Before a request is compacted, the requested output yields
    to a quarter of the window; before content is cut, it yields completely. `adds_output` says that the
    upstream refuses a prompt if prompt and requested output together exceed the window.
    """
    requested, max_reserve = max_output or 0, window // RESERVE_SHARE
    reserve = min(reserves.system + max(reserves.output, requested) + reserves.safety, max_reserve)
    total = reserves.system + reserves.output + reserves.safety
    safety = reserves.safety * min(total, max_reserve) // total if total else 0
    least_output = min(requested, LEAST_OUTPUT_TOKENS) if adds_output else 0
    reserved = min(requested, RESERVED_OUTPUT_TOKENS) if adds_output else 0
    return Budget(
        window=window,
        usable=window - reserve,
        limit=window - min(requested + safety, max_reserve),
        input_limit=window - max(safety, reserved),
        sum_limit=window - safety - requested if adds_output else None,
        least_output=least_output,
    )
