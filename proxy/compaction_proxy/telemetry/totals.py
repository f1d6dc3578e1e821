"""Totals of a conversation: its usage, its cost, and the figures of its last exchange."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from compaction_proxy.core.event import parse_integer, parse_number
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.telemetry.exchange_batch import ExchangeBatch

# Fields that are summed, as whole numbers and in dollars.
COUNTS = (
    "requests", "request_bytes", "prompt_tokens", "completion_tokens", "cached_tokens", "recalls", "rounds",
    "priced",
)  # fmt: skip
DOLLARS = ("cost_usd", "gross_usd", "cache_loss_usd", "summary_usd")
# Fields that hold the value of the last exchange that knows it.
LAST_WHOLE = ("tokens_before", "tokens_after", "trigger", "window")
LAST_TEXT = ("model", "status")


@dataclass(slots=True)
class Totals:
    """What a conversation has used; added to in place, because each request adds.

    Attributes:
        model: The model that was asked last; empty if it was not read.
        status: What was done to the last request (`core.exchange`).
        requests: Requests relayed.
        request_bytes: Bytes of their bodies, as the client sent them.
        prompt_tokens: Input tokens that the upstream reported.
        completion_tokens: Output tokens that it reported.
        cached_tokens: Input tokens that it had cached.
        recalls: How often answers went on because the model searched what was removed.
        rounds: Rounds that were made.
        priced: Requests of which the price is known.
        cost_usd: What these cost, in dollars, summaries not among it.
        gross_usd: What compaction took off that price.
        cache_loss_usd: What it added to it, because the provider's cache had to be filled again.
        summary_usd: What summaries cost.
        tokens_before: What the client sent last, in tokens; None if that is not known.
        tokens_after: What was forwarded of it.
        trigger: T of the last request that was read, in tokens.
        window: Of its model, in tokens.
        last_at: Seconds since the epoch of the last request.
    """

    model: str = ""
    status: str = ""
    requests: int = 0
    request_bytes: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    recalls: int = 0
    rounds: int = 0
    priced: int = 0
    cost_usd: float = 0.0
    gross_usd: float = 0.0
    cache_loss_usd: float = 0.0
    summary_usd: float = 0.0
    tokens_before: int | None = None
    tokens_after: int | None = None
    trigger: int | None = None
    window: int | None = None
    last_at: float = 0.0

    @property
    def net_usd(self) -> float | None:
        """Dollars that compaction has saved, less cache loss and summaries; None without known prices."""
        return self.gross_usd - self.cache_loss_usd - self.summary_usd if self.priced else None

    def add_exchange(self, exchange: Exchange) -> None:
        """Adds one request, without its price."""
        self.requests += 1
        self.request_bytes += exchange.request_bytes
        self.prompt_tokens += exchange.prompt_tokens or 0
        self.completion_tokens += exchange.completion_tokens or 0
        self.cached_tokens += exchange.cached_tokens or 0
        self.recalls += exchange.recalls or 0
        if exchange.at >= self.last_at:
            self.last_at = exchange.at
            self.update_latest(exchange)

    def add_batch(self, batch: ExchangeBatch) -> None:
        """Adds requests that were not read."""
        columns = batch.columns
        self.requests += len(batch.exchanges)
        self.request_bytes += sum(columns.request_bytes)
        self.prompt_tokens += batch.prompt_tokens
        self.completion_tokens += batch.completion_tokens
        self.cached_tokens += batch.cached_tokens
        self.priced += batch.priced
        self.cost_usd += batch.cost_usd
        if columns.at[-1] >= self.last_at:
            self.last_at = columns.at[-1]
            self.update_latest(batch.list_newest(1)[0].exchange)

    def update_latest(self, source: "Exchange | Totals") -> None:
        """Takes over the known figures of a newer exchange or of newer totals."""
        self.model = source.model or self.model
        self.status = source.status or self.status
        if source.tokens_before is not None:
            self.tokens_before = source.tokens_before
        if source.tokens_after is not None:
            self.tokens_after = source.tokens_after
        if source.trigger is not None:
            self.trigger = source.trigger
        if source.window is not None:
            self.window = source.window

    def add_price(self, cost: float, gross: float, cache_loss: float) -> None:
        """Adds the price of one request, in dollars."""
        self.priced += 1
        self.cost_usd += cost
        self.gross_usd += gross
        self.cache_loss_usd += cache_loss


def sum_totals(one: Totals, other: Totals) -> Totals:
    """Adds up two totals. Fields that are not sums get the values of the later one."""
    early, late = sorted((one, other), key=lambda each: each.last_at)
    sums = {name: getattr(one, name) + getattr(other, name) for name in COUNTS + DOLLARS}
    merged = replace(early, **sums, last_at=late.last_at)
    merged.update_latest(late)
    return merged


def to_fields(totals: Totals) -> dict[str, Any]:
    """Returns the totals as JSON values, without unknown values."""
    values = {each.name: getattr(totals, each.name) for each in fields(totals)}
    return {name: value for name, value in values.items() if value is not None}


def from_fields(stored: Mapping[str, Any] | None) -> Totals:
    """Restores totals from stored fields. A value of the wrong type counts as 0, empty or unknown."""
    known = stored or {}
    values: dict[str, Any] = {name: parse_integer(known.get(name)) or 0 for name in COUNTS}
    values |= {name: parse_number(known.get(name)) or 0.0 for name in (*DOLLARS, "last_at")}
    values |= {name: parse_integer(known.get(name)) for name in LAST_WHOLE}
    texts = {name: known.get(name) for name in LAST_TEXT}
    values |= {name: text if isinstance(text, str) else "" for name, text in texts.items()}
    return Totals(**values)
