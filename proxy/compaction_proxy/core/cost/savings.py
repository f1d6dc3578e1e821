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
from math import gcd
from typing import NamedTuple

from compaction_proxy.core.cost.price import ModelPrice
from compaction_proxy.core.exchange import Exchange

# Providers forget a prefix that nobody has asked for in this time.
EXPIRY_S = 600.0
# The shortest prefix that a provider caches, in tokens.
LEAST_CACHED_TOKENS = 1_024
# Requests of a conversation that are remembered: it may have branches, and agents that share its id.
MAX_CACHED_REQUESTS = 8
# Messages that a conversation grows by from one request to the next, mostly.
FEW_MESSAGES = 8
# The largest block in which providers cache, and the smallest whose rounding is worth knowing, in tokens.
LARGEST_BLOCK_TOKENS = 128
SMALLEST_BLOCK_TOKENS = 64
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


class CacheableRequest(NamedTuple):
    """What a provider has read, and so may have cached.

    Attributes:
        at: When, in seconds since the epoch.
        model: Which model.
        digest: Prefix digest of the client's whole list; empty where the request was not read.
        before: Tokens of the client's list, as far as possible as the provider would count them.
        listed: The same, as we count them; 0 where the request was not read.
        removed: Tokens that were left away, less what stands in for them, as we count them.
        forwarded: Tokens of what was forwarded, as the provider counted them.
        form: What had been made of the list: two requests of one form that continue one another have what
            the first one forwarded in common.
    """

    at: float
    model: str
    digest: bytes
    before: int
    listed: int
    removed: int
    forwarded: int
    form: str


class CacheState(NamedTuple):
    """What is remembered of a conversation from one exchange to the next.

    Attributes:
        requests: Its newest requests, the newest last.
        shortfall: Tokens of a prefix that the provider leaves uncached although it has read them before,
            beside what does not fill a block; below zero where it has answers cached, too. None: nothing has
            told.
        block: Tokens of which every number that it had cached was a multiple, up to the largest block that is
            known of a provider; 0: nothing has told.
    """

    requests: tuple[CacheableRequest, ...] = ()
    shortfall: int | None = None
    block: int = 0


EMPTY_CACHE_STATE = CacheState()


def compute_single_answer_saving(
    exchange: Exchange,
    prefixes: Sequence[bytes],
    state: CacheState | None,
    price: ModelPrice | None,
    counted: tuple[int, int] = (0, 0),
) -> tuple[Saving | None, CacheState]:
    """What an exchange has saved, and what is to be remembered of its conversation for the next one.

    Args:
        exchange: The exchange.
        prefixes: Prefix digests of the client's non-privileged messages; empty if it was not read.
        state: What was returned for the conversation's exchange before; None if there was none.
        price: Of the model that was asked; None if that is not known.
        counted: Tokens that the client sent and that were forwarded, uncalibrated; zeros: see the exchange.

    The saving is None where no price is known, or not what the provider has counted. A refused request
    costs nothing, and one that went on as it came saves exactly nothing.
    """
    state, prompt, refused = state or EMPTY_CACHE_STATE, exchange.prompt_tokens, exchange.has_failed
    if refused or prompt is None:
        return compute_unchanged_saving(exchange, price), state
    now = _build_cacheable_request(exchange, prefixes, prompt, counted)
    earlier = _find_continued_request(now, prefixes, state)
    if not now.removed:
        return compute_unchanged_saving(exchange, price), _update_cache_state(exchange, now, earlier, state)
    now = now._replace(before=_estimate_client_tokens(exchange, now, earlier))
    learned = _update_cache_state(exchange, now, earlier, state)
    cached = _estimate_unchanged_cached(exchange, now, earlier, learned, first=not state.requests)
    return _compute_priced_saving(exchange, now, cached, price), learned


def compute_unchanged_saving(exchange: Exchange, price: ModelPrice | None) -> Saving | None:
    """What an exchange cost whose request went on as it came, and so saved nothing; None if not known."""
    if price is None:
        return None
    if exchange.has_failed:
        return Saving(0.0)
    if exchange.prompt_tokens is None:
        return None
    cached, completion = exchange.cached_tokens or 0, exchange.completion_tokens or 0
    return Saving(price.compute_cost(exchange.prompt_tokens, cached, completion))


def _update_cache_state(
    exchange: Exchange, request: CacheableRequest, earlier: CacheableRequest | None, state: CacheState
) -> CacheState:
    block = _update_block_size(exchange, state.block)
    shortfall = _estimate_shortfall(exchange, request, earlier, state.shortfall, block)
    others = state.requests
    if request.digest in [each.digest for each in others]:
        others = tuple(
            each for each in others if (each.model, each.digest) != (request.model, request.digest)
        )
    return CacheState((*others[1 - MAX_CACHED_REQUESTS :], request), shortfall, block)


def _build_cacheable_request(
    exchange: Exchange, prefixes: Sequence[bytes], prompt: int, counted: tuple[int, int]
) -> CacheableRequest:
    listed, left = counted if any(counted) else (exchange.tokens_before or 0, exchange.tokens_after or 0)
    removed = max(0, listed - left)
    form = f"{exchange.strategy}/{exchange.round}" if removed else ""
    digest = prefixes[-1] if prefixes else b""
    before = prompt + round(removed * prompt / max(1, left))
    return CacheableRequest(exchange.at, exchange.model, digest, before, listed, removed, prompt, form)


def _estimate_client_tokens(
    exchange: Exchange, request: CacheableRequest, earlier: CacheableRequest | None
) -> int:
    """Tokens of the client's list: those that the provider has counted once, and what has come since then.

    What has come is counted, too, where what stands before it has not changed; what of it was left away, or
    all of it, is estimated by what the conversation's tokens have been to the provider so far. So the error
    of estimates does not grow with what was removed.
    """
    if earlier is None or not request.removed or not earlier.listed:
        return request.before
    rate = earlier.before / earlier.listed
    if _keeps_prefix(exchange, request, earlier):
        come = request.forwarded - earlier.forwarded + rate * (request.removed - earlier.removed)
    else:
        come = rate * (request.listed - earlier.listed)
    return max(request.forwarded, earlier.before + round(come))


def _find_continued_request(
    request: CacheableRequest, prefixes: Sequence[bytes], state: CacheState
) -> CacheableRequest | None:
    """The longest earlier request that this one begins with; of one that was not read, that is believed."""
    newest = state.requests[-1] if state.requests else None
    if newest is not None and _continues_newest(request, prefixes, newest):  # as nearly always
        longest = max([each.before for each in state.requests])
        if newest.before == longest:
            return newest
    ours = frozenset(prefixes)

    def is_prefix(each: CacheableRequest) -> bool:
        read = bool(each.digest and ours)
        return each.model == request.model and (
            each.digest in ours if read else each.before <= request.before
        )

    return max(filter(is_prefix, state.requests), key=lambda each: (each.before, each.at), default=None)


def _continues_newest(request: CacheableRequest, prefixes: Sequence[bytes], newest: CacheableRequest) -> bool:
    """Whether this request is the newest one and a few messages more."""
    same = newest.model == request.model and newest.digest != b""
    return same and newest.digest in prefixes[-FEW_MESSAGES:]


def _keeps_prefix(exchange: Exchange, request: CacheableRequest, earlier: CacheableRequest) -> bool:
    """Whether all that was forwarded of the earlier request stands at the beginning of this one."""
    whole = exchange.status not in {"applied", "over-limit"} or not request.removed
    return whole and earlier.form == request.form and earlier.forwarded <= request.forwarded


def _is_expired(request: CacheableRequest, earlier: CacheableRequest) -> bool:
    return request.at - earlier.at > EXPIRY_S


def _is_cache_miss(exchange: Exchange, request: CacheableRequest, earlier: CacheableRequest) -> bool:
    """Whether the provider had nothing cached although it could have."""
    could = earlier.forwarded >= LEAST_CACHED_TOKENS and _keeps_prefix(exchange, request, earlier)
    return could and not exchange.cached_tokens


def _update_block_size(exchange: Exchange, known: int) -> int:
    """Tokens of which all that the provider has cached until now was a multiple."""
    cached = exchange.cached_tokens
    return gcd(known or LARGEST_BLOCK_TOKENS, cached) if cached else known


def _get_usable_block(block: int) -> int:
    """The block to reckon with."""
    return block if block >= SMALLEST_BLOCK_TOKENS else 1


def _estimate_shortfall(
    exchange: Exchange,
    request: CacheableRequest,
    earlier: CacheableRequest | None,
    last: int | None,
    block: int,
) -> int | None:
    """How much of a prefix the provider leaves uncached, as far as this exchange and those before told.

    Beside what does not fill a block: so an exchange tells no more than two bounds.
    """
    if earlier is None or _is_expired(request, earlier) or not _keeps_prefix(exchange, request, earlier):
        return last
    if exchange.cached_tokens:
        most = earlier.forwarded - exchange.cached_tokens
        expected = 0 if last in {None, NOTHING_CACHED_TOKENS} else last
        return min(max(expected or 0, most - _get_usable_block(block) + 1), most)
    if last is None and _is_cache_miss(exchange, request, earlier):
        return NOTHING_CACHED_TOKENS
    return last


def _estimate_unchanged_cached(
    exchange: Exchange,
    request: CacheableRequest,
    earlier: CacheableRequest | None,
    state: CacheState,
    *,
    first: bool,
) -> int:
    """Tokens that the provider would have had cached of the request as the client sent it."""
    cached = exchange.cached_tokens or 0
    if earlier is None:
        share = cached / max(1, request.forwarded) if first else 0.0
        return max(cached, int(share * request.before))
    if not cached and (_is_expired(request, earlier) or _is_cache_miss(exchange, request, earlier)):
        return 0
    block = _get_usable_block(state.block)
    read = min(earlier.before - (state.shortfall or 0), request.before)
    return max(cached, read // block * block)


def _compute_priced_saving(
    exchange: Exchange, request: CacheableRequest, would_be_cached: int, price: ModelPrice | None
) -> Saving | None:
    paid = compute_unchanged_saving(exchange, price)
    if price is None or paid is None or request.before == request.forwarded:
        return paid
    cost, written = paid.cost, exchange.completion_tokens or 0
    unbroken = price.compute_cost(request.forwarded, min(would_be_cached, request.forwarded), written)
    gross = price.compute_cost(request.before, would_be_cached, written) - unbroken
    loss = cost - unbroken
    return Saving(cost, gross, loss, gross - loss)


def compute_break_even_requests(
    before: int,
    after: int,
    price: ModelPrice | None,
    *,
    summary_usd: float | None = 0.0,
    cached_share: float = 1.0,
) -> float | None:
    """Requests until a round has paid for its summary and for the cache that it broke.

    Each request after it is shorter by what the round has removed. The broken cache is taken to cost what it
    can at most: as if nothing of what stays had been cached any more.

    Args:
        before: Tokens of the request without the round.
        after: Tokens of it with the round.
        price: Of the model that is asked.
        summary_usd: What the summary cost, in dollars.
        cached_share: How much of a prefix that the provider has read is found cached, 0..1.

    Returns None where a price is not known, and where the round never pays.
    """
    if price is None or summary_usd is None:
        return None
    hits = int(cached_share * after)
    lost = price.compute_cost(after) - price.compute_cost(after, hits)
    won = price.compute_cost(before, int(cached_share * before)) - price.compute_cost(after, hits)
    return max(0.0, summary_usd + lost) / won if won > 0 else None


def compute_saving(
    exchange: Exchange,
    prefixes: Sequence[bytes],
    state: CacheState | None,
    price: ModelPrice | None,
    counted: tuple[int, int] = (0, 0),
) -> tuple[Saving | None, CacheState]:
    """As `economics.saving`, whatever number of answers the exchange has."""
    prompt, cached = exchange.recall_prompt_tokens, exchange.recall_cached_tokens or 0
    if not prompt:
        return compute_single_answer_saving(exchange, prefixes, state, price, counted)
    first = exchange._replace(
        prompt_tokens=exchange.first_prompt_tokens,
        cached_tokens=(exchange.cached_tokens or 0) - cached,
    )
    made, learned = compute_single_answer_saving(first, prefixes, state, price, counted)
    if made is None or price is None:
        return made, learned
    more = price.compute_cost(prompt, cached)
    return Saving(made.cost + more, made.gross - more, made.cache_loss, made.net - more), learned
