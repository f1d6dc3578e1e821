"""What compaction is worth: what an exchange has saved, and when a round has paid for itself.

A saving compares an exchange with the same request sent as the client wrote it. What that would have cost
depends on how much of it the provider would have had cached, which is worked out from what the provider has
really cached of the requests that were sent. The parts:

- *gross*: what the tokens that were left away would have cost, cached as they would have been.
- *cache loss*: what was paid for tokens that would have been cached if no round had changed what stands
  before them.
- *net*: gross less cache loss. What summaries cost is known of rounds, not of exchanges: it comes off later.
"""

from collections.abc import Sequence
from typing import NamedTuple

from proxy.core.exchange import Exchange
from proxy.core.price import Price

# Providers forget a prefix that nobody has asked for in this time.
EXPIRY_S = 600.0
# The shortest prefix that a provider caches, in tokens.
LEAST_CACHED_TOKENS = 1_024
# Requests of a conversation that are remembered: it may have branches, and agents that share its id.
MAX_HEARD = 8
# Estimates of what was removed wobble by so much, in tokens and as a share; what is more was removed anew.
WOBBLE_TOKENS = 1_000
WOBBLE_SHARE = 0.10
# Stands for a shortfall where a provider caches nothing, in tokens.
NOTHING_CACHED_TOKENS = 10**12


class Saving(NamedTuple):
    """What one exchange cost and saved, in dollars; what summaries cost is not among it.

    Attributes:
        cost: What was paid for it.
        gross: What it would have cost more with everything that the client sent.
        cache_loss: What of the cost was due to prompt caches that rounds have broken.
        net: `gross` less `cache_loss`; below zero where the round has yet to pay for itself.
    """

    cost: float
    gross: float = 0.0
    cache_loss: float = 0.0
    net: float = 0.0


class Heard(NamedTuple):
    """What a provider has read, and so may have cached.

    Attributes:
        at: When, in seconds since the epoch.
        model: Which model.
        digest: Prefix digest of the client's whole list; empty where the request was not read.
        before: Tokens of the client's list, as far as possible as the provider would count them.
        estimate: The same, estimated; None where the request was not read.
        removed: Tokens that were left away, estimated.
        forwarded: Tokens of what was forwarded, as the provider counted them.
        form: What had been made of the list: two requests of one form that continue one another have what
            the first one forwarded in common.
    """

    at: float
    model: str
    digest: bytes
    before: int
    estimate: int | None
    removed: int
    forwarded: int
    form: str


class Standing(NamedTuple):
    """What is remembered of a conversation from one exchange to the next.

    Attributes:
        heard: Its newest requests, the newest last.
        shortfall: Tokens of a prefix that the provider has left uncached although it had read them before,
            because it caches in blocks; below zero where it has answers cached, too. None: nothing has told.
    """

    heard: tuple[Heard, ...] = ()
    shortfall: int | None = None


UNHEARD = Standing()


def saving(
    exchange: Exchange, prefixes: Sequence[bytes], known: Standing | None, price: Price | None
) -> tuple[Saving | None, Standing]:
    """What an exchange has saved, and what is to be remembered of its conversation for the next one.

    Args:
        exchange: The exchange.
        prefixes: Prefix digests of the client's non-privileged messages; empty if it was not read.
        known: What was returned for the conversation's exchange before; None if there was none.
        price: Of the model that was asked; None if that is not known.

    Returns:
        The saving: None where no price is known, or not what the provider has counted. A request that was
        refused costs nothing, and one that went on as it came saves exactly nothing.
    """
    known = known or UNHEARD
    if exchange.code >= 400:
        return (Saving(0.0) if price else None), known
    prompt = exchange.prompt_tokens
    if prompt is None:
        return None, known
    heard = _heard(exchange, prefixes, prompt)
    earlier = _continued(heard, prefixes, known)
    now = heard._replace(before=_before(exchange, heard, earlier))
    shortfall = _shortfall(exchange, now, earlier, known.shortfall)
    made = _priced(exchange, now, _unchanged_cached(exchange, now, earlier, known, shortfall), price)
    others = tuple(each for each in known.heard if (each.model, each.digest) != (now.model, now.digest))
    return made, Standing((*others, now)[-MAX_HEARD:], shortfall)


def _removed(exchange: Exchange) -> int:
    """Tokens that were left away, less what stands in for them, estimated."""
    if exchange.tokens_before is None or exchange.tokens_after is None:
        return 0
    return max(0, exchange.tokens_before - exchange.tokens_after)


def _heard(exchange: Exchange, prefixes: Sequence[bytes], prompt: int) -> Heard:
    removed = _removed(exchange)
    form = f"{exchange.strategy}/{exchange.round}" if removed else ""
    digest = prefixes[-1] if prefixes else b""
    return Heard(
        exchange.at, exchange.model, digest, prompt + removed, exchange.tokens_before, removed, prompt, form
    )


def _before(exchange: Exchange, now: Heard, earlier: Heard | None) -> int:
    """Tokens of the client's list: those that the provider has counted once, and what has come since then.

    What has come is counted, too, where what stands before it has not changed, else it is estimated. So the
    error of estimates does not grow with what was removed.
    """
    if earlier is None or not now.removed:
        return now.before
    if _kept_prefix(exchange, now, earlier):
        anew = now.removed - earlier.removed  # of a new message that was shortened at once
        anew = anew if anew > max(WOBBLE_TOKENS, WOBBLE_SHARE * earlier.removed) else 0
        return earlier.before + now.forwarded - earlier.forwarded + anew
    if now.estimate is None or earlier.estimate is None:
        return now.before
    return max(now.forwarded, earlier.before + max(0, now.estimate - earlier.estimate))


def _continued(now: Heard, prefixes: Sequence[bytes], known: Standing) -> Heard | None:
    """The longest earlier request that this one begins with; of one that was not read, that is believed."""
    ours = frozenset(prefixes)

    def begins(each: Heard) -> bool:
        read = bool(each.digest and ours)
        return each.model == now.model and (each.digest in ours if read else each.before <= now.before)

    return max(filter(begins, known.heard), key=lambda each: (each.before, each.at), default=None)


def _kept_prefix(exchange: Exchange, now: Heard, earlier: Heard) -> bool:
    """Whether all that was forwarded of the earlier request stands at the beginning of this one."""
    whole = exchange.status not in {"applied", "over-limit"} or not _removed(exchange)
    return whole and earlier.form == now.form and earlier.forwarded <= now.forwarded


def _expired(now: Heard, earlier: Heard) -> bool:
    return now.at - earlier.at > EXPIRY_S


def _missed(exchange: Exchange, now: Heard, earlier: Heard) -> bool:
    """Whether the provider had nothing cached although it could have."""
    could = earlier.forwarded >= LEAST_CACHED_TOKENS and _kept_prefix(exchange, now, earlier)
    return could and not exchange.cached_tokens


def _shortfall(exchange: Exchange, now: Heard, earlier: Heard | None, last: int | None) -> int | None:
    """How much of a prefix the provider leaves uncached, as far as this exchange and those before told."""
    if earlier is None or _expired(now, earlier) or not _kept_prefix(exchange, now, earlier):
        return last
    if exchange.cached_tokens:
        return earlier.forwarded - exchange.cached_tokens
    if last is None and _missed(exchange, now, earlier):
        return NOTHING_CACHED_TOKENS
    return last


def _unchanged_cached(
    exchange: Exchange, now: Heard, earlier: Heard | None, known: Standing, shortfall: int | None
) -> int:
    """Tokens that the provider would have had cached of the request as the client sent it."""
    cached = exchange.cached_tokens or 0
    if earlier is None:
        share = 0.0 if known.heard else cached / max(1, now.forwarded)
        return max(cached, int(share * now.before))
    if not cached and (_expired(now, earlier) or _missed(exchange, now, earlier)):
        return 0
    return max(cached, min(earlier.before - (shortfall or 0), now.before))


def _priced(exchange: Exchange, now: Heard, would_be_cached: int, price: Price | None) -> Saving | None:
    if price is None:
        return None
    written = exchange.completion_tokens or 0
    cost = price.of(now.forwarded, exchange.cached_tokens or 0, written)
    if now.before == now.forwarded:
        return Saving(cost)
    unbroken = price.of(now.forwarded, min(would_be_cached, now.forwarded), written)
    gross = price.of(now.before, would_be_cached, written) - unbroken
    loss = cost - unbroken
    return Saving(cost, gross, loss, gross - loss)


def pay_back(
    before: int,
    after: int,
    price: Price | None,
    *,
    summary_usd: float | None = 0.0,
    loss_usd: float | None = None,
    cached_share: float = 1.0,
) -> float | None:
    """Requests until a round has paid for its summary and for the cache that it broke.

    Each request after it is shorter by what the round has removed.

    Args:
        before: Tokens of the request without the round.
        after: Tokens of it with the round.
        price: Of the model that is asked.
        summary_usd: What the summary cost, in dollars.
        loss_usd: What the broken cache cost, in dollars; None: as if nothing of what stays had been cached
            any more, which is the most that it can have cost.
        cached_share: How much of a prefix that the provider has read is found cached, 0..1.

    Returns None where a price is not known, and where the round never pays.
    """
    if price is None or summary_usd is None:
        return None
    hits = int(cached_share * after)
    lost = price.of(after) - price.of(after, hits) if loss_usd is None else loss_usd
    won = price.of(before, int(cached_share * before)) - price.of(after, hits)
    return max(0.0, summary_usd + lost) / won if won > 0 else None
