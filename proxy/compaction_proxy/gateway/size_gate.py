"""The gate: finds requests that are certainly too small for a compaction.

The proxy forwards these requests without parsing them.
"""

import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from compaction_proxy.compaction.compacted_conversations import CompactedConversations
from compaction_proxy.compaction.directives import DirectiveStore
from compaction_proxy.compaction.request_view import resolve_policy
from compaction_proxy.config.config import Config, get_model_settings
from compaction_proxy.core.budget import compute_budget
from compaction_proxy.core.trigger import (
    PriceThresholds,
    compute_min_trigger,
    compute_trigger_marks,
    set_price_thresholds,
)
from compaction_proxy.gateway.identity import map_wires_to_origins
from compaction_proxy.gateway.side_requests import has_history
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.providers.types import PriceSource
from compaction_proxy.wires.prescan import find_models, find_output_limits, may_have_media

# The proxy parses every body with more bytes than this. The gate would have to search the whole body for
# models and media. In a known conversation, this would take more time than parsing, because only the new
# messages are parsed.
MAX_BYTES = 131_072
# The proxy parses every body that names more models than this, because the gate would have to check each
# model.
MAX_MODELS = 8
# The safe size is the number of bytes up to which a body certainly passes the gate. The gate caches the safe
# size of each tenant, model and output limit for this many seconds. The time is short because a safe size
# depends on prices, calibrations and learned limits that expire. If the proxy learns a new limit, the gate
# clears the cache before its next decision.
CACHE_S = 1.0
# The most safe sizes that the gate caches. If there are more, it clears the cache.
MAX_CACHED = 4_096
# The safe size, in bytes, if every request must be parsed. No body is so small.
_NO_SIZE = -1.0


class GateLimits(NamedTuple):
    """The sizes that decide about requests for a model.

    Attributes:
        max_bytes: Size of a body, in bytes, up to which a request passes the gate. -1 if every request is
            parsed. `math.inf` if the proxy never compacts such requests; it still parses bodies of more than
            `MAX_BYTES` bytes.
        trigger_tokens: Smallest size, in tokens, from which a compaction can start. None if none can, or if
            every request is parsed to offer the search tool.
    """

    max_bytes: float
    trigger_tokens: int | None


class SizeGate:
    """Decides by size alone whether the proxy forwards a request without parsing its body.

    Text never has more tokens than bytes. So if a body has fewer bytes than the trigger has tokens, the
    request is below the trigger.

    Args:
        config: Has the configured context windows and triggers of models.
        model_limits: Has the context windows and calibrations that were learned from the upstream.
        directives: Records for which conversations somebody has requested a compaction regardless of their
            size.
        compacted: Records which conversations have been compacted. Their requests do not pass.
        origin: The origin of the upstream.
        pricing: Has the prices of models, on which triggers may depend. None if no prices are known.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        config: Config,
        model_limits: ModelLimits,
        directives: DirectiveStore,
        compacted: CompactedConversations,
        origin: str,
        *,
        pricing: PriceSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._model_limits = model_limits
        self._directives = directives
        self._compacted = compacted
        self._origin = origin
        self._pricing = pricing
        self._clock = clock
        # For each tenant, model and output limit: the safe size in bytes, and the time when it expires.
        self._safe_sizes: dict[tuple[str, str, int | None], tuple[float, float]] = {}
        self._changes = 0

    async def remember_compacted(self, tenant: str, conversation: str | None, size_bytes: int) -> None:
        """Keeps all later requests of a compacted conversation from passing the gate.

        The proxy must parse these requests to apply the conversation's replacements to them.

        Args:
            tenant: The tenant that owns the conversation.
            conversation: The id of the conversation; None if it has none.
            size_bytes: Size of the request that was compacted. If it exceeds `MAX_BYTES`, the gate does not
                notify other processes, because requests of this size never pass a gate, and later requests
                are usually larger.
        """
        await self._compacted.add(tenant, conversation, should_publish=size_bytes <= MAX_BYTES)

    @staticmethod
    def find_candidate_models(raw: bytes, deployment: str | None) -> AbstractSet[str]:
        """Returns every model name in a request body, and `deployment`, the model that the path names.

        The body may contain several model names, and only a parser can tell which one counts. If the body is
        too large to pass the gate, it is not searched, and the result is empty.
        """
        if len(raw) > MAX_BYTES:
            return frozenset()
        models = find_models(raw)
        if deployment:
            models.add(deployment)
        return models

    def can_pass(self, raw: bytes, models: AbstractSet[str], tenant: str, conversation: str | None) -> bool:
        """Returns whether a request may be forwarded without being parsed.

        A request may pass if all of these conditions hold:

        - It has at most `MAX_BYTES` bytes and contains no media.
        - The state of its conversation does not require that the proxy parses it (`_has_pending_action`).
        - It names 1 to `MAX_MODELS` models.
        - With each of these models, it is certainly too small for a compaction and for preparing one.

        Args:
            raw: The request body.
            models: The result of `find_candidate_models`.
            tenant: The tenant that sent the request.
            conversation: The id of its conversation; None if it is unknown.
        """
        size = len(raw)
        if size > MAX_BYTES or self._has_pending_action(tenant, conversation, raw):
            return False
        if not 0 < len(models) <= MAX_MODELS or may_have_media(raw):
            return False
        limits = find_output_limits(raw)
        output_tokens = max(limits) if limits else None
        return size <= min([self._get_safe_bytes(tenant, model, output_tokens) for model in models])

    def get_limits(self, tenant: str, model: str) -> GateLimits:
        """Returns the current limits for requests that ask for no number of output tokens.

        `max_bytes` is at most `MAX_BYTES`.
        """
        limits = self._compute_limits(tenant, model, None)
        return limits._replace(max_bytes=min(limits.max_bytes, MAX_BYTES))

    async def has_learned(self, tenant: str, model: str) -> bool:
        """Returns whether the proxy has learned something from this upstream's answers to a tenant.

        If so, the tenant belongs to this upstream, because each tenant belongs to one upstream only.
        """
        learned = await self._model_limits.get(tenant, self._origin, model)
        return learned.is_limited or learned.calibration.observations > 0

    def record_accepted_size(self, tenant: str, model: str, size_bytes: int) -> None:
        """Records that the upstream accepted a body of `size_bytes` that had passed the gate.

        If the upstream later refuses a larger request, this size is a lower bound of the upstream's limit.
        """
        self._model_limits.record_accepted_bytes(tenant, self._origin, model, size_bytes)

    def clear_cache(self) -> None:
        """Clears the cached safe sizes, because the proxy may have learned something about a model."""
        self._safe_sizes.clear()

    def _has_pending_action(self, tenant: str, conversation: str | None, raw: bytes) -> bool:
        """Returns whether a request must be parsed regardless of its size.

        It must be parsed if its conversation has been compacted, or if somebody has requested a compaction of
        the conversation. If the request has no conversation id, it must be parsed if it contains earlier
        replies and the tenant has any compacted conversation without an id.
        """
        if self._compacted.has_rounds(tenant, conversation):
            return conversation is not None or has_history(raw)
        return conversation is not None and self._directives.is_compaction_requested(tenant, conversation)

    def _get_safe_bytes(self, tenant: str, model: str, output_tokens: int | None) -> float:
        """Returns the cached `max_bytes` of `_compute_limits`, and computes it anew if it has expired."""
        if self._changes != self._model_limits.changes:
            self._changes = self._model_limits.changes
            self._safe_sizes.clear()
        key = tenant, model, output_tokens
        size, until = self._safe_sizes.get(key, (_NO_SIZE, -math.inf))
        now = self._clock()
        if until < now:
            size = self._compute_limits(tenant, model, output_tokens).max_bytes
            if len(self._safe_sizes) >= MAX_CACHED:
                self._safe_sizes.clear()
            if size > 0:
                self._safe_sizes[key] = size, now + CACHE_S
        return size

    def _compute_limits(self, tenant: str, model: str, output_tokens: int | None) -> GateLimits:
        """Returns the limits for requests for this model.

        `output_tokens` is the number of output tokens that the request asks for; None if the request names no
        number.
        """
        settings = get_model_settings(self._config, model)
        if settings.recall.tool == "always":  # each request is parsed, to offer the tool with it
            return GateLimits(_NO_SIZE, None)
        policy = resolve_policy(settings)
        window = self._model_limits.peek_effective_window(tenant, self._origin, model, settings.window)
        adds_output = self._model_limits.adds_output(tenant, self._origin, model)
        budget = compute_budget(window, policy.reserves, output_tokens, adds_output=adds_output)
        price = None
        if self._pricing is not None and any(row.price_tier for row in policy.trigger):
            price = self._pricing.get_price(model, self._origin)
        # A trigger may depend on the size from which the model costs a surcharge, or on the size at which a
        # compaction makes the conversation cheapest. The second size is not known here. It is taken as 0, so
        # that the result is not too large for any conversation.
        thresholds = PriceThresholds(tier_tokens=price.surcharge_tokens if price else None, optimum_tokens=0)
        rows = set_price_thresholds(policy.trigger, thresholds)
        least = compute_min_trigger(rows, budget)
        if least is None:
            return GateLimits(math.inf, None)
        if output_tokens is not None and not self._model_limits.is_known(tenant, self._origin, model):
            # This process has not loaded the learned limits yet. Another process may have learned that the
            # upstream counts the output against the context window. So this request is parsed, which also
            # loads the learned limits. The next request may pass.
            return GateLimits(_NO_SIZE, least)
        marks = compute_trigger_marks(rows, budget, policy.soft_share, policy.hard_percent)
        watched = min(least, marks.soft_tokens or least)
        limit = (
            budget.compaction_limit
            if budget.sum_limit is None
            else min(budget.compaction_limit, budget.sum_limit)
        )
        # Text never has more tokens than bytes. So the size in bytes is an upper bound of the proxy's own
        # token count. The calibration converts this count into the upstream's count, as `predict_tokens` and
        # `predict_upper_bound` do.
        calibration = self._model_limits.peek_calibration(tenant, self._origin, model)
        upper = calibration.ratio * math.exp(calibration.margin)
        expected = calibration.ratio if calibration.observations else upper
        return GateLimits(min((watched - 1) / expected, limit / upper) - 1, least)


def build_gates(
    config: Config,
    model_limits: ModelLimits,
    directives: DirectiveStore,
    compacted: CompactedConversations,
    pricing: PriceSource,
) -> Mapping[str, SizeGate]:
    """Builds a gate for each wire. The keys of the result are the names of the wires.

    Wires whose upstreams have the same origin share a gate.
    """
    origins = map_wires_to_origins(config.upstream)
    gates = {
        origin: SizeGate(config, model_limits, directives, compacted, origin, pricing=pricing)
        for origin in set(origins.values())
    }
    return {wire: gates[origin] for wire, origin in origins.items()}
