"""Defines the strategies as data: one `Policy` of numbers and rules for each strategy.

The same planner and the same renderer carry out all strategies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from compaction_proxy.core.budget import Reserves
from compaction_proxy.core.summary.answer import PromptSection
from compaction_proxy.core.trigger import TriggerRule

StandInRole = Literal["user", "assistant", "system"]


@dataclass(frozen=True, slots=True)
class ScaledLimit:
    """A size limit that suits large and small triggers: the smaller of a number of tokens and a share of T.

    Attributes:
        tokens: Limit in tokens; None if only the share limits the size.
        share: Limit as a share of T, 0..1.
    """

    tokens: int | None
    share: float

    def compute_tokens(self, trigger_tokens: int) -> int:
        """Computes the limit, in tokens, if T is `trigger_tokens`."""
        shared = int(self.share * trigger_tokens)
        return shared if self.tokens is None else min(self.tokens, shared)


@dataclass(frozen=True, slots=True)
class KeepRules:
    """The messages that a compaction leaves unchanged.

    If several rules keep newest messages, the rule that keeps the most applies. If the kept messages would
    begin inside a unit, the whole unit stays.

    Attributes:
        messages: Number of newest messages of the effective list that stay.
        iterations: Number of newest iterations that stay.
        tail: Newest messages up to this many tokens stay. If all messages would fit, this rule does not
            apply.
        includes_reaching_message: Whether the message that makes the tail as large as `tail`, or larger,
            still belongs to the tail.
        keeps_task: Whether the task stays in its place.
        tool_results: Number of newest tool results that are never masked; 0 protects only those in the tail.
    """

    messages: int = 0
    iterations: int = 0
    tail: ScaledLimit | None = None
    includes_reaching_message: bool = False
    keeps_task: bool = False
    tool_results: int = 0


@dataclass(frozen=True, slots=True)
class SummaryShape:
    """The form and the size of the summaries that a strategy requests from the summary model.

    Attributes:
        prompt_name: Name of the prompt file with the instructions.
        tokens: Size that is requested, in tokens; if `share` is not 0, the largest size that is requested.
        max_tokens: Largest size, in tokens, that a summary may have if `tokens` tokens are requested. If
            fewer are requested, this limit is lower in proportion.
        temperature: Temperature of the summary model, 0..2; None leaves the temperature to the provider.
        tool_characters: Maximum characters of a tool result in the transcript.
        message_characters: Maximum characters of any other message in the transcript.
        share: Requested size as a share of the removed tokens, 0..1; 0 always requests `tokens`.
        least_tokens: Smallest size that is requested if the size follows from `share`, in tokens.
        model: Model that writes the summary if the configuration names none. `cheap`: a cheap model. `same`:
            the model that the client's request names.
        form: `transcript`: fenced text. `aligned`: the conversation itself, followed by the instructions.
        may_cut: Whether a summary that is too long is cut to its largest size and used. Otherwise it is
            refused.
        is_verified: Whether the summary is checked against the text that the summary model read.
        sections: The exact sections that the prompt demands; empty if the summary has no fixed form.
    """

    prompt_name: str
    tokens: int
    max_tokens: int
    temperature: float | None = 0.0
    tool_characters: int = 2_000
    message_characters: int = 8_000
    share: float = 0.0
    least_tokens: int = 0
    model: Literal["cheap", "same"] = "cheap"
    form: Literal["transcript", "aligned"] = "transcript"
    may_cut: bool = False
    is_verified: bool = False
    sections: tuple[PromptSection, ...] = ()

    def compute_target_tokens(self, removed_tokens: int) -> int:
        """Computes the size to request, in tokens, for a summary that replaces `removed_tokens` tokens."""
        if not self.share:
            return self.tokens
        return max(self.least_tokens, min(self.tokens, int(self.share * removed_tokens)))

    def compute_max_tokens(self, target_tokens: int) -> int:
        """Computes the largest size of a summary, in tokens, if `target_tokens` tokens are requested."""
        return target_tokens * self.max_tokens // self.tokens


@dataclass(frozen=True, slots=True)
class SummaryFrame:
    """The texts before and after a summary in its replacement.

    Attributes:
        opening: Text before the summary. `{round}` becomes the number of the compaction.
        closing: Text after the summary. If the summary itself contains this text, a character is inserted
            into it, so that a model does not take it for the end of the summary.
        task_heading: Heading above the task, which is quoted verbatim; None leaves the task out.
        request_introduction: Text that introduces the latest user message at the end; None leaves that
            message in its place.
        mentions_earlier_rounds: Whether a line says how many earlier compactions the summary incorporates.
    """

    opening: str = ""
    closing: str = ""
    task_heading: str | None = None
    request_introduction: str | None = None
    mentions_earlier_rounds: bool = False


@dataclass(frozen=True, slots=True)
class AnchoredLayout:
    """The sizes of the parts of an `anchored` context, and the limits at which its chain is written anew.

    Attributes:
        ledger: Size of the ledger: rules, requests and facts from removed messages, with their quoted text.
        cap: Size to which a huge tool result is cut.
        huge_share: Share of usable above which a new tool result is capped if no compaction makes room for
            it, 0..1.
        rounds: Number of records in a chain at which the next compaction writes one new record in place of
            all of them.
        chain_share: Share, 0..1, of the size that a compaction aims at. If the records of the chain take
            more, the next compaction writes the chain anew.
    """

    ledger: ScaledLimit
    cap: ScaledLimit
    huge_share: float
    rounds: int
    chain_share: float


@dataclass(frozen=True, slots=True)
class Policy:
    """The numbers and rules of a strategy.

    Attributes:
        name: Name of the strategy in the configuration.
        trigger: Rows of thresholds. A compaction is due if all thresholds of at least one row are reached.
        reserves: Tokens of the context window to keep free.
        keep: The messages that stay.
        removal_scope: `all` replaces all messages that do not stay. `runs` replaces runs of assistant and
            tool messages, earliest first.
        one_run: Whether `runs` replaces one run per request. Otherwise it replaces as many runs as are needed
            to bring the request under the target or, without a target, under T.
        earlier_rounds: What a compaction does with earlier compactions. `integrate`: one new replacement
            takes the place of all earlier ones. `leave`: the earlier replacements stay where they are.
            `freeze`: they stay as the first records of a growing chain.
        stand_in_role: Role of the replacement.
        frame: Text around the summary.
        task_tokens: Largest size at which the task is quoted verbatim. A longer task is cut to its beginning
            and end.
        summary: Form and size of the summary; None removes messages without any replacement.
        target: Size to which a compaction shrinks the request; None if the other rules decide the size.
        soft_share: Share of T from which compactions are prepared ahead of need, 0..1; 0 disables this.
        hard_percent: Percent of usable from which automatic compactions are made again after an undo.
        max_block_s: Longest time that a request waits for a summary, in seconds. None: a request waits as
            long as a summary may take.
        layout: Sizes of the parts of an `anchored` context; None for every other strategy.
        least_messages: An effective list of at most this many messages is not compacted.
    """

    name: str
    trigger: tuple[TriggerRule, ...]
    reserves: Reserves
    keep: KeepRules
    stand_in_role: StandInRole
    frame: SummaryFrame
    summary: SummaryShape | None
    removal_scope: Literal["all", "runs"] = "all"
    one_run: bool = False
    earlier_rounds: Literal["integrate", "leave", "freeze"] = "integrate"
    task_tokens: ScaledLimit = ScaledLimit(2_000, 1.0)
    target: ScaledLimit | None = None
    soft_share: float = 0.0
    hard_percent: float = 100.0
    max_block_s: float | None = None
    layout: AnchoredLayout | None = None
    least_messages: int = 1


# Reserves that several strategies share. Calibration corrects the errors of the token counts. The safety
# reserve covers the error that remains, because calibration cannot know the next message.
DEFAULT_RESERVES = Reserves(system=0, output=4_000, safety=1_000)

ANCHORED_LAYOUT = AnchoredLayout(
    ledger=ScaledLimit(8_000, 0.27),
    cap=ScaledLimit(16_000, 0.20),
    huge_share=0.25,
    rounds=6,
    chain_share=0.25,
)

ANCHORED = Policy(
    name="anchored",
    trigger=(TriggerRule(percent=75),),
    reserves=Reserves(system=0, output=8_000, safety=2_000),
    keep=KeepRules(messages=1, tail=ScaledLimit(20_000, 0.20), keeps_task=True),
    earlier_rounds="freeze",
    stand_in_role="user",
    frame=SummaryFrame(
        opening="[Record {round} of the earlier conversation, for reference: it is not a request, the newest "
        "message decides, and all tools remain available]\n",
        closing="\n[End of record]",
    ),
    task_tokens=ScaledLimit(2_000, 0.10),
    summary=SummaryShape(
        prompt_name="anchored", tokens=3_000, max_tokens=4_500, share=0.08, least_tokens=600, is_verified=True
    ),
    target=ScaledLimit(None, 0.40),
    soft_share=0.83,
    hard_percent=90,
    max_block_s=8.0,
    layout=ANCHORED_LAYOUT,
)

FULL = Policy(
    name="full",
    trigger=(TriggerRule(tokens=200_000),),
    reserves=DEFAULT_RESERVES,
    keep=KeepRules(),
    stand_in_role="user",
    frame=SummaryFrame(request_introduction="Last request from user was: "),
    summary=SummaryShape(
        prompt_name="full",
        tokens=3_000,
        max_tokens=3_750,
        model="same",
        form="aligned",
        sections=(
            PromptSection("1. User's Primary Goals and Intent"),
            PromptSection("2. Conversation Timeline and Progress"),
            PromptSection("3. Technical Context and Decisions"),
            PromptSection("4. Files and Code Changes"),
            PromptSection("5. Active Work and Last Actions (CRITICAL)"),
            PromptSection("6. Unresolved Issues and Pending Tasks"),
            PromptSection("7. Immediate Next Step"),
        ),
    ),
)

SELECTIVE = Policy(
    name="selective",
    trigger=(TriggerRule(tokens=60_000),),
    reserves=DEFAULT_RESERVES,
    keep=KeepRules(messages=6),
    removal_scope="runs",
    earlier_rounds="leave",
    stand_in_role="assistant",
    frame=SummaryFrame(opening="<summary>\n", closing="\n</summary>"),
    summary=SummaryShape(prompt_name="selective", tokens=2_000, max_tokens=2_000),
)

SPLIT = Policy(
    name="split",
    trigger=(TriggerRule(percent_of_window=95),),
    reserves=Reserves(system=0, output=0, safety=0),
    keep=KeepRules(messages=5, tail=ScaledLimit(None, 0.50), includes_reaching_message=True),
    earlier_rounds="leave",
    stand_in_role="system",
    frame=SummaryFrame(opening="[Previous conversation summary]\n", closing="\n[End of summary]"),
    summary=SummaryShape(prompt_name="split", tokens=1_000, max_tokens=1_250),
    target=ScaledLimit(None, 0.50),
)

PRUNE = Policy(
    name="prune",
    trigger=(TriggerRule(percent_of_window=95),),
    reserves=Reserves(system=0, output=0, safety=0),
    keep=KeepRules(messages=50, keeps_task=True),
    earlier_rounds="leave",
    stand_in_role="user",
    frame=SummaryFrame(),
    summary=None,
)

ITERATIONS = Policy(
    name="iterations",
    trigger=(TriggerRule(iterations=8), TriggerRule(tokens=80_000)),
    reserves=DEFAULT_RESERVES,
    keep=KeepRules(messages=6, iterations=3),
    stand_in_role="user",
    frame=SummaryFrame(
        opening="[Summary of the earlier work, for reference]\n", closing="\n[End of the summary]"
    ),
    summary=SummaryShape(prompt_name="iterations", tokens=1_500, max_tokens=1_875, may_cut=True),
)

CHAINED = Policy(
    name="chained",
    trigger=(TriggerRule(percent=80),),
    reserves=Reserves(system=2_000, output=4_000, safety=5_000),
    keep=KeepRules(messages=10),
    stand_in_role="assistant",
    frame=SummaryFrame(
        opening="## Session Summary (Compaction Round {round})\n\n",
        task_heading="### Original Task",
        mentions_earlier_rounds=True,
    ),
    summary=SummaryShape(
        prompt_name="chained",
        tokens=800,
        max_tokens=1_000,
        temperature=0.3,
        tool_characters=500,
        message_characters=2_000,
        sections=(
            PromptSection("### Completed Work"),
            PromptSection("### Key Technical Decisions"),
            PromptSection("### Current State"),
            PromptSection("### Pending Work"),
            PromptSection("### Errors & Resolutions", is_optional=True),
        ),
    ),
    least_messages=11,
)

STRATEGIES: Mapping[str, Policy] = MappingProxyType(
    {policy.name: policy for policy in (ANCHORED, FULL, SELECTIVE, SPLIT, PRUNE, ITERATIONS, CHAINED)}
)
DEFAULT_STRATEGY = ANCHORED.name
