"""Defines the requests that the compactor takes and the results that it returns."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from compaction_proxy.compaction.message_reader import CountingOptions
from compaction_proxy.compaction.summary_request import SummaryRoute
from compaction_proxy.config.config import ModelSettings
from compaction_proxy.core.checkpoint import Checkpoint
from compaction_proxy.core.message import Message
from compaction_proxy.wires.body import RequestBody


class CompactionMode(StrEnum):
    """Says how the compactor treats a request.

    - `ACTIVE`: The compactor makes a compaction if one is due.
    - `FORCE`: The compactor makes a compaction even if none is due.
    - `SHADOW`: The compactor only reports what it would do.
    - `BYPASS`: The compactor leaves the request unchanged.
    """

    ACTIVE = "active"
    FORCE = "force"
    SHADOW = "shadow"
    BYPASS = "bypass"


class CompactionStatus(StrEnum):
    """The outcome for a request, as the header `x-compaction-status` reports it.

    With `NONE`, `SHADOW`, `BYPASSED` and `SCHEDULED`, the client's own messages are forwarded.

    - `NONE`: No compaction was necessary or useful.
    - `SHADOW`: Only a report was requested.
    - `BYPASSED`: Compaction is switched off.
    - `SCHEDULED`: A compaction is prepared after the response, for a later request.
    - `REUSED`: An earlier compaction was applied.
    - `APPLIED`: A new compaction or a cut has shortened the messages.
    - `FAILED_OPEN`: A compaction was due but failed, so the request is forwarded without it.
    - `OVER_LIMIT`: The forwarded request probably does not fit the context window.
    """

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
    """A request, with everything that the compactor must know to make the request fit the context window.

    Attributes:
        body: The body of the request.
        model: The name of the model that will answer.
        tenant: The tenant that sent the request.
        conversation: The conversation id that the client gave; None if the client gave none.
        origin: The origin (scheme, host and port) of the upstream.
        settings: The configuration for the model.
        mode: How the compactor treats the request.
        trigger_tokens: The trigger that the client asked for, in tokens; None if there is none. It has an
            effect only if it is lower than the configured trigger.
        resolve_summary_routes: Returns the summary models to try, in order; empty if no summary can be
            requested. It is a function, so that the routes are computed only for requests that need them.
        patience_s: Seconds after which the client gives up; None if this is unknown.
        uses_checkpoints: Whether stored checkpoints may be used and new ones stored. The configuration may
            forbid both for requests without a conversation id.
        strategy: The strategy that the client asked for; None if the client named none.
        can_lower_output: Whether the proxy may lower the output limit in the request to make the request fit.
        pins: Texts that the client wants to be kept word for word.
        client: The name of the client program, if its headers identify it (`wires.project_instructions`);
            else empty.
        continued_conversation: The id of the conversation that the messages continue, if the client gave no
            id and the proxy has found one; else None.
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
        """The conversation id that the client gave or the proxy found; None if there is neither."""
        return self.conversation or self.continued_conversation

    @property
    def counting_options(self) -> CountingOptions:
        """The options with which the tokens of the request are counted."""
        return CountingOptions(self.model, self.settings.compaction.counter, self.body.wire)

    @property
    def summary_routes(self) -> tuple[SummaryRoute, ...]:
        """The summary models to try, in order; empty if no summary can be requested."""
        return self.resolve_summary_routes()


class CompactionReport(NamedTuple):  # created for each request: a dataclass costs four times as much
    """Reports what the proxy has done with a request, and why. Headers and logs show these values.

    A field other than `checkpoint_id` is None if its value is unknown or does not exist. Sizes are calibrated
    tokens, which estimate the provider's count.

    Attributes:
        status: The outcome.
        conversation: The conversation id.
        strategy: The strategy that applies to the request.
        round: The number of the compaction that is applied to the request.
        messages_before: Number of messages that the client sent.
        messages_after: Number of messages that are forwarded.
        tokens_before: Tokens of the request with the messages that the client sent.
        tokens_after: Tokens of the forwarded request.
        window: The context window of the model.
        trigger: The request size at which a compaction starts automatically.
        reason: Why a compaction was due, was not made, or failed.
        tokens_without_round: Tokens that would have been forwarded if no new compaction had been made for
            this request.
        checkpoint_id: The id of the checkpoint that is applied to the request, as hex digits; empty if none
            is applied.
        max_output: The lowered output limit, in tokens; None if the client's own limit is kept.
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
    """Identifies a forwarded request when the upstream reports the token usage of this request.

    From the reported size, the proxy estimates the size of the next request of the conversation.

    Attributes:
        root: Digest of the first messages of the conversation (`storage.keys.get_conversation_root`).
        prefixes: Prefix digests of the client's messages that are not fixed.
        baseline_key: Key shared by requests whose token counts can be compared
            (`providers.usage_baseline.build_baseline_key`).
        fixed_tokens: Calibrated tokens of the request that no compaction removes.
    """

    root: bytes
    prefixes: tuple[bytes, ...]
    baseline_key: bytes
    fixed_tokens: int = 0


class CompactedMessages(NamedTuple):
    """The messages that are forwarded instead of the client's messages.

    They result from applying a checkpoint to the client's messages. If the proxy has also cut messages to
    make the request fit, it does not build this object.

    Attributes:
        messages: The forwarded list.
        unfixed_messages: The client's messages that are not fixed.
        checkpoint: The checkpoint that was applied.
    """

    messages: tuple[Message, ...]
    unfixed_messages: tuple[Message, ...]
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class FitResult:
    """The result of making a request fit the context window: the body to forward, and a report.

    Attributes:
        raw: The body to forward. It is the client's own bytes object if nothing was changed.
        estimate: Counted tokens of the forwarded request, before calibration; 0 if the request was not
            counted.
        report: What the proxy has done with the request, and why.
        usage_basis: Identifies the request when the upstream reports its usage. None if the messages were not
            parsed, if nothing is stored for the conversation, or if the proxy has cut messages to make the
            request fit.
        has_guessed_tokens: Whether the request contains parts such as images, whose tokens may be
            overestimated.
        should_prepare: Whether the proxy should prepare a compaction for a later request once this request
            has been answered.
        client_tokens: Counted tokens of the request as the client sent it, before calibration.
        compacted_messages: The forwarded messages. None if the client's own messages are forwarded, or if the
            proxy has cut messages to make the request fit.
    """

    raw: bytes
    estimate: int
    report: CompactionReport
    usage_basis: UsageBasis | None = None
    has_guessed_tokens: bool = False
    should_prepare: bool = False
    client_tokens: int = 0
    compacted_messages: CompactedMessages | None = None

    @property
    def is_compacted(self) -> bool:
        """Whether a checkpoint is applied to the forwarded request.

        `report.round` alone does not show this, because it is None if the checkpoint only masks or caps
        messages.
        """
        return self.compacted_messages is not None or self.report.round is not None
