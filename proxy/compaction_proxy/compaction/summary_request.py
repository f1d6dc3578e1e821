"""What is wanted of a summary model, who may be asked, and what comes back."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from compaction_proxy.compaction.message_reader import Gauge
from compaction_proxy.compaction.summary_client import Account, Spent
from compaction_proxy.core.ledger.frontier import RequestState
from compaction_proxy.core.message import Message
from compaction_proxy.core.strategies import SummaryShape
from compaction_proxy.wires.body import Body
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.wire import Dialect

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
        dialect: The wire of the endpoint.
    """

    url: str
    headers: Mapping[str, str] = field(repr=False)
    model: str
    window: int
    dialect: Dialect = CHAT


@dataclass(frozen=True, slots=True)
class Aligned:
    """The very conversation, for the aligned form.

    Attributes:
        body: The client's request.
        messages: The list as it would be forwarded, stand-ins in place and repaired.
    """

    body: Body = field(repr=False)
    messages: tuple[Message, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Brief:
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
        gauge: How tokens are counted.
        ratio: Calibrated tokens for each counted one.
        tenant: Whose calls they are.
        calls_per_hour: How many the tenant may make; 0: no bound.
        aligned: The conversation itself, where the call is to continue it; asked of the first route, if that
            is the request's own model.
        deadline_s: Seconds after which the calls are cancelled for their slowness; 0: not known.
        spent: What the calls have taken so far; to be read after a failure or a deadline, too.
        said: What users have said in the whole conversation; with the groups it is what a summary may know.
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
    gauge: Gauge
    ratio: float
    tenant: str
    calls_per_hour: int
    aligned: Aligned | None
    deadline_s: float = 0.0
    spent: Spent = field(default_factory=Spent, compare=False)
    said: tuple[Message, ...] = field(default=(), repr=False)
    states: Mapping[tuple[int, str], RequestState] = field(default_factory=dict, repr=False)

    @property
    def characters(self) -> int:
        """Size allowed, of all texts together."""
        return int(self.shape.allowed(self.tokens) * SUMMARY_CHARACTERS)

    @property
    def account(self) -> Account:
        """Who pays for it."""
        return Account(self.tenant, self.calls_per_hour, self.spent, self.deadline_s)


@dataclass(frozen=True, slots=True)
class Written:
    """What was written for a brief.

    Attributes:
        texts: One for each group: cleaned, validated, and verified where the strategy says so.
        model: Who wrote them.
        spent: What all calls together took.
    """

    texts: tuple[str, ...] = field(repr=False)
    model: str
    spent: Spent = field(compare=False)
