"""Totals of a conversation: its usage, its cost, and the figures of its last exchange."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from compaction_proxy.core.event import parse_integer, parse_number
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.telemetry.exchange_batch import ExchangeBatch

# Fields of `Totals` that are summed: whole numbers (`COUNTS`), and amounts in dollars (`DOLLARS`).
COUNTS = (
    "requests", "request_bytes", "prompt_tokens", "completion_tokens", "cached_tokens", "recalls", "rounds",
    "priced",
)  # fmt: skip
DOLLARS = ("cost_usd", "gross_usd", "cache_loss_usd", "summary_usd")
# Fields of `Totals` that are not summed. Each has the value from the latest exchange for which it is known.
LAST_WHOLE = ("tokens_before", "tokens_after", "trigger", "window")
LAST_TEXT = ("model", "status")


@dataclass(slots=True)
class Totals:
    """Usage of a conversation. Mutable, because each request adds to it.

    Attributes:
        model: Model of the latest request whose model is known; empty if there was none.
        status: What the proxy did with the last request (`Exchange.status`).
        requests: Number of requests.
        request_bytes: Total size of the request bodies, as the client sent them, in bytes.
        prompt_tokens: Input tokens, as the upstream counted them.
        completion_tokens: Output tokens, as the upstream counted them.
        cached_tokens: Input tokens that the upstream had cached.
        recalls: Number of times that an answer continued after the model had searched removed messages.
        rounds: Number of compactions.
        priced: Number of requests whose price is known.
        cost_usd: Cost of the requests whose price is known, in dollars. Summaries are not included.
        gross_usd: Dollars that the same requests would have cost more without compaction.
        cache_loss_usd: Dollars that the same requests cost more because compaction broke prompt caches.
        summary_usd: Cost of summaries, in dollars.
        tokens_before: Tokens of the latest request that the proxy counted, as the client sent it; None if no
            request was counted.
        tokens_after: Tokens of the latest request that the proxy counted, as it was forwarded; None if no
            request was counted.
        trigger: T for the latest request that the proxy read, in tokens; None if unknown.
        window: Context window of the model of that request, in tokens; None if unknown.
        last_at: Time of the last request, in seconds since the epoch.
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
        """Gross saving less cache loss and the cost of summaries, in dollars; None if no price is known."""
        return self.gross_usd - self.cache_loss_usd - self.summary_usd if self.priced else None

    def add_exchange(self, exchange: Exchange) -> None:
        """Adds the counts of one request. `add_price` adds its cost."""
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
        """Adds requests that were forwarded without being read, with their cost."""
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
        """Sets the fields that are not summed from `source`, a newer exchange or newer totals.

        A field whose value is unknown in `source` keeps its value.
        """
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
        """Adds the cost and the saving of one request, in dollars."""
        self.priced += 1
        self.cost_usd += cost
        self.gross_usd += gross
        self.cache_loss_usd += cache_loss


def sum_totals(first: Totals, second: Totals) -> Totals:
    """Returns the sum of two totals.

    A field that is not summed gets its value from the totals with the later request, if it is known there.
    """
    early, late = sorted((first, second), key=lambda each: each.last_at)
    sums = {name: getattr(first, name) + getattr(second, name) for name in COUNTS + DOLLARS}
    merged = replace(early, **sums, last_at=late.last_at)
    merged.update_latest(late)
    return merged


def to_fields(totals: Totals) -> dict[str, Any]:
    """Returns the totals as JSON values. Leaves out unknown values."""
    values = {each.name: getattr(totals, each.name) for each in fields(totals)}
    return {name: value for name, value in values.items() if value is not None}


def from_fields(stored: Mapping[str, Any] | None) -> Totals:
    """Restores totals from stored fields. A missing or invalid value becomes 0, empty or unknown."""
    known = stored or {}
    values: dict[str, Any] = {name: parse_integer(known.get(name)) or 0 for name in COUNTS}
    values |= {name: parse_number(known.get(name)) or 0.0 for name in (*DOLLARS, "last_at")}
    values |= {name: parse_integer(known.get(name)) for name in LAST_WHOLE}
    texts = {name: known.get(name) for name in LAST_TEXT}
    values |= {name: text if isinstance(text, str) else "" for name, text in texts.items()}
    return Totals(**values)
