"""Computes what an exchange has saved, and when a compaction has paid for itself.

A saving compares an exchange with the same request as the client sent it. The cost of that request depends on
how much of it the provider would have cached. This is estimated from what the provider has really cached of
the forwarded requests. The parts of a saving:

- *gross*: what the removed tokens would have cost, at the share of them that would have been cached.
- *cache loss*: what was paid for tokens that would have been cached if no compaction had changed the tokens
  before them.
- *net*: gross less cache loss. The cost of summaries belongs to compactions, not to exchanges, and is
  deducted later.
"""

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

from compaction_proxy.core.cost.price import ModelPrice
from compaction_proxy.core.exchange import Exchange

# Providers drop a prefix from their cache if no request has used it for this time.
EXPIRY_S = 600.0
# The shortest prefix that a provider caches, in tokens.
LEAST_CACHED_TOKENS = 1_024
# Requests that are remembered of a conversation, which may have branches and agents that share its id.
MAX_CACHED_REQUESTS = 8
# A conversation usually grows by at most this many messages from one request to the next.
FEW_MESSAGES = 8
# The largest block in which providers cache, and the smallest block that estimates round to, in tokens.
LARGEST_BLOCK_TOKENS = 128
SMALLEST_BLOCK_TOKENS = 64
# The shortfall of a provider that caches nothing, in tokens.
NOTHING_CACHED_TOKENS = 10**12


class Saving(NamedTuple):
    """The cost and the saving of one exchange in dollars, without the cost of summaries.

    Attributes:
        cost: What the exchange cost.
        gross: What the exchange would have cost more with everything that the client sent.
        cache_loss: The part of the cost that is due to prompt caches that compactions have broken.
        net: `gross` less `cache_loss`. Negative if the compaction has yet to pay for itself.
    """

    cost: float
    gross: float = 0.0
    cache_loss: float = 0.0
    net: float = 0.0


class CacheableRequest(NamedTuple):
    """A request that a provider has read and so may have cached.

    Attributes:
        at: Time of the request, in seconds since the epoch.
        model: Name of the model.
        digest: Prefix digest of the client's whole list; empty if the proxy did not read the request.
        before: Tokens of the client's list, as far as possible in the provider's count.
        listed: Tokens of the client's list in the proxy's count; 0 if the proxy did not read the request.
        removed: Removed tokens less the tokens of their replacements, in the proxy's count.
        forwarded: Tokens that were forwarded, in the provider's count.
        form: Strategy and round that shortened the list; empty for none. If a request continues another of
            the same form, it begins with everything that the other forwarded.
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
    """What the proxy remembers of a conversation's caching from one exchange to the next.

    Attributes:
        requests: The newest requests, the newest last.
        shortfall: Tokens of an already read prefix that the provider leaves uncached, beside those that do
            not fill a block. Negative if the provider caches answers, too. None if it is not known yet.
        block: Tokens of which every number of cached tokens so far was a multiple, at most the largest known
            block of a provider. 0 if it is not known yet.
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
    """Returns the saving of an exchange with a single answer, and the state for the next exchange.

    The saving is None if the price or the provider's token count is unknown. A refused request costs nothing,
    and a request that was forwarded unchanged saves exactly nothing.

    Args:
        exchange: The exchange.
        prefixes: Prefix digests of the client's non-privileged messages; empty if the request was not read.
        state: The state that the conversation's previous exchange returned; None if there was none.
        price: Price of the model that was asked; None if unknown.
        counted: Tokens that the client sent and tokens that were forwarded, uncalibrated. If both are 0, the
            counts of the exchange are used.
    """
    state, prompt, refused = state or EMPTY_CACHE_STATE, exchange.prompt_tokens, exchange.has_failed
    if refused or prompt is None:
        return compute_unchanged_saving(exchange, price), state
    now = _build_cacheable_request(exchange, prefixes, prompt, counted)
    earlier = _find_continued_request(now, prefixes, state)
    if not now.removed:
        return compute_unchanged_saving(exchange, price), _update_cache_state(exchange, now, earlier, state)
    now = now._replace(before=_estimate_client_tokens(exchange, now, earlier))
    next_state = _update_cache_state(exchange, now, earlier, state)
    cached = _estimate_unchanged_cached(exchange, now, earlier, next_state, first=not state.requests)
    return _compute_priced_saving(exchange, now, cached, price), next_state


def compute_unchanged_saving(exchange: Exchange, price: ModelPrice | None) -> Saving | None:
    """Returns the cost of an exchange as a saving of nothing, or None if the cost is unknown."""
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
    listed, forwarded = counted if any(counted) else (exchange.tokens_before or 0, exchange.tokens_after or 0)
    removed = max(0, listed - forwarded)
    form = f"{exchange.strategy}/{exchange.round}" if removed else ""
    digest = prefixes[-1] if prefixes else b""
    before = prompt + round(removed * prompt / max(1, forwarded))
    return CacheableRequest(exchange.at, exchange.model, digest, before, listed, removed, prompt, form)


def _estimate_client_tokens(
    exchange: Exchange, request: CacheableRequest, earlier: CacheableRequest | None
) -> int:
    """Estimates the client's tokens: those of the earlier request, and the tokens that are new since then.

    If this request begins with what the earlier one forwarded, the provider has counted the new forwarded
    tokens, and only newly removed tokens are estimated. Otherwise all new tokens are estimated. Estimates use
    the conversation's ratio of the provider's count to the proxy's count so far. The error therefore does not
    grow with the number of removed tokens.
    """
    if earlier is None or not request.removed or not earlier.listed:
        return request.before
    rate = earlier.before / earlier.listed
    if _keeps_prefix(exchange, request, earlier):
        added = request.forwarded - earlier.forwarded + rate * (request.removed - earlier.removed)
    else:
        added = rate * (request.listed - earlier.listed)
    return max(request.forwarded, earlier.before + round(added))


def _find_continued_request(
    request: CacheableRequest, prefixes: Sequence[bytes], state: CacheState
) -> CacheableRequest | None:
    """Returns the longest earlier request that this request begins with, or None if there is none.

    Without digests of both requests, a request is taken to begin with every earlier one that is not longer.
    """
    newest = state.requests[-1] if state.requests else None
    if newest is not None and _continues_newest(request, prefixes, newest):  # the usual case
        longest = max([each.before for each in state.requests])
        if newest.before == longest:
            return newest
    own_digests = frozenset(prefixes)

    def is_prefix(each: CacheableRequest) -> bool:
        read = bool(each.digest and own_digests)
        return each.model == request.model and (
            each.digest in own_digests if read else each.before <= request.before
        )

    return max(filter(is_prefix, state.requests), key=lambda each: (each.before, each.at), default=None)


def _continues_newest(request: CacheableRequest, prefixes: Sequence[bytes], newest: CacheableRequest) -> bool:
    """Returns whether this request is the newest earlier one with a few messages more."""
    same = newest.model == request.model and newest.digest != b""
    return same and newest.digest in prefixes[-FEW_MESSAGES:]


def _keeps_prefix(exchange: Exchange, request: CacheableRequest, earlier: CacheableRequest) -> bool:
    """Returns whether this request begins with everything that the earlier request forwarded."""
    whole = exchange.status not in {"applied", "over-limit"} or not request.removed
    return whole and earlier.form == request.form and earlier.forwarded <= request.forwarded


def _is_expired(request: CacheableRequest, earlier: CacheableRequest) -> bool:
    return request.at - earlier.at > EXPIRY_S


def _is_cache_miss(exchange: Exchange, request: CacheableRequest, earlier: CacheableRequest) -> bool:
    """Returns whether the provider had nothing cached although it could have."""
    could = earlier.forwarded >= LEAST_CACHED_TOKENS and _keeps_prefix(exchange, request, earlier)
    return could and not exchange.cached_tokens


def _update_block_size(exchange: Exchange, known: int) -> int:
    """Returns the tokens of which every number of cached tokens so far was a multiple."""
    cached = exchange.cached_tokens
    return gcd(known or LARGEST_BLOCK_TOKENS, cached) if cached else known


def _get_usable_block(block: int) -> int:
    """Returns the block size that estimates use: 1 if the known block is too small to matter."""
    return block if block >= SMALLEST_BLOCK_TOKENS else 1


def _estimate_shortfall(
    exchange: Exchange,
    request: CacheableRequest,
    earlier: CacheableRequest | None,
    last: int | None,
    block: int,
) -> int | None:
    """Estimates how many tokens of a prefix the provider leaves uncached, from this and earlier exchanges.

    Tokens that do not fill a block are not included. One exchange therefore gives only a lower and an upper
    bound.
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
    """Estimates the tokens that would have been cached of the request as the client sent it."""
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
    unchanged = compute_unchanged_saving(exchange, price)
    if price is None or unchanged is None or request.before == request.forwarded:
        return unchanged
    cost, written = unchanged.cost, exchange.completion_tokens or 0
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
    """Returns the number of requests until a compaction has paid for its summary and the broken cache.

    Each later request is shorter by the removed tokens. The broken cache is counted at its maximum cost: as
    if nothing that stays were cached any more. The result is None if a price is unknown or the compaction
    never pays.

    Args:
        before: Tokens of the request without the compaction.
        after: Tokens of the request with the compaction.
        price: Price of the model that is asked; None if unknown.
        summary_usd: Cost of the summary in dollars; None if unknown.
        cached_share: Share of an already read prefix that the provider has cached, 0..1.
    """
    if price is None or summary_usd is None:
        return None
    hits = int(cached_share * after)
    cache_cost = price.compute_cost(after) - price.compute_cost(after, hits)
    saved_a_request = price.compute_cost(before, int(cached_share * before)) - price.compute_cost(after, hits)
    return max(0.0, summary_usd + cache_cost) / saved_a_request if saved_a_request > 0 else None


def compute_saving(
    exchange: Exchange,
    prefixes: Sequence[bytes],
    state: CacheState | None,
    price: ModelPrice | None,
    counted: tuple[int, int] = (0, 0),
) -> tuple[Saving | None, CacheState]:
    """Returns the same as `compute_single_answer_saving`, but for an exchange with any number of answers."""
    prompt, cached = exchange.recall_prompt_tokens, exchange.recall_cached_tokens or 0
    if not prompt:
        return compute_single_answer_saving(exchange, prefixes, state, price, counted)
    first = exchange._replace(
        prompt_tokens=exchange.first_prompt_tokens,
        cached_tokens=(exchange.cached_tokens or 0) - cached,
    )
    first_saving, next_state = compute_single_answer_saving(first, prefixes, state, price, counted)
    if first_saving is None or price is None:
        return first_saving, next_state
    more_cost = price.compute_cost(prompt, cached)
    return Saving(
        first_saving.cost + more_cost,
        first_saving.gross - more_cost,
        first_saving.cache_loss,
        first_saving.net - more_cost,
    ), next_state
