"""What requests to a model cost."""

from dataclasses import dataclass
from typing import NamedTuple

MILLION = 1_000_000


class PriceTier(NamedTuple):
    """Prices that hold for every token of a request of a certain size, in dollars per million tokens.

    Attributes:
        above: Input tokens that the request has more than; 0: any.
        input: Of input tokens that were not cached.
        cached: Of input tokens that the provider had cached.
        cache_write: Of input tokens that it has put into its cache.
        output: Of output tokens.
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
        tiers: By size, the smallest first; that one is above 0. The size of a request is all of its input,
            and the tier that it falls into holds for all of its tokens.
        source: Where the prices are from: `configuration`, or the name and version of a table.
        date: When they were current, as `YYYY-MM-DD`; empty if that is not known.
    """

    tiers: tuple[PriceTier, ...]
    source: str
    date: str = ""

    def get_tier(self, prompt: int) -> PriceTier:
        """The prices of a request with so many input tokens."""
        return next((tier for tier in reversed(self.tiers) if prompt > tier.above), self.tiers[0])

    def compute_cost(self, prompt: int, cached: int = 0, completion: int = 0) -> float:
        """Dollars for a request.

        Args:
            prompt: Input tokens, the cached ones included.
            cached: Input tokens that the provider had cached.
            completion: Output tokens.
        """
        tier = self.tiers[0] if len(self.tiers) == 1 else self.get_tier(prompt)
        hit = cached if 0 <= cached <= prompt else min(max(cached, 0), prompt)
        return (hit * tier.cached + (prompt - hit) * tier.input + completion * tier.output) / MILLION

    @property
    def surcharge_tokens(self) -> int | None:
        """Input tokens above which a request costs more a token than a small one; None: nowhere."""
        least = self.tiers[0]
        return next((tier.above for tier in self.tiers if tier.input > least.input), None)
