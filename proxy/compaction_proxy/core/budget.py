"""How many tokens there are to spend: the window, what is usable of it, and what a request must fit in."""

from dataclasses import dataclass

# Reserves may take no more than a quarter of a window, so that small windows work too (DESIGN.md §5.5).
# Rounds make room for as much output, and more is lowered: else a round would follow every few requests.
RESERVE_SHARE = 4
# Output is not lowered below this, in tokens.
LEAST_OUTPUT_TOKENS = 1_024
# What an upstream that adds the output asked for must have beside a prompt: the least output, and something
# for the error of estimates.
RESERVED_OUTPUT_TOKENS = LEAST_OUTPUT_TOKENS + 256


@dataclass(frozen=True, slots=True)
class Reserves:
    """Tokens that a strategy keeps free.

    Attributes:
        system: For the system prompt and tools.
        output: For the answer, unless the request asks for more.
        safety: For the error of estimates.
    """

    system: int
    output: int
    safety: int


@dataclass(frozen=True, slots=True)
class Budget:
    """What one request may spend, in tokens.

    Attributes:
        window: Largest input that the model takes.
        usable: The window less the reserves; percentages are of this.
        limit: The window less safety and the output asked for, which counts up to a quarter of the window
            here. A larger request is compacted.
        input_limit: The window less safety. Content is only cut, without a summary, from what is larger.
        sum_limit: The window less safety and all of the output asked for, where the upstream refuses what is
            larger; else None.
        least_output: Output that is not lowered any further; 0 where the upstream does not add it.
    """

    window: int
    usable: int
    limit: int
    input_limit: int
    sum_limit: int | None = None
    least_output: int = 0

    @property
    def round_limit(self) -> int | None:
        """A larger request needs a round to make room for its output; None where none does."""
        if self.sum_limit is None:
            return None
        return max(self.sum_limit, self.window - self.window // RESERVE_SHARE)

    @property
    def prompt_limit(self) -> int:
        """The upstream refuses a prompt that is larger, however little output is asked for."""
        return self.window - self.least_output


def compute_budget(
    window: int, reserves: Reserves, max_output: int | None, *, adds_output: bool = False
) -> Budget:
    """The budget of a request that asks for up to `max_output` tokens (None: it does not say).

    Reserves shrink in proportion where together they would take more than a quarter of the window. The
    output asked for is a ceiling, not a need: it yields to a quarter of the window before a request is
    compacted, and to nothing before content is cut. `adds_output` says that the upstream refuses a prompt
    that exceeds the window together with the output asked for.
    """
    asked, most = max_output or 0, window // RESERVE_SHARE
    reserve = min(reserves.system + max(reserves.output, asked) + reserves.safety, most)
    own = reserves.system + reserves.output + reserves.safety
    safety = reserves.safety * min(own, most) // own if own else 0
    least = min(asked, LEAST_OUTPUT_TOKENS) if adds_output else 0
    reserved = min(asked, RESERVED_OUTPUT_TOKENS) if adds_output else 0
    return Budget(
        window=window,
        usable=window - reserve,
        limit=window - min(asked + safety, most),
        input_limit=window - max(safety, reserved),
        sum_limit=window - safety - asked if adds_output else None,
        least_output=least,
    )
