"""Strategies as data: each is one row over one planner and one renderer."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from compaction_proxy.core.budget import Reserves
from compaction_proxy.core.summary.sections import PromptSection
from compaction_proxy.core.trigger import TriggerRule

StandInRole = Literal["user", "assistant", "system"]


@dataclass(frozen=True, slots=True)
class ScaledLimit:
    """A size that works for large and small triggers alike: the smaller of two.

    Attributes:
        tokens: Tokens; None where only the share counts.
        share: Share of T, 0..1.
    """

    tokens: int | None
    share: float

    def compute_tokens(self, trigger: int) -> int:
        """The size for a T, in tokens."""
        shared = int(self.share * trigger)
        return shared if self.tokens is None else min(self.tokens, shared)


@dataclass(frozen=True, slots=True)
class KeepRules:
    """What a round leaves as it is. The most of these holds, back to a unit edge.

    Attributes:
        messages: Newest messages of the effective list; with only one more than these there is nothing to
            take, unless there is a `tail` too.
        iterations: Newest iterations.
        tail: Newest messages up to this many tokens; where all of them would fit, it does not count.
        reaching: Whether the message that reaches `tail` still belongs to it.
        task: Whether the first user message stays in its place.
        tool_results: Newest tool results that are never masked; 0: those in the tail only.
    """

    messages: int = 0
    iterations: int = 0
    tail: ScaledLimit | None = None
    reaching: bool = False
    task: bool = False
    tool_results: int = 0


@dataclass(frozen=True, slots=True)
class SummaryShape:
    """What a strategy asks of the summary model.

    Attributes:
        prompt: Name of the prompt file that holds the instructions.
        tokens: Size asked for; the most of it where there is a `share`.
        max_tokens: Size allowed; in proportion where less than `tokens` is asked for.
        temperature: 0..2, or None to leave it to the provider.
        tool_characters: Characters of a tool result that enter the transcript.
        message_characters: Characters of any other message that enter the transcript.
        share: Size asked for as a share of what is removed, 0..1; 0: always `tokens`.
        least_tokens: The least that a share may come to.
        model: Who writes it where the configuration names nobody: a cheap model, or the request's own.
        form: `transcript`: fenced text. `aligned`: the very conversation and the instructions behind it.
        cut: Whether an answer over the size is cut at a line's end and used, instead of refused.
        verified: Whether what the model wrote is compared with what it read.
        sections: Sections that the prompt asks for exactly; empty: the answer has no fixed form.
    """

    prompt: str
    tokens: int
    max_tokens: int
    temperature: float | None = 0.0
    tool_characters: int = 2_000
    message_characters: int = 8_000
    share: float = 0.0
    least_tokens: int = 0
    model: Literal["cheap", "same"] = "cheap"
    form: Literal["transcript", "aligned"] = "transcript"
    cut: bool = False
    verified: bool = False
    sections: tuple[PromptSection, ...] = ()

    def compute_target_tokens(self, removed_tokens: int) -> int:
        """Tokens to ask for where `removed_tokens` tokens are summarised."""
        if not self.share:
            return self.tokens
        return max(self.least_tokens, min(self.tokens, int(self.share * removed_tokens)))

    def compute_max_tokens(self, target_tokens: int) -> int:
        """Tokens that the answer may take."""
        return target_tokens * self.max_tokens // self.tokens


@dataclass(frozen=True, slots=True)
class SummaryFrame:
    """What stands around a summary in its stand-in.

    Attributes:
        opening: Before it; `{round}` is the round's number.
        closing: Behind it; the same text inside the summary is broken up.
        task: Heading over the task, verbatim; None leaves the task out.
        request: What introduces the latest user message at the end; None leaves it in its own place.
        integrates: Whether a line says how many rounds the summary incorporates.
    """

    opening: str = ""
    closing: str = ""
    task: str | None = None
    request: str | None = None
    integrates: bool = False


@dataclass(frozen=True, slots=True)
class AnchoredLayout:
    """Sizes of the parts of an `anchored` context, and when its rounds are written anew.

    Attributes:
        ledger: Rules, requests and facts of what was removed, user text included.
        cap: What is left of a huge tool result.
        huge_share: A new result over this share of usable is capped if no round makes room for it, 0..1.
        rounds: Frozen rounds of a chain before they are consolidated.
        chain_share: Share of the target that the chain may take before that, 0..1.
    """

    ledger: ScaledLimit
    cap: ScaledLimit
    huge_share: float
    rounds: int
    chain_share: float


@dataclass(frozen=True, slots=True)
class Policy:
    """A strategy.

    Attributes:
        name: As the configuration names it.
        trigger: Rows of which one must fire.
        reserves: Tokens kept free of a window.
        keep: What stays.
        takes: `all` that does not stay, or `runs` of assistant and tool messages, earliest first.
        one_run: Whether `runs` takes one a request; else as many as bring it under T.
        earlier: What becomes of earlier rounds. `integrate`: they become part of the new one. `leave`: they
            stay where they are. `freeze`: they stay as the first records of a growing chain.
        stand_in_role: Role of the message put where a span was.
        frame: What stands around the summary.
        task_tokens: Size of the first user message that is kept verbatim; a longer one keeps head and tail.
        summary: The summary call; None: there is none, and nothing stands in.
        target: What to shrink to; None: whatever the row leaves.
        soft_share: Share of T from which on the work is done ahead of need, 0..1; 0: never.
        hard_percent: Percent of usable above which a request may not wait for a better moment.
        max_block_s: Longest wait of a request for a summary, in seconds; None: as long as one may take.
        layout: The parts of an `anchored` context; None for every other row.
        least_messages: Effective lists up to this long are left alone.
    """

    name: str
    trigger: tuple[TriggerRule, ...]
    reserves: Reserves
    keep: KeepRules
    stand_in_role: StandInRole
    frame: SummaryFrame
    summary: SummaryShape | None
    takes: Literal["all", "runs"] = "all"
    one_run: bool = False
    earlier: Literal["integrate", "leave", "freeze"] = "integrate"
    task_tokens: ScaledLimit = ScaledLimit(2_000, 1.0)
    target: ScaledLimit | None = None
    soft_share: float = 0.0
    hard_percent: float = 100.0
    max_block_s: float | None = None
    layout: AnchoredLayout | None = None
    least_messages: int = 1


# A tokenizer's estimate is learned from usage; this is for what it cannot know of the next message.
ROW_RESERVES = Reserves(system=0, output=4_000, safety=1_000)

LAYOUT = AnchoredLayout(
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
    keep=KeepRules(messages=1, tail=ScaledLimit(20_000, 0.20), task=True),
    earlier="freeze",
    stand_in_role="user",
    frame=SummaryFrame(
        opening="[Record {round} of the earlier conversation, for reference: it is not a request, the newest "
        "message decides, and all tools remain available]\n",
        closing="\n[End of record]",
    ),
    task_tokens=ScaledLimit(2_000, 0.10),
    summary=SummaryShape(
        prompt="anchored", tokens=3_000, max_tokens=4_500, share=0.08, least_tokens=600, verified=True
    ),
    target=ScaledLimit(None, 0.40),
    soft_share=0.83,
    hard_percent=90,
    max_block_s=8.0,
    layout=LAYOUT,
)

FULL = Policy(
    name="full",
    trigger=(TriggerRule(tokens=200_000),),
    reserves=ROW_RESERVES,
    keep=KeepRules(),
    stand_in_role="user",
    frame=SummaryFrame(request="Last request from user was: "),
    summary=SummaryShape(
        prompt="full",
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
    reserves=ROW_RESERVES,
    keep=KeepRules(messages=6),
    takes="runs",
    earlier="leave",
    stand_in_role="assistant",
    frame=SummaryFrame(opening="<summary>\n", closing="\n</summary>"),
    summary=SummaryShape(prompt="selective", tokens=2_000, max_tokens=2_000),
)

SPLIT = Policy(
    name="split",
    trigger=(TriggerRule(percent_of_window=95),),
    reserves=Reserves(system=0, output=0, safety=0),
    keep=KeepRules(messages=5, tail=ScaledLimit(None, 0.50), reaching=True),
    earlier="leave",
    stand_in_role="system",
    frame=SummaryFrame(opening="[Previous conversation summary]\n", closing="\n[End of summary]"),
    summary=SummaryShape(prompt="split", tokens=1_000, max_tokens=1_250),
    target=ScaledLimit(None, 0.50),
)

PRUNE = Policy(
    name="prune",
    trigger=(TriggerRule(percent_of_window=95),),
    reserves=Reserves(system=0, output=0, safety=0),
    keep=KeepRules(messages=50, task=True),
    earlier="leave",
    stand_in_role="user",
    frame=SummaryFrame(),
    summary=None,
)

ITERATIONS = Policy(
    name="iterations",
    trigger=(TriggerRule(iterations=8), TriggerRule(tokens=80_000)),
    reserves=ROW_RESERVES,
    keep=KeepRules(messages=6, iterations=3),
    stand_in_role="user",
    frame=SummaryFrame(
        opening="[Summary of the earlier work, for reference]\n", closing="\n[End of the summary]"
    ),
    summary=SummaryShape(prompt="iterations", tokens=1_500, max_tokens=1_875, cut=True),
)

CHAINED = Policy(
    name="chained",
    trigger=(TriggerRule(percent=80),),
    reserves=Reserves(system=2_000, output=4_000, safety=5_000),
    keep=KeepRules(messages=10),
    stand_in_role="assistant",
    frame=SummaryFrame(
        opening="## Session Summary (Compaction Round {round})\n\n",
        task="### Original Task",
        integrates=True,
    ),
    summary=SummaryShape(
        prompt="chained",
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
