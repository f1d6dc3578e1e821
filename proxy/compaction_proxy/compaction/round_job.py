"""One round to be made, and everything that making it needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from compaction_proxy.compaction.message_reader import Gauge
from compaction_proxy.compaction.summary_request import Brief
from compaction_proxy.core.checkpoint import Checkpoint
from compaction_proxy.core.ledger.frontier import Frontier
from compaction_proxy.core.masking import answered_calls
from compaction_proxy.core.message import Call, Message
from compaction_proxy.core.planner import Plan
from compaction_proxy.core.strategies import Policy
from compaction_proxy.support.cached import kept

# The reason of a round that no request needs yet.
AHEAD = "soft"


@dataclass(frozen=True)  # no slots: what follows from the fields is worked out when asked for, and once
class Job:
    """One round to be made.

    Attributes:
        plan: What to take.
        policy: How.
        key: Store key of the checkpoint to be.
        place: Its place (`core.checkpoint.place`), 64 bytes.
        root: The conversation's root (`storage.keys.root_of`).
        tenant: Whose it is.
        conversation: In which conversation.
        thread: What tells conversations of a root and strategies apart, named by their clients or not.
        messages: The client's non-privileged messages.
        prefixes: Their prefix digests.
        earlier: The round before.
        ledger: What the user said and what was observed, for a chain of records.
        rules: What the ledger must hold in any case.
        outdated: What the user said and no longer holds, by index of the message.
        pins: What people want to be kept word for word.
        model: The model that the conversation asks.
        asked: Size of the summary, in tokens.
        brief: What to ask the summary model; None where nothing is asked.
        extract: Whether a text without a model stands for the summary.
        staged: Whether the round is made ahead of need, and no request is given it before it is due.
        gauge: How tokens are counted.
        ratio: Calibrated tokens for each counted one.
        trigger: T, in counted tokens.
        fires_at: T, calibrated; None where no round is made by itself.
        window: Of the conversation's model, in tokens.
        listed: Messages that the client sent, privileged ones included.
        tokens_before: Calibrated size of the request.
        reason: What made it due.
        timeout_s: Seconds for the whole round.
        ttl_s: Seconds that the checkpoint is kept.
        basis: The numbers that T follows from where it is about money, each with its name.
        searchable: Whether the model will be offered the tool that finds what the round takes out.
        frontier: Where the conversation stands, for a chain of records; else empty.
    """

    plan: Plan
    policy: Policy
    key: str
    place: bytes
    root: bytes
    tenant: str
    conversation: str
    thread: str
    messages: tuple[Message, ...]
    prefixes: tuple[bytes, ...]
    earlier: Checkpoint | None
    ledger: str
    rules: tuple[str, ...]
    outdated: Mapping[int, tuple[str, ...]]
    pins: tuple[str, ...]
    model: str
    asked: int
    brief: Brief | None
    extract: bool
    staged: bool
    gauge: Gauge
    ratio: float
    trigger: int
    fires_at: int | None
    window: int
    listed: int
    tokens_before: int
    reason: str
    timeout_s: float
    ttl_s: float
    basis: Mapping[str, float] = field(default_factory=dict)
    searchable: bool = False
    frontier: Frontier = field(default_factory=Frontier)

    @property
    def ahead(self) -> bool:
        """Whether the round is begun before any request needs it."""
        return self.reason == AHEAD

    @property
    def groups(self) -> tuple[tuple[Message, ...], ...]:
        """What is summarised, group by group, without what no longer holds."""
        return tuple(tuple(self._current(index) for index in group) for group in self.plan.groups)

    @property
    def said(self) -> tuple[Message, ...]:
        """What users have said and still holds."""
        users = (k for k, each in enumerate(self.messages) if each.role == "user" and not each.answers)
        return tuple(self._current(index) for index in users)

    def _current(self, index: int) -> Message:
        text = self.messages[index].text
        for statement in self.outdated.get(index, ()):
            text = text.replace(statement, "")
        return replace(self.messages[index], text=text) if index in self.outdated else self.messages[index]

    @kept
    def taken(self) -> tuple[int, ...]:
        """Indices of what this round takes out or shortens for the first time, in order."""
        known = self.earlier.gone | self.earlier.edited if self.earlier else frozenset[int]()
        edits = {fill.at for fill in self.plan.fills if fill.kind in {"mask", "cap"}}
        return tuple(sorted({*self.plan.gone, *edits} - known))

    @kept
    def calls(self) -> Mapping[int, Call]:
        """The call that each tool result answers, by the result's index."""
        return answered_calls(self.messages)

    @property
    def forwarded_tokens(self) -> int:
        """Counted tokens of the conversation's messages as they would be forwarded without this round."""
        gone = self.earlier.gone if self.earlier else frozenset()
        edits = self.earlier.edits if self.earlier else {}
        put = sum(
            each.tokens for _, messages in (self.earlier.pieces if self.earlier else ()) for each in messages
        )
        whole = sum(each.tokens for k, each in enumerate(self.messages) if k not in gone and k not in edits)
        return whole + put

    def deterministic(self, key: str, place: bytes) -> Self:
        """The same round without a model."""
        return replace(self, brief=None, extract=True, staged=False, key=key, place=place)
