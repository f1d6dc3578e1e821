"""Batches of exchanges whose requests the proxy forwarded without reading them, with their sums.

There may be thousands of such exchanges with the same tenant, conversation, model and status code. They are
added up together, because this is faster than one by one.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from compaction_proxy.core.cost.price import ModelPrice
from compaction_proxy.core.cost.savings import Saving, compute_unchanged_saving
from compaction_proxy.core.exchange import FIRST_ERROR_STATUS, Exchange, UnreadExchange, build_unread_exchange


class ExchangeEntry(NamedTuple):
    """An exchange, its saving, and to whom it belongs.

    Attributes:
        tenant: Tenant of the exchange.
        conversation: Conversation of the exchange; None if it is unknown.
        exchange: Figures of the exchange.
        saving: Saving of the exchange; None if it is unknown.
    """

    tenant: str
    conversation: str | None
    exchange: Exchange
    saving: Saving | None


class ExchangeColumns(NamedTuple):
    """Exchanges as columns: one sequence of values per field of `UnreadExchange`, all of equal length."""

    at: Sequence[float]
    request: Sequence[str]
    request_bytes: Sequence[int]
    prompt_tokens: Sequence[int | None]
    completion_tokens: Sequence[int | None]
    cached_tokens: Sequence[int | None]
    overhead_s: Sequence[float]
    first_byte_s: Sequence[float | None]
    upstream_s: Sequence[float | None]


class ExchangeBatch(NamedTuple):
    """Exchanges with one tenant, conversation, model and status code, whose requests were not read.

    Attributes:
        tenant: Tenant of the exchanges.
        conversation: Conversation of the exchanges; None if it is unknown.
        model: Requested model; empty if it is unknown.
        code: Status code of the upstream.
        exchanges: The exchanges, oldest first; at least one.
        columns: The same exchanges, column by column.
        price: Price of the model; None if it is unknown.
        prompt_tokens: Sum of the input tokens, as the upstream counted them.
        completion_tokens: Sum of the output tokens, as the upstream counted them.
        cached_tokens: Sum of the input tokens that the upstream had cached.
        priced: Number of exchanges with a known price.
        cost_usd: Cost of the exchanges with a known price, in dollars.
    """

    tenant: str
    conversation: str | None
    model: str
    code: int
    exchanges: Sequence[UnreadExchange]
    columns: ExchangeColumns
    price: ModelPrice | None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    priced: int = 0
    cost_usd: float = 0.0

    @property
    def has_failed(self) -> bool:
        """Whether the upstream answered with an error."""
        return self.code >= FIRST_ERROR_STATUS

    def list_newest(self, limit: int) -> list[ExchangeEntry]:
        """Returns the newest exchanges, at most `limit`, oldest first."""
        newest = [build_unread_exchange(self.model, self.code, each) for each in self.exchanges[-limit:]]
        shared = self.tenant, self.conversation
        return [ExchangeEntry(*shared, each, compute_unchanged_saving(each, self.price)) for each in newest]


get_entry_time = attrgetter("exchange.at")
"""Returns the time at which the exchange of an entry began."""


def select_newest_entries(groups: Iterable[ExchangeBatch], limit: int) -> list[ExchangeEntry]:
    """Returns the newest exchanges of all batches, at most `limit`, oldest first."""
    return sorted([each for alike in groups for each in alike.list_newest(limit)], key=get_entry_time)[
        -limit:
    ]


def build_exchange_batch(
    tenant: str,
    conversation: str | None,
    model: str,
    code: int,
    exchanges: Sequence[UnreadExchange],
    price: ModelPrice | None,
) -> ExchangeBatch:
    """Builds a batch with its sums. `ExchangeBatch` describes the arguments, which are its fields."""
    columns = ExchangeColumns._make(zip(*exchanges, strict=True))
    batch = ExchangeBatch(tenant, conversation, model, code, exchanges, columns, price)
    if batch.has_failed:  # a failed request costs nothing, and the usage in its response is not trusted
        return batch._replace(priced=len(exchanges) if price else 0)
    counted = [each for each in exchanges if each.prompt_tokens is not None]
    if not counted:
        return batch
    return batch._replace(
        prompt_tokens=sum(filter(None, columns.prompt_tokens)),
        completion_tokens=sum([each.completion_tokens or 0 for each in counted]),
        cached_tokens=sum([each.cached_tokens or 0 for each in counted]),
        priced=len(counted) if price else 0,
        cost_usd=_compute_cost(counted, price) if price else 0.0,
    )


def _compute_cost(exchanges: Sequence[UnreadExchange], price: ModelPrice) -> float:
    """Computes the cost of exchanges with known usage, in dollars.

    If the price has a single tier, computes it from the sums of the tokens, which is faster.
    """
    counts = [
        (each.prompt_tokens or 0, each.cached_tokens or 0, each.completion_tokens or 0) for each in exchanges
    ]
    if len(price.tiers) == 1 and all(cached <= prompt for prompt, cached, _ in counts):
        return price.compute_cost(*map(sum, zip(*counts, strict=True)))
    return sum(price.compute_cost(*each) for each in counts)
