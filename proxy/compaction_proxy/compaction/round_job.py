"""Describes a compaction that is to be made."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from compaction_proxy.compaction.message_reader import CountingOptions
from compaction_proxy.compaction.summary_request import SummaryRequest
from compaction_proxy.core.checkpoint import Checkpoint
from compaction_proxy.core.ledger.frontier import Frontier
from compaction_proxy.core.masking import map_results_to_calls
from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.core.planner import RoundPlan
from compaction_proxy.core.strategies import Policy
from compaction_proxy.support.cached import cached_attribute

# The reason that is reported for a compaction that starts before any request needs it.
AHEAD_REASON = "soft"


@dataclass(frozen=True)  # no slots: cached attributes are stored in `__dict__`
class RoundJob:
    """A compaction to be made, with everything that is needed to make it.

    Attributes:
        plan: The spans to replace, and what replaces them.
        policy: The strategy.
        key: Store key of the checkpoint that will be written.
        checkpoint_id: Id of that checkpoint (`core.checkpoint_ids`), 64 bytes.
        root: Root digest of the conversation (`storage.keys.get_conversation_root`).
        tenant: The tenant that owns the conversation.
        conversation: The conversation id.
        strategy_thread: Key of the conversation's history with this strategy
            (`request_view.format_strategy_thread`).
        messages: The client's messages that are not fixed.
        prefixes: Prefix digests of `messages`.
        previous_checkpoint: The checkpoint in force before this compaction; None if there is none.
        ledger: Text of the ledger; empty if none is needed.
        rules: Rules that the ledger must contain.
        outdated_statements: User statements that no longer hold, by message index. They are removed from the
            messages that the summary model reads.
        pins: Texts that are to be kept word for word.
        model: The model that the conversation uses.
        summary_tokens: Size of the summary, in tokens.
        summary_request: The request for the summary model; None if no model is asked.
        is_extractive: Whether an extract, written without a model, is used instead of a summary.
        is_staged: Whether the checkpoint is stored as staged, so that no request uses it before it is
            installed.
        counting_options: How tokens are counted.
        calibration_ratio: Calibrated tokens per counted token.
        trigger_tokens: The trigger T, in counted tokens.
        calibrated_trigger_tokens: The trigger T, in calibrated tokens; None if no compaction starts
            automatically.
        window: Context window of the conversation's model, in tokens.
        client_message_count: Number of messages that the client sent, including fixed messages.
        tokens_before: Size of the request before the compaction, in calibrated tokens.
        reason: Why the compaction is due.
        timeout_s: Time limit for the whole compaction, in seconds.
        ttl_s: How long the checkpoint is kept, in seconds.
        price_basis: The named numbers from which T was computed, if T depends on prices.
        is_searchable: Whether the model will be offered the tool that searches the removed messages.
        frontier: Where the conversation stands; empty unless the strategy keeps a chain of records.
    """

    plan: RoundPlan
    policy: Policy
    key: str
    checkpoint_id: bytes
    root: bytes
    tenant: str
    conversation: str
    strategy_thread: str
    messages: tuple[Message, ...]
    prefixes: tuple[bytes, ...]
    previous_checkpoint: Checkpoint | None
    ledger: str
    rules: tuple[str, ...]
    outdated_statements: Mapping[int, tuple[str, ...]]
    pins: tuple[str, ...]
    model: str
    summary_tokens: int
    summary_request: SummaryRequest | None
    is_extractive: bool
    is_staged: bool
    counting_options: CountingOptions
    calibration_ratio: float
    trigger_tokens: int
    calibrated_trigger_tokens: int | None
    window: int
    client_message_count: int
    tokens_before: int
    reason: str
    timeout_s: float
    ttl_s: float
    price_basis: Mapping[str, float] = field(default_factory=dict)
    is_searchable: bool = False
    frontier: Frontier = field(default_factory=Frontier)

    @property
    def is_ahead_of_need(self) -> bool:
        """Whether the compaction starts before any request needs it."""
        return self.reason == AHEAD_REASON

    @property
    def groups(self) -> tuple[tuple[Message, ...], ...]:
        """The messages to summarise, by group, without the statements that no longer hold."""
        return tuple(tuple(self._drop_outdated(index) for index in group) for group in self.plan.groups)

    @property
    def user_messages(self) -> tuple[Message, ...]:
        """All user messages, without the statements that no longer hold."""
        indices = (
            k
            for k, message in enumerate(self.messages)
            if message.role == "user" and not message.answered_call_ids
        )
        return tuple(self._drop_outdated(index) for index in indices)

    def _drop_outdated(self, index: int) -> Message:
        text = self.messages[index].text
        for statement in self.outdated_statements.get(index, ()):
            text = text.replace(statement, "")
        return (
            replace(self.messages[index], text=text)
            if index in self.outdated_statements
            else self.messages[index]
        )

    @cached_attribute
    def affected_indices(self) -> tuple[int, ...]:
        """Indices of the messages that this compaction removes or shortens, in order.

        Messages that an earlier compaction has removed or shortened are not included.
        """
        known = (
            self.previous_checkpoint.removed_indices | self.previous_checkpoint.edited
            if self.previous_checkpoint
            else frozenset[int]()
        )
        edits = {
            fill.reference_index for fill in self.plan.planned_replacements if fill.kind in {"mask", "cap"}
        }
        return tuple(sorted({*self.plan.removed_indices, *edits} - known))

    @cached_attribute
    def calls_by_result(self) -> Mapping[int, MessageToolCall]:
        """The tool call that each tool result answers, by the index of the result."""
        return map_results_to_calls(self.messages)

    @property
    def forwarded_tokens(self) -> int:
        """Counted tokens of the messages that would be forwarded without this compaction.

        Fixed messages do not count. Replacements of the previous checkpoint do.
        """
        removed = self.previous_checkpoint.removed_indices if self.previous_checkpoint else frozenset()
        edited = self.previous_checkpoint.edited_messages if self.previous_checkpoint else {}
        replaced_tokens = sum(
            each.tokens
            for _, messages in (
                self.previous_checkpoint.span_replacements if self.previous_checkpoint else ()
            )
            for each in messages
        )
        unchanged_tokens = sum(
            each.tokens for k, each in enumerate(self.messages) if k not in removed and k not in edited
        )
        return unchanged_tokens + replaced_tokens

    def without_model(self, key: str, checkpoint_id: bytes) -> Self:
        """Returns the job of the same compaction with an extract instead of a model's summary.

        Args:
            key: Store key of the checkpoint that will be written.
            checkpoint_id: Id of that checkpoint.
        """
        return replace(
            self,
            summary_request=None,
            is_extractive=True,
            is_staged=False,
            key=key,
            checkpoint_id=checkpoint_id,
        )
