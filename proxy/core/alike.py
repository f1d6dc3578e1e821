"""Exchanges that were not read, added up: thousands of them are alike, and only their sums matter."""

from collections.abc import Sequence
from typing import NamedTuple

from proxy.core.exchange import FAILED_FROM, Exchange
from proxy.core.price import Price


class Alike(NamedTuple):
    """Exchanges that were not read: of one tenant, conversation, model and status code, oldest first.

    Attributes:
        tenant: Whose.
        conversation: Of which conversation; None where none is known.
        model: The model that was asked; empty if that is not known.
        code: The upstream's status code.
        exchanges: Their figures, at least one.
        prompt_tokens: Input tokens of them all, as the upstream counted them.
        completion_tokens: Output tokens, likewise.
        cached_tokens: Input tokens that it had cached.
        priced: How many of them have a price.
        cost_usd: What those cost, in dollars.
    """

    tenant: str
    conversation: str | None
    model: str
    code: int
    exchanges: Sequence[Exchange]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    priced: int = 0
    cost_usd: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the upstream answered them with an error."""
        return self.code >= FAILED_FROM


def added_up(
    tenant: str, conversation: str | None, exchanges: Sequence[Exchange], price: Price | None
) -> Alike:
    """Exchanges that are alike, with their sums.

    Args:
        tenant: Whose.
        conversation: Of which conversation.
        exchanges: Of one model and status code, none of which was read.
        price: Of the model; None if that is not known.
    """
    first = exchanges[0]
    alike = Alike(tenant, conversation, first.model, first.code, exchanges)
    if alike.failed:  # costs nothing, and its usage is not believed
        return alike._replace(priced=len(exchanges) if price else 0)
    told = [each for each in exchanges if each.prompt_tokens is not None]
    if not told:
        return alike
    return alike._replace(
        prompt_tokens=sum([each.prompt_tokens or 0 for each in told]),
        completion_tokens=sum([each.completion_tokens or 0 for each in told]),
        cached_tokens=sum([each.cached_tokens or 0 for each in told]),
        priced=len(told) if price else 0,
        cost_usd=_cost(told, price) if price else 0.0,
    )


def _cost(told: Sequence[Exchange], price: Price) -> float:
    """What exchanges whose usage is known cost. Without tiers that depends on nothing but their sums."""
    counts = [
        (each.prompt_tokens or 0, each.cached_tokens or 0, each.completion_tokens or 0) for each in told
    ]
    if len(price.tiers) == 1 and all(cached <= prompt for prompt, cached, _ in counts):
        return price.of(*map(sum, zip(*counts, strict=True)))
    return sum(price.of(*each) for each in counts)
