"""`POST /v1/compact`: a list of messages in, a shorter one out. Nothing is kept of it.

The list goes through the same use case as a relayed request that asks for `force`, aside from everything
that is stored. Where no model writes the summary, a text without a model stands in, whatever the strategy.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from starlette.types import Receive, Scope, Send

from compaction_proxy.compaction.request_limits import policy_for
from compaction_proxy.compaction.stateless import Aside, Shortened, shortened
from compaction_proxy.compaction.types import Ask, Mode, Status
from compaction_proxy.config.config import Config, ModelSettings, for_model
from compaction_proxy.core.errors import RequestRefused, Unreadable
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.gateway.body_budget import BodyHold
from compaction_proxy.gateway.body_decoder import UNDECODABLE
from compaction_proxy.gateway.client_stream import read_body, while_connected
from compaction_proxy.gateway.concurrency_limit import Admission
from compaction_proxy.gateway.headers import first_values, length_of
from compaction_proxy.gateway.summary_routes import summary_routes
from compaction_proxy.gateway.upstream import Upstream
from compaction_proxy.gateway.whose import Whose
from compaction_proxy.support.offload import beside
from compaction_proxy.wires.body import Body, read
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.json.slices import members
from compaction_proxy.wires.project_instructions import find_client

# Where a provider is asked for summaries: the client has named no path of its own.
_ASKED = {"raw_path": b"/v1/chat/completions", "query_string": b""}
# A round is aimed at the size that is wanted; T is so many times that, as `anchored` shrinks to 40 % of T.
TRIGGERS_PER_TARGET = 2.5
# What is asked for as a size has at most so many tokens.
MAX_TOKENS = 999_999_999
# No value of ours is written in more bytes.
MAX_VALUE_BYTES = 64
_OWN = ("strategy", "trigger_tokens", "target_tokens")


class Wanted(NamedTuple):
    """What a call asks for.

    Attributes:
        body: The request.
        strategy: Name of the strategy; None: the configured one.
        trigger_tokens: A lower trigger; it says how much is kept.
        target_tokens: What the list must come under.
    """

    body: Body
    strategy: str | None
    trigger_tokens: int | None
    target_tokens: int | None


class Compact:
    """An ASGI endpoint that compacts a list of messages, and keeps nothing.

    Args:
        config: The configuration.
        upstream: Where summaries are asked for.
        origin: Of the upstream, as identities name it.
        aside: Compacts.
        secret: Gives the key of the digests that tell tenants apart.
        admission: Places for requests under way, those of chats included.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        config: Config,
        upstream: Upstream,
        origin: str,
        *,
        aside: Aside,
        secret: Callable[[], bytes],
        admission: Admission,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._upstream = upstream
        self._origin = origin
        self._aside = aside
        self._admission = admission
        self._clock = clock
        self._whose = Whose(config, origin, secret)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            RequestRefused: The body is too large, or cannot be compacted.
            Overloaded: There are too many requests.
            ClientDisconnect: The client left; a summary that was asked for is hung up on.
        """
        if scope["method"] != "POST":
            raise RequestRefused(405, "Only POST is answered here.", "method_not_allowed")
        if not self._admission.entered():
            await self._admission.wait()
        hold = self._admission.bodies.open()
        try:
            raw = await self._read(scope, receive, hold)
            async with while_connected(scope, receive):
                raw = await self._decode(raw, scope, hold)
                answer = await self._compacted(raw, scope)
            await _answered(send, answer)
        finally:
            hold.release()
            self._admission.leave()

    async def _read(self, scope: Scope, receive: Receive, hold: BodyHold) -> bytes:
        declared = length_of(first_values(scope["headers"]).get(b"content-length"))
        return await read_body(scope, receive, self._config.server.max_body_bytes, hold, declared)

    async def _decode(self, raw: bytes, scope: Scope, hold: BodyHold) -> bytes:
        limit = self._config.server.max_body_bytes
        decoded = await self._admission.decoder.decode(raw, scope["headers"], hold, limit)
        if decoded is None:
            raise RequestRefused(415, UNDECODABLE, "encoded")
        return decoded

    async def _compacted(self, raw: bytes, scope: Scope) -> bytes:
        """The answer's body."""
        started = self._clock()
        wants = await beside(partial(wanted, raw))
        ask = self._ask(wants, scope)
        try:
            made = await shortened(self._aside, ask, wants.target_tokens)
        except Unreadable as unreadable:
            raise _unusable(unreadable.reason) from unreadable
        report = _report(made, wants, self._clock() - started)
        return await beside(partial(_body, made.fit.raw, report))

    def _ask(self, wants: Wanted, scope: Scope) -> Ask:
        headers = scope["headers"]
        who = self._whose.of(headers, first_values(headers))
        model = wants.body.model
        settings = patient(for_model(self._config, model), wants.target_tokens)
        policy = policy_for(settings, wants.strategy)
        asked: Scope = {**scope, **_ASKED}
        return Ask(
            body=wants.body,
            model=model,
            tenant=who.tenant,
            conversation=None,
            origin=self._origin,
            settings=settings,
            mode=Mode.FORCE,
            trigger_tokens=_trigger(wants),
            whom=partial(summary_routes, self._config, settings, policy, self._upstream, asked, model),
            patience_s=None,
            strategy=wants.strategy,
            client=find_client(first_values(headers)),
        )


def wanted(raw: bytes) -> Wanted:
    """What a body asks for.

    Raises:
        RequestRefused: 400, it is no list of messages, names no model, or asks for what there is not.
    """
    try:
        body = read(raw, CHAT)
    except Unreadable as unreadable:
        raise _unusable(unreadable.reason) from unreadable
    if not body.model:
        raise RequestRefused(400, "`model` must be the name of a model.", "model_required")
    found = members(raw)
    told = {name: _told(raw[found[name].start : found[name].stop]) for name in _OWN if name in found}
    strategy = told.get("strategy")
    if strategy is not None and not (isinstance(strategy, str) and strategy in STRATEGIES):
        names = ", ".join(sorted(STRATEGIES))
        raise RequestRefused(400, f"`strategy` must be one of {names}.", "unknown_strategy")
    return Wanted(body, strategy, _tokens(told, "trigger_tokens"), _tokens(told, "target_tokens"))


def _unusable(reason: str) -> RequestRefused:
    code = reason.replace("-", "_")
    return RequestRefused(400, f"The body holds no messages that could be compacted: {reason}.", code)


def _told(raw: bytes) -> Any:  # noqa: ANN401 - a JSON value
    """The value of a member of ours; what is longer than any that makes sense stays as it is."""
    return json.loads(raw) if len(raw) <= MAX_VALUE_BYTES else raw


def _tokens(told: Mapping[str, Any], name: str) -> int | None:
    value = told.get(name)
    if value is None:
        return None
    if type(value) is not int or not 0 < value <= MAX_TOKENS:
        raise RequestRefused(400, f"`{name}` must be a whole number of tokens above 0.", "invalid_tokens")
    return value


@lru_cache(maxsize=256)
def patient(settings: ModelSettings, target: int | None) -> ModelSettings:
    """The settings of a call that waits for its summary, however long a request would; and its target."""
    changed: dict[str, Any] = {"max_block_s": settings.summary.timeout_s}
    if target is not None:
        changed["target_tokens"] = target
    return replace(settings, compaction=settings.compaction.model_copy(update=changed))


def _trigger(wants: Wanted) -> int | None:
    """T, where the call says something of it: the lower of what it names and what its target implies."""
    implied = int(wants.target_tokens * TRIGGERS_PER_TARGET) if wants.target_tokens else None
    return min(filter(None, (wants.trigger_tokens, implied)), default=None)


def _report(made: Shortened, wants: Wanted, seconds: float) -> dict[str, Any]:
    first, last = made.first.report, made.fit.report
    after, target = last.tokens_after or 0, wants.target_tokens
    status = Status.APPLIED if made.fit.raw is not wants.body.raw else first.status
    if last.status is Status.OVER_LIMIT or (target is not None and after > target):
        status = Status.OVER_LIMIT
    return {
        "status": status,
        "strategy": first.strategy or last.strategy or wants.strategy,
        "tokens_before": first.tokens_before,
        "tokens_after": last.tokens_after,
        "messages_before": first.messages_before,
        "messages_after": last.messages_after,
        "reason": first.reason,
        "summary_model": made.model,
        "seconds": round(seconds, 3),
    }


def _body(raw: bytes, report: Mapping[str, Any]) -> bytes:
    """The answer: the messages as they are written in a request, byte for byte."""
    place = members(raw)["messages"]
    parts = b'{"object":"compaction","messages":', raw[place.start : place.stop], b',"report":'
    return b"".join((*parts, json.dumps(report).encode(), b"}"))


async def _answered(send: Send, body: bytes) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"cache-control", b"no-store"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
