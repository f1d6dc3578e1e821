"""The read-only pages: overview, conversations, one conversation or compaction, failures and settings."""

import asyncio
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from compaction_proxy.admin.ui import charts, readings
from compaction_proxy.admin.ui.api import InProcessAdminClient
from compaction_proxy.admin.ui.round_view import MAX_SHOWN_CHARACTERS, build_panes
from compaction_proxy.admin.ui.shown import (
    ConversationRowView,
    CountersView,
    HitView,
    MessageView,
    ModelView,
    PromptView,
    UpstreamFailureView,
)
from compaction_proxy.admin.ui.templates import Templates
from compaction_proxy.core.event import parse_number

# Time ranges of the overview page, each with the period that one column of its chart covers.
RANGES = {"24h": "hour", "7d": "hour", "30d": "day"}
SORTS = {"last": "Last request", "tokens": "Tokens", "net": "Net saved", "requests": "Requests"}
# Scopes of a search, with their names on the page.
SCOPES = {"conversation": "this conversation", "tenant": "all conversations of this tenant"}
# Confirmations that a page shows after an action, by the value of the query parameter `done`.
ACTION_MESSAGES = {
    "compact": "The next request of this conversation will be compacted.",
    "undo": "The newest round is not applied any more.",
    "bypass": "This conversation's requests go on as they come from now on.",
    "resume": "This conversation is compacted again.",
    "pin": "The text is pinned: no round may lose it.",
    "unpin": "The text is not pinned any more.",
    "remove": "These instructions are left out as soon as a request is rewritten.",
    "restore": "These instructions are kept again.",
    "deleted": "Everything that was stored of the conversation is deleted.",
}
MAX_ROWS = 200
MAX_EXCHANGES = 500
MAX_EVENTS = 200
RECENT_EVENTS = 10
MAX_HITS = 50


def _choose_value(request: Request, name: str, allowed: dict[str, str]) -> str:
    """Returns the query parameter `name` if it is one of `allowed`, or else the first of `allowed`."""
    value = request.query_params.get(name, "")
    return value if value in allowed else next(iter(allowed))


@dataclass(frozen=True, slots=True)
class PageRoutes:
    """Handles the GET requests for the read-only pages.

    Attributes:
        api: Client of the admin API.
        templates: Templates of the pages.
    """

    api: InProcessAdminClient
    templates: Templates

    async def show_overview(self, request: Request) -> Response:
        """Shows the savings, the traffic and the latest events."""
        since = _choose_value(request, "since", RANGES)
        over_time, by_model, recent = await asyncio.gather(
            self.api.get(request, "stats", since=since, by=RANGES[since]),
            self.api.get(request, "stats", since=since, by="model"),
            self.api.get(request, "events", limit=RECENT_EVENTS),
        )
        rows = readings.read_records(CountersView, over_time.get("rows"))
        return await self.templates.render_page(
            "overview.html",
            at="overview",
            since=since,
            ranges=tuple(RANGES),
            by=RANGES[since],
            total=readings.read_record(CountersView, over_time.get("total")),
            rows=rows,
            models=sorted(
                (each for each in readings.read_records(CountersView, by_model.get("rows")) if each.requests),
                key=lambda each: -each.tokens_before,
            ),
            events=readings.read_events(recent.get("events")),
            chart=charts.build_period_chart(
                rows,
                RANGES[since],
                parse_number(over_time.get("since")),
                parse_number(over_time.get("until")),
            ),
            base_url=_build_base_url(request),
        )

    async def show_conversations(self, request: Request) -> Response:
        """Shows the list of conversations, filtered and sorted."""
        query, sort = request.query_params.get("q", ""), _choose_value(request, "sort", SORTS)
        response = await self.api.get(request, "conversations", limit=MAX_ROWS, q=query, sort=sort)
        return await self.templates.render_page(
            "conversations.html",
            at="conversations",
            rows=readings.read_records(ConversationRowView, response.get("conversations")),
            query=query,
            sort=sort,
            sorts=SORTS,
            limit=MAX_ROWS,
            done=ACTION_MESSAGES.get(request.query_params.get("done", ""), ""),
            base_url=_build_base_url(request),
        )

    async def show_conversation(self, request: Request) -> Response:
        """Shows one conversation: its requests, compactions and pins, and the actions for it."""
        name = request.path_params["name"]
        overview, requests, compactions = await asyncio.gather(
            self.api.get(request, "conversations", name),
            self.api.get(request, "conversations", name, "exchanges", limit=MAX_EXCHANGES),
            self.api.get(request, "conversations", name, "compactions"),
        )
        exchanges = readings.read_exchanges(requests.get("exchanges"))
        rounds = readings.read_rounds(compactions.get("compactions"))
        return await self.templates.render_page(
            "conversation.html",
            at="conversations",
            seen=readings.read_conversation(name, overview),
            exchanges=exchanges,
            latest=next((each for each in reversed(exchanges) if each.tokens_before is not None), None),
            rounds=rounds,
            chart=charts.build_requests_chart(exchanges, rounds),
            done=ACTION_MESSAGES.get(request.query_params.get("done", ""), ""),
        )

    async def show_compaction(self, request: Request) -> Response:
        """Shows one compaction: the removed messages, their replacement, and what the model then saw."""
        name, place = request.path_params["name"], request.path_params["place"]
        response = await self.api.get(request, "conversations", name, "compactions", place)
        made = readings.read_round(response)
        if made is None:
            return await self.show_error(502, "This round was written by another version and cannot be read.")
        panes = await asyncio.to_thread(
            build_panes,
            made.event.summary,
            readings.read_records(MessageView, response.get("removed")),
            readings.read_records(MessageView, response.get("seen")),
        )
        return await self.templates.render_page(
            "compaction.html", at="conversations", name=name, made=made, event=made.event, panes=panes
        )

    async def show_prompts(self, request: Request) -> Response:
        """Shows the prompts that the summary model received for a compaction."""
        name, place = request.path_params["name"], request.path_params["place"]
        response = await self.api.get(request, "conversations", name, "compactions", place)
        prompts = readings.read_records(PromptView, response.get("prompts"))
        return await self.templates.render_page(
            "prompts.html", at="conversations", name=name, place=place, prompts=prompts
        )

    async def show_search(self, request: Request) -> Response:
        """Shows the removed messages that match a query, the best first."""
        name, query = request.path_params["name"], request.query_params.get("q", "")
        scope = _choose_value(request, "scope", SCOPES)
        hits: tuple[HitView, ...] = ()
        if query:
            response = await self.api.get(
                request, "conversations", name, "search", q=query, limit=MAX_HITS, scope=scope
            )
            hits = readings.read_records(HitView, response.get("hits"))
        return await self.templates.render_page(
            "search.html",
            at="conversations",
            name=name,
            query=query,
            hits=hits,
            scope=scope,
            scopes=SCOPES,
        )

    async def show_message(self, request: Request) -> Response:
        """Shows a removed message, cut to a limit unless the query has the parameter `whole`."""
        name = request.path_params["name"]
        response = await self.api.get(
            request, "conversations", name, "messages", request.path_params["message"]
        )
        whole = request.query_params.get("whole") is not None
        return await self.templates.render_page(
            "message.html",
            at="conversations",
            name=name,
            message=readings.read_record(MessageView, response),
            limit=None if whole else 10 * MAX_SHOWN_CHARACTERS,
        )

    async def show_failures(self, request: Request) -> Response:
        """Shows failures of upstreams and of compaction; only those of upstreams if the store is away."""
        since = _choose_value(request, "since", RANGES)
        failures, upstreams = await asyncio.gather(
            self.api.get_or_none(request, "events", limit=MAX_EVENTS, failures="true"),
            self.api.get(request, "upstream-failures", since=since),
        )
        return await self.templates.render_page(
            "failures.html",
            at="failures",
            since=since,
            ranges=tuple(RANGES),
            upstreams=readings.read_records(UpstreamFailureView, upstreams.get("failures")),
            complete=upstreams.get("complete") is not False,
            events=None if failures is None else readings.read_events(failures.get("events")),
            limit=MAX_EVENTS,
        )

    async def show_settings(self, request: Request) -> Response:
        """Shows the current configuration and the models. If the store is away, the models are missing."""
        config, models = await asyncio.gather(
            self.api.get(request, "config"), self.api.get_or_none(request, "models")
        )
        warnings = config.get("warnings")
        return await self.templates.render_page(
            "settings.html",
            at="settings",
            path=str(config.get("path") or ""),
            values=readings.read_settings(config.get("values")),
            warnings=[str(each) for each in warnings] if isinstance(warnings, list) else [],
            models=None if models is None else readings.read_records(ModelView, models.get("models")),
        )

    async def show_error(self, status: int, message: str) -> Response:
        """Shows a page that explains an error."""
        titles = {404: "Not found", 409: "Not possible now", 413: "Too large", 503: "The store is away"}
        title = titles.get(status, "This did not work")
        return await self.templates.render_page("trouble.html", status, at="", title=title, message=message)


def _build_base_url(request: Request) -> str:
    """Returns the `base_url` that clients should use, derived from the host of this request."""
    return f"{request.url.scheme}://{request.headers.get('host', '')}/v1"
