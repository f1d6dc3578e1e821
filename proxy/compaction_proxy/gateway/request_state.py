"""One request on its way through the relay: what is known of it at each stage, and its figures at the end."""

import asyncio
import re
import time
from dataclasses import dataclass, field, replace
from itertools import count
from secrets import token_hex

from starlette.types import Scope

from compaction_proxy.compaction.types import Ask, Fit, Report, Status
from compaction_proxy.core.exchange import FAILED_FROM, Exchange, Unread
from compaction_proxy.gateway.after_response import Answered
from compaction_proxy.gateway.body_budget import BodyHold
from compaction_proxy.gateway.body_decoder import OriginalRequest
from compaction_proxy.gateway.client.types import HttpRequest
from compaction_proxy.gateway.compaction_trigger import TriggerRequest
from compaction_proxy.gateway.control_headers import UNREAD, Control, report_headers
from compaction_proxy.gateway.headers import Headers
from compaction_proxy.gateway.identity import Who
from compaction_proxy.gateway.recall_loop import Course, Offer
from compaction_proxy.gateway.side_requests import Side
from compaction_proxy.telemetry.exchange_log import Notes
from compaction_proxy.telemetry.tracing import Trace
from compaction_proxy.wires.wire import Usage

# Ids of requests are told apart by the process and a number: they go into logs, and guess nothing.
_PROCESS = token_hex(5)
_NUMBERS = count(1)
_GIVEN = re.compile(rb"[!-~]{1,128}")
_NOTHING = Report(Status.NONE)
IDEMPOTENCY = b"idempotency-key"


def request_id(given: bytes | None) -> str:
    """The id that the client gave its request (`x-request-id`), if it is fit to be shown; else a new one."""
    if given is not None and _GIVEN.fullmatch(given):
        return given.decode("ascii")
    return f"r_{_PROCESS}{next(_NUMBERS):x}"


@dataclass(slots=True)
class Passage:
    """One request on its way.

    Attributes:
        who: Whose it is.
        raw: The client's body, decoded, until nobody needs it any more.
        scope: The request (ASGI), as if its body had come decoded.
        control: What the client asked of us.
        size: Bytes of the body, decoded.
        request: Its id.
        hold: Counts its body.
        side: Which side call it is: nothing is learned of it, and no conversation notes it; None: it is none.
        original: The request as it came, as long as that may be forwarded; None: its body was not encoded.
        opaque: Whether its body is encoded in a way that cannot be undone, so that nothing is read of it.
        fit: What is forwarded; None where that is the body as it came, unread.
        ask: The request as it was read.
        model: The model asked for, as far as it matters.
        code: The upstream's status code; 0 while there is no answer.
        at: When it came, in seconds since the epoch.
        started: The same in monotonic seconds.
        waited_s: Seconds that the upstream was waited for, before its answers began.
        first_byte_s: Of these, those for the answer that is relayed.
        overhead_s: Seconds from its coming to its answer's being relayed that were not the upstream's.
        trace: Follows it; None: nobody does.
        recovered: Whether the upstream had refused it as too long, and took a shorter one.
        offer: How the model may search what was removed; None: it may not.
        trigger: The same request without the compaction trigger that it ends in; None: it ends in none.
        course: How its answer goes on; None: nothing is to be looked for in it.
        search: Looks for its conversation while the answer is relayed; None: nothing does.
    """

    who: Who
    raw: bytes
    scope: Scope
    control: Control
    size: int
    request: str
    hold: BodyHold
    side: Side | None = None
    original: OriginalRequest | None = None
    opaque: bool = False
    fit: Fit | None = None
    ask: Ask | None = None
    model: str = ""
    code: int = 0
    at: float = field(default_factory=time.time)
    started: float = field(default_factory=time.perf_counter)
    waited_s: float = 0.0
    first_byte_s: float | None = None
    overhead_s: float = 0.0
    trace: Trace | None = None
    recovered: bool = False
    offer: Offer | None = None
    trigger: TriggerRequest | None = None
    course: Course | None = None
    search: asyncio.Task[str | None] | None = None

    @property
    def conversation(self) -> str | None:
        """The conversation, as far as it is known."""
        return (self.fit.report.conversation if self.fit else None) or self.who.conversation

    @property
    def _noted(self) -> str | None:
        """The conversation that it is noted of."""
        return self.conversation if self.side is None else None

    @property
    def teaches(self) -> bool:
        """Whether anything is done with what its answer says."""
        return self.ask is not None or self.conversation is not None or self.search is not None

    @property
    def failed(self) -> bool:
        """Whether the upstream answered with an error."""
        return self.code >= FAILED_FROM

    @property
    def prefixes(self) -> tuple[bytes, ...]:
        """Prefix digests of the client's messages; none where they were not read."""
        return self.fit.footing.prefixes if self.fit and self.fit.footing and self.side is None else ()

    @property
    def counted(self) -> tuple[int, int]:
        """Our own counts of what the client sent and of what was forwarded; zeros where it was not read."""
        return (self.fit.listed, self.fit.estimate) if self.fit else (0, 0)

    def named(self, request: HttpRequest) -> HttpRequest:
        """A request of it; the client's idempotency key names the first only: others have other bodies."""
        if self.first_byte_s is None:
            return request
        return request._replace(headers=[each for each in request.headers if each[0] != IDEMPOTENCY])

    def waited(self, seconds: float) -> None:
        """The upstream has answered, or failed to, after so long."""
        if self.course is None:  # else it has answered long ago, and goes on
            self.waited_s += seconds
            self.first_byte_s = seconds

    def settled(self) -> None:
        """From here on the client waits for nobody but the upstream."""
        self.overhead_s = time.perf_counter() - self.started - self.waited_s

    def headers(self) -> Headers:
        """Our response headers; a request that passed the gate carries its status only."""
        if self.fit is None:
            return UNREAD
        if self.ask is None:
            return report_headers(self.fit.report)
        told = report_headers(self.fit.report, self.overhead_s)
        told.append((b"x-compaction-request-id", self.request.encode()))
        return told

    def whole(self) -> Fit:
        """What is forwarded, as a fit in any case."""
        return self.fit or Fit(self.raw, 0, _NOTHING)

    def release(self) -> None:
        """Let go of what nobody needs while the answer streams: bodies as they came, and those not read."""
        self.original = None  # what may be sent from here on is changed
        if self.ask is None:
            self.raw = b""
            self.hold.release()
            self.fit = self.fit and replace(self.fit, raw=b"")

    def answered(self, usage: Usage | None) -> Answered:
        """What is left to do, now that the client has its answer."""
        model = self.ask.model if self.ask else self.model
        whose = self.who.tenant, self._noted, model, self.request
        fit = self.fit
        if self.offer is not None and fit is not None and fit.estimate:
            fit = replace(fit, estimate=fit.estimate + self.offer.tool_tokens)
        if self.course is not None and self.course.hops:  # the others had more to read than was sized
            usage = self.course.first.result()
        side = self.side is not None
        return Answered(*whose, usage, self.scope, self.ask, fit, self.failed, self.recovered, side)

    def ended(self, usage: Usage | None, origin: str, notes: Notes) -> None:
        """Tell those who listen that it has ended; of what the upstream was never asked nothing is noted.

        Args:
            usage: What the upstream counted, if it said so.
            origin: Of the upstream.
            notes: Where it is noted.
        """
        first_s = self.first_byte_s
        if self.fit is None and first_s is not None:
            whose = self.who.tenant, self._noted, origin
            notes.note_unread(*whose, self.model, self.code, self._unread(usage, first_s))
        if self.fit is None and self.trace is None:
            return
        exchange = self.exchange(usage)
        if self.fit is not None and first_s is not None:
            notes.note(self.who.tenant, self._noted, origin, exchange, self.prefixes, self.counted)
        if self.trace is not None:
            self.trace.ended(exchange, self.conversation)

    def _upstream_s(self, first_s: float) -> float:
        """Seconds from asking the upstream to the end of its answer, which is now."""
        return time.perf_counter() - self.started - self.overhead_s - self.waited_s + first_s

    def _unread(self, usage: Usage | None, first_s: float) -> Unread:
        prompt = completion = cached = None
        if usage is not None:
            prompt, completion, cached = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
        times = self.overhead_s, first_s, self._upstream_s(first_s)
        return Unread(self.at, self.request, self.size, prompt, completion, cached, *times)

    def exchange(self, usage: Usage | None) -> Exchange:
        """The request and its answer as figures."""
        first_s = self.first_byte_s
        upstream_s = None if first_s is None else self._upstream_s(first_s)
        report = self.fit.report if self.fit else _NOTHING
        return Exchange(
            self.at,
            self.ask.model if self.ask else self.model,
            report.status.value,
            self.code,
            self.request,
            report.strategy or "",
            report.round,
            report.reason or "",
            self.size,
            report.messages_before,
            report.messages_after,
            report.tokens_before,
            report.tokens_after,
            report.window,
            report.trigger,
            usage.prompt_tokens if usage else None,
            usage.completion_tokens if usage else None,
            usage.cached_tokens if usage else None,
            self.overhead_s,
            first_s,
            upstream_s,
            *self._recalls(usage),
        )

    def _recalls(self, usage: Usage | None) -> tuple[int | None, int | None, int | None]:
        """How often the answer went on, and what of `usage` that took; None: it did not, or nobody said."""
        if self.course is None or not self.course.hops:
            return None, None, None
        first = self.course.first.result()
        if usage is None or first is None:
            return self.course.hops, None, None
        more = usage.prompt_tokens - first.prompt_tokens, usage.cached_tokens - first.cached_tokens
        return self.course.hops, max(0, more[0]), max(0, more[1])
