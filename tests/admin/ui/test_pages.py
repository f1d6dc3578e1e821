"""The pages over a socket: what they show, what the buttons do, what is said where there is nothing."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from compaction_proxy.admin.api.routing import AdminSettings
from compaction_proxy.admin.queries import (
    CompactionRecord,
    ConversationFilter,
    ConversationPage,
    ListedConversation,
    StatisticsReport,
)
from compaction_proxy.admin.ui.pages import MAX_PASTED_BYTES, STRATEGY_HINTS
from compaction_proxy.admin.ui.templates import STATIC_FOLDER
from compaction_proxy.compaction.commands import ConversationOverview
from compaction_proxy.compaction.directives import Directives
from compaction_proxy.config.config import Config
from compaction_proxy.core.errors import RequestRefusedError, SearchUnavailableError, StoreUnavailableError
from compaction_proxy.core.event import COMPACTED, Event, to_fields
from compaction_proxy.core.problem import Problem
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.recall.archive import ArchivedRound, RecalledMessage, RemovedMessage
from compaction_proxy.recall.round_detail import RoundDetail
from compaction_proxy.replay.jobs import ReplayJob
from compaction_proxy.replay.runner import ReplayOptions
from compaction_proxy.support.formatting import MINUS
from compaction_proxy.telemetry.live_feed import COMPACTION, FeedItem
from compaction_proxy.telemetry.statistics import ExchangeCounters, StatisticsRow
from compaction_proxy.telemetry.usage import ExchangeEntry, Totals
from tests.helpers.dashboard import AT, KEY, NAME, PLACE, FakeAdmin, Read, counters, pages, sample
from tests.helpers.journals import exchange

ONE = f"/ui/conversations/{NAME}"
EVERY = (
    "/ui", "/ui/", "/ui?since=30d&model=m&key=k", "/ui?since=custom&from=2026-11-18T00:00&to=x",
    "/ui/conversations", "/ui/conversations?sort=net&q=gpt", ONE, f"{ONE}/transcript",
    f"{ONE}/compactions/{PLACE}", f"{ONE}/compactions/{PLACE}/prompts", f"{ONE}/messages/m_2",
    f"{ONE}/search?q=502", f"{ONE}/search", "/ui/failures", "/ui/failures?kind=failed&model=m",
    "/ui/settings", "/ui/playground", "/ui/playground?example",
)  # fmt: skip
BARE = Event(COMPACTED, 1.0, place=PLACE)
NOTHING: dict[str, Any] = {
    "get_statistics": StatisticsReport((), ExchangeCounters()),
    "list_recent_conversations": [],
    "list_archived_messages": [],
    "list_recent_items": [],
    "list_upstream_failures": ([], True),
    "list_conversations": ConversationPage([], None),
    "get_overview": ConversationOverview(Totals(), (), frozenset(), Directives()),
    "get_gate_limits": None,
    "list_exchanges": [],
    "list_compactions": [],
    "get_compaction": (
        CompactionRecord(BARE, undone=False, pays_back_after=None, state="followed", used_at=1.0),
        RoundDetail(BARE, (), (), ()),
    ),
    "get_archived_message": RecalledMessage(
        RemovedMessage("m_2", 0, "", ""), ArchivedRound(NAME, "", bytes.fromhex(PLACE), 0, 0.0)
    ),
    "search_archive": [],
    "list_models": [],
    "run_job": [],
}
AWAY = StoreUnavailableError("store-failed", "the store is not reachable")


def links(page: Read) -> set[str]:
    """Everything that a page loads, leads to or sends to."""
    names = ("href", "src", "action")
    return {str(each[name]) for _, each in page.elements for name in names if name in each}


@pytest.mark.parametrize("answers", [sample(), NOTHING], ids=["something", "nothing"])
async def test_every_page_is_whole_loads_nothing_from_elsewhere_and_stays_in_its_frame(
    answers: dict[str, Any],
) -> None:
    async with pages(FakeAdmin(answers)) as client:
        for path in EVERY:
            answer = await client.get(path)
            assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store"), path
            assert answer.headers["content-security-policy"] == (
                "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
                "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
            )
            assert answer.headers["x-frame-options"] == "DENY"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "same-origin"
            page = Read(answer.text)
            assert all(
                not urlsplit(link).netloc and link.startswith(("/ui", "#main")) for link in links(page)
            )
            assert not [each for _, each in page.elements if "style" in each]
            assert not page.all("style")
            assert all(each.get("src") for each in page.all("script"))
            assert [each.get("aria-current") for each in page.all("a")].count("page") == 1
            assert len(page.all("h1")) == 1
            assert "None" not in page.text


async def test_on_a_phone_where_tables_lose_their_heads_each_cell_has_a_label() -> None:
    async with pages(FakeAdmin(sample())) as client:
        shown = [Read((await client.get(path)).text) for path in EVERY]
        shown.append(Read((await client.post("/ui/playground", data={"transcript": "[5]"})).text))
    labels = [cell.get("data-label") for page in shown for cell in _list_cells(page, "stacks")]
    assert {"What the proxy did", "What was sent", "Context now", "Net saved"} <= set(labels)
    assert all(labels)


def _list_cells(page: Read, table: str) -> Iterator[dict[str, str | None]]:
    """The cells of the tables of a class."""
    is_inside = False
    for name, attributes in page.elements:
        is_inside = table in (attributes.get("class") or "").split() if name == "table" else is_inside
        if is_inside and name == "td":
            yield attributes


async def test_the_pages_stand_below_the_base_path_and_leave_everything_else_alone() -> None:
    async with pages(FakeAdmin(sample()), base_path="/own") as client:
        page = Read((await client.get("/own/ui/conversations")).text)
        assert all(link.startswith(("/own/ui", "#main")) for link in links(page))
        for path in ("/own/admin/v1/models", "/uix", "/ui"):
            assert (await client.get(path)).json() == {"no page": path}


async def test_assets_are_small_kept_for_ever_by_their_content_and_brought_with_their_licences() -> None:
    files = [path for path in STATIC_FOLDER.iterdir() if path.name != "NOTICE"]
    assert sum(path.stat().st_size for path in files) <= 150 * 1024
    assert all(name in (STATIC_FOLDER / "NOTICE").read_text() for name in ("uplot 1.6.32", "MIT"))
    async with pages(FakeAdmin(sample())) as client:
        loaded = {link for link in links(Read((await client.get("/ui")).text)) if "/static/" in link}
        assert {urlsplit(link).path.rpartition("/")[2] for link in loaded} == {path.name for path in files}
        for link in loaded:
            answer = await client.get(link)
            assert answer.content == (STATIC_FOLDER / Path(urlsplit(link).path).name).read_bytes()
            assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
        for missing in ("/ui/static/NOTICE", "/ui/static/../ui/site.py", "/ui/static/%2e%2e%2fapp.py"):
            assert (await client.get(missing)).status_code == 404


FEWER = (
    "Providers read 59 % less than clients sent, summary calls included, in 4 compactions. 75 % of the input "
    "of requests was cached; summary calls are not part of this. "
    "Covers 9,300 of 9,311 requests. For the others, the token count is not known."
)


async def test_the_overview_shows_what_is_left_of_the_saving_and_its_parts() -> None:
    async with pages(FakeAdmin(sample())) as client:
        text = Read((await client.get("/ui")).text).text
        for told in (
            f"Net saved $12.41 gross saving $15.02 {MINUS} summaries $1.10 {MINUS} cache loss $1.51",
            "Covers 9,299 of 9,311 requests. For the others, the price or the provider's token count is not",
            "Covers 3 of 4 summary calls. For the others, the price or the token count is not known.",
            "Latest request in these figures: 18 Nov 11:06:20",
            f"4.1M → 1.7M {FEWER}",
            "Time added by the proxy 1.8 ms Median of a request without a new compaction. p95: 6.0",
            "2 requests got a new compaction, or waited for one. Median: 5.0 s",
            "Compaction failures 4 Events: compaction failed 1, sent without a due compaction 1, sent",
            "although too long 1, of a kind that was not stored 1. An event may stand for several requests.",
            "Requests sent without a due compaction: 2 of 9,311: the store 2 (store-failed). Earlier",
            "Earlier compactions still applied to 1 of them. The others were sent unchanged. Failures",
            "(store-failed) deploy 10 d ago",
            "local 9,311 4.1M of 9,300 requests 1.7M n/a n/a",
            "18 Nov 11:00:00 9,311 3 4,100,000 of 9,300 requests 1,700,000 1,200,000 4 6.0 ms $20.50 $12.41",
        ):  # fmt: skip
            assert told in text, told


async def test_where_no_price_is_known_no_dollar_is_shown() -> None:
    answers, unpriced = sample(), counters(unpriced=9_308)
    answers |= {
        "get_statistics": StatisticsReport((), unpriced),
        "get_statistics by model": StatisticsReport((StatisticsRow("local", unpriced),), unpriced),
        "get_overview": replace(answers["get_overview"], totals=Totals(prompt_tokens=9)),
    }
    async with pages(FakeAdmin(answers)) as client:
        overview = Read((await client.get("/ui")).text).text
        assert "$" not in overview
        assert (
            f"Tokens 4.1M → 1.7M {FEWER} No dollars: the prices of all used models are unknown; set models"
            in overview
        )
        page = Read((await client.get(ONE)).text).text
    assert "Net saved not known No dollars: the prices of all used models are unknown; set models." in page


LOCAL = Config.model_validate({"upstream": {"base_url": "http://127.0.0.1:9000/v1"}})
UNUSED = (
    "No dollars: list prices do not apply to an upstream on this machine or network; set upstream.prices: "
    "list or models.*.prices in config.yaml."
)


async def test_without_a_price_tokens_are_the_saving_of_a_conversation_and_the_reason_is_said() -> None:
    answers, unpriced = sample(), counters(unpriced=9_308)
    saved = Totals(
        requests=3, prompt_tokens=9, counted=2, sent_tokens=50_000, read_tokens=20_000, summary_tokens=1_500
    )
    answers |= {
        "settings": AdminSettings(LOCAL),
        "get_statistics": StatisticsReport((), unpriced),
        "get_overview": replace(answers["get_overview"], totals=saved),
    }
    async with pages(FakeAdmin(answers)) as client:
        assert UNUSED in Read((await client.get("/ui")).text).text
        assert f"No price: {UNUSED.partition(': ')[2]}" in Read((await client.get("/ui/settings")).text).text
        assert (
            f"Net saved 28.5k tokens tokens saved, gross 30,000 {MINUS} summaries 1,500 "
            f"Covers 2 of 3 requests. For the others, the token count is not known. {UNUSED}"
        ) in Read((await client.get(ONE)).text).text


async def test_where_all_requests_failed_that_is_why_there_are_no_dollars() -> None:
    failed = ExchangeCounters(requests=2, failed=2)
    async with pages(FakeAdmin(sample() | {"get_statistics": StatisticsReport((), failed)})) as client:
        text = Read((await client.get("/ui")).text).text
    assert "No dollars: all requests failed." in text
    assert "No token count is known, because all requests failed." in text
    assert "n/a" not in text


async def test_of_a_conversation_that_was_not_inspected_the_count_and_the_limits_are_shown() -> None:
    small = exchange(AT, reason="small", request_bytes=38_851, prompt_tokens=9_712)
    answers = sample() | {"list_exchanges": [ExchangeEntry("t", NAME, small, None)]}
    async with pages(FakeAdmin(answers)) as client:
        assert (
            "Context now 9.7k 9,712 tokens, counted by the provider. The last request: not inspected "
            "(small), 38,851 bytes; up to 84,998 need no compaction. Compacts at 88,500 tokens."
        ) in Read((await client.get(ONE)).text).text


async def test_a_search_that_finds_nothing_says_how_a_session_is_found() -> None:
    async with pages(FakeAdmin({**NOTHING})) as client:
        searched = Read((await client.get("/ui/conversations?q=invoice")).text).text
        filtered = Read((await client.get("/ui/conversations?model=invoice")).text).text
    assert "Nothing found for “invoice” Enter the client's own session id in full" in searched
    assert "session.store_names" not in filtered


async def test_where_summaries_took_more_than_was_removed_providers_read_more() -> None:
    answers, dear = sample(), counters()
    dear.summary_prompt_tokens = 2_910_000
    async with pages(FakeAdmin(answers | {"get_statistics": StatisticsReport((), dear)})) as client:
        text = Read((await client.get("/ui")).text).text
    assert "4.1M → 4.5M Providers read 10 % more than clients sent, summary calls included" in text


async def test_without_usage_no_price_is_blamed_for_missing_dollars() -> None:
    answers, silent = sample(), counters(unpriced=9_308)
    silent.prompt_tokens = silent.cached_tokens = 0
    answers |= {
        "get_statistics": StatisticsReport((), silent),
        "get_overview": replace(answers["get_overview"], totals=Totals()),
    }
    reason = "he provider has not reported token counts (usage)."
    async with pages(FakeAdmin(answers)) as client:
        assert f"No dollars: t{reason}" in Read((await client.get("/ui")).text).text
        assert f"Net saved not known No dollars: t{reason}" in Read((await client.get(ONE)).text).text


async def test_only_a_proxy_that_was_used_leads_to_a_longer_period() -> None:
    used = ListedConversation(NAME, Totals(), KEY)
    for conversations, is_linked in (([], False), ([used], True)):
        async with pages(FakeAdmin(NOTHING | {"list_recent_conversations": conversations})) as client:
            assert ("Look at the last 30 days" in Read((await client.get("/ui")).text).text) is is_linked


async def test_a_conversation_without_compactions_has_no_search_and_no_legend_for_what_is_not_drawn() -> None:
    small = exchange(AT, reason="small", cached_tokens=0)
    answers = sample() | {"list_compactions": [], "list_exchanges": [ExchangeEntry("t", NAME, small, None)]}
    async with pages(FakeAdmin(answers)) as client:
        text = Read((await client.get(ONE)).text).text
    assert "Tokens of each request forwarded The same as a table" in text
    assert "Search the removed messages" not in text


async def test_a_last_request_that_is_too_long_leads_to_its_cause() -> None:
    answers = sample()
    [row] = answers["list_conversations"].rows
    totals = replace(row.totals, status="over-limit", model="m/1&2")
    answers["list_conversations"] = ConversationPage([row._replace(totals=totals)], None)
    [*_, last] = answers["list_exchanges"]
    answers["list_exchanges"] = [
        last._replace(exchange=last.exchange._replace(status="over-limit", reason="nothing-to-take"))
    ]
    async with pages(FakeAdmin(answers)) as client:
        assert "/ui/failures?since=30d&kind=over-limit&model=m%2F1%262" in links(
            Read((await client.get("/ui/conversations")).text)
        )
        page = Read((await client.get(ONE)).text)
    assert "The last request: sent although too long: the request contains nothing that" in page.text
    assert "/ui/failures?since=30d&kind=over-limit" in links(page)


async def test_an_empty_proxy_says_what_to_do_next() -> None:
    async with pages(FakeAdmin(NOTHING)) as client:
        for path in ("/ui", "/ui/conversations"):
            text = Read((await client.get(path)).text).text
            assert f"export OPENAI_BASE_URL={client.base_url}/v1" in text.replace("/ /v1", "/v1")
        assert "Nothing has failed" in (await client.get("/ui/failures")).text
        assert "Nothing found for “zzz”" in (await client.get("/ui/conversations?q=zzz")).text


async def test_failures_of_upstreams_are_listed_by_cause_beside_those_of_compaction() -> None:
    api = FakeAdmin(sample())
    async with pages(api) as client:
        text = Read((await client.get("/ui/failures?since=7d")).text).text
    for told in (
        "Target Cause Count Last Models Latest conversation https://api.example:443",
        "https://api.example:443 connection refused connection-refused 1,204 18 Nov",
        "https://api.example:443 upstream answered 503 http-503 3 18 Nov 11:06:40",
        "Upstream 1,207 requests",
        "2 of 9,311 requests in the last 7 days went on without a compaction that was due: the store 2",
        "Sent without a due compaction 1 event The store: the store could not be read or written (store-",
        "(store-failed) 10 d ago · deploy · req-9",
    ):
        assert told in text, told
    assert "Nothing has failed" not in text
    assert ("list_upstream_failures", (AT - 7 * 86_400, AT), {}) in api.asked


async def test_without_the_store_failures_of_upstreams_are_shown_and_nothing_else_is_claimed() -> None:
    answers = {**sample(), "list_recent_items": AWAY}
    async with pages(FakeAdmin(answers)) as client:
        shown = await client.get("/ui/failures")
        answers["list_upstream_failures"] = ([], False)
        nothing = Read((await client.get("/ui/failures")).text).text
    assert shown.status_code == 200
    assert "upstream answered 503" in Read(shown.text).text
    for text in (Read(shown.text).text, nothing):
        assert (
            "The proxy cannot reach the store. This page shows only upstream failures of this process."
            in text
        )
    assert "Nothing has failed" not in nothing


async def test_the_list_is_searched_and_sorted() -> None:
    api = FakeAdmin(sample())
    async with pages(api) as client:
        page = Read((await client.get("/ui/conversations?q=a b&sort=net")).text)
        await client.get("/ui/conversations?sort=nonsense")
        assert (await client.get(f"/ui/conversations?q={'x' * 1_001}")).status_code == 422
        assert (await client.get(f"{ONE}/search?q={'x' * 1_001}")).status_code == 422
    assert api.asked == [
        ("list_conversations", (25, ConversationFilter(text="a b")), {"offset": 0, "sort": "net"}),
        ("list_conversations", (25, ConversationFilter()), {"offset": 0, "sort": "last"}),
    ]
    assert [each["aria-sort"] for each in page.all("th") if "aria-sort" in each] == ["descending"]
    assert "/ui/conversations?q=a+b&sort=net" in links(page)


async def test_a_conversation_is_drawn_with_its_marks_and_told_as_a_table() -> None:
    async with pages(FakeAdmin(sample())) as client:
        page = Read((await client.get(ONE)).text)
    [chart] = [json.loads(each["data-chart"] or "") for each in page.all("div") if "data-chart" in each]
    assert {each["name"]: each["values"] for each in chart["series"]} == {
        "client sent": [103_000, 103_000], "forwarded": [33_100, 33_100], "cached": [30_000, 30_000],
        "trigger": [102_000, 102_000],
    }  # fmt: skip
    assert (chart["x"], chart["marks"], chart["places"]) == ([1, 2], [None, 1], [None, PLACE])
    assert (
        "18 Nov 11:06:40 earlier compaction used: above trigger 103,000 33,000 33,100 30,000 300 2.1 ms 200"
        in page.text
    )
    assert "33k of 128k Compacts at 102,000 tokens (the mark). The client sent 103,000." in page.text
    assert f"{ONE}/compactions/{PLACE}" in links(page)
    assert "Searches" not in page.text


async def test_searches_of_the_model_have_a_column_where_there_were_any() -> None:
    told = sample()
    listed = told["list_exchanges"]
    listed[-1] = listed[-1]._replace(
        exchange=listed[-1].exchange._replace(recalls=2, recall_prompt_tokens=0), saving=None
    )
    async with pages(FakeAdmin(told)) as client:
        page = Read((await client.get(ONE)).text)
    assert "Cached Answer Searches Added time" in page.text
    assert "30,000 300 not known 2.1 ms 200 req-7" in page.text
    assert "30,000 300 2 2.1 ms 200 req-8" in page.text


@pytest.mark.parametrize(
    ("path", "form", "asked", "leads_to"),
    [
        ("compact", {}, ("request_compaction", (NAME,), {}), f"{ONE}?done=compact"),
        ("undo", {}, ("undo_round", (NAME,), {}), f"{ONE}?done=undo"),
        ("redo", {}, ("redo_round", (NAME,), {}), f"{ONE}?done=redo"),
        ("bypass", {}, ("bypass_compaction", (NAME,), {}), f"{ONE}?done=bypass"),
        ("resume", {}, ("resume_compaction", (NAME,), {}), f"{ONE}?done=resume"),
        ("pin", {"text": "a & b\u202e"}, ("add_pin", (NAME, "a & b\u202e"), {}), f"{ONE}?done=pin"),
        ("unpin", {"pin": "p_1"}, ("remove_pin", (NAME, "p_1"), {}), f"{ONE}?done=unpin"),
        (
            "remove",
            {"instruction": "i_1"},
            ("set_instruction_removed", (NAME, "i_1"), {"removed": True}),
            f"{ONE}?done=remove",
        ),
        (
            "restore",
            {"instruction": "i_1"},
            ("set_instruction_removed", (NAME, "i_1"), {"removed": False}),
            f"{ONE}?done=restore",
        ),
        ("delete", {}, ("forget_conversation", (NAME,), {}), "/ui/conversations?done=deleted"),
    ],
)
async def test_a_button_runs_a_command_and_leads_back(
    path: str, form: dict[str, str], asked: tuple[str, Any, Any], leads_to: str
) -> None:
    api = FakeAdmin({asked[0]: None})
    async with pages(api) as client:
        answer = await client.post(f"{ONE}/{path}", data=form)
    assert (answer.status_code, answer.headers["location"]) == (303, leads_to)
    assert api.asked == [asked]


async def test_what_does_not_work_is_said_in_words_with_the_status_that_the_api_has() -> None:
    unsearchable = SearchUnavailableError("no-fts5", "This SQLite has no FTS5.")
    async with pages(FakeAdmin({"search_archive": unsearchable, "undo_round": AWAY})) as client:
        for answer in (
            await client.get("/ui/conversations/c_x"),
            await client.post("/ui/conversations/c_x/bypass"),
        ):
            assert answer.status_code == 404
            assert "This conversation does not exist." in Read(answer.text).text
        for answer, status, said in (
            (await client.get(f"{ONE}/search?q=a"), 501, "This SQLite has no FTS5."),
            (await client.post(f"{ONE}/undo"), 503, "The store is not available."),
        ):
            assert answer.status_code == status
            assert said in Read(answer.text).text
        assert (await client.get("/ui/nothing")).status_code == 404
        assert (await client.get(f"{ONE}/undo")).status_code in (404, 405)
        assert (await client.post(f"{ONE}/explode")).status_code == 404
        assert (await client.post(f"{ONE}/pin", content=b"x" * 70_000)).status_code == 413
        assert (await client.post(f"{ONE}/pin", json={"text": "x"})).status_code == 415


async def test_the_overview_says_what_degrades_the_proxy_also_without_its_store() -> None:
    answers = dict.fromkeys(("get_statistics", "list_recent_items"), AWAY)
    problem = Problem("The store is <away>.", "Start it.")
    async with pages(FakeAdmin({**NOTHING, **answers, "problems": [problem]})) as client:
        answer = await client.get("/ui")
    assert answer.status_code == 200
    text = Read(answer.text).text
    assert "The store is <away>. Start it." in text
    assert "No figures The proxy keeps figures in the store, and cannot reach it now." in text


async def test_a_round_is_shown_in_one_table_that_marks_what_was_kept() -> None:
    async with pages(FakeAdmin(sample())) as client:
        page = (await client.get(f"{ONE}/compactions/{PLACE}")).text
    assert "Please deploy <mark>deploy/prod.yaml</mark> at <mark>14:03</mark>" in page
    assert "The deploy of <mark>deploy/prod.yaml</mark> failed with" in page
    text = Read(page).text
    assert text.count("The deploy of") == 1
    for told in (
        "102k → 31.9k 88 of 190 messages replaced. The upstream counted 32,010 for the first request",
        "paths 41 3 44", "written by this proxy", "the client's own", "Removed 2 messages Replaced by",
        "2 requests until it has paid for itself.", "1,026 more characters", "Price of the summary $0.01",
    ):  # fmt: skip
        assert told in text, told


async def test_a_summary_call_that_is_larger_than_the_request_is_explained() -> None:
    answers = sample()
    made, detail = answers["get_compaction"]
    larger = made._replace(event=replace(made.event, prompt_tokens=103_000))
    told = []
    for record in (made, larger):
        async with pages(FakeAdmin({**answers, "get_compaction": (record, detail)})) as client:
            told.append(Read((await client.get(f"{ONE}/compactions/{PLACE}")).text).text)
    explained = (
        "900 out. Besides the instructions, the input can have original messages in place of shortened"
    )
    assert [explained in text for text in told] == [False, True]


async def test_the_settings_keep_the_nesting_of_values_and_say_what_a_cached_token_costs() -> None:
    models = {f"m-{n}": {"window": 9_000, "prices": {"input": 2.5, "output": 9.0}} for n in (1, 2)}
    row = replace(sample()["list_models"][0], input_usd=2.5, cached_usd=2.5)
    answers = {
        **sample(),
        "settings": AdminSettings(Config.model_validate({"models": models})),
        "list_models": [row],
    }
    async with pages(FakeAdmin(answers)) as client:
        page = Read((await client.get("/ui/settings")).text)
        answers["list_models"] = []
        unused = Read((await client.get("/ui/settings")).text).text
    assert "$2.50 $2.50 as input" in page.text
    for number in (1, 2):
        assert f"m-{number}: {{window: 9000, prices: {{input: 2.5, output: 9.0}}}}" in page.text
    assert {"Value", "Origin"} <= {each.get("data-label") for each in page.all("td")}
    assert "models: my-model: {window: 128000" in unused


def test_every_strategy_has_a_hint() -> None:
    assert list(STRATEGY_HINTS) == list(STRATEGIES)


async def test_the_playground_hands_on_what_was_pasted_and_shows_what_came_of_it() -> None:
    api = FakeAdmin(sample())
    pasted = '{"model": "m", "messages": [{"role": "user", "content": "a&b=c"}], "stream": true}'
    form = {
        "transcript": pasted,
        "strategy": ["anchored", "prune", "none-such"],
        "trigger": "5000",
        "window": "0",
    }
    async with pages(api) as client:
        answer = await client.post("/ui/playground", data=form)
        for wrong in ({}, {"transcript": "{"}, {"transcript": "{}"}, {"transcript": "5"}):
            assert (await client.post("/ui/playground", data=wrong)).status_code == 422
        assert (await client.post("/ui/playground", data={"conversation": NAME})).status_code == 200
    messages = b'[{"role": "user", "content": "a&b=c"}]'
    assert [args for name, args, _ in api.asked if name == "run_job"] == [
        (
            ReplayJob(
                "", {"messages": messages}, ("anchored", "prune"), ReplayOptions("m", trigger_tokens=5000)
            ),
        ),
        (ReplayJob(NAME, {}, ("anchored",)),),
    ]
    text = Read(answer.text).text
    assert (
        "anchored 1 120k of 300k 101,000 80 % 90 % without it 0 1 without it $1.60 $3.10 without it "
        "$0.10 $1.40" in text
    )
    assert (
        "prune 1 120k of 300k 101,000 80 % 90 % without it 0 1 without it n/a n/a without it n/a "
        "1 tokens after 2" in text
    )


async def test_a_transcript_that_is_too_large_is_refused_and_does_not_come_back() -> None:
    api = FakeAdmin(sample())
    async with pages(api, timeout=100) as client:
        answers = [
            await client.post("/ui/playground", data={"transcript": letter * size})
            for letter, size in (("x", 24_000_000), ("[", MAX_PASTED_BYTES + 1))
        ]
    assert [(each.status_code, len(each.text) < 10_000) for each in answers] == [(413, True)] * 2
    assert "The transcript is larger than 8,388,608 bytes" in Read(answers[0].text).text
    assert "run_job" not in [name for name, _, _ in api.asked]


async def test_what_takes_too_long_to_replay_does_not_come_back_either() -> None:
    refused = RequestRefusedError(413, "The rehearsal took more than 30 s", "too_large")
    async with pages(FakeAdmin({**sample(), "run_job": refused})) as client:
        answer = await client.post("/ui/playground", data={"transcript": '["known text"]'})
    assert (answer.status_code, "known text" in answer.text) == (413, False)
    assert "The rehearsal took more than 30 s" in Read(answer.text).text


async def test_what_needs_no_store_is_shown_without_one() -> None:
    async with pages(FakeAdmin({**sample(), "list_models": AWAY, "list_conversations": AWAY})) as client:
        settings = await client.get("/ui/settings")
        played = await client.post("/ui/playground", data={"transcript": "[5]"})
        listed = await client.get("/ui/conversations")
    assert [each.status_code for each in (settings, played, listed)] == [200, 200, 503]
    text = Read(settings.text).text
    assert "The proxy cannot reach the store, so it does not know which models were used." in text
    assert "upstream.base_url https://api.openai.com/v1" in text
    assert "prune" in Read(played.text).text


async def test_a_round_that_no_request_has_used_is_shown_as_prepared() -> None:
    made = sample()["list_compactions"][0]
    used = made._replace(event=replace(made.event, round=1), state="in-use")
    ahead = made._replace(
        event=replace(made.event, round=2, outcome="scheduled", place="cd" * 64),
        state="prepared",
        used_at=None,
    )
    item = FeedItem("1", COMPACTION, to_fields(ahead.event))
    detail = replace(sample()["get_compaction"][1], event=ahead.event)
    answers = {
        **sample(),
        "list_compactions": [used, ahead],
        "get_compaction": (ahead, detail),
        "list_recent_items": [item],
    }
    async with pages(FakeAdmin(answers)) as client:
        overview = Read((await client.get("/ui")).text).text
        page = Read((await client.get(ONE)).text).text
        shown = Read((await client.get(f"{ONE}/compactions/{'cd' * 64}")).text).text
    assert "Prepared 88 messages, 102k → 31.9k, for a later request" in overview
    assert "Compacted" not in overview
    assert (
        "Compactions 2 Requests have used 1 of them, which the chart marks. 1 was prepared, and not used"
        in page
    )
    assert "The newest: prepared, not used yet. In use: Round 1 of anchored." in page
    assert "Undo Round 1 of anchored" in page
    assert "prepared, not used yet" in shown
    assert "messages would be replaced." in shown
    assert "The model would see" in shown
    assert "Seen by the model" not in shown


async def test_the_page_says_which_round_was_undone_offers_to_redo_it_and_says_what_comes_next() -> None:
    answers = sample()
    made = answers["list_compactions"][0]
    overview = answers["get_overview"]
    directives = replace(overview.directives, undone=(bytes.fromhex(PLACE),))
    answers |= {
        "get_overview": replace(overview, directives=directives),
        "list_compactions": [made._replace(undone=True, state="undone")],
    }
    async with pages(FakeAdmin(answers)) as client:
        page = Read((await client.get(f"{ONE}?done=undo")).text).text
    assert "Round 1 of anchored, made 18 Nov 11:06:40 , is undone." in page
    assert "Redo Round 1 of anchored" in page
    assert "The next request is sent in full. Compaction is paused, except when a request exceeds" in page
    assert "x-compaction: bypass" in page
    assert "Round 1 of anchored undone" in page


async def test_the_overview_counts_what_its_filters_select() -> None:
    api = FakeAdmin(sample())
    async with pages(api) as client:
        page = Read((await client.get("/ui?since=7d&model=local&key=k_0123456789ab")).text)
        custom = Read((await client.get("/ui?since=custom&from=2026-11-17T00:00&to=2026-11-18T11:00")).text)
    asked = {args[2]: (args[:2], kwargs) for name, args, kwargs in api.asked[:6] if name == "get_statistics"}
    week = (AT - 7 * 86_400, AT)
    assert asked == {
        "hour": (week, {"model": "local", "key": "k_0123456789ab"}),
        "model": (week, {"key": "k_0123456789ab"}),
        "key": (week, {"model": "local"}),
    }
    assert "team-a (k_0123456789ab)" in page.text
    assert "gpt-5.6 9,311" not in page.text
    [charts] = [
        [json.loads(each["data-chart"] or "") for each in shown.all("div") if "data-chart" in each]
        for shown in (custom,)
    ]
    assert len(charts) == 5
    assert (charts[0]["step"], charts[0]["x"][0], charts[0]["x"][-1]) == (3_600, 1_794_873_600, 1_794_999_600)


@pytest.mark.parametrize(
    ("since", "step_s", "columns"), [("1h", 3_600, 2), ("7d", 21_600, 29), ("30d", 86_400, 31)]
)
async def test_the_columns_of_a_long_period_are_few(since: str, step_s: int, columns: int) -> None:
    async with pages(FakeAdmin(sample())) as client:
        page = Read((await client.get(f"/ui?since={since}")).text)
    chart = next(json.loads(each["data-chart"] or "") for each in page.all("div") if "data-chart" in each)
    assert (chart["step"], len(chart["x"])) == (step_s, columns)
    assert sum(chart["series"][0]["values"]) == 2 * 4_100_000


async def test_the_list_names_conversations_where_names_are_stored_and_says_how_else() -> None:
    answers = sample()
    [row] = answers["list_conversations"].rows
    named = row._replace(totals=replace(row.totals, title="Fix the build", name="s-1", priced=0))
    async with pages(FakeAdmin(answers)) as client:
        plain = Read((await client.get("/ui/conversations")).text).text
        answers["list_conversations"] = ConversationPage([named], None)
        shown = Read((await client.get("/ui/conversations")).text).text
    assert "set session.store_names and session.store_titles to true" in plain
    assert "Fix the build s-1 · gpt-5.6 · c_01234567…" in shown
    assert "n/a" not in shown
    assert "earlier compaction used" in shown


async def test_a_transcript_says_which_round_removed_a_message_and_which_messages_were_kept() -> None:
    async with pages(FakeAdmin(sample())) as client:
        page = Read((await client.get(f"{ONE}/transcript")).text)
    assert (
        "Not removed by any compaction so far user 1 And now? "
        "Removed by Round 1 of anchored 18 Nov 11:06:40 user 4" in page.text
    )
    assert f"{ONE}/messages/m_2" in links(page)
    assert "1 to 3 of 3 stored messages" in page.text


async def test_a_message_has_one_number_on_all_pages_and_leads_to_its_place_in_the_transcript() -> None:
    answers = sample()
    removed = answers["list_archived_messages"]
    later = [
        replace(removed[0], message=replace(removed[0].message, id=f"m_later{n}", index=n, text=" "))
        for n in range(5, 150)
    ]
    answers["list_archived_messages"] = [*removed, *later]
    async with pages(FakeAdmin(answers)) as client:
        for path, told in (
            ("search?q=said", "tool 5 removed by round 1 of anchored"),
            ("messages/m_2", "Removed message 5"),
            (f"compactions/{PLACE}", "tool 5 exit 1"),
        ):
            assert told in Read((await client.get(f"{ONE}/{path}")).text).text, path
        message = Read((await client.get(f"{ONE}/messages/m_2?q=exit&scope=tenant")).text)
        page = Read((await client.get(f"{ONE}/transcript?message=130")).text)
    assert f"{ONE}/transcript?message=5#message-5" in links(message)
    assert f"{ONE}/search?q=exit&scope=tenant" in links(message)
    assert "101 to 148 of 148 stored messages" in page.text
    assert "user 130 empty" in page.text
    assert "message-130" in {each.get("id") for each in page.all("article")}


async def test_a_search_says_which_words_no_excerpt_has_and_which_hits_have_none() -> None:
    answers = sample()
    answers["search_archive"] += [replace(answers["search_archive"][0], snippet="exit 1", round=0)]
    answers["get_overview"] = replace(answers["get_overview"], totals=Totals(name="build"))
    async with pages(FakeAdmin(answers)) as client:
        page = Read((await client.get(f"{ONE}/search?q=it said HAT229&scope=tenant")).text)
        answers["search_archive"] = []
        nothing = Read((await client.get(f"{ONE}/search?q=a")).text).text
        answers["list_compactions"] = []
        never = Read((await client.get(f"{ONE}/search?q=a")).text).text
    assert "Conversations / build Search the removed messages" in page.text
    assert "2 messages, as excerpts · no excerpt contains: hat229 ·" in page.text
    assert "11:06:40 , this conversation said 502" in page.text
    assert "shortened, 18 Nov 11:06:40 , this conversation, found by the messages next to it" in page.text
    assert "No removed message matches “a”." in nothing
    assert "No compaction has removed messages of this conversation yet." in never


async def test_a_text_that_the_page_cuts_ends_with_an_ellipsis() -> None:
    answers = sample()
    found = answers["get_archived_message"]
    long = replace(found.message, text="word " * 60_000)
    answers["get_archived_message"] = replace(found, message=long)
    async with pages(FakeAdmin(answers)) as client:
        cut = Read((await client.get(f"{ONE}/messages/m_2")).text).text
        whole = Read((await client.get(f"{ONE}/messages/m_2?whole")).text).text
    assert "… Show all 300,000 characters" in cut
    assert "…" not in whole


async def test_hits_are_marked_link_to_the_message_and_to_the_search() -> None:
    async with pages(FakeAdmin(sample())) as client:
        found = (await client.get(f"{ONE}/search?q=SAID")).text
        message = (await client.get(f"{ONE}/messages/m_2?q=exit")).text
    assert "<mark>said</mark> 502" in found
    assert f"{ONE}/search?q=SAID&scope=conversation" in links(Read(found))
    assert f"{ONE}/messages/m_2?q=SAID&scope=conversation" in links(Read(found))
    assert "<mark>exit</mark> 1" in message


async def test_failures_of_compactions_are_grouped_counted_and_filtered() -> None:
    answers = sample()
    failed = answers["list_recent_items"][1]
    fields = {**failed.fields, "kind": "failed", "reason": "deadline", "asked": "m"}
    answers["list_recent_items"] = [failed, failed, failed._replace(fields=fields)]
    async with pages(FakeAdmin(answers)) as client:
        every = Read((await client.get("/ui/failures")).text).text
        one = Read((await client.get("/ui/failures?kind=failed&model=m")).text).text
        none = Read((await client.get("/ui/failures?model=unused&kind=over-limit")).text).text
    assert "Compaction 3 events Sent without a due compaction 2 events" in every
    assert "Compaction failed 1 event the summary was not ready" in every
    assert "Compaction 1 event Compaction failed 1 event" in one
    assert "Sent without a due compaction 2 events" not in one
    assert "Upstream 1,207 requests" not in one
    assert "No such failure" in none


async def test_the_failures_of_an_hour_that_the_period_overlaps_are_listed_as_they_are_counted() -> None:
    answers = sample()
    [failed] = answers["list_recent_items"][1:]
    hour = AT // 3_600 * 3_600 - 3_600
    answers["list_recent_items"] = [
        failed._replace(fields={**failed.fields, "at": at}) for at in (AT, hour, hour - 1)
    ]
    async with pages(FakeAdmin(answers)) as client:
        assert "Compaction 2 events" in Read((await client.get("/ui/failures?since=1h")).text).text


async def test_the_playground_offers_only_conversations_whose_messages_are_stored() -> None:
    answers = sample()
    [row] = answers["list_conversations"].rows
    fresh = row._replace(id="c_fresh", totals=replace(row.totals, rounds=0))
    answers["list_conversations"] = ConversationPage([row, fresh], None)
    async with pages(FakeAdmin(answers)) as client:
        page = Read((await client.get("/ui/playground")).text)
        example = Read((await client.get("/ui/playground?example")).text)
        linked = [Read((await client.get(f"/ui/playground?conversation={NAME}")).text)]
        answers["list_compactions"] = []
        linked.append(Read((await client.get(f"/ui/playground?conversation={NAME}")).text))
    assert [each["value"] for each in page.all("option")] == ["", NAME]
    chosen = [[each["value"] for each in shown.all("option") if "selected" in each] for shown in linked]
    assert chosen == [[NAME], []]
    assert "This conversation was not compacted yet" in linked[1].text
    assert "prune: the task and the newest messages; no summary" in page.text
    messages = json.loads(example.text[example.text.index("[ {") : example.text.rindex("} ]") + 3])
    assert [each["role"] for each in messages[:4]] == ["system", "user", "assistant", "tool"]


async def test_one_state_of_a_conversation_is_said_at_a_time() -> None:
    answers = sample()
    overview = answers["get_overview"]
    said = []
    for directives in (
        Directives(bypass=True, compact=True, suppressed=True),
        Directives(compact=True, suppressed=True),
        Directives(suppressed=True),
    ):
        answers["get_overview"] = replace(overview, directives=directives)
        async with pages(FakeAdmin(answers)) as client:
            page = Read((await client.get(f"{ONE}?done=compact")).text)
        said.append([each["class"] for _, each in page.elements if "notice" in str(each.get("class"))])
    assert said == [["notice"]] * 3
