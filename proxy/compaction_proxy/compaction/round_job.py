"""One round to be made, and everything that making it needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from compaction_proxy.compaction.message_reader import CountingOptions
from compaction_proxy.compaction.summary_request import SummaryRequest
from compaction_proxy.core.checkpoint import Checkpoint
from compaction_proxy.core.ledger.frontier import Frontier
from compaction_proxy.core.masking import find_answered_calls
from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.core.planner import RoundPlan
from compaction_proxy.core.strategies import Policy
from compaction_proxy.support.cached import cached_attribute

# The reason of a round that no request needs yet.
AHEAD_REASON = "soft"


@dataclass(frozen=True)  # no slots: what follows from the fields is worked out when asked for, and once
class RoundJob:
    """One round to be made.

    Attributes:
        plan: What to take.
        policy: How.
        key: Store key of the checkpoint to be.
        checkpoint_id: Its place (`core.checkpoint.place`), 64 bytes.
        root: The conversation's root (`storage.keys.root_of`).
        tenant: Whose it is.
        conversation: In which conversation.
        strategy_thread: What tells conversations of a root and strategies apart, named by their clients or
            not.
        messages: The client's non-privileged messages.
        prefixes: Their prefix digests.
        previous_checkpoint: The round before.
        ledger: What the user said and what was observed, for a chain of records.
        rules: What the ledger must hold in any case.
        outdated_statements: What the user said and no longer holds, by index of the message.
        pins: What people want to be kept word for word.
        model: The model that the conversation asks.
        summary_tokens: Size of the summary, in tokens.
        summary_request: What to ask the summary model; None where nothing is asked.
        is_extractive: Whether a text without a model stands for the summary.
        is_staged: Whether the round is made ahead of need, and no request is given it before it is due.
        counting_options: How tokens are counted.
        calibration_ratio: Calibrated tokens for each counted one.
        trigger: T, in counted tokens.
        calibrated_trigger: T, calibrated; None where no round is made by itself.
        window: Of the conversation's model, in tokens.
        client_message_count: Messages that the client sent, privileged ones included.
        tokens_before: Calibrated size of the request.
        reason: What made it due.
        timeout_s: Seconds for the whole round.
        ttl_s: Seconds that the checkpoint is kept.
        basis: The numbers that T follows from where it is about money, each with its name.
        is_searchable: Whether the model will be offered the tool that finds what the round takes out.
        frontier: Where the conversation stands, for a chain of records; else empty.
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
    trigger: int
    calibrated_trigger: int | None
    window: int
    client_message_count: int
    tokens_before: int
    reason: str
    timeout_s: float
    ttl_s: float
    basis: Mapping[str, float] = field(default_factory=dict)
    is_searchable: bool = False
    frontier: Frontier = field(default_factory=Frontier)

    @property
    def is_ahead_of_need(self) -> bool:
        """Whether the round is begun before any request needs it."""
        return self.reason == AHEAD_REASON

    @property
    def groups(self) -> tuple[tuple[Message, ...], ...]:
        """What is summarised, group by group, without what no longer holds."""
        return tuple(tuple(self._drop_outdated(index) for index in group) for group in self.plan.groups)

    @property
    def user_messages(self) -> tuple[Message, ...]:
        """What users have said and still holds."""
        users = (k for k, each in enumerate(self.messages) if each.role == "user" and not each.answers)
        return tuple(self._drop_outdated(index) for index in users)

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
        """Indices of what this round takes out or shortens for the first time, in order."""
        known = (
            self.previous_checkpoint.removed_indices | self.previous_checkpoint.edited
            if self.previous_checkpoint
            else frozenset[int]()
        )
        edits = {fill.at for fill in self.plan.fills if fill.kind in {"mask", "cap"}}
        return tuple(sorted({*self.plan.removed_indices, *edits} - known))

    @cached_attribute
    def calls_by_result(self) -> Mapping[int, MessageToolCall]:
        """The call that each tool result answers, by the result's index."""
        return find_answered_calls(self.messages)

    @property
    def forwarded_tokens(self) -> int:
        """Counted tokens of the conversation's messages as they would be forwarded without this round."""
        gone = self.previous_checkpoint.removed_indices if self.previous_checkpoint else frozenset()
        edits = self.previous_checkpoint.edited_messages if self.previous_checkpoint else {}
        put = sum(
            each.tokens
            for _, messages in (
                self.previous_checkpoint.span_replacements if self.previous_checkpoint else ()
            )
            for each in messages
        )
        whole = sum(each.tokens for k, each in enumerate(self.messages) if k not in gone and k not in edits)
        return whole + put

    def without_model(self, key: str, place: bytes) -> Self:
        """The same round without a model."""
        return replace(
            self, summary_request=None, is_extractive=True, is_staged=False, key=key, checkpoint_id=place
        )
