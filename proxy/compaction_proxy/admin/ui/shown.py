"""Records that the templates show. A number that is unknown is None, and a text that is unknown is empty."""

from dataclasses import dataclass, field

from compaction_proxy.core.event import Event


@dataclass(frozen=True, slots=True)
class MoneyView:
    """Dollars of a conversation or a period; None if no price is known."""

    cost_usd: float | None = None
    gross_usd: float | None = None
    cache_loss_usd: float | None = None
    summary_usd: float | None = None
    net_usd: float | None = None


@dataclass(frozen=True, slots=True)
class ConversationRowView:
    """A conversation in the list. `tokens_before` and `tokens_after` are the sizes of its last exchange."""

    id: str = ""
    model: str = ""
    requests: int | None = None
    last_at: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    tokens_before: int | None = None
    tokens_after: int | None = None
    trigger: int | None = None
    window: int | None = None
    status: str = ""
    rounds: int | None = None
    cost_usd: float | None = None
    net_usd: float | None = None


@dataclass(frozen=True, slots=True)
class RoundView:
    """A compaction: its event, whether it was undone, and after how many requests it has paid for itself."""

    event: Event
    undone: bool = False
    pays_back_after: float | None = None


@dataclass(frozen=True, slots=True)
class MessageView:
    """A message that a compaction removed, or that the model saw after it.

    In the second case, `origin` tells whether the message was kept or is a replacement.
    """

    id: str = ""
    index: int | None = None
    role: str = ""
    text: str = ""
    origin: str = ""


@dataclass(frozen=True, slots=True)
class PromptView:
    """A prompt that a summary model received."""

    model: str = ""
    system: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class PinView:
    """A pinned text."""

    id: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class InstructionView:
    """Project instructions of a conversation."""

    id: str = ""
    client: str = ""
    kind: str = ""
    path: str = ""
    tokens: int | None = None
    removed: bool = False


@dataclass(frozen=True, slots=True)
class HitView:
    """A message that a search has found."""

    message_id: str = ""
    index: int | None = None
    role: str = ""
    round: int | None = None
    at: float | None = None
    snippet: str = ""
    conversation: str = ""
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class CountersView:
    """One row of the statistics. `of` is its hour, day, model or key."""

    of: str = ""
    requests: int = 0
    failed: int = 0
    tokens_before: int = 0
    tokens_after: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    rounds: int = 0
    failures: int = 0
    summary_calls: int = 0
    unpriced: int = 0
    cost_usd: float | None = None
    gross_usd: float | None = None
    cache_loss_usd: float | None = None
    summary_usd: float | None = None
    net_usd: float | None = None
    overhead_p50_s: float | None = None
    overhead_p95_s: float | None = None
    failed_open: int = 0


@dataclass(frozen=True, slots=True)
class UpstreamFailureView:
    """Failures of one upstream with one cause."""

    target: str = ""
    cause: str = ""
    count: int = 0
    last_at: float | None = None


@dataclass(frozen=True, slots=True)
class BillView:
    """Cost of a conversation with and without compaction, in dollars or in uncached input tokens."""

    without: float | None = None
    compacted: float | None = None
    summaries: float | None = None
    net: float | None = None
    pays_back_after: float | None = None


@dataclass(frozen=True, slots=True)
class StrategyOutcomeView:
    """Result of a strategy in a replay.

    `points` has two sizes of each request, in tokens: before and after compaction.
    """

    strategy: str = ""
    model: str = ""
    window: int | None = None
    trigger: int | None = None
    requests: int | None = None
    rounds: int | None = None
    summary_calls: int | None = None
    sent_tokens: int | None = None
    forwarded_tokens: int | None = None
    largest_tokens: int | None = None
    cached_share: float | None = None
    cached_share_without: float | None = None
    over_without: int | None = None
    over_with: int | None = None
    failed: int | None = None
    price_source: str = ""
    tokens: BillView = field(default_factory=BillView)
    dollars: BillView = field(default_factory=BillView)
    points: tuple[tuple[int | None, int | None], ...] = ()


@dataclass(frozen=True, slots=True)
class SettingView:
    """A value of the configuration and its source."""

    key: str = ""
    value: str = ""
    origin: str = ""

    @property
    def section(self) -> str:
        """Heading of the value on the page: the first word of its key, or the part that names a strategy."""
        words = self.key.split(".")
        return ".".join(words[:3] if words[1:2] == ["strategies"] else words[:1])


@dataclass(frozen=True, slots=True)
class ModelView:
    """Context window of a model in tokens, and its prices in dollars per million tokens."""

    model: str = ""
    window: int | None = None
    window_source: str = ""
    input_usd: float | None = None
    cached_usd: float | None = None
    output_usd: float | None = None
    surcharge_tokens: int | None = None
    price_source: str = ""
    price_date: str = ""


@dataclass(frozen=True, slots=True)
class ConversationView:
    """A conversation with its totals, pins, instructions and state."""

    id: str
    model: str = ""
    requests: int | None = None
    last_at: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    pins: tuple[PinView, ...] = ()
    instructions: tuple[InstructionView, ...] = ()
    compact: bool = False
    suppressed: bool = False
    bypass: bool = False
    money: MoneyView = field(default_factory=MoneyView)
