"""Handles the requests for the admin pages, such as the overview and the page of a conversation.

A button on a conversation's page sends a form. The proxy then runs a command and redirects the browser to a
page. The playground is a page that shows what each strategy would forward for a conversation, and what that
would cost. It calls no model.

The templates write the data of a chart into an HTML attribute, as JSON. The script `static/pages.js` draws
the chart from this data. Next to each chart is a table with the same figures, for readers who cannot see the
chart or whose browser runs no scripts.
"""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from types import MappingProxyType
from typing import NamedTuple, TypeVar
from urllib.parse import unquote_to_bytes, urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from compaction_proxy.admin.api.conversations import MAX_QUERY_CHARACTERS
from compaction_proxy.admin.api.overview import Value, build_configuration
from compaction_proxy.admin.api.routing import AdminApi, parse_time
from compaction_proxy.admin.api.schemas import to_counters, to_instructions, to_pins, to_stats_row
from compaction_proxy.admin.auth import BASIC, BEARER, check_access
from compaction_proxy.admin.browser_sessions import (
    LINK_TTL_S,
    SESSION_TTL_S,
    build_cookie_name,
    create_token,
    is_valid_token,
    redeem_code,
)
from compaction_proxy.admin.queries import (
    CompactionRecord,
    ConversationFilter,
    ListedConversation,
    Sort,
    estimate_hard_mark,
)
from compaction_proxy.admin.ui.charts import (
    DASHES,
    DAY_S,
    MAX_PERIODS,
    STEPS_S,
    build_period_charts,
    build_requests_chart,
    build_strategies_chart,
    sum_columns,
)
from compaction_proxy.admin.ui.diff import (
    MAX_SHOWN_CHARACTERS,
    build_round_view,
    find_missing_words,
    highlight_query,
    show_message,
)
from compaction_proxy.admin.ui.templates import HEADERS, Templates, describe_error
from compaction_proxy.compaction.directives import Directives
from compaction_proxy.compaction.types import CompactionStatus
from compaction_proxy.core.errors import (
    ProxyError,
    RequestRefusedError,
    StoreUnavailableError,
    UnreadableBodyError,
)
from compaction_proxy.core.event import FAILED_OPEN, FAILURE_KINDS, SMALL, Event, from_fields
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.providers.pricing import uses_list_prices
from compaction_proxy.recall.archive import RecalledMessage, RemovedMessage
from compaction_proxy.recall.round_detail import KEPT, VisibleMessage
from compaction_proxy.replay.jobs import ReplayJob, parse_job
from compaction_proxy.replay.provider import JsonObject
from compaction_proxy.support.formatting import (
    describe_event_kind,
    describe_reason,
    describe_status,
    encode_path_segment,
)
from compaction_proxy.telemetry.live_feed import FeedItem
from compaction_proxy.telemetry.statistics import HOUR_S
from compaction_proxy.wires.json.slices import find_members

# Maps each period that a reader can choose to its name on the page. A custom period has two more parameters,
# `from` and `to`.
PERIODS = {
    "1h": "1 hour", "6h": "6 hours", "24h": "24 hours", "7d": "7 days", "30d": "30 days", "custom": "Custom",
}  # fmt: skip
DEFAULT_PERIOD = "24h"
SORTS: Mapping[Sort, str] = {
    "last": "Last request", "tokens": "Tokens", "net": "Net saved", "requests": "Requests",
}  # fmt: skip
# Maps each age of the last request that a reader can choose to its name on the page.
AGES = {"": "Any time", "1h": "Last hour", "24h": "Last 24 hours", "7d": "Last 7 days", "30d": "Last 30 days"}
# Maps each status of a request to what the proxy did with the request.
STATUS_TEXTS: Mapping[str, str] = {
    CompactionStatus.NONE: "sent unchanged",
    CompactionStatus.REUSED: "earlier compaction used",
    CompactionStatus.APPLIED: "compacted",
    CompactionStatus.SCHEDULED: "sent unchanged, near the trigger",
    CompactionStatus.SHADOW: "report only",
    CompactionStatus.BYPASSED: "bypassed",
    CompactionStatus.FAILED_OPEN: "compaction failed, request sent",
    CompactionStatus.OVER_LIMIT: "sent although too long",
}
# Maps figures of a request to the titles of their columns on the page of a conversation.
EXCHANGE_COLUMNS = {
    "tokens_before": "Sent", "tokens_after": "Forwarded", "prompt_tokens": "Counted",
    "cached_tokens": "Cached", "completion_tokens": "Answer", "recalls": "Searches",
}  # fmt: skip

STATUSES = {"": "Any status", **{str(each): f"{text} ({each})" for each, text in STATUS_TEXTS.items()}}
STRATEGY_NAMES = {"": "Any strategy", **{name: name for name in STRATEGIES}}
# Maps each strategy to what it leaves of a conversation.
STRATEGY_HINTS = {
    "anchored": "a record for each compaction, and one with the user's own words; the newest messages",
    "full": "one summary with the last request",
    "selective": "all user messages; a digest for each run of messages between them",
    "split": "a summary, and the newest half",
    "prune": "the task and the newest messages; no summary",
    "iterations": "a summary, and the last steps of an agent",
    "chained": "one summary that grows with each compaction, the newest messages",
}
# Fields of the form on the page of conversations that select conversations by what a reader types.
_TYPED_FILTERS = ("q", "model", "key", "label")
# Maps each scope of a search to its name on the page.
SCOPES = {"conversation": "this conversation", "tenant": "all conversations of this client key"}
# Maps each action to the confirmation that a page then shows. The query parameter `done` names the action.
# The state of a conversation, which its page always shows, confirms the other actions.
ACTION_MESSAGES = {
    "resume": "This conversation is compacted again.",
    "pin": "The text is pinned. Every compaction keeps it word for word.",
    "unpin": "The text is no longer pinned.",
    "remove": "The proxy leaves out these instructions from the next request that it rewrites.",
    "restore": "The proxy keeps these instructions again.",
    "deleted": "All stored data of the conversation is deleted.",
}
ROWS_PER_PAGE = 25
MESSAGES_PER_PAGE = 100
MAX_EXCHANGES = 500
MAX_EVENTS = 200
RECENT_EVENTS = 10
# Maximum number of events that the failures page lists of one group.
EVENTS_PER_GROUP = 20
# Maximum number of rows (an upstream and a cause of its failures) on the overview. The failures page has all.
OVERVIEW_CAUSES = 5
MAX_HITS = 20
MAX_FORM_BYTES = 65_536
_MAX_FIELDS = 100
# Maximum bytes of a transcript in the playground's form. A larger one gets status 413. The whole form may
# have three times as many bytes, because URL encoding takes three bytes for each special character of JSON.
MAX_PASTED_BYTES = 8 * 1024 * 1024
_MAX_FORM_BYTES = 3 * MAX_PASTED_BYTES
TOO_LARGE = (
    f"The transcript is larger than {MAX_PASTED_BYTES:,} bytes; the command `replay` takes longer ones."
)
_TOO_LARGE = 413
_OFFERED_CONVERSATIONS = 50
_TRANSCRIPT_FIELDS = ("messages", "tools", "model")
# `_decode_component` decodes a value of a form in pieces of at most this many bytes. A single call for
# megabytes would hold Python's global lock for seconds, and the event loop would have to wait.
_PIECE_BYTES = 65_536


async def read_form(request: Request, limit_bytes: int = MAX_FORM_BYTES) -> dict[str, list[str]]:
    """Reads a form (`application/x-www-form-urlencoded`). Returns the values of each field, by its name.

    Raises:
        RequestRefusedError: If the form is larger than `limit_bytes` (413), has another content type (415),
            or cannot be read (400).
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/x-www-form-urlencoded", ""):
        raise RequestRefusedError(415, "This takes forms only.", "invalid_request")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit_bytes:
            raise RequestRefusedError(413, f"That is more than {limit_bytes:,} bytes.", "request_too_large")
    try:
        return await asyncio.to_thread(_parse_fields, bytes(body))
    except ValueError as error:
        raise RequestRefusedError(400, "The form cannot be read.", "invalid_request") from error


def _parse_fields(body: bytes) -> dict[str, list[str]]:
    if body.count(b"&") >= _MAX_FIELDS:
        raise ValueError("too many fields")
    fields: dict[str, list[str]] = {}
    for pair in filter(None, body.split(b"&")):
        name, _, value = pair.partition(b"=")
        fields.setdefault(_decode_component(name), []).append(_decode_component(value))
    return fields


def _decode_component(raw: bytes) -> str:
    return b"".join(map(unquote_to_bytes, _split_pieces(raw.replace(b"+", b" ")))).decode("utf-8", "replace")


def _split_pieces(raw: bytes) -> Iterator[bytes]:
    """Splits URL-encoded text into pieces of at most `_PIECE_BYTES` bytes.

    An escape such as `%20` is never divided between two pieces.
    """
    start = 0
    while start < len(raw):
        stop = start + _PIECE_BYTES
        escaped = raw.rfind(b"%", stop - 2, stop)
        stop = stop if escaped < 0 else escaped
        yield raw[start:stop]
        start = stop


def get_field(fields: dict[str, list[str]], name: str) -> str:
    """Returns the first value of a form field, or an empty text if the field is missing."""
    return fields.get(name, [""])[0]


_Name = TypeVar("_Name", bound=str)
_T = TypeVar("_T")


def _choose_value(
    request: Request, name: str, allowed: Mapping[_Name, str], default: _Name | None = None
) -> _Name:
    """Returns the value of the query parameter `name` if it is a key of `allowed`.

    Otherwise returns `default`, or the first key.
    """
    value = request.query_params.get(name, "")
    return next((each for each in allowed if each == value), default or next(iter(allowed)))


def _read_query(request: Request, name: str = "q") -> str:
    """Returns a query parameter, or an empty text if it is missing.

    Raises:
        RequestRefusedError: If the parameter has more than `MAX_QUERY_CHARACTERS` characters (422).
    """
    query = request.query_params.get(name, "")
    if len(query) > MAX_QUERY_CHARACTERS:
        message = f"query.{name}: String should have at most {MAX_QUERY_CHARACTERS} characters"
        raise RequestRefusedError(422, message, "invalid_request")
    return query


@dataclass(frozen=True, slots=True)
class Period:
    """A period that a reader has chosen.

    Attributes:
        name: Key of `PERIODS`.
        start: Start, in seconds since the epoch.
        end: End, in seconds since the epoch.
        parameters: The query parameters that choose this period.
    """

    name: str
    start: float
    end: float
    parameters: Mapping[str, str]

    @property
    def text(self) -> str:
        """The period in a sentence, such as `in the last 24 hours`."""
        return "in the chosen period" if self.name == "custom" else f"in the last {PERIODS[self.name]}"

    @property
    def step_s(self) -> int:
        """Number of seconds that a column of a chart covers."""
        fitting = (each for each in STEPS_S if self.end - self.start <= MAX_PERIODS * each)
        return next(fitting, STEPS_S[-1])


def read_period(request: Request, now: float) -> Period:
    """Returns the period that the query parameters choose. An unreadable time counts as missing."""
    name = _choose_value(request, "since", PERIODS, DEFAULT_PERIOD)
    if name != "custom":
        return Period(name, parse_time(name, now), now, {"since": name})
    texts = {each: request.query_params.get(each, "") for each in ("from", "to")}
    start, end = (_parse_minute(text) for text in texts.values())
    end = min(now, end or now)
    start = start if start is not None and start < end else end - DAY_S
    return Period(name, start, end, {"since": name, "from": _format_minute(start), "to": _format_minute(end)})


def _parse_minute(text: str) -> float | None:
    """Returns the time of a text such as `2026-11-22T13:05`, which is UTC; None if it is unreadable."""
    try:
        return max(0.0, datetime.fromisoformat(text[:16]).replace(tzinfo=UTC).timestamp())
    except ValueError:
        return None


def _format_minute(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M")


async def get_or_none(answer: Awaitable[_T]) -> _T | None:
    """Awaits `answer` and returns its result, or None if the store cannot be reached."""
    try:
        return await answer
    except StoreUnavailableError:
        return None


def _parse_events(items: Iterable[FeedItem]) -> list[Event]:
    """Returns the events in feed items. Skips items that cannot be read as events."""
    return [event for item in items if (event := from_fields(item.fields)) is not None]


def _group_values(values: Iterable[Value]) -> dict[str, list[Value]]:
    """Groups configuration values by section.

    The section is the part of a key before its first dot. For the keys of a strategy, it is the part before
    the third dot, such as `compaction.strategies.anchored`.
    """
    sections: dict[str, list[Value]] = {}
    for each in values:
        words = each.key.split(".")
        section = words[:3] if words[1:2] == ["strategies"] else words[:1]
        sections.setdefault(".".join(section), []).append(each)
    return sections


@dataclass(frozen=True, slots=True)
class PlaygroundForm:
    """The values of the form on the playground, with which a user starts a replay.

    Attributes:
        transcript: A list of messages or a whole request, as JSON; empty for a stored conversation.
        conversation: Id of a stored conversation. It is used only if `transcript` is empty.
        model: Name of the model; empty for the model in the transcript or the stored conversation.
        strategies: Names of the strategies to compare.
        trigger: T, in tokens; 0 for the T that each strategy computes itself.
        window: Context window of the model, in tokens; 0 for the one that the proxy knows.
    """

    transcript: str = ""
    conversation: str = ""
    model: str = ""
    strategies: tuple[str, ...] = ("anchored",)
    trigger: int = 0
    window: int = 0


@dataclass(frozen=True, slots=True)
class PageRoutes:
    """Handles the requests for the admin pages.

    Attributes:
        api: Commands, queries and settings of the admin API, which the pages use too.
        templates: Renders the pages.
    """

    api: AdminApi
    templates: Templates

    async def open_session(self, request: Request) -> Response:
        """Opens a session for a browser that follows a link, and redirects the browser to the overview.

        The link can be used once. A browser that has access already does not use it up.

        Raises:
            StoreUnavailableError: If the store cannot tell whether the link was used before.
            HTTPException: If the method is HEAD, with which programs look at a link that nobody has followed.
        """
        if request.method != "GET":
            raise HTTPException(405, headers={"allow": "GET"})
        policy, root = self.api.access_policy, self.templates.root
        answer = RedirectResponse(
            root, 303, {**HEADERS, "cache-control": "no-store", "referrer-policy": "no-referrer"}
        )
        if check_access(policy, request.scope, BASIC) is None:
            return answer
        code = request.query_params.get("code", "")
        if not is_valid_token(policy.key, "link", code) or not await redeem_code(
            self.api.queries.records, code
        ):
            message = f"This link was used before, or was not made in the last {LINK_TTL_S} seconds."
            refused = RequestRefusedError(401, message, "invalid_link")
            page = await self.templates.render_refusal(request.scope, refused)
            page.headers["www-authenticate"] = BEARER
            return page
        answer.set_cookie(
            build_cookie_name(request.url.scheme, request.headers["host"]),
            create_token(policy.key, "session", SESSION_TTL_S),
            path=root,
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return answer

    async def show_overview(self, request: Request) -> Response:
        """Shows the overview: what degrades the proxy, savings, traffic, upstream failures, latest events.

        If the store cannot be reached, shows no figures.
        """
        queries = self.api.queries
        period = read_period(request, queries.now())
        model, key = _read_query(request, "model"), _read_query(request, "key")
        step, start, end = period.step_s, period.start, period.end
        over_time, by_model, by_key, used, recent, (upstreams, _) = await asyncio.gather(
            get_or_none(
                queries.get_statistics(start, end, "day" if step >= DAY_S else "hour", model=model, key=key)
            ),
            get_or_none(queries.get_statistics(start, end, "model", key=key)),
            get_or_none(queries.get_statistics(start, end, "key", model=model)),
            get_or_none(queries.list_recent_conversations()),
            get_or_none(queries.list_recent_items(RECENT_EVENTS)),
            queries.list_upstream_failures(start, end),
        )
        columns = sum_columns(over_time.rows if over_time else (), step, start, end)
        models = [to_stats_row(each) for each in by_model.rows if each.counters.requests] if by_model else []
        keys = [each.label for each in by_key.rows] if by_key else []
        events = _parse_events(recent or ())
        return await self.templates.render_page(
            "overview.html",
            at="overview",
            period=period,
            periods=PERIODS,
            model=model,
            key=key,
            model_names=_list_choices("All models", (model, *(str(each["of"]) for each in models))),
            key_names=_list_choices("All keys", (key, *keys), _list_key_labels(used or ())),
            query=urlencode({name: value for name, value in (("model", model), ("key", key)) if value}),
            step=step,
            problems=self.api.list_problems(),
            total=to_counters(over_time.total) if over_time else None,
            list_prices=uses_list_prices(self.api.settings.config),
            rows=[(at, to_counters(each)) for at, each in columns if each.requests],
            models=sorted(
                (each for each in models if model in {"", each["of"]}),
                key=lambda row: -int(row["tokens_before"]),
            ),
            events=[each for each in events if model in {"", each.asked}],
            names=_list_names(used or ()),
            upstreams=upstreams,
            most_causes=OVERVIEW_CAUSES,
            charts=build_period_charts(columns, step),
            base_url=_build_base_url(request),
        )

    async def show_conversations(self, request: Request) -> Response:
        """Shows at most `ROWS_PER_PAGE` conversations, selected and sorted as the parameters say."""
        queries, sort = self.api.queries, _choose_value(request, "sort", SORTS)
        chosen = {name: _read_query(request, name).strip() for name in _TYPED_FILTERS}
        chosen |= {
            "strategy": _choose_value(request, "strategy", STRATEGY_NAMES),
            "status": _choose_value(request, "status", STATUSES),
            "since": _choose_value(request, "since", AGES),
        }
        wanted = ConversationFilter(
            text=chosen["q"],
            model=chosen["model"],
            key=chosen["key"],
            label=chosen["label"],
            strategy=chosen["strategy"],
            status=chosen["status"],
            since=parse_time(chosen["since"], queries.now()) if chosen["since"] else -math.inf,
        )
        offset = _parse_number(request.query_params.get("offset", ""))
        page = await queries.list_conversations(ROWS_PER_PAGE, wanted, offset=offset, sort=sort)
        return await self.templates.render_page(
            "conversations.html",
            at="conversations",
            rows=page.rows,
            chosen=chosen,
            selection=urlencode({name: value for name, value in chosen.items() if value}),
            is_filtered=any(value for name, value in chosen.items() if name != "q"),
            strategies=STRATEGY_NAMES,
            statuses=STATUSES,
            ages=AGES,
            sort=sort,
            sorts=SORTS,
            offset=offset,
            previous=max(0, offset - ROWS_PER_PAGE),
            next=page.next,
            done=ACTION_MESSAGES.get(request.query_params.get("done", ""), ""),
            base_url=_build_base_url(request),
            status_texts=STATUS_TEXTS,
            session=self.api.settings.config.session,
        )

    async def show_conversation(self, request: Request) -> Response:
        """Shows one conversation: its requests, compactions and pins, and buttons that run commands on it."""
        queries, name = self.api.queries, request.path_params["name"]
        overview, stored, rounds = await asyncio.gather(
            self.api.commands.get_overview(name),
            queries.list_exchanges(name, MAX_EXCHANGES),
            queries.list_compactions(name),
        )
        exchanges = [each.exchange for each in stored]
        done = request.query_params.get("done", "")
        sized = (each for each in reversed(exchanges) if each.tokens_after or each.prompt_tokens)
        chart = build_requests_chart(exchanges, rounds)
        return await self.templates.render_page(
            "conversation.html",
            at="conversations",
            name=name,
            totals=overview.totals,
            directives=overview.directives,
            pins=to_pins(overview.directives.pins),
            instructions=to_instructions(overview.directives),
            exchanges=exchanges,
            latest=next(sized, None),
            limits=await queries.get_gate_limits(name, overview.totals.model),
            list_prices=uses_list_prices(self.api.settings.config),
            rounds=rounds,
            current=next((each.event for each in reversed(rounds) if each.state == "in-use"), None),
            taken_back=_find_last_undone(overview.directives, rounds),
            hard_tokens=estimate_hard_mark(self.api.settings.config, overview.totals),
            requests_chart=chart,
            signs={each["sign"] for each in json.loads(chart)["series"]} | ({"round"} if rounds else set()),
            # Columns in which no request has a value are left out.
            columns=[
                (title, name)
                for name, title in EXCHANGE_COLUMNS.items()
                if any(getattr(each, name) for each in exchanges)
            ],
            done="" if done == "resume" and overview.directives.bypass else ACTION_MESSAGES.get(done, ""),
            explain_status=explain_status,
        )

    async def show_transcript(self, request: Request) -> Response:
        """Shows the messages of a conversation, as far as they are stored, and which rounds removed them.

        The query parameter `message`, the number of a message, selects the part of the list that contains it.
        Only messages of the last compaction and before are stored.
        """
        name = request.path_params["name"]
        removed, rounds = await asyncio.gather(
            self.api.commands.list_archived_messages(name), self.api.queries.list_compactions(name)
        )
        current = next((each.event for each in reversed(rounds) if each.state == "in-use"), None)
        detail = (await self.api.queries.get_compaction(name, current.place))[1] if current else None
        lines = build_transcript(removed, detail.visible_messages if detail else ())
        offset = _parse_number(request.query_params.get("offset", ""))
        if number := _parse_number(request.query_params.get("message", "")):
            offset = sum(index < number - 1 for index, *_ in lines) // MESSAGES_PER_PAGE * MESSAGES_PER_PAGE
        page = lines[offset : offset + MESSAGES_PER_PAGE]
        return await self.templates.render_page(
            "transcript.html",
            at="conversations",
            name=name,
            title=await self._find_title(name),
            lines=[
                (index, place, await asyncio.to_thread(show_message, message))
                for index, place, message in page
            ],
            rounds={each.event.place: each.event for each in rounds},
            current=current,
            offset=offset,
            per_page=MESSAGES_PER_PAGE,
            count=len(lines),
        )

    async def show_compaction(self, request: Request) -> Response:
        """Shows a compaction: the removed messages, the summary, and what the model saw afterwards."""
        name, place = request.path_params["name"], request.path_params["place"]
        made, detail = await self.api.queries.get_compaction(name, place)
        view = await asyncio.to_thread(
            build_round_view, made.event.summary, detail.removed, detail.visible_messages
        )
        return await self.templates.render_page(
            "compaction.html",
            at="conversations",
            name=name,
            title=await self._find_title(name),
            made=made,
            event=made.event,
            view=view,
        )

    async def show_prompts(self, request: Request) -> Response:
        """Shows the prompts that the summary model received for a compaction."""
        name, place = request.path_params["name"], request.path_params["place"]
        _, detail = await self.api.queries.get_compaction(name, place)
        return await self.templates.render_page(
            "prompts.html", at="conversations", name=name, place=place, prompts=detail.prompts
        )

    async def show_search(self, request: Request) -> Response:
        """Shows at most `MAX_HITS` removed messages that match the query, the best match first."""
        name, query = request.path_params["name"], _read_query(request)
        scope = _choose_value(request, "scope", SCOPES)
        search, everywhere = self.api.commands.search_archive, scope == "tenant"
        hits = await search(name, query, MAX_HITS, everywhere=everywhere) if query else ()
        return await self.templates.render_page(
            "search.html",
            at="conversations",
            name=name,
            query=query,
            title=await self._find_title(name),
            hits=[(each, highlight_query(each.snippet, query)) for each in hits],
            missing=find_missing_words(query, [each.snippet for each in hits]),
            has_compactions=hits or everywhere or await self.api.queries.list_compactions(name),
            is_cut=len(hits) == MAX_HITS,
            link=urlencode({"q": query, "scope": scope}),
            scope=scope,
            scopes=SCOPES,
        )

    async def show_message(self, request: Request) -> Response:
        """Shows a removed message.

        Cuts off the end of a long text unless the URL has the query parameter `whole`.
        """
        name = request.path_params["name"]
        found = await self.api.commands.get_archived_message(name, request.path_params["message"])
        whole, query = request.query_params.get("whole") is not None, _read_query(request)
        limit = None if whole else 10 * MAX_SHOWN_CHARACTERS
        return await self.templates.render_page(
            "message.html",
            at="conversations",
            name=name,
            title=await self._find_title(name),
            message=found.message,
            round=found.round,
            pieces=await asyncio.to_thread(highlight_query, found.message.text[:limit], query),
            left_out=0 if limit is None else max(0, len(found.message.text) - limit),
            query=query,
            search=urlencode({"q": query, "scope": _choose_value(request, "scope", SCOPES)}),
        )

    async def _find_title(self, name: str) -> str:
        """Returns the title or name of a conversation if one is stored, else its id."""
        totals = (await self.api.commands.get_overview(name)).totals
        return totals.title or totals.name or name

    async def show_failures(self, request: Request) -> Response:
        """Shows failures of upstreams, requests that failed open, and failures of compactions, by cause.

        If the store cannot be reached, shows only failures of upstreams that this process has counted.
        """
        queries = self.api.queries
        period = read_period(request, queries.now())
        model, kind = _read_query(request, "model"), _choose_value(request, "kind", FAILURE_KIND_NAMES)
        failures, used, (upstreams, complete), sums = await asyncio.gather(
            get_or_none(queries.list_recent_items(MAX_EVENTS, failures=True)),
            get_or_none(queries.list_recent_conversations()),
            queries.list_upstream_failures(period.start, period.end),
            get_or_none(queries.get_statistics(period.start, period.end, "total", model=model)),
        )
        found = [] if failures is None else _parse_events(failures)
        # Like the sums, in whole hours. So the overview counts the same events.
        hours = range(int(period.start // HOUR_S), int(period.end // HOUR_S) + 1)
        events = [each for each in found if each.at // HOUR_S in hours]
        models = [model, *(each.asked for each in events)]
        models += [name for each in upstreams for name in each.models]
        return await self.templates.render_page(
            "failures.html",
            at="failures",
            period=period,
            periods=PERIODS,
            model=model,
            model_names=_list_choices("All models", models),
            names=_list_names(used or ()),
            kind=kind,
            kinds=FAILURE_KIND_NAMES,
            query=urlencode({name: value for name, value in (("model", model), ("kind", kind)) if value}),
            upstreams=[
                each for each in upstreams if kind in {"", "upstream"} and (not model or model in each.models)
            ],
            complete=complete and failures is not None,
            total=None if sums is None or kind not in {"", FAILED_OPEN} else to_counters(sums.total),
            groups=group_failures(
                each for each in events if kind in {"", each.kind} and model in {"", each.asked}
            ),
            is_cut=len(found) >= MAX_EVENTS,
            limit=MAX_EVENTS,
            per_group=EVENTS_PER_GROUP,
        )

    async def show_settings(self, _: Request) -> Response:
        """Shows the current configuration and the models.

        If the store cannot be reached, the page lists no models.
        """
        config = build_configuration(self.api.settings)
        return await self.templates.render_page(
            "settings.html",
            at="settings",
            path=config.path,
            values=config.values,
            sections=_group_values(config.values),
            warnings=config.warnings,
            list_prices=uses_list_prices(self.api.settings.config),
            models=await get_or_none(self.api.queries.list_models()),
        )

    async def run_action(self, request: Request) -> Response:
        """Runs a command on a conversation, then redirects the browser to a page that confirms it.

        The path of the request contains the id of the conversation and the name of the command (`action`).

        Raises:
            RequestRefusedError: If there is no such command (404), if the form cannot be read (`read_form`),
                or if the command cannot be run on this conversation.
        """
        name, action = request.path_params["name"], request.path_params["action"]
        commands = self.api.commands
        commands_without_fields: Mapping[str, Callable[[str], Awaitable[object]]] = {
            "compact": commands.request_compaction,
            "undo": commands.undo_round,
            "redo": commands.redo_round,
            "bypass": commands.bypass_compaction,
            "resume": commands.resume_compaction,
            "delete": commands.forget_conversation,
        }
        if action in commands_without_fields:
            await commands_without_fields[action](name)
        elif action == "pin":
            await commands.add_pin(name, get_field(await read_form(request), "text"))
        elif action == "unpin":
            await commands.remove_pin(name, get_field(await read_form(request), "pin"))
        elif action in {"remove", "restore"}:
            instruction = get_field(await read_form(request), "instruction")
            await commands.set_instruction_removed(name, instruction, removed=action == "remove")
        else:
            raise RequestRefusedError(404, "There is no such action.", "not_found")
        shown = "?done=deleted" if action == "delete" else f"/{encode_path_segment(name)}?done={action}"
        headers = {**HEADERS, "cache-control": "no-store"}
        return RedirectResponse(f"{self.templates.root}/conversations{shown}", 303, headers)

    async def show_playground(self, request: Request) -> Response:
        """Shows the playground.

        The query parameter `conversation` selects a stored conversation, and `example` fills in a transcript.
        """
        name, trouble = request.query_params.get("conversation", ""), ""
        if name and await get_or_none(self.api.queries.list_compactions(name)) == []:
            name, trouble = "", "This conversation was not compacted yet, so none of its messages are stored."
        form = PlaygroundForm(conversation=name)
        if request.query_params.get("example") is not None:
            form = PlaygroundForm(
                transcript=build_example(), strategies=("anchored", "prune"), window=EXAMPLE_WINDOW_TOKENS
            )
        return await self._render_playground(form, trouble=trouble)

    async def run_replay(self, request: Request) -> Response:
        """Runs the replay that the form describes. Shows the form again, with the results or an error.

        Raises:
            RequestRefusedError: If the transcript is too large or the replay takes too long (413), or if the
                form cannot be read (`read_form`).
        """
        form = _parse_form(await read_form(request, _MAX_FORM_BYTES))
        try:
            results = await self.api.replay_jobs.run_job(await asyncio.to_thread(_build_job, form))
        except ProxyError as error:
            status, message = describe_error(error)
            if status == _TOO_LARGE:  # the form would send megabytes back to the browser
                raise
            return await self._render_playground(form, status=status, trouble=message)
        return await self._render_playground(form, results)

    async def _render_playground(
        self,
        wanted: PlaygroundForm,
        results: Sequence[JsonObject] = (),
        *,
        status: int = 200,
        trouble: str = "",
    ) -> Response:
        listed = await get_or_none(self.api.queries.list_conversations(_OFFERED_CONVERSATIONS))
        return await self.templates.render_page(
            "playground.html",
            status,
            at="playground",
            wanted=wanted,
            results=results,
            strategies_chart=build_strategies_chart(results),
            strategies=STRATEGY_HINTS,
            dashes=DASHES,
            # Messages of a conversation are stored only once it was compacted.
            conversations=[each for each in listed.rows if each.totals.rounds] if listed else (),
            trouble=trouble,
        )


def explain_status(status: str, reason: str, size_bytes: int | None) -> str:
    """Returns what the proxy did with a request, and why."""
    if reason == SMALL:
        return describe_status(status, reason, size_bytes)
    text = STATUS_TEXTS.get(status, status)
    return f"{text}: {describe_reason(reason)}" if reason else text


def _list_key_labels(conversations: Iterable[ListedConversation]) -> dict[str, list[str]]:
    """Returns the labels of each client key."""
    labels: dict[str, list[str]] = {}
    for each in conversations:
        known = labels.setdefault(each.key, [])
        if each.totals.label and each.totals.label not in known:
            known.append(each.totals.label)
    return labels


def _list_names(conversations: Iterable[ListedConversation]) -> dict[str, str]:
    """Returns the stored title or name of each conversation, empty if it has neither."""
    return {each.id: each.totals.title or each.totals.name for each in conversations}


def _list_choices(
    all_name: str, values: Iterable[str], labels: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> dict[str, str]:
    """Returns the values of a list in a form, each with the text that the list shows for it."""
    texts = {each: ", ".join(labels.get(each, ())) for each in sorted(set(values) - {""})}
    return {"": all_name, **{each: f"{text} ({each})" if text else each for each, text in texts.items()}}


def _find_last_undone(directives: Directives, rounds: Sequence[CompactionRecord]) -> Event | None:
    """Returns the event of the compaction that a user has undone last and can redo; None if there is none."""
    place = directives.undone[-1].hex() if directives.undone and directives.suppressed else ""
    return next((each.event for each in rounds if place and each.event.place == place), None)


def _build_base_url(request: Request) -> str:
    """Returns the base URL for clients of the proxy: the scheme and host of this request, and `/v1`."""
    return f"{request.url.scheme}://{request.headers.get('host', '')}/v1"


# An upstream or the kind of an event, and its name on the page of failures.
FAILURE_KIND_NAMES = {
    "": "All failures",
    "upstream": "Upstream",
    **{each: describe_event_kind(each) for each in sorted(FAILURE_KINDS)},
}


class FailureGroup(NamedTuple):
    """Failures of compactions with the same kind and reason, newest first."""

    kind: str
    reason: str
    events: Sequence[Event]


def group_failures(events: Iterable[Event]) -> list[FailureGroup]:
    """Groups events of failures, given newest first. The group with the newest event comes first."""
    groups: dict[tuple[str, str], list[Event]] = {}
    for each in events:
        groups.setdefault((each.kind, each.reason), []).append(each)
    return [FailureGroup(*pair, found) for pair, found in groups.items()]


def build_transcript(
    removed: Sequence[RecalledMessage], visible: Sequence[VisibleMessage]
) -> list[tuple[int, str, RemovedMessage | VisibleMessage]]:
    """Returns the messages of a conversation, each with its index and the checkpoint id of its compaction.

    The compaction is the one that removed the message. The id is empty if no compaction has removed it.

    Args:
        removed: Messages that compactions removed. If several messages have the same index, the function
            uses the last of them.
        visible: Messages that the model saw after the last compaction.
    """
    placed: dict[int, tuple[str, RemovedMessage | VisibleMessage]] = {
        each.message.index: (each.round.checkpoint_place.hex(), each.message) for each in removed
    }
    known = {each.message.id for each in removed}
    kept = [each for each in visible if each.origin == KEPT and each.id not in known]
    free = (index for index in count() if index not in placed)
    placed |= {index: ("", each) for index, each in zip(free, kept, strict=False)}
    return [(index, *placed[index]) for index in sorted(placed)]


EXAMPLE_WINDOW_TOKENS = 8_000
_EXAMPLE_FILES = ("invoice", "rounding", "export", "retry", "mailer", "report", "login", "search")


def build_example() -> str:
    """Builds an example of a transcript for the playground: an agent that reads files, as JSON."""
    messages: list[JsonObject] = [
        {"role": "system", "content": "You are a careful engineer. Never push to main."}
    ]
    for number, name in enumerate(_EXAMPLE_FILES, 1):
        path = f"src/{name}.py"
        lines = [
            f"{line}: total_{line} = round(price_{line} * {number}.{line % 10}, 2)" for line in range(1, 61)
        ]
        call = {"name": "read_file", "arguments": json.dumps({"path": path})}
        messages += [
            {"role": "user", "content": f"Why does {path} round wrong on line {7 * number}?"},
            {
                "role": "assistant",
                "content": f"I read {path}.",
                "tool_calls": [{"id": f"call_{number}", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": f"call_{number}", "content": "\n".join(lines)},
            {
                "role": "assistant",
                "content": f"Line {7 * number} of {path} is wrong twice. Correct it at the end.",
            },
        ]
    return json.dumps(messages, indent=1)


def _parse_form(fields: Mapping[str, list[str]]) -> PlaygroundForm:
    values = dict(fields)
    return PlaygroundForm(
        transcript=get_field(values, "transcript").strip(),
        conversation=get_field(values, "conversation"),
        model=get_field(values, "model").strip(),
        strategies=tuple(each for each in values.get("strategy", ()) if each in STRATEGIES) or ("anchored",),
        trigger=_parse_number(get_field(values, "trigger")),
        window=_parse_number(get_field(values, "window")),
    )


def _parse_number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0


def _build_job(form: PlaygroundForm) -> ReplayJob:
    """Builds the replay job that a form describes. To save time, copies the transcript without decoding it.

    Raises:
        RequestRefusedError: If the transcript is too large (413), if it is not valid JSON or has no messages
            (400 or 422), or if the form has neither a transcript nor a conversation (422).
    """
    small: dict[str, object] = {
        "strategies": list(form.strategies),
        "trigger_tokens": form.trigger or None,
        "window": form.window or None,
    }
    if form.transcript:
        parts = _split_transcript(form.transcript.encode("utf-8", "replace"))
    elif form.conversation:
        parts = {"conversation": json.dumps(form.conversation).encode()}
    else:
        raise _build_refusal("Paste a transcript, or choose a conversation.")
    if form.model:
        small["model"] = form.model
    parts |= {name: json.dumps(value).encode() for name, value in small.items()}
    return parse_job(
        b"{%b}" % b",".join(b"%b:%b" % (json.dumps(name).encode(), value) for name, value in parts.items())
    )


def _build_refusal(message: str) -> RequestRefusedError:
    return RequestRefusedError(422, message, "invalid_request")


def _split_transcript(text: bytes) -> dict[str, bytes]:
    """Returns the member `messages` of a transcript and, if it is a request, `tools` and `model`, as JSON.

    Raises:
        RequestRefusedError: If the transcript is too large (413), or if it is neither a list nor a request
            with messages (422).
    """
    if len(text) > MAX_PASTED_BYTES:
        raise RequestRefusedError(_TOO_LARGE, TOO_LARGE, "request_too_large")
    if text.startswith(b"["):
        return {"messages": text}
    try:
        found = find_members(text)
    except (UnreadableBodyError, RecursionError) as error:
        raise _build_refusal("The transcript is not JSON.") from error
    if "messages" not in found:
        raise _build_refusal("The transcript is neither a list of messages nor a request with messages.")
    return {name: text[found[name].start : found[name].stop] for name in _TRANSCRIPT_FIELDS if name in found}
