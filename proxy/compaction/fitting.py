"""What goes into a fit and what comes out of it."""

from dataclasses import dataclass
from enum import StrEnum

from proxy.compaction.summarising import SummaryRoute
from proxy.config.model import ModelSettings
from proxy.dialects.chat import Body


class Mode(StrEnum):
    """How a request is to be treated."""

    ACTIVE = "active"
    FORCE = "force"
    SHADOW = "shadow"
    BYPASS = "bypass"


class Status(StrEnum):
    """What was done to a request, as the header `x-compaction-status` says it."""

    NONE = "none"
    REUSED = "reused"
    APPLIED = "applied"
    SHADOW = "shadow"
    BYPASSED = "bypassed"
    FAILED_OPEN = "failed-open"
    OVER_LIMIT = "over-limit"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, as the compactor is asked to make it fit.

    Attributes:
        body: The request.
        model: The model that will answer.
        tenant: Whose it is.
        conversation: Its id, if the headers gave one.
        origin: Of the upstream.
        settings: What the configuration says of the model.
        mode: How to treat it.
        trigger_tokens: A lower trigger that the client asked for.
        routes: Whom to ask for a summary; empty: nobody.
        patience_s: Seconds after which the client gives up, if it said so.
        remembered: Whether stored rounds may be used and made; without an id the configuration may say no.
    """

    body: Body
    model: str
    tenant: str
    conversation: str | None
    origin: str
    settings: ModelSettings
    mode: Mode
    trigger_tokens: int | None
    routes: tuple[SummaryRoute, ...]
    patience_s: float | None
    remembered: bool = True


@dataclass(frozen=True, slots=True)
class Report:
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
    """

    status: Status
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


@dataclass(frozen=True, slots=True)
class Fit:
    """A request that fits, as far as it could be made to.

    Attributes:
        raw: The body to forward; the very object that came where nothing was changed.
        estimate: Its counted tokens, before calibration; 0 where it was not counted.
        report: What was done.
    """

    raw: bytes
    estimate: int
    report: Report
