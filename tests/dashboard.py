"""The dashboard on a socket, over an admin API that answers what a test gives it; and pages taken apart."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from compaction_proxy.admin.auth import AccessPolicy
from compaction_proxy.admin.ui.app import mount_pages
from compaction_proxy.core.errors import RequestRefusedError, format_openai_error
from compaction_proxy.gateway.server import serve_embedded

PLACE = "ab" * 64
NAME = "c_0123456789abcdef"
AT = 1_795_000_000.0


class FakeApi:
    """Answers as `answers` says, by path below `/admin/v1`; remembers what it was asked.

    An answer may be an exception of ours, which the API answers with its status in OpenAI's shape.
    """

    def __init__(self, answers: dict[str, Any], base_path: str = "") -> None:
        self.answers = answers
        self.base = f"{base_path}/admin/v1/"
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []
        self.keys: list[str | None] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await Router()(scope, receive, send)
            return
        request = Request(scope, receive)
        path = scope["path"].removeprefix(self.base)
        by = request.query_params.get("by")
        body = await request.body()
        told = json.loads(body) if body else None
        self.asked.append((request.method, path, dict(request.query_params), told))
        self.keys.append(request.headers.get("authorization"))
        found = self.answers.get(f"{path} by {by}") or self.answers.get(path)
        if found is None:
            error = {"error": {"message": "There is no such conversation.", "code": "conversation_not_found"}}
            await JSONResponse(error, 404)(scope, receive, send)
        elif isinstance(found, RequestRefusedError):
            await Response(format_openai_error(found), found.status)(scope, receive, send)
        else:
            await Response(json.dumps(found), media_type="application/json")(scope, receive, send)


@asynccontextmanager
async def pages(
    api: FakeApi, key: str = "", base_path: str = "", **client: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the pages over what answers the API."""
    app = mount_pages(api, AccessPolicy("127.0.0.1", key), base_path)
    async with serve_embedded(app) as url, httpx.AsyncClient(base_url=url, **client) as asking:
        yield asking


def sample(say: Callable[[str], str] = str) -> dict[str, Any]:
    """What the API answers where something has happened; `say` makes each text that others have written."""
    name = NAME
    event = {
        "kind": "compacted",
        "at": AT,
        "conversation": name,
        "id": "e_1",
        "request": say("req-7"),
        "strategy": say("anchored"),
        "round": 1,
        "place": PLACE,
        "reason": say("percent"),
        "outcome": "applied",
        "asked": say("gpt-5.6"),
        "model": say("gpt-5.4-mini"),
        "tokens_before": 102_400,
        "tokens_after": 31_900,
        "tokens_real": 32_010,
        "trigger": 102_000,
        "window": 128_000,
        "basis": {say("growth"): 1_200.5},
        "listed": 190,
        "messages": 88,
        "seconds": 3.2,
        "calls": 1,
        "prompt_tokens": 71_000,
        "completion_tokens": 900,
        "cost_usd": 0.011,
        "facts": {say("paths"): [41, 44], "numbers": [17, 21], "user rules": [6, 6]},
        "summary": say("The deploy of deploy/prod.yaml failed with 502; retry after 14:03. Metric units."),
    }
    failure = {
        **event,
        "kind": "failed-open",
        "reason": say("store-failed"),
        "request": say("req-9"),
        "place": "",
        "outcome": "failed-open",
    }
    exchange = {
        "at": AT,
        "model": say("gpt-5.6"),
        "status": "reused",
        "code": 200,
        "request": say("req-7"),
        "strategy": say("anchored"),
        "round": 1,
        "reason": say("above-trigger"),
        "request_bytes": 400_000,
        "messages_before": 190,
        "messages_after": 103,
        "tokens_before": 103_000,
        "tokens_after": 33_000,
        "window": 128_000,
        "trigger": 102_000,
        "prompt_tokens": 33_100,
        "completion_tokens": 300,
        "cached_tokens": 30_000,
        "overhead_s": 0.0021,
        "first_byte_s": 0.4,
        "upstream_s": 2.0,
        "saving": {"cost": 0.02, "gross": 0.05, "cache_loss": 0.0, "net": 0.05},
    }
    counters = {
        "requests": 9_311,
        "failed": 3,
        "tokens_before": 4_100_000,
        "tokens_after": 1_600_000,
        "prompt_tokens": 1_610_000,
        "completion_tokens": 90_000,
        "cached_tokens": 1_200_000,
        "rounds": 4,
        "failures": 2,
        "summary_calls": 4,
        "unpriced": 12,
        "cost_usd": 20.5,
        "gross_usd": 15.02,
        "cache_loss_usd": 1.51,
        "summary_usd": 1.1,
        "net_usd": 12.41,
        "failed_open": 2,
        "statuses": {"none": 9_000, "failed-open": 2},
        "overhead_p50_s": 0.0018,
        "overhead_p95_s": 0.006,
    }
    row = {
        "id": name,
        "model": say("gpt-5.6"),
        "requests": 214,
        "last_at": AT,
        "prompt_tokens": 900_000,
        "completion_tokens": 50_000,
        "cached_tokens": 700_000,
        "tokens_before": 103_000,
        "tokens_after": 33_000,
        "trigger": 102_000,
        "window": 128_000,
        "status": say("reused"),
        "rounds": 1,
        "cost_usd": 2.5,
        "net_usd": 1.92,
    }
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
    one = f"conversations/{name}"
    return {
        "stats": {
            "rows": [
                {**counters, "of": say("2026-11-22T12")},
                {**counters, "of": "2026-11-22T13"},
            ],
            "total": counters,
        },
        "stats by model": {
            "rows": [
                {**counters, "of": say("gpt-5.6")},
                {**counters, "of": "local", "net_usd": None, "cost_usd": None},
            ]
        },
        "events": {"events": [{**event, "feed": "1"}, {**failure, "feed": "2"}]},
        "upstream-failures": {
            "complete": True,
            "failures": [
                {
                    "target": say("https://api.example:443"),
                    "cause": say("connection-refused"),
                    "count": 1_204,
                    "last_at": AT,
                },
                {"target": "https://api.example:443", "cause": "http-503", "count": 3, "last_at": AT},
            ],
        },
        "conversations": {"conversations": [row]},
        one: {
            "id": name,
            "totals": {
                "model": say("gpt-5.6"),
                "requests": 214,
                "prompt_tokens": 900_000,
                "cached_tokens": 700_000,
                "last_at": AT,
            },
            "rounds": [],
            "pins": [{"id": "p_1", "text": say("Always use metric units")}],
            "compact": False,
            "suppressed": True,
            "bypass": False,
            "money": {
                "cost_usd": 2.5,
                "gross_usd": 2.1,
                "cache_loss_usd": 0.1,
                "summary_usd": 0.08,
                "net_usd": 1.92,
            },
        },
        f"{one}/exchanges": {
            "exchanges": [{**exchange, "round": None}, {**exchange, "request": say("req-8")}]
        },
        f"{one}/compactions": {"compactions": [{**event, "undone": False, "pays_back_after": 2.0}]},
        f"{one}/compactions/{PLACE}": {
            **event,
            "undone": False,
            "pays_back_after": 2.0,
            "removed": [
                {
                    "id": "m_1",
                    "index": 3,
                    "role": say("user"),
                    "text": say("Please deploy deploy/prod.yaml at 14:03"),
                },
                {
                    "id": "m_2",
                    "index": 4,
                    "role": say("tool"),
                    "text": say("exit 1: upstream said 502 " + "x" * 5_000),
                },
            ],
            "prompts": [
                {
                    "model": say("gpt-5.4-mini"),
                    "system": say("Summarise."),
                    "text": say("user: Please deploy"),
                }
            ],
            "seen": [
                {
                    "id": "m_9",
                    "role": say("user"),
                    "text": say("The deploy of deploy/prod.yaml failed with 502"),
                    "origin": "stand-in",
                },
                {"id": "m_10", "role": say("user"), "text": say("And now?"), "origin": say("kept")},
            ],
        },
        f"{one}/search": {
            "hits": [
                {
                    "message_id": say("m_2"),
                    "index": 4,
                    "role": say("tool"),
                    "round": 1,
                    "strategy": say("anchored"),
                    "at": AT,
                    "score": 1.0,
                    "snippet": say("said 502"),
                }
            ]
        },
        f"{one}/messages/m_2": {
            "id": say("m_2"),
            "index": 4,
            "role": say("tool"),
            "text": say("exit 1"),
            "round": 1,
            "strategy": say("anchored"),
            "at": AT,
        },
        "config": {
            "path": say("config.yaml"),
            "values": [
                {"key": "server.port", "value": 4141, "origin": "default"},
                {
                    "key": "upstream.base_url",
                    "value": say("https://api.openai.com/v1"),
                    "origin": say("config.yaml:3"),
                },
                {"key": "compaction.trigger", "value": [{"tokens": 5}], "origin": "config.yaml:9"},
            ],
            "warnings": [say("upstream.timeout_s is short")],
        },
        "models": {
            "models": [
                {
                    "model": say("gpt-5.6"),
                    "window": 272_000,
                    "window_source": say("table"),
                    "input_usd": 1.25,
                    "cached_usd": 0.125,
                    "output_usd": 10.0,
                    "surcharge_tokens": None,
                    "price_source": say("genai-prices 0.0.40"),
                    "price_date": "2026-11-01",
                },
                {"model": "local", "window": 8_192, "window_source": "config", "input_usd": None},
            ]
        },
        "replay": {"results": [outcome, {**outcome, "strategy": "prune", "dollars": None}]},
    }


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
