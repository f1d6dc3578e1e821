"""The dashboard on a socket, over queries and commands that a test answers; and pages taken apart."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from inspect import iscoroutinefunction
from typing import Any, TypeVar, cast
from unittest.mock import create_autospec

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from compaction_proxy.admin.api.routing import AdminApi, AdminSettings
from compaction_proxy.admin.app import mount_pages
from compaction_proxy.admin.auth import AccessPolicy
from compaction_proxy.admin.queries import (
    CompactionRecord,
    ConversationPage,
    ConversationQueries,
    ListedConversation,
    ModelRow,
    StatisticsReport,
)
from compaction_proxy.compaction.commands import ConversationCommands, ConversationOverview
from compaction_proxy.compaction.directives import Directives
from compaction_proxy.config.config import Config, format_key_path, iter_keys
from compaction_proxy.core.cost.savings import Saving
from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.core.event import COMPACTED, FAILED_OPEN, Event, to_fields
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.core.upstream_failure import UpstreamFailure
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.gateway.size_gate import GateLimits
from compaction_proxy.recall.archive import ArchivedRound, RecalledMessage, RemovedMessage
from compaction_proxy.recall.round_detail import RoundDetail, SummaryPrompt, VisibleMessage
from compaction_proxy.recall.search import SearchHit
from compaction_proxy.replay.jobs import ReplayJobRunner
from compaction_proxy.telemetry.live_feed import COMPACTION, FeedItem
from compaction_proxy.telemetry.statistics import ExchangeCounters, StatisticsRow
from compaction_proxy.telemetry.usage import ExchangeEntry, Totals

PLACE = "ab" * 64
NAME = "c_0123456789abcdef"
KEY = "k_0123456789ab"
AT = 1_795_000_000.0
NOT_FOUND = RequestRefusedError(404, "This conversation does not exist.", "conversation_not_found")
Part = TypeVar("Part")


class FakeAdmin:
    """Queries, commands and replays that answer as `answers` says, by the method's name.

    What has no answer is not there, and an answer that is an exception is raised. The answer of
    `get_statistics` may depend on how it is grouped: `get_statistics by model`.

    Attributes:
        answers: The answers; the settings of the proxy as `settings`.
        asked: The calls: the method, and its arguments by position and by name.
    """

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def api(self, key: str) -> AdminApi:
        queries = self._fake(ConversationQueries)
        object.__setattr__(queries, "now", lambda: AT)
        return AdminApi(
            self._fake(ConversationCommands),
            queries,
            self._fake(ReplayJobRunner),
            AccessPolicy("127.0.0.1", key),
            self.answers.get("settings", AdminSettings()),
            list_problems=lambda: self.answers.get("problems", ()),
        )

    def _fake(self, part: type[Part]) -> Part:
        fake = create_autospec(part, instance=True)
        for name in dir(part):
            if iscoroutinefunction(getattr(part, name)):
                getattr(fake, name).side_effect = partial(self._answer, name)
        return cast("Part", fake)

    async def _answer(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.asked.append((name, args, kwargs))
        found = self.answers.get(name, NOT_FOUND)
        found = self.answers.get(f"{name} by {args[-1]}", found) if args else found
        if isinstance(found, Exception):
            raise found
        return found


async def _answer_elsewhere(request: Request) -> Response:
    return JSONResponse({"no page": request.url.path}, 404)


@asynccontextmanager
async def pages(
    admin: FakeAdmin, key: str = "none", base_path: str = "", **client: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the pages over fake queries and commands."""
    elsewhere = Starlette(routes=[Route("/{path:path}", _answer_elsewhere)])
    app = mount_pages(elsewhere, admin.api(key), base_path)
    async with serve_embedded(app) as url, httpx.AsyncClient(base_url=url, **client) as asking:
        yield asking


def sample(say: Callable[[str], str] = str) -> dict[str, Any]:
    """The answers where something has happened; `say` makes each text that others have written."""
    event = Event(
        COMPACTED,
        AT,
        NAME,
        id="e_1",
        request=say("req-7"),
        strategy=say("anchored"),
        round=1,
        place=PLACE,
        reason=say("percent"),
        outcome="applied",
        asked=say("gpt-5.6"),
        model=say("gpt-5.4-mini"),
        tokens_before=102_400,
        tokens_after=31_900,
        tokens_real=32_010,
        trigger=102_000,
        window=128_000,
        basis={say("growth"): 1_200.5},
        listed=190,
        messages=88,
        seconds=3.2,
        calls=1,
        prompt_tokens=71_000,
        completion_tokens=900,
        cost_usd=0.011,
        facts={say("paths"): (41, 44), "numbers": (17, 21), "user rules": (6, 6)},
        summary=say("The deploy of deploy/prod.yaml failed with 502; retry after 14:03. Metric units."),
    )
    failure = Event(
        FAILED_OPEN,
        AT,
        NAME,
        id="e_2",
        request=say("req-9"),
        strategy=say("anchored"),
        reason=say("store-failed"),
        outcome="failed-open",
        model=say("gpt-5.4-mini"),
    )
    exchange = Exchange(
        AT,
        say("gpt-5.6"),
        "reused",
        200,
        request=say("req-7"),
        strategy=say("anchored"),
        round=1,
        reason=say("above-trigger"),
        request_bytes=400_000,
        messages_before=190,
        messages_after=103,
        tokens_before=103_000,
        tokens_after=33_000,
        window=128_000,
        trigger=102_000,
        prompt_tokens=33_100,
        completion_tokens=300,
        cached_tokens=30_000,
        overhead_s=0.0021,
        first_byte_s=0.4,
        upstream_s=2.0,
    )
    totals = Totals(
        model=say("gpt-5.6"),
        status=say("reused"),
        requests=214,
        prompt_tokens=900_000,
        completion_tokens=50_000,
        cached_tokens=700_000,
        rounds=1,
        priced=214,
        cost_usd=2.5,
        gross_usd=2.1,
        cache_loss_usd=0.1,
        summary_usd=0.08,
        tokens_before=103_000,
        tokens_after=33_000,
        trigger=102_000,
        window=128_000,
        last_at=AT,
    )
    made = CompactionRecord(event, undone=False, pays_back_after=2.0, state="in-use", used_at=AT)
    bill = {"without": 3.1, "with": 1.6, "summaries": 0.1, "net": 1.4, "pays_back_after": 2}
    outcome = {
        "strategy": say("anchored"),
        "model": say("gpt-5.6"),
        "window": 128_000,
        "trigger": 102_000,
        "requests": 3,
        "rounds": 1,
        "summary_calls": 1,
        "sent_tokens": 300_000,
        "forwarded_tokens": 120_000,
        "largest_tokens": 101_000,
        "cached_share": 0.8,
        "cached_share_without": 0.9,
        "over_without": 1,
        "over_with": 0,
        "failed": 0,
        "price_source": say("genai-prices"),
        "tokens": bill,
        "dollars": bill,
        "points": [{"before": n * 50_000, "after": min(n * 50_000, 60_000)} for n in (1, 2, 3)],
    }
    removed = (
        RemovedMessage("m_1", 3, say("user"), say("Please deploy deploy/prod.yaml at 14:03")),
        RemovedMessage("m_2", 4, say("tool"), say("exit 1: upstream said 502 " + "x" * 5_000)),
    )
    seen = (
        VisibleMessage(say("user"), say("The deploy of deploy/prod.yaml failed with 502"), "stand-in", ""),
        VisibleMessage(say("user"), say("And now?"), say("kept"), "m_10"),
    )
    prompts = (SummaryPrompt(say("gpt-5.4-mini"), say("Summarise."), say("user: Please deploy")),)
    return {
        "get_statistics": StatisticsReport(
            (
                StatisticsRow("2026-11-18T10", counters()),
                StatisticsRow("2026-11-18T11", counters()),
            ),
            counters(),
        ),
        "get_statistics by key": StatisticsReport((StatisticsRow(KEY, counters()),), counters()),
        "get_statistics by model": StatisticsReport(
            (StatisticsRow(say("gpt-5.6"), counters()), StatisticsRow("local", counters(unpriced=9_308))),
            counters(),
        ),
        "list_recent_conversations": [
            ListedConversation(NAME, replace(totals, title=say("deploy"), label=say("team-a")), KEY)
        ],
        "list_recent_items": [
            FeedItem("1", COMPACTION, to_fields(event)),
            FeedItem("2", COMPACTION, to_fields(failure)),
        ],
        "list_upstream_failures": (
            [
                UpstreamFailure(say("https://api.example:443"), say("connection-refused"), 1_204, AT),
                UpstreamFailure("https://api.example:443", "http-503", 3, AT),
            ],
            True,
        ),
        "list_conversations": ConversationPage([ListedConversation(NAME, totals, KEY)], None),
        "get_overview": ConversationOverview(
            totals,
            (),
            frozenset(),
            Directives(pins=(say("Always use metric units"),), suppressed=True),
        ),
        "get_gate_limits": GateLimits(84_998.0, 88_500),
        "list_exchanges": [
            ExchangeEntry("t", NAME, exchange._replace(round=None), Saving(0.02, 0.05, 0.0)),
            ExchangeEntry("t", NAME, exchange._replace(request=say("req-8")), None),
        ],
        "list_compactions": [made],
        "get_compaction": (made, RoundDetail(event, removed, prompts, seen)),
        "search_archive": [
            SearchHit(say("m_2"), 4, say("tool"), 1, say("anchored"), AT, 1.0, say("said 502"))
        ],
        "get_archived_message": RecalledMessage(
            RemovedMessage(say("m_2"), 4, say("tool"), say("exit 1")),
            ArchivedRound(NAME, say("anchored"), bytes.fromhex(PLACE), 1, AT),
        ),
        "list_archived_messages": [
            RecalledMessage(each, ArchivedRound(NAME, say("anchored"), bytes.fromhex(PLACE), 1, AT))
            for each in removed
        ],
        "settings": AdminSettings(
            Config.model_validate(
                {
                    "summary": {"model": say("small").encode("utf-8", "replace").decode()},
                    "compaction": {"trigger": [{"tokens": 5}]},
                }
            ),
            dict.fromkeys((format_key_path(key.path) for key in iter_keys()), "default")
            | {
                "upstream.base_url": say("config.yaml:3"),
                "summary.model": "config.yaml:5",
                "compaction.trigger": "config.yaml:9",
            },
            say("config.yaml"),
            (say("upstream.timeout_s is short"),),
        ),
        "list_models": [
            ModelRow(
                say("gpt-5.6"),
                272_000,
                say("table"),
                1.25,
                0.125,
                10.0,
                None,
                say("genai-prices 0.0.40"),
                "2026-11-01",
            ),
            ModelRow("local", 8_192, "configured", None, None, None, None, None, None),
        ],
        "run_job": [outcome, {**outcome, "strategy": "prune", "dollars": None}],
    }


def counters(unpriced: int = 12) -> ExchangeCounters:
    """The figures of some hours."""
    return ExchangeCounters(
        requests=9_311,
        failed=3,
        tokens_before=4_100_000,
        tokens_after=1_600_000,
        prompt_tokens=1_610_000,
        completion_tokens=90_000,
        cached_tokens=1_200_000,
        rounds=4,
        failures=4,
        summary_calls=4,
        summary_prompt_tokens=100_000,
        uncounted=11,
        unpriced=unpriced,
        unpriced_summary_calls=1,
        cost_usd=20.5,
        gross_usd=15.02,
        cache_loss_usd=1.51,
        summary_usd=1.1,
        last_at=AT - 20,
        statuses={"none": 9_000, "failed-open": 2},
        failed_open_reasons={"store-failed": 2},
        failed_open_compacted=1,
        failure_kinds={"failed": 1, "over-limit": 1, "failed-open": 1},
        overhead=[0, 200, 1_500, 175, 125, *[0] * 8, 2],
        waiting_overhead=[*[0] * 13, 2],
    )


class Read(HTMLParser):
    """A page, taken apart: its elements with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        """All text, white space as one blank."""
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of each element of this name."""
        return [attributes for name, attributes in self.elements if name == tag]
