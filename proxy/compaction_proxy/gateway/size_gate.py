"""The gate: requests that are certainly too small to be compacted are not even parsed."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from compaction_proxy.compaction.compacted_conversations import CompactedConversations
from compaction_proxy.compaction.directives import DirectiveStore
from compaction_proxy.compaction.request_limits import resolve_policy
from compaction_proxy.config.config import Config, get_model_settings
from compaction_proxy.config.sections import WIRES
from compaction_proxy.core.budget import compute_budget
from compaction_proxy.core.trigger import (
    PriceThresholds,
    TriggerRule,
    compute_min_trigger,
    compute_trigger_marks,
    set_price_thresholds,
)
from compaction_proxy.gateway.identity import format_origin
from compaction_proxy.gateway.side_requests import has_history
from compaction_proxy.providers.calibration import Calibration
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.providers.pricing import PriceBook
from compaction_proxy.wires.prescan import find_models, find_output_limits, has_media

# A larger body is always read. For a known conversation, reading takes less time than a search of the body.
MAX_BYTES = 131_072
# A body that names more models than this is read.
MAX_MODELS = 8
# Limits that were computed for a model are used for this many seconds, and for at most this many tenants and
# models.
CACHE_S = 1.0
MAX_CACHED = 4_096
# More tokens of output than any request can ask for.
ANY_OUTPUT = 10**18


@dataclass(frozen=True, slots=True)
class _SizeLimit:
    """The limits below which a body passes the gate.

    Attributes:
        calibration: How the upstream counts tokens.
        least: The fewest tokens at which a compaction or its preparation may start.
        limit: The most tokens that are forwarded unchanged.
    """

    calibration: Calibration
    least: int
    limit: int

    def can_hold(self, size: int) -> bool:
        """Returns whether a body of this many bytes is certainly below `least` and not above `limit`."""
        return (
            self.calibration.predict_tokens(size) < self.least
            and self.calibration.predict_upper_bound(size) <= self.limit
        )

    def compute_safe_size(self) -> float:
        """Returns a size in bytes that certainly passes, at most one byte less than the largest such size."""
        factor = self.calibration.ratio * math.exp(self.calibration.margin)
        return min(self.least - 1, self.limit) / factor - 1


_PASSES_NOTHING = _SizeLimit(Calibration(0.0, 0.0), 0, 0)


class SizeGate:
    """Decides by size alone whether a body may pass unread.

    Text never has more tokens than bytes, so a body with fewer bytes than the trigger also has fewer tokens.

    Args:
        config: Gives context windows and triggers by model.
        model_limits: Gives the context windows and calibrations that were learned from the upstream.
        directives: Knows which conversations are to be compacted, however small they are.
        compacted: Knows which conversations have been compacted, so that they no longer pass.
        origin: The origin of the upstream.
        pricing: Gives the prices of models. Without it, no price is known.
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
        pricing: PriceBook | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._model_limits = model_limits
        self._directives = directives
        self._compacted = compacted
        self._origin = origin
        self._pricing = pricing
        self._clock = clock
        self._safe_sizes: dict[tuple[str, str], tuple[float, float]] = {}  # bytes, and when they expire
        self._changes = 0

    async def remember_compacted(self, tenant: str, conversation: str | None, size_bytes: int) -> None:
        """Makes requests of a compacted conversation be read, so that its replacements are always applied.

        Args:
            tenant: The tenant that owns the conversation.
            conversation: The id of the conversation; None if it has none.
            size_bytes: Size of the request that was compacted. A large one never passes, on any replica.
        """
        await self._compacted.add(tenant, conversation, is_listed=size_bytes <= MAX_BYTES)

    @staticmethod
    def find_candidate_models(raw: bytes, deployment: str | None) -> AbstractSet[str]:
        """Returns every model that a request could mean; `deployment` is the model that its path names.

        The result is empty if the body is too large to pass, whatever it means. Such a body is not searched.
        """
        if len(raw) > MAX_BYTES:
            return frozenset()
        models = find_models(raw)
        if deployment:
            models.add(deployment)
        return models

    def can_pass(self, raw: bytes, models: AbstractSet[str], tenant: str, conversation: str | None) -> bool:
        """Returns whether a body is certainly below every mark.

        Args:
            raw: The request body.
            models: All models that the request could mean.
            tenant: The tenant that sent the request.
            conversation: The id of its conversation, if it is known.
        """
        size = len(raw)
        if size > MAX_BYTES or self._has_pending_action(tenant, conversation, raw):
            return False
        if not 0 < len(models) <= MAX_MODELS or has_media(raw):
            return False
        if size <= min([self._get_safe_size(tenant, model) for model in models]):
            return True
        output = max(find_output_limits(raw), default=None)
        limits = [self._compute_size_limit(tenant, model, output) for model in models]
        return all(limit is None or limit.can_hold(size) for limit in limits)

    def note_accepted(self, tenant: str, model: str, size_bytes: int) -> None:
        """Remembers that a body that passed was answered, in case a larger one is refused later."""
        self._model_limits.record_accepted_bytes(tenant, self._origin, model, size_bytes)

    def clear_cache(self) -> None:
        """Forgets all computed limits, because something was learned about a model."""
        self._safe_sizes.clear()

    def _has_pending_action(self, tenant: str, conversation: str | None, raw: bytes) -> bool:
        """Returns whether something has to be done about a conversation, whatever its size."""
        if self._compacted.has_rounds(tenant, conversation):
            return conversation is not None or has_history(raw)
        return conversation is not None and self._directives.is_compaction_requested(tenant, conversation)

    def _get_safe_size(self, tenant: str, model: str) -> float:
        """Returns the size in bytes up to which a body passes, whatever output it asks for."""
        if self._changes != self._model_limits.changes:
            self._changes = self._model_limits.changes
            self._safe_sizes.clear()
        size, until = self._safe_sizes.get((tenant, model), (0.0, 0.0))
        now = self._clock()
        if until < now:
            limit = self._compute_size_limit(tenant, model, ANY_OUTPUT)
            size = math.inf if limit is None else limit.compute_safe_size()
            if len(self._safe_sizes) >= MAX_CACHED:
                self._safe_sizes.clear()
            self._safe_sizes[tenant, model] = size, now + CACHE_S
        return size

    def _compute_size_limit(self, tenant: str, model: str, output: int | None) -> _SizeLimit | None:
        """Returns the limits for requests to a model, or None if nothing ever happens to them."""
        settings = get_model_settings(self._config, model)
        if settings.recall.tool == "always":  # every request is read, because each one is offered the tool
            return _PASSES_NOTHING
        policy = resolve_policy(settings)
        window = self._model_limits.peek_effective_window(tenant, self._origin, model, settings.window)
        adds_output = self._model_limits.adds_output(tenant, self._origin, model)
        budget = compute_budget(window, policy.reserves, output, adds_output=adds_output)
        rows = set_price_thresholds(policy.trigger, self._compute_least_aims(model, policy.trigger))
        least = compute_min_trigger(rows, budget)
        if least is None:
            return None
        if output is not None and not self._model_limits.is_known(tenant, self._origin, model):
            return _PASSES_NOTHING  # only once: another process may have learned that the upstream adds it
        marks = compute_trigger_marks(rows, budget, policy.soft_share, policy.hard_percent)
        least = min(least, marks.soft or least)
        limit = budget.limit if budget.sum_limit is None else min(budget.limit, budget.sum_limit)
        return _SizeLimit(self._model_limits.peek_calibration(tenant, self._origin, model), least, limit)

    def _compute_least_aims(self, model: str, rows: Sequence[TriggerRule]) -> PriceThresholds:
        """Returns the least values that the price fields of a trigger may have, whatever the conversation."""
        price = None
        if self._pricing is not None and any(row.price_tier for row in rows):
            price = self._pricing.get_price(model, self._origin)
        return PriceThresholds(tier=price.surcharge_tokens if price else None, optimum=0)


def build_gates(
    config: Config,
    model_limits: ModelLimits,
    directives: DirectiveStore,
    compacted: CompactedConversations,
    pricing: PriceBook,
) -> Mapping[str, SizeGate]:
    """Builds a gate for each wire, by the wire's name. Wires with the same provider share one."""
    gates: dict[str, SizeGate] = {}
    targets = {wire: format_origin(config.upstream.get_provider(wire)[0]) for wire in WIRES}
    for target in targets.values():
        if target not in gates:
            gates[target] = SizeGate(config, model_limits, directives, compacted, target, pricing=pricing)
    return {wire: gates[target] for wire, target in targets.items()}
