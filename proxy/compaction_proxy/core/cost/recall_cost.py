"""What an exchange has saved whose answer went on because its model searched what rounds had taken out.

The saving is that of the first answer, which is about the request as it was sent. What the others took comes
on top of its cost, and off what was saved: had nothing been removed, nothing would have been searched.
"""

from collections.abc import Sequence

from compaction_proxy.core.cost.price import Price
from compaction_proxy.core.cost.savings import Saving, Standing, saving
from compaction_proxy.core.exchange import Exchange


def saving_of(
    exchange: Exchange,
    prefixes: Sequence[bytes],
    known: Standing | None,
    price: Price | None,
    counted: tuple[int, int] = (0, 0),
) -> tuple[Saving | None, Standing]:
    """As `economics.saving`, whatever number of answers the exchange has."""
    prompt, cached = exchange.recall_prompt_tokens, exchange.recall_cached_tokens or 0
    if not prompt:
        return saving(exchange, prefixes, known, price, counted)
    first = exchange._replace(
        prompt_tokens=exchange.first_prompt_tokens,
        cached_tokens=(exchange.cached_tokens or 0) - cached,
    )
    made, learned = saving(first, prefixes, known, price, counted)
    if made is None or price is None:
        return made, learned
    more = price.of(prompt, cached)
    return Saving(made.cost + more, made.gross - more, made.cache_loss, made.net - more), learned
