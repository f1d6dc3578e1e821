"""What is done once the client has its answer: learning from it, and work ahead of need."""

from contextlib import aclosing
from typing import NamedTuple

import httpx
import structlog
from starlette.types import Scope

from compaction_proxy.compaction.compactor import Compactor
from compaction_proxy.compaction.feedback import Observing
from compaction_proxy.compaction.types import Ask, Fit, Status
from compaction_proxy.core.errors import UpstreamError
from compaction_proxy.gateway.incidents import Trouble
from compaction_proxy.gateway.summary_routes import credentials
from compaction_proxy.gateway.upstream import Upstream, build_request, open_answer
from compaction_proxy.providers.model_limits import Learning
from compaction_proxy.providers.types import Discovery
from compaction_proxy.support.fail_open import contained
from compaction_proxy.support.log_events import NOT_OBSERVED
from compaction_proxy.telemetry.conversation_registry import Owners
from compaction_proxy.telemetry.exchange_log import Notes
from compaction_proxy.wires.body import probe_body
from compaction_proxy.wires.wire import Dialect, Usage

# An answer of 16 tokens is small.
MAX_PROBE_BYTES = 262_144

_log = structlog.get_logger()


class Answered(NamedTuple):
    """A request that the client has its answer to.

    Attributes:
        tenant: Whose it was.
        conversation: Of which conversation, if that is known.
        model: The model that was asked; empty if that is not known.
        request: The request's id.
        usage: What the upstream counted, if it said so; None where the answer is an error.
        scope: The request (ASGI).
        ask: The request as it was read; None where it passed unread.
        fit: What was forwarded; None where it passed unread.
        failed: Whether the answer is an error: nothing it says is learned, and nothing is prepared or asked.
        recovered: Whether the upstream had refused it as too long, and took a shorter one.
        side: Whether it was a side call (`side_calls`): it says nothing of what its conversation is now.
    """

    tenant: str
    conversation: str | None
    model: str
    request: str
    usage: Usage | None
    scope: Scope
    ask: Ask | None = None
    fit: Fit | None = None
    failed: bool = False
    recovered: bool = False
    side: bool = False


class Aftermath:
    """Learns from answers and prepares for the next request.

    Args:
        upstream: Where requests go.
        compactor: Works ahead of need.
        observing: Learns from answers.
        notes: Are given each request's figures once it has ended.
        trouble: Tells of requests that did not go as they should.
        owners: Remembers whose a conversation is.
        learning: Knows which windows are unknown.
        discovery: Asks the upstream for them.
    """

    def __init__(
        self,
        upstream: Upstream,
        *,
        compactor: Compactor,
        observing: Observing,
        notes: Notes,
        trouble: Trouble,
        owners: Owners,
        learning: Learning,
        discovery: Discovery,
    ) -> None:
        self._upstream = upstream
        self._compactor = compactor
        self._observing = observing
        self.notes = notes
        self._trouble = trouble
        self._owners = owners
        self._learning = learning
        self._discovery = discovery

    async def __call__(self, answered: Answered) -> None:
        """Take note of one request; nothing that goes wrong here touches anybody."""
        with contained(_not_observed):
            if answered.conversation is not None:
                await self._owners.note(answered.tenant, answered.conversation)
            if answered.ask is not None and answered.fit is not None:
                await self._read(answered, answered.ask, answered.fit)

    async def _read(self, answered: Answered, ask: Ask, fit: Fit) -> None:
        """What only a request that was read allows."""
        told = answered.request, ask.model
        await self._trouble(ask.tenant, fit.report, *told, recovered=answered.recovered)
        if answered.side or answered.failed:
            return
        usage = answered.usage
        if fit.report.status is Status.APPLIED and ask.settings.compaction.recount == "probe":
            usage = await self._probed(answered.scope, ask.body.dialect, fit) or usage
        await self._observing.observe(ask, fit, usage)
        self._discover(answered, ask)
        if fit.ahead:
            await self._compactor.prepare(ask)

    def _discover(self, answered: Answered, ask: Ask) -> None:
        if ask.settings.window is not None:
            return

        async def window() -> int | None:
            headers = credentials(self._upstream, answered.scope["headers"])
            return await self._discovery.window(self._upstream.base_url, headers, ask.model)

        self._learning.discover(ask.tenant, ask.origin, ask.model, window)

    async def _probed(self, scope: Scope, dialect: Dialect, fit: Fit) -> Usage | None:
        """What the upstream counts of the forwarded request when it is asked once more, for 16 tokens.

        Seeds/000 recounts in this way after each compaction. The client has its answer already.
        """
        body = probe_body(fit.raw, dialect)
        if body is None:
            return None
        request = build_request(self._upstream, scope, body)
        try:
            opened = await open_answer(self._upstream, request)
        except UpstreamError:  # the client's own answer still says something
            return None
        async with aclosing(opened) as answer:
            tap = dialect.tap(answer.field(b"content-type"), answer.field(b"content-encoding"))
            tap.feed(await answer.peek(MAX_PROBE_BYTES))
            return tap.result() if answer.response.status == httpx.codes.OK else None


def _not_observed(error: BaseException) -> None:
    _log.warning(NOT_OBSERVED, error=type(error).__name__)
