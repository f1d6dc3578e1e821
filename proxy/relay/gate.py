"""The gate: requests that cannot be large enough to compact are not even parsed."""

from collections import OrderedDict

from proxy.compaction.policies import policy_for
from proxy.config.model import Config, for_model
from proxy.core.budget import budget
from proxy.core.trigger import mark, marks
from proxy.dialects.chat import has_media, models_named, outputs_named
from proxy.learning import Learning
from proxy.wishes import Wishing

# Compacted conversations that are known by their id.
MAX_REMEMBERED = 10_000
# What every tool result has.
RESULT = b'"tool_call_id"'
# A body that names more models than this is read instead.
MAX_MODELS = 8


class Gate:
    """Decides by size alone whether a body may go straight on.

    Text never has more tokens than bytes, so a body with fewer bytes than the trigger has fewer tokens too.

    Args:
        config: Windows and triggers by model.
        learning: Windows and ratios learned from the upstream.
        wishing: Knows which conversations are to be compacted, however small.
        origin: Of the upstream.
    """

    def __init__(self, config: Config, learning: Learning, wishing: Wishing, origin: str) -> None:
        self._config = config
        self._learning = learning
        self._wishing = wishing
        self._origin = origin
        self._compacted: OrderedDict[str, None] = OrderedDict()

    def remember(self, conversation: str | None) -> None:
        """Let a compacted conversation pass no more: what replaced its messages is always applied."""
        if conversation is not None:
            self._compacted[conversation] = None
            self._compacted.move_to_end(conversation)
            if len(self._compacted) > MAX_REMEMBERED:
                self._compacted.popitem(last=False)

    def passes(self, raw: bytes, deployment: str | None, tenant: str, conversation: str | None) -> bool:
        """Whether a body is certainly under every mark; `deployment` is the model that its path names."""
        if conversation is not None and self._awaited(tenant, conversation):
            return False
        models = models_named(raw) | ({deployment} if deployment else set())
        if not 0 < len(models) <= MAX_MODELS or has_media(raw):
            return False
        output = max(outputs_named(raw), default=None)
        results = RESULT in raw
        return all(self._under(len(raw), tenant, model, output, results=results) for model in models)

    def _awaited(self, tenant: str, conversation: str) -> bool:
        """Whether something is to be done about a conversation whatever its size."""
        return conversation in self._compacted or self._wishing.marked(tenant, conversation)

    def _under(self, size: int, tenant: str, model: str, output: int | None, *, results: bool) -> bool:
        settings = for_model(self._config, model)
        policy = policy_for(settings)
        window = self._learning.window_for(tenant, self._origin, model, settings.window)
        spent = budget(window, policy.reserves, output)
        least = mark(policy.trigger, spent)
        if least is None:
            return True
        at = marks(policy.trigger, spent, policy.soft_share, policy.hard_percent)
        least = min(least, at.soft or least)
        if results and policy.layout:  # a single result may be huge
            least = min(least, int(spent.usable * policy.layout.huge_share))
        calibration = self._learning.calibration(tenant, self._origin, model)
        return calibration.size(size) < least and calibration.bound(size) <= spent.limit
