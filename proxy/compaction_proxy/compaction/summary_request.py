"""What is wanted of a summary model, who may be asked, and what comes back."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from compaction_proxy.compaction.chunking import Group
from compaction_proxy.compaction.message_reader import CountingOptions
from compaction_proxy.compaction.summary_client import CallAccount, SummaryUsage
from compaction_proxy.core.ledger.frontier import StatementStatus
from compaction_proxy.core.message import Message
from compaction_proxy.core.strategies import SummaryShape
from compaction_proxy.core.summary.call import SummaryCall
from compaction_proxy.core.summary.prompt import build_prompt
from compaction_proxy.support.offload import run_in_worker
from compaction_proxy.wires.body import RequestBody
from compaction_proxy.wires.chat.summary_call import takes_cache_key
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.wire import Wire

# Characters of a text for each token.
SUMMARY_CHARACTERS = 3.5


@dataclass(frozen=True, slots=True)
class SummaryRoute:
    """Where a summary is asked for.

    Attributes:
        url: Absolute URL of the endpoint.
        headers: Credentials and whatever else the call needs.
        model: The model's name.
        window: Tokens that the model takes.
        wire: The wire of the endpoint.
    """

    url: str
    headers: Mapping[str, str] = field(repr=False)
    model: str
    window: int
    wire: Wire = CHAT


@dataclass(frozen=True, slots=True)
class AlignedConversation:
    """The very conversation, for the aligned form.

    Attributes:
        body: The client's request.
        messages: The list as it would be forwarded, stand-ins in place and repaired.
    """

    body: RequestBody = field(repr=False)
    messages: tuple[Message, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class SummaryRequest:
    """What is wanted of a summary model.

    Attributes:
        shape: As the strategy asks.
        instructions: System prompt of the call.
        groups: What to summarise; one text is wanted for each.
        task: The user's task; empty where it is not shown.
        earlier: Texts of earlier rounds, oldest first.
        language: English name of the language to write in; empty if it is not known.
        tokens: Size asked for, of all texts together.
        routes: Whom to ask; the next one where a model is unknown.
        counting_options: How tokens are counted.
        calibration_ratio: Calibrated tokens for each counted one.
        tenant: Whose calls they are.
        calls_per_hour: How many the tenant may make; 0: no bound.
        aligned: The conversation itself, where the call is to continue it; asked of the first route, if that
            is the request's own model.
        deadline_s: Seconds after which the calls are cancelled for their slowness; 0: not known.
        usage: What the calls have taken so far; to be read after a failure or a deadline, too.
        user_messages: What users have said in the whole conversation; with the groups it is what a summary
            may know.
        states: How far each request has come (`core.ledger.frontier`), as far as that is known.
    """

    shape: SummaryShape
    instructions: str = field(repr=False)
    groups: tuple[tuple[Message, ...], ...] = field(repr=False)
    task: str = field(repr=False)
    earlier: tuple[str, ...] = field(repr=False)
    language: str
    tokens: int
    routes: tuple[SummaryRoute, ...]
    counting_options: CountingOptions
    calibration_ratio: float
    tenant: str
    calls_per_hour: int
    aligned: AlignedConversation | None
    deadline_s: float = 0.0
    usage: SummaryUsage = field(default_factory=SummaryUsage, compare=False)
    user_messages: tuple[Message, ...] = field(default=(), repr=False)
    states: Mapping[tuple[int, str], StatementStatus] = field(default_factory=dict, repr=False)

    @property
    def max_characters(self) -> int:
        """Size allowed, of all texts together."""
        return int(self.shape.compute_max_tokens(self.tokens) * SUMMARY_CHARACTERS)

    @property
    def account(self) -> CallAccount:
        """Who pays for it."""
        return CallAccount(self.tenant, self.calls_per_hour, self.usage, self.deadline_s)


@dataclass(frozen=True, slots=True)
class Summary:
    """What was written for a brief.

    Attributes:
        texts: One for each group: cleaned, validated, and verified where the strategy says so.
        model: Who wrote them.
        usage: What all calls together took.
    """

    texts: tuple[str, ...] = field(repr=False)
    model: str
    usage: SummaryUsage = field(compare=False)


# An answer takes at most this share of the summary model's window, whatever was asked for.
ANSWER_SHARE = 0.25
# A call, its answer included, takes at most this share of the window: sizes are estimates.
WINDOW_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A brief, or a portion of one, before one model.

    Attributes:
        brief: What is wanted.
        route: Who is asked.
        window: Tokens that the model is believed to take.
        tokens: Size asked for.
        earlier: Texts of earlier rounds that are shown.
    """

    brief: SummaryRequest
    route: SummaryRoute
    window: int
    tokens: int
    earlier: tuple[str, ...]

    @property
    def answer_tokens(self) -> int:
        """Tokens that an answer may take, with what the model thinks before it."""
        return self.brief.shape.compute_max_tokens(
            self.tokens
        ) + self.route.wire.call_format.get_thinking_allowance(self.route.model, None)

    @property
    def max_input_tokens(self) -> float:
        """Counted tokens that instructions and prompt may take, less what the estimate may be wrong by."""
        return (WINDOW_SHARE * self.window - self.answer_tokens) / self.brief.calibration_ratio

    async def build_prompt(self, groups: tuple[Group, ...], shape: SummaryShape) -> str:
        """The data of a call, written beside the loop: it may be megabytes."""
        brief = self.brief
        return await run_in_worker(
            partial(
                build_prompt,
                groups,
                shape,
                task=brief.task,
                earlier=self.earlier,
                language=brief.language,
                tokens=self.tokens,
            )
        )

    def build_call(self, prompt_text: str) -> SummaryCall:
        """The transcript call that a prompt makes."""
        brief, route = self.brief, self.route
        return SummaryCall(
            url=route.url,
            headers=route.headers,
            model=route.model,
            system=brief.instructions,
            prompt=prompt_text,
            max_tokens=brief.shape.compute_max_tokens(self.tokens),
            temperature=brief.shape.temperature,
            wire=route.wire.name,
            cache_key=_build_cache_key(brief) if takes_cache_key(route.url) else "",
        )


def build_model_call(brief: SummaryRequest, route: SummaryRoute, window: int) -> ModelCall:
    """A whole brief before one model that is believed to take so many tokens."""
    shape = brief.shape
    most = int(window * ANSWER_SHARE) * shape.tokens // shape.max_tokens
    return ModelCall(brief, route, window, max(1, min(brief.tokens, most)), brief.earlier)


def _build_cache_key(brief: SummaryRequest) -> str:
    """Of a strategy and a tenant, so that summary calls and conversations do not share a cache's place."""
    whose = hashlib.sha256(brief.tenant.encode()).hexdigest()[:16]
    return f"compaction-{brief.shape.prompt}-{whose}"
