"""Prices of models, and the cost of requests at these prices."""

from dataclasses import dataclass
from typing import NamedTuple

MILLION = 1_000_000


class PriceTier(NamedTuple):
    """Prices for requests in a certain range of sizes, in dollars per million tokens.

    Attributes:
        above: The tier applies to requests with more input tokens than this. It is 0 in the tier for the
            smallest requests.
        input: Price of input tokens that were not cached.
        cached: Price of input tokens that the provider had cached.
        cache_write: Price of input tokens that the provider has put into its cache.
        output: Price of output tokens.
    """

    above: int
    input: float
    cached: float
    cache_write: float
    output: float


@dataclass(frozen=True, slots=True)
class ModelPrice:
    """The prices of one model.

    Attributes:
        tiers: The tiers in ascending order of `above`, which is 0 in the first tier. The number of all input
            tokens of a request decides which tier applies. This tier applies to all tokens of the request.
        source: The origin of the prices: `configuration`, or the name and version of a price table.
        date: The day on which the prices were current, as `YYYY-MM-DD`; empty if unknown.
    """

    tiers: tuple[PriceTier, ...]
    source: str
    date: str = ""

    def compute_cost(self, prompt_tokens: int, cached_tokens: int = 0, completion_tokens: int = 0) -> float:
        """Returns the cost of a request in dollars.

        Args:
            prompt_tokens: Input tokens, including the cached ones.
            cached_tokens: Input tokens that the provider had cached; at most `prompt_tokens` count.
            completion_tokens: Output tokens.
        """
        tier = next((each for each in reversed(self.tiers) if prompt_tokens > each.above), self.tiers[0])
        hit = min(max(cached_tokens, 0), prompt_tokens)
        return (
            hit * tier.cached + (prompt_tokens - hit) * tier.input + completion_tokens * tier.output
        ) / MILLION

    @property
    def surcharge_tokens(self) -> int | None:
        """The number of input tokens above which a request pays a surcharge; None if there is none."""
        least = self.tiers[0]
        return next((tier.above for tier in self.tiers if tier.input > least.input), None)
