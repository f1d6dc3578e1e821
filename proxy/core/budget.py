"""How many tokens there are to spend: the window, what is usable of it, and what a request must fit in."""

from dataclasses import dataclass

# Reserves may take no more than this share of a window, so that small windows work too (DESIGN.md §5.5).
RESERVE_SHARE = 4


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
        limit: The window less the output asked for and safety; what is forwarded must fit in here.
    """

    window: int
    usable: int
    limit: int


def budget(window: int, reserves: Reserves, max_output: int | None) -> Budget:
    """The budget of a request that asks for up to `max_output` tokens (None: it does not say).

    Reserves shrink in proportion where together they would take more than a quarter of the window. A
    request that asks for more output than the window can give still gets a limit of a quarter: how such a
    wish is judged is the upstream's affair, and nothing would be won by removing everything.
    """
    asked = max_output or 0
    wanted = reserves.system + max(reserves.output, asked) + reserves.safety
    reserve = min(wanted, window // RESERVE_SHARE)
    safety = reserves.safety * reserve // wanted if wanted else 0
    limit = max(window - asked - safety, window // RESERVE_SHARE)
    return Budget(window=window, usable=window - reserve, limit=limit)
