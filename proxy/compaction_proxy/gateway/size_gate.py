"""The gate: requests that cannot be large enough to compact are not even parsed."""

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

# A larger body is read whatever it says: of a conversation that is known, that takes less than a search.
MAX_BYTES = 131_072
# A body that names more models than this is read instead.
MAX_MODELS = 8
# What was worked out for a model is used for this long, in seconds, and for so many tenants and models.
CACHE_S = 1.0
MAX_CACHED = 4_096
# More output than any request can be given, in tokens.
ANY_OUTPUT = 10**18


@dataclass(frozen=True, slots=True)
class _SizeLimit:
    """What a body must stay under.

    Attributes:
        calibration: How the upstream counts.
        least: The fewest tokens at which anything happens.
        limit: The most tokens that are forwarded as they are.
    """

    calibration: Calibration
    least: int
    limit: int

    def can_hold(self, size: int) -> bool:
        """Whether a body of so many bytes is certainly under both."""
        return (
            self.calibration.predict_tokens(size) < self.least
            and self.calibration.predict_upper_bound(size) <= self.limit
        )

    def compute_safe_size(self) -> float:
        """Bytes that it holds; at most one less than there would be."""
        factor = self.calibration.ratio * math.exp(self.calibration.margin)
        return min(self.least - 1, self.limit) / factor - 1


_PASSES_NOTHING = _SizeLimit(Calibration(0.0, 0.0), 0, 0)


class SizeGate:
    """Decides by size alone whether a body may go straight on.

    Text never has more tokens than bytes, so a body with fewer bytes than the trigger has fewer tokens too.

    Args:
        config: Windows and triggers by model.
        model_limits: Windows and ratios learned from the upstream.
        directives: Knows which conversations are to be compacted, however small.
        compacted: Knows which ones have been, so that they pass no more.
        origin: Of the upstream.
        pricing: Knows prices; None: nobody does.
        clock: Monotonic seconds.
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
        self._safe_sizes: dict[tuple[str, str], tuple[float, float]] = {}  # bytes, and until when they hold
        self._changes = 0

    async def remember_compacted(self, tenant: str, conversation: str | None, size_bytes: int) -> None:
        """Let a compacted conversation pass no more: what replaced its messages is always applied.

        Args:
            tenant: Whose it is.
            conversation: Its id; None if it has none.
            size_bytes: Of the request that was compacted. A large one never passes, on any replica.
        """
        await self._compacted.add(tenant, conversation, is_listed=size_bytes <= MAX_BYTES)

    @staticmethod
    def find_candidate_models(raw: bytes, deployment: str | None) -> AbstractSet[str]:
        """Every model that a request could mean; `deployment` is the one that its path names.

        None where the body is too large to pass whatever it means: it is not searched.
        """
        if len(raw) > MAX_BYTES:
            return frozenset()
        models = find_models(raw)
        if deployment:
            models.add(deployment)
        return models

    def can_pass(self, raw: bytes, models: AbstractSet[str], tenant: str, conversation: str | None) -> bool:
        """Whether a body is certainly under every mark.

        Args:
            raw: The body.
            models: All that the request could mean.
            tenant: Whose it is.
            conversation: Of which conversation, if that is known.
        """
        size = len(raw)
        if size > MAX_BYTES or self._has_pending_action(tenant, conversation, raw):
            return False
        if not 0 < len(models) <= MAX_MODELS or has_media(raw):
            return False
        if size <= min([self._get_safe_size(tenant, model) for model in models]):
            return True
        output = max(find_output_limits(raw), default=None)
        rooms = [self._compute_size_limit(tenant, model, output) for model in models]
        return all(room is None or room.can_hold(size) for room in rooms)

    def note_accepted(self, tenant: str, model: str, size_bytes: int) -> None:
        """A body that was let through was answered: should a larger one be refused, this one was not."""
        self._model_limits.record_accepted_bytes(tenant, self._origin, model, size_bytes)

    def clear_cache(self) -> None:
        """Something was learned of a model: believe nothing that was worked out before."""
        self._safe_sizes.clear()

    def _has_pending_action(self, tenant: str, conversation: str | None, raw: bytes) -> bool:
        """Whether something is to be done about a conversation whatever its size."""
        if self._compacted.has_rounds(tenant, conversation):
            return conversation is not None or has_history(raw)
        return conversation is not None and self._directives.is_compaction_requested(tenant, conversation)

    def _get_safe_size(self, tenant: str, model: str) -> float:
        """Bytes up to which a body passes, whatever output it asks for."""
        if self._changes != self._model_limits.changes:
            self._changes = self._model_limits.changes
            self._safe_sizes.clear()
        size, until = self._safe_sizes.get((tenant, model), (0.0, 0.0))
        now = self._clock()
        if until < now:
            room = self._compute_size_limit(tenant, model, ANY_OUTPUT)
            size = math.inf if room is None else room.compute_safe_size()
            if len(self._safe_sizes) >= MAX_CACHED:
                self._safe_sizes.clear()
            self._safe_sizes[tenant, model] = size, now + CACHE_S
        return size

    def _compute_size_limit(self, tenant: str, model: str, output: int | None) -> _SizeLimit | None:
        """What a body for a model must stay under; None where nothing ever happens to one."""
        settings = get_model_settings(self._config, model)
        if settings.recall.tool == "always":  # every request is read, to be offered the tool
            return _PASSES_NOTHING
        policy = resolve_policy(settings)
        window = self._model_limits.peek_effective_window(tenant, self._origin, model, settings.window)
        adds_output = self._model_limits.adds_output(tenant, self._origin, model)
        spent = compute_budget(window, policy.reserves, output, adds_output=adds_output)
        rows = set_price_thresholds(policy.trigger, self._compute_least_aims(model, policy.trigger))
        least = compute_min_trigger(rows, spent)
        if least is None:
            return None
        if output is not None and not self._model_limits.is_known(tenant, self._origin, model):
            return _PASSES_NOTHING  # once: another process may have learned that the upstream adds them
        at = compute_trigger_marks(rows, spent, policy.soft_share, policy.hard_percent)
        least = min(least, at.soft or least)
        limit = spent.limit if spent.sum_limit is None else min(spent.limit, spent.sum_limit)
        return _SizeLimit(self._model_limits.peek_calibration(tenant, self._origin, model), least, limit)

    def _compute_least_aims(self, model: str, rows: Sequence[TriggerRule]) -> PriceThresholds:
        """The least that the fields of a trigger about money may come to, whatever the conversation."""
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
    """A gate for each wire, by its name; wires with one provider share theirs."""
    made: dict[str, SizeGate] = {}
    targets = {wire: format_origin(config.upstream.get_provider(wire)[0]) for wire in WIRES}
    for target in targets.values():
        if target not in made:
            made[target] = SizeGate(config, model_limits, directives, compacted, target, pricing=pricing)
    return {wire: made[target] for wire, target in targets.items()}
