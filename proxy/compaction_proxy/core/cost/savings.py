"""Computes what an exchange has saved, and after how many requests a compaction has saved its own cost.

A saving is the difference between two costs: the cost that the request would have had if the proxy had
forwarded it as the client sent it, and the cost of the exchange. The first cost depends on how many tokens
the provider would have cached. The proxy estimates this number from the number of tokens that the provider
has cached of the forwarded requests. A saving has these parts:

- *gross*: the price of the removed tokens. The estimate takes into account that the provider would have
  cached some of them.
- *cache loss*: the additional price of forwarded tokens that the provider would have cached if no compaction
  had changed the tokens before them.
- *net*: gross less cache loss. The cost of summaries belongs to compactions, not to exchanges, and is
  deducted later.
"""

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

from compaction_proxy.core.cost.price import ModelPrice
from compaction_proxy.core.exchange import Exchange

# Providers are assumed to drop a prefix from their cache if no request has used it for this many seconds.
EXPIRY_S = 600.0
# Providers are assumed not to cache a prefix of fewer tokens than this.
MIN_CACHED_TOKENS = 1_024
# The proxy remembers at most this many of the latest requests of each conversation. One request is not
# enough, because several branches or several agents may use the same conversation id.
MAX_CACHED_REQUESTS = 8
# A conversation usually grows by at most this many messages from one request to the next. So the prefix
# digests of this many of a request's last messages are enough to find the earlier request that it continues.
MAX_GROWTH_MESSAGES = 8
# Providers cache prefixes in blocks of tokens. The two numbers are the size of the largest known block of a
# provider, and the size of the smallest block to which estimates are rounded, in tokens.
LARGEST_BLOCK_TOKENS = 128
SMALLEST_BLOCK_TOKENS = 64
# The value of `CacheState.shortfall_tokens`, in tokens, for a provider that caches no tokens.
NOTHING_CACHED_TOKENS = 10**12


class Saving(NamedTuple):
    """The cost and the saving of one exchange in dollars, without the cost of summaries.

    Attributes:
        cost: The cost of the exchange.
        gross: How much more the exchange would have cost if everything that the client sent had been
            forwarded.
        cache_loss: The part of `cost` that was paid only because a compaction broke the prompt cache.
        net: `gross` less `cache_loss`. It is negative if the compaction made this exchange more expensive.
    """

    cost: float
    gross: float = 0.0
    cache_loss: float = 0.0
    net: float = 0.0


class CacheableRequest(NamedTuple):
    """A request that a provider has read and may therefore have cached.

    Attributes:
        at: Time of the request, in seconds since the epoch.
        model: Name of the model.
        digest: Prefix digest of all the client's messages; empty if the proxy did not read the request.
        client_tokens: Estimate of the number of tokens that the provider would have counted in the client's
            messages.
        estimated_client_tokens: Tokens of the client's messages as the proxy counts them; 0 if the proxy did
            not read the request.
        removed_tokens: Removed tokens less the tokens of their replacements, as the proxy counts them.
        forwarded_tokens: Tokens that were forwarded, as the provider counted them.
        form: Strategy and number of the compaction that shortened the messages; empty if none did. If a
            request continues an earlier request of the same form, it begins with everything that was
            forwarded in the earlier one.
    """

    at: float
    model: str
    digest: bytes
    client_tokens: int
    estimated_client_tokens: int
    removed_tokens: int
    forwarded_tokens: int
    form: str


class CacheState(NamedTuple):
    """The figures on a conversation's prompt cache that the proxy keeps from one exchange to the next.

    Attributes:
        requests: The latest requests, the newest last.
        shortfall_tokens: Number of tokens of an earlier request that the provider does not find in its cache,
            although the new request begins with everything that was forwarded in the earlier one. Tokens at
            the end that do not fill a cache block are not included. The number is negative if the provider
            also caches replies. None if the number is not known yet.
        block_tokens: Size of the provider's cache blocks in tokens: the largest number that divides
            `LARGEST_BLOCK_TOKENS` and every number of cached tokens so far. 0 if the size is not known yet.
    """

    requests: tuple[CacheableRequest, ...] = ()
    shortfall_tokens: int | None = None
    block_tokens: int = 0


EMPTY_CACHE_STATE = CacheState()


def compute_single_answer_saving(
    exchange: Exchange,
    prefix_digests: Sequence[bytes],
    state: CacheState | None,
    price: ModelPrice | None,
    counted_tokens: tuple[int, int] = (0, 0),
) -> tuple[Saving | None, CacheState]:
    """Returns the saving of an exchange with a single reply, and the cache state for the next exchange.

    The saving is None if the price or the provider's token count is unknown. A request that the upstream
    refused has a cost of 0. A request that was forwarded unchanged has a gross, a cache loss and a net of 0.

    Args:
        exchange: The exchange.
        prefix_digests: Prefix digests of the client's non-privileged messages; empty if the proxy did not
            read the request.
        state: The state that was returned for the conversation's previous exchange; None if there was none.
        price: Price of the model that the client asked for; None if unknown.
        counted_tokens: The number of tokens that the client sent and the number that was forwarded, as the
            proxy counts them without calibration. If both are 0, the numbers in `exchange` are used.
    """
    state, unchanged = state or EMPTY_CACHE_STATE, compute_unchanged_saving(exchange, price)
    if exchange.has_failed or exchange.prompt_tokens is None:
        return unchanged, state
    now = _build_cacheable_request(exchange, prefix_digests, exchange.prompt_tokens, counted_tokens)
    earlier = _find_continued_request(now, prefix_digests, state)
    now = now._replace(client_tokens=_estimate_client_tokens(exchange, now, earlier))
    next_state = _update_cache_state(exchange, now, earlier, state)
    if price is None or unchanged is None or now.client_tokens == now.forwarded_tokens:
        return unchanged, next_state
    cached = _estimate_unchanged_cached_tokens(exchange, now, earlier, next_state, first=not state.requests)
    written = exchange.completion_tokens or 0
    # The cost that the forwarded request would have if no compaction had broken its prompt cache.
    unbroken = price.compute_cost(now.forwarded_tokens, min(cached, now.forwarded_tokens), written)
    gross = price.compute_cost(now.client_tokens, cached, written) - unbroken
    loss = unchanged.cost - unbroken
    return Saving(unchanged.cost, gross, loss, gross - loss), next_state


def compute_unchanged_saving(exchange: Exchange, price: ModelPrice | None) -> Saving | None:
    """Returns the saving of a request that was forwarded unchanged: its cost, and 0 for all other amounts.

    Returns None if the price or the provider's token count is unknown. A failed exchange costs 0.
    """
    if price is None:
        return None
    if exchange.has_failed:
        return Saving(0.0)
    if exchange.prompt_tokens is None:
        return None
    return Saving(
        price.compute_cost(
            exchange.prompt_tokens, exchange.cached_tokens or 0, exchange.completion_tokens or 0
        )
    )


def _update_cache_state(
    exchange: Exchange, request: CacheableRequest, earlier: CacheableRequest | None, state: CacheState
) -> CacheState:
    block = state.block_tokens
    if exchange.cached_tokens:
        block = gcd(block or LARGEST_BLOCK_TOKENS, exchange.cached_tokens)
    shortfall = _estimate_shortfall(exchange, request, earlier, state.shortfall_tokens, block)
    key = request.model, request.digest
    others = [each for each in state.requests if (each.model, each.digest) != key]
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
    """Estimates how many tokens the provider would have counted in the client's messages.

    The result is the estimate for the earlier request, plus the tokens that are new since then. If this
    request begins with everything that was forwarded in the earlier one, the provider has counted the new
    forwarded tokens, and only the newly removed tokens are estimated. Otherwise all new tokens are estimated.
    Tokens are estimated as the proxy's count, times the ratio of the provider's count to the proxy's count in
    the earlier request. So the error does not grow with the number of tokens that earlier compactions
    removed.

    Returns `request.client_tokens` if there is no earlier request, or if nothing was removed from this one.
    """
    if earlier is None or not request.removed_tokens or not earlier.estimated_client_tokens:
        return request.client_tokens
    rate = earlier.client_tokens / earlier.estimated_client_tokens
    if _keeps_prefix(exchange, request, earlier):
        added = (
            request.forwarded_tokens
            - earlier.forwarded_tokens
            + rate * (request.removed_tokens - earlier.removed_tokens)
        )
    else:
        added = rate * (request.estimated_client_tokens - earlier.estimated_client_tokens)
    return max(request.forwarded_tokens, earlier.client_tokens + round(added))


def _find_continued_request(
    request: CacheableRequest, prefixes: Sequence[bytes], state: CacheState
) -> CacheableRequest | None:
    """Returns the earlier request that this request continues, or None if there is none.

    A request continues an earlier one of the same model if it begins with all messages of the earlier one. If
    it continues several, the longest is returned. If the digest of one of the two requests is unknown, this
    request is assumed to continue the earlier one, unless the earlier one has more tokens.
    """
    own_digests = frozenset(prefixes)

    def is_prefix(each: CacheableRequest) -> bool:
        read = bool(each.digest and own_digests)
        return each.model == request.model and (
            each.digest in own_digests if read else each.client_tokens <= request.client_tokens
        )

    return max(
        filter(is_prefix, state.requests), key=lambda each: (each.client_tokens, each.at), default=None
    )


def _keeps_prefix(exchange: Exchange, request: CacheableRequest, earlier: CacheableRequest) -> bool:
    """Returns whether this request begins with everything that was forwarded in the earlier one.

    This is assumed unless a new compaction or a cut shortened this request, another compaction was in force
    for the earlier one, or fewer tokens were forwarded than in the earlier one.
    """
    whole = exchange.status not in {"applied", "over-limit"} or not request.removed_tokens
    return whole and earlier.form == request.form and earlier.forwarded_tokens <= request.forwarded_tokens


def _is_expired(request: CacheableRequest, earlier: CacheableRequest) -> bool:
    return request.at - earlier.at > EXPIRY_S


def _is_cache_miss(exchange: Exchange, request: CacheableRequest, earlier: CacheableRequest) -> bool:
    """Returns whether the provider had cached nothing, although it could have cached the earlier request."""
    could = earlier.forwarded_tokens >= MIN_CACHED_TOKENS and _keeps_prefix(exchange, request, earlier)
    return could and not exchange.cached_tokens


def _choose_rounding_block(block: int) -> int:
    """Returns the block size to which estimates are rounded, in tokens.

    Returns 1 if `block` is unknown (0) or less than `SMALLEST_BLOCK_TOKENS`, so that estimates are not
    rounded.
    """
    return block if block >= SMALLEST_BLOCK_TOKENS else 1


def _estimate_shortfall(
    exchange: Exchange,
    request: CacheableRequest,
    earlier: CacheableRequest | None,
    last: int | None,
    block: int,
) -> int | None:
    """Returns the new value of `CacheState.shortfall_tokens`. `last` is the value before this exchange.

    The shortfall is the number of tokens of the earlier request that the provider does not find in its cache.
    One exchange shows only a range for it, because tokens that do not fill a cache block are not cached. If
    `last` is outside the range, the nearest end of the range is returned. If the exchange shows no range,
    `last` is returned.
    """
    if earlier is None or _is_expired(request, earlier) or not _keeps_prefix(exchange, request, earlier):
        return last
    if exchange.cached_tokens:
        most = earlier.forwarded_tokens - exchange.cached_tokens
        expected = 0 if last is None or last == NOTHING_CACHED_TOKENS else last
        return min(max(expected, most - _choose_rounding_block(block) + 1), most)
    if last is None and _is_cache_miss(exchange, request, earlier):
        return NOTHING_CACHED_TOKENS
    return last


def _estimate_unchanged_cached_tokens(
    exchange: Exchange,
    request: CacheableRequest,
    earlier: CacheableRequest | None,
    state: CacheState,
    *,
    first: bool,
) -> int:
    """Estimates how many input tokens the provider would have had in its cache for the unchanged request.

    `first` is true if no earlier request of the conversation is remembered.
    """
    cached = exchange.cached_tokens or 0
    if earlier is None:
        share = cached / max(1, request.forwarded_tokens) if first else 0.0
        return max(cached, int(share * request.client_tokens))
    if not cached and (_is_expired(request, earlier) or _is_cache_miss(exchange, request, earlier)):
        return 0
    block = _choose_rounding_block(state.block_tokens)
    read = min(earlier.client_tokens - (state.shortfall_tokens or 0), request.client_tokens)
    return max(cached, read // block * block)


def compute_break_even_requests(
    tokens_before: int,
    tokens_after: int,
    price: ModelPrice | None,
    *,
    summary_usd: float | None = 0.0,
    cached_share: float = 1.0,
) -> float | None:
    """Returns the number of requests after which a compaction has saved its own cost.

    This cost is the price of the summary and of the broken prompt cache. Each later request saves the price
    of the removed tokens. The price of the broken cache is an upper limit: it assumes that, in the first
    request after the compaction, none of the remaining tokens are cached. The result is None if a price is
    unknown or the compaction never saves its cost.

    Args:
        tokens_before: Tokens of the request without the compaction.
        tokens_after: Tokens of the request with the compaction.
        price: Price of the model that the client asks for; None if unknown.
        summary_usd: Cost of the summary in dollars; None if unknown.
        cached_share: Share of the tokens from earlier requests that the provider has cached, 0..1.
    """
    if price is None or summary_usd is None:
        return None
    before = price.compute_cost(tokens_before, int(cached_share * tokens_before))
    after = price.compute_cost(tokens_after, int(cached_share * tokens_after))
    cache_cost = price.compute_cost(tokens_after) - after
    return max(0.0, summary_usd + cache_cost) / (before - after) if before > after else None


def compute_saving(
    exchange: Exchange,
    prefix_digests: Sequence[bytes],
    state: CacheState | None,
    price: ModelPrice | None,
    counted_tokens: tuple[int, int] = (0, 0),
) -> tuple[Saving | None, CacheState]:
    """Returns the same as `compute_single_answer_saving`, but for an exchange with any number of replies.

    An exchange has several replies if the model searched removed messages. Without the proxy, there would
    have been only the first reply. So the cost of the input tokens of the later replies reduces the saving.
    """
    prompt, cached = exchange.recall_prompt_tokens, exchange.recall_cached_tokens or 0
    if not prompt:
        return compute_single_answer_saving(exchange, prefix_digests, state, price, counted_tokens)
    first = exchange._replace(
        prompt_tokens=exchange.first_prompt_tokens,
        cached_tokens=(exchange.cached_tokens or 0) - cached,
    )
    first_saving, next_state = compute_single_answer_saving(
        first, prefix_digests, state, price, counted_tokens
    )
    if first_saving is None or price is None:
        return first_saving, next_state
    more_cost = price.compute_cost(prompt, cached)
    return Saving(
        first_saving.cost + more_cost,
        first_saving.gross - more_cost,
        first_saving.cache_loss,
        first_saving.net - more_cost,
    ), next_state
