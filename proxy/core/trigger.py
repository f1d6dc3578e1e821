"""When to compact: rows of thresholds. Rows are alternatives; the fields of one row must all be reached."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.core.budget import Budget

FIELDS = ("tokens", "percent", "percent_of_window", "messages", "turns", "iterations")


@dataclass(frozen=True, slots=True)
class Row:
    """One alternative. A field that is None does not count; a field that is 0 switches the row off.

    Attributes:
        tokens: Tokens of the effective list.
        percent: The same, in percent of the usable tokens.
        percent_of_window: The same, in percent of the window.
        messages: Messages gained since the last round.
        turns: Turns gained since the last round.
        iterations: Iterations (assistant messages) gained since the last round.
        active: Whether the row can fire at all; follows from the others.
    """

    tokens: int | None = None
    percent: float | None = None
    percent_of_window: float | None = None
    messages: int | None = None
    turns: int | None = None
    iterations: int | None = None
    active: bool = field(init=False, repr=False, compare=False)  # asked several times for each request

    def __post_init__(self) -> None:
        """Work out whether the row can fire."""
        named = [getattr(self, name) for name in FIELDS]
        object.__setattr__(self, "active", 0 not in named and any(named))

    @property
    def named(self) -> tuple[str, ...]:
        """The fields that count."""
        return tuple(name for name in FIELDS if getattr(self, name) is not None)

    @property
    def counts(self) -> bool:
        """Whether it matters what the conversation has gained."""
        return bool(self.messages or self.turns or self.iterations)

    def token_mark(self, budget: Budget) -> int:
        """Tokens at which the token fields are all reached; 0 if the row has none."""
        return max(
            self.tokens or 0,
            int(budget.usable * (self.percent or 0) / 100),
            int(budget.window * (self.percent_of_window or 0) / 100),
        )


@dataclass(frozen=True, slots=True)
class Gained:
    """What a conversation has gained since its last round, in counts."""

    messages: int
    turns: int
    iterations: int


NOTHING_GAINED = Gained(messages=0, turns=0, iterations=0)


def automatic(rows: Sequence[Row]) -> bool:
    """Whether anything may compact on its own: with no active row, not even overflow recovery does."""
    return any(row.active for row in rows)


@dataclass(frozen=True, slots=True)
class Marks:
    """Where things happen, in tokens of the effective list.

    Attributes:
        soft: Work ahead of need begins; None: never.
        trigger: T; where no row names tokens, all that is usable.
        hard: A request above it cannot wait for a better moment.
    """

    soft: int | None
    trigger: int
    hard: int


def marks(rows: Sequence[Row], budget: Budget, soft_share: float, hard_percent: float) -> Marks:
    """The marks of a strategy's rows (DESIGN.md §5.6)."""
    named = [tokens for row in rows if row.active and (tokens := row.token_mark(budget))]
    trigger = min([*named, budget.usable])
    soft = int(soft_share * trigger) if soft_share and named else None
    return Marks(soft, trigger, min(max(int(budget.usable * hard_percent / 100), trigger), budget.usable))


def mark(rows: Sequence[Row], budget: Budget) -> int | None:
    """T: the fewest tokens at which a row can fire; 0 if one asks for counts only, None if none is active."""
    return min((row.token_mark(budget) for row in rows if row.active), default=None)


def fired(rows: Sequence[Row], tokens: int, gained: Gained, budget: Budget) -> Row | None:
    """The first row that is reached, or None. `tokens` is the size of the effective list."""
    for row in rows:
        if (
            row.active
            and tokens >= row.token_mark(budget)
            and gained.messages >= (row.messages or 0)
            and gained.turns >= (row.turns or 0)
            and gained.iterations >= (row.iterations or 0)
        ):
            return row
    return None
