"""What goes into a fit and what comes out of it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from compaction_proxy.compaction.summarizer import SummaryRoute
from compaction_proxy.config.config import ModelSettings
from compaction_proxy.core.checkpoint import Checkpoint
from compaction_proxy.core.message import Message
from compaction_proxy.wires.body import RequestBody


class CompactionMode(StrEnum):
    """How a request is to be treated."""

    ACTIVE = "active"
    FORCE = "force"
    SHADOW = "shadow"
    BYPASS = "bypass"


class CompactionStatus(StrEnum):
    """What was done to a request, as the header `x-compaction-status` says it."""

    NONE = "none"
    REUSED = "reused"
    APPLIED = "applied"
    SHADOW = "shadow"
    BYPASSED = "bypassed"
    FAILED_OPEN = "failed-open"
    OVER_LIMIT = "over-limit"
    SCHEDULED = "scheduled"


@dataclass(frozen=True, slots=True)
class FitRequest:
    """One request, as the compactor is asked to make it fit.

    Attributes:
        body: The request.
        model: The model that will answer.
        tenant: Whose it is.
        conversation: Its id, if the client gave one.
        origin: Of the upstream.
        settings: What the configuration says of the model.
        mode: How to treat it.
        trigger_tokens: A lower trigger that the client asked for.
        resolve_summary_routes: Says whom to ask for a summary, in order; nobody if it is empty. Few requests
            need to know.
        patience_s: Seconds after which the client gives up, if it said so.
        uses_checkpoints: Whether stored rounds may be used and made; without an id the configuration may say
            no.
        strategy: The strategy that the client asked for, if it named one.
        can_lower_output: Whether the output asked for may be lowered to make the request fit.
        pins: What the client wants to be kept word for word.
        client: The name of the client, as far as its header fields tell (`wires.project_instructions`).
        continued_conversation: Id of the conversation that its messages continue, where the client gave none.
    """

    body: RequestBody
    model: str
    tenant: str
    conversation: str | None
    origin: str
    settings: ModelSettings
    mode: CompactionMode
    trigger_tokens: int | None
    resolve_summary_routes: Callable[[], tuple[SummaryRoute, ...]]
    patience_s: float | None
    uses_checkpoints: bool = True
    strategy: str | None = None
    can_lower_output: bool = False
    pins: tuple[str, ...] = ()
    client: str = ""
    continued_conversation: str | None = None

    @property
    def known_conversation(self) -> str | None:
        """Id of its conversation, whoever found it."""
        return self.conversation or self.continued_conversation

    @property
    def summary_routes(self) -> tuple[SummaryRoute, ...]:
        """Whom to ask for a summary; empty: nobody."""
        return self.resolve_summary_routes()


class CompactionReport(NamedTuple):  # made for each request: a dataclass costs four times as much
    """What was done and why, for headers and logs; None where it is not known. Sizes are calibrated tokens.

    Attributes:
        status: The outcome.
        conversation: Its id.
        strategy: Whose checkpoint is in force.
        round: Its number.
        messages_before: Messages that the client sent.
        messages_after: Messages that go on.
        tokens_before: Tokens that the client sent.
        tokens_after: Tokens that go on.
        window: Of the model.
        trigger: T, in tokens.
        reason: Why not more was done, or why it failed.
        tokens_without_round: Tokens that would have gone on without a round made just now.
        checkpoint_id: Where the checkpoint in force is kept, as hex digits.
        max_output: Tokens of output that are asked for in place of what the client asked for; None: its own.
    """

    status: CompactionStatus
    conversation: str | None = None
    strategy: str | None = None
    round: int | None = None
    messages_before: int | None = None
    messages_after: int | None = None
    tokens_before: int | None = None
    tokens_after: int | None = None
    window: int | None = None
    trigger: int | None = None
    reason: str | None = None
    tokens_without_round: int | None = None
    checkpoint_id: str = ""
    max_output: int | None = None


class UsageBasis(NamedTuple):
    """What a forwarded request stood on, so that its real size says something about the next one.

    Attributes:
        root: The conversation's root (`storage.keys.root_of`).
        prefixes: Prefix digests of the client's non-privileged messages.
        baseline_key: What makes sizes comparable (`providers.usage_baseline.place_of`).
        fixed_tokens: Of what no round removes, in calibrated tokens.
    """

    root: bytes
    prefixes: tuple[bytes, ...]
    baseline_key: bytes
    fixed_tokens: int = 0


class CompactedMessages(NamedTuple):
    """A list that is forwarded in place of the client's, with a round in force and nothing cut from it.

    Attributes:
        messages: The list.
        body: The client's non-privileged messages.
        checkpoint: The round.
    """

    messages: tuple[Message, ...]
    body: tuple[Message, ...]
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class FitResult:
    """A request that fits, as far as it could be made to.

    Attributes:
        raw: The body to forward; the very object that came where nothing was changed.
        estimate: Its counted tokens, before calibration; 0 where it was not counted.
        report: What was done.
        usage_basis: What it stood on; None where it was not read, or cut in a way that no checkpoint
            remembers.
        has_guessed_tokens: Whether it holds images and the like, which we may price too high.
        should_prepare: Whether there is work to be done ahead of need, once the client has its answer.
        client_tokens: Tokens of what the client sent, counted as `estimate` is.
        compacted_messages: The list that is forwarded; None where it is the client's, or was cut.
        added_tokens: Tokens of `estimate` that neither the client nor a round has put there (`auto_recall`).
    """

    raw: bytes
    estimate: int
    report: CompactionReport
    usage_basis: UsageBasis | None = None
    has_guessed_tokens: bool = False
    should_prepare: bool = False
    client_tokens: int = 0
    compacted_messages: CompactedMessages | None = None
    added_tokens: int = 0

    @property
    def is_compacted(self) -> bool:
        """Whether a round is in force in what is forwarded; one that only masks has no number."""
        return self.compacted_messages is not None or self.report.round is not None
