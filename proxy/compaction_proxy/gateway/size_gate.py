"""The gate: requests that cannot be large enough to compact are not even parsed."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from compaction_proxy.compaction.compacted_conversations import CompactedConversations
from compaction_proxy.compaction.directives import Wishing
from compaction_proxy.compaction.request_limits import policy_for
from compaction_proxy.config.config import Config, for_model
from compaction_proxy.config.sections import WIRES
from compaction_proxy.core.budget import budget
from compaction_proxy.core.trigger import Aims, Row, aimed, mark, marks
from compaction_proxy.gateway.identity import origin
from compaction_proxy.gateway.side_requests import has_history
from compaction_proxy.providers.calibration import Calibration
from compaction_proxy.providers.model_limits import Learning
from compaction_proxy.providers.pricing import Pricing
from compaction_proxy.wires.prescan import has_media, models_named, outputs_named

# A larger body is read whatever it says: of a conversation that is known, that takes less than a search.
MAX_BYTES = 131_072
# A body that names more models than this is read instead.
MAX_MODELS = 8
# What was worked out for a model is used for this long, in seconds, and for so many tenants and models.
SURE_S = 1.0
MAX_SURE = 4_096
# More output than any request can be given, in tokens.
ANY_OUTPUT = 10**18


@dataclass(frozen=True, slots=True)
class _Room:
    """What a body must stay under.

    Attributes:
        calibration: How the upstream counts.
        least: The fewest tokens at which anything happens.
        limit: The most tokens that are forwarded as they are.
    """

    calibration: Calibration
    least: int
    limit: int

    def holds(self, size: int) -> bool:
        """Whether a body of so many bytes is certainly under both."""
        return self.calibration.size(size) < self.least and self.calibration.bound(size) <= self.limit

    def sure(self) -> float:
        """Bytes that it holds; at most one less than there would be."""
        factor = self.calibration.ratio * math.exp(self.calibration.margin)
        return min(self.least - 1, self.limit) / factor - 1


_NO_ROOM = _Room(Calibration(0.0, 0.0), 0, 0)


class Gate:
    """Decides by size alone whether a body may go straight on.

    Text never has more tokens than bytes, so a body with fewer bytes than the trigger has fewer tokens too.

    Args:
        config: Windows and triggers by model.
        learning: Windows and ratios learned from the upstream.
        wishing: Knows which conversations are to be compacted, however small.
        compacted: Knows which ones have been, so that they pass no more.
        origin: Of the upstream.
        pricing: Knows prices; None: nobody does.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        config: Config,
        learning: Learning,
        wishing: Wishing,
        compacted: CompactedConversations,
        origin: str,
        *,
        pricing: Pricing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._learning = learning
        self._wishing = wishing
        self._compacted = compacted
        self._origin = origin
        self._pricing = pricing
        self._clock = clock
        self._sure: dict[tuple[str, str], tuple[float, float]] = {}  # bytes, and until when they hold
        self._changes = 0

    async def remember(self, tenant: str, conversation: str | None, size_bytes: int) -> None:
        """Let a compacted conversation pass no more: what replaced its messages is always applied.

        Args:
            tenant: Whose it is.
            conversation: Its id; None if it has none.
            size_bytes: Of the request that was compacted. A large one never passes, on any replica.
        """
        await self._compacted.add(tenant, conversation, listed=size_bytes <= MAX_BYTES)

    @staticmethod
    def models(raw: bytes, deployment: str | None) -> AbstractSet[str]:
        """Every model that a request could mean; `deployment` is the one that its path names.

        None where the body is too large to pass whatever it means: it is not searched.
        """
        if len(raw) > MAX_BYTES:
            return frozenset()
        models = models_named(raw)
        if deployment:
            models.add(deployment)
        return models

    def passes(self, raw: bytes, models: AbstractSet[str], tenant: str, conversation: str | None) -> bool:
        """Whether a body is certainly under every mark.

        Args:
            raw: The body.
            models: All that the request could mean.
            tenant: Whose it is.
            conversation: Of which conversation, if that is known.
        """
        size = len(raw)
        if size > MAX_BYTES or self._awaited(tenant, conversation, raw):
            return False
        if not 0 < len(models) <= MAX_MODELS or has_media(raw):
            return False
        if size <= min([self._sure_size(tenant, model) for model in models]):
            return True
        output = max(outputs_named(raw), default=None)
        rooms = [self._room(tenant, model, output) for model in models]
        return all(room is None or room.holds(size) for room in rooms)

    def note_accepted(self, tenant: str, model: str, size_bytes: int) -> None:
        """A body that was let through was answered: should a larger one be refused, this one was not."""
        self._learning.note_accepted_bytes(tenant, self._origin, model, size_bytes)

    def reconsider(self) -> None:
        """Something was learned of a model: believe nothing that was worked out before."""
        self._sure.clear()

    def _awaited(self, tenant: str, conversation: str | None, raw: bytes) -> bool:
        """Whether something is to be done about a conversation whatever its size."""
        if self._compacted.has(tenant, conversation):
            return conversation is not None or has_history(raw)
        return conversation is not None and self._wishing.marked(tenant, conversation)

    def _sure_size(self, tenant: str, model: str) -> float:
        """Bytes up to which a body passes, whatever output it asks for."""
        if self._changes != self._learning.changes:
            self._changes = self._learning.changes
            self._sure.clear()
        size, until = self._sure.get((tenant, model), (0.0, 0.0))
        now = self._clock()
        if until < now:
            room = self._room(tenant, model, ANY_OUTPUT)
            size = math.inf if room is None else room.sure()
            if len(self._sure) >= MAX_SURE:
                self._sure.clear()
            self._sure[tenant, model] = size, now + SURE_S
        return size

    def _room(self, tenant: str, model: str, output: int | None) -> _Room | None:
        """What a body for a model must stay under; None where nothing ever happens to one."""
        settings = for_model(self._config, model)
        if settings.recall.tool == "always":  # every request is read, to be offered the tool
            return _NO_ROOM
        policy = policy_for(settings)
        window = self._learning.window_for(tenant, self._origin, model, settings.window)
        adds_output = self._learning.adds_output(tenant, self._origin, model)
        spent = budget(window, policy.reserves, output, adds_output=adds_output)
        rows = aimed(policy.trigger, self._least_aims(model, policy.trigger))
        least = mark(rows, spent)
        if least is None:
            return None
        if output is not None and not self._learning.is_known(tenant, self._origin, model):
            return _NO_ROOM  # once: another process may have learned that the upstream adds them
        at = marks(rows, spent, policy.soft_share, policy.hard_percent)
        least = min(least, at.soft or least)
        limit = spent.limit if spent.sum_limit is None else min(spent.limit, spent.sum_limit)
        return _Room(self._learning.calibration(tenant, self._origin, model), least, limit)

    def _least_aims(self, model: str, rows: Sequence[Row]) -> Aims:
        """The least that the fields of a trigger about money may come to, whatever the conversation."""
        price = None
        if self._pricing is not None and any(row.price_tier for row in rows):
            price = self._pricing.of(model, self._origin)
        return Aims(tier=price.surcharge_tokens if price else None, optimum=0)


def gates(
    config: Config,
    learning: Learning,
    wishing: Wishing,
    compacted: CompactedConversations,
    pricing: Pricing,
) -> Mapping[str, Gate]:
    """A gate for each wire, by its name; wires with one provider share theirs."""
    made: dict[str, Gate] = {}
    targets = {wire: origin(config.upstream.provider(wire)[0]) for wire in WIRES}
    for target in targets.values():
        if target not in made:
            made[target] = Gate(config, learning, wishing, compacted, target, pricing=pricing)
    return {wire: made[target] for wire, target in targets.items()}
