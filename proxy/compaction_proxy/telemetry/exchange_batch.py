"""Exchanges that were not read, added up: thousands of them are alike, and only their sums matter."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from compaction_proxy.core.cost.price import ModelPrice
from compaction_proxy.core.cost.savings import Saving, compute_unchanged_saving
from compaction_proxy.core.exchange import FIRST_ERROR_STATUS, Exchange, UnreadExchange, build_unread_exchange


class ExchangeEntry(NamedTuple):
    """An exchange, and what it saved.

    Attributes:
        tenant: Whose it was.
        conversation: Of which conversation; None where that is not known.
        exchange: Its figures.
        saving: What it saved; None where that is not known.
    """

    tenant: str
    conversation: str | None
    exchange: Exchange
    saving: Saving | None


class ExchangeColumns(NamedTuple):
    """What is known of exchanges, column by column (`core.exchange.UnreadExchange`); each has all of them."""

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
    """Exchanges that were not read: of one tenant, conversation, model and status code, oldest first.

    Attributes:
        tenant: Whose.
        conversation: Of which conversation; None where none is known.
        model: The model that was asked; empty if that is not known.
        code: The upstream's status code.
        exchanges: At least one.
        columns: The same, column by column.
        price: Of the model; None if that is not known.
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
        """Whether the upstream answered them with an error."""
        return self.code >= FIRST_ERROR_STATUS

    def list_newest(self, limit: int) -> list[ExchangeEntry]:
        """The newest of them, oldest first."""
        found = [build_unread_exchange(self.model, self.code, each) for each in self.exchanges[-limit:]]
        whose = self.tenant, self.conversation
        return [ExchangeEntry(*whose, each, compute_unchanged_saving(each, self.price)) for each in found]


get_entry_time = attrgetter("exchange.at")
"""When the exchange of an entry came."""


def select_newest(groups: Iterable[ExchangeBatch], limit: int) -> list[ExchangeEntry]:
    """The newest exchanges of groups."""
    return sorted([each for alike in groups for each in alike.list_newest(limit)], key=get_entry_time)[
        -limit:
    ]


def build_batch(
    tenant: str,
    conversation: str | None,
    model: str,
    code: int,
    exchanges: Sequence[UnreadExchange],
    price: ModelPrice | None,
) -> ExchangeBatch:
    """Exchanges that are alike, with their sums; the arguments are fields of `ExchangeBatch`."""
    columns = ExchangeColumns._make(zip(*exchanges, strict=True))
    alike = ExchangeBatch(tenant, conversation, model, code, exchanges, columns, price)
    if alike.has_failed:  # costs nothing, and its usage is not believed
        return alike._replace(priced=len(exchanges) if price else 0)
    told = [each for each in exchanges if each.prompt_tokens is not None]
    if not told:
        return alike
    return alike._replace(
        prompt_tokens=sum(filter(None, columns.prompt_tokens)),
        completion_tokens=sum([each.completion_tokens or 0 for each in told]),
        cached_tokens=sum([each.cached_tokens or 0 for each in told]),
        priced=len(told) if price else 0,
        cost_usd=_compute_cost(told, price) if price else 0.0,
    )


def _compute_cost(exchanges: Sequence[UnreadExchange], price: ModelPrice) -> float:
    """What exchanges whose usage is known cost. Without tiers that depends on nothing but their sums."""
    counts = [
        (each.prompt_tokens or 0, each.cached_tokens or 0, each.completion_tokens or 0) for each in exchanges
    ]
    if len(price.tiers) == 1 and all(cached <= prompt for prompt, cached, _ in counts):
        return price.compute_cost(*map(sum, zip(*counts, strict=True)))
    return sum(price.compute_cost(*each) for each in counts)
