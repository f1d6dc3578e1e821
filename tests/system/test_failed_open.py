"""Requests that failed open: both pages count the same, and say what failed and what still applied."""

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.summaries import put_as_asked
from tests.system.black_box import Provider, Received, Reply, chat_reply, run_proxy

SUMMARY_MODEL = "writer"
STRATEGY = {"trigger": [{"tokens": 2_000}], "background": False, "strategy": "chained"}
CONFIG = {
    "compaction": STRATEGY,
    "summary": {"model": SUMMARY_MODEL},
    "models": {"m": {"window": 100_000}},
}
WORDS = "one word and another and so on " * 40
SUMMARY = "The user asked for words, and the assistant gave them. Nothing else is open. " * 6


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider()
    yield made
    made.close()


def read_text(client: httpx.Client, path: str) -> str:
    """The text of a page."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", client.get(path).text)).split())


def write_summary(request: Received) -> Reply:
    """A summary in the form that the call asks for."""
    asked = [str(each["content"]) for each in request.json()["messages"]]
    return chat_reply(request, put_as_asked(SUMMARY, *asked))


def ask(client: httpx.Client, session: str, turns: int) -> httpx.Response:
    """A conversation with this many turns."""
    talk = [
        {"role": role, "content": f"{session} {turn} {WORDS}"}
        for turn in range(turns)
        for role in ("user", "assistant")
    ]
    body = {"model": "m", "messages": [*talk, {"role": "user", "content": "And now?"}]}
    answer = client.post("/v1/chat/completions", json=body, headers={"x-session-id": session})
    assert answer.status_code == 200
    return answer


def test_both_pages_count_the_same_and_say_what_failed_and_what_still_applied(
    tmp_path: Path, provider: Provider
) -> None:
    is_broken = False

    def answer(request: Received) -> Reply:
        if request.json()["model"] != SUMMARY_MODEL:
            return chat_reply(request)
        return Reply(500, b'{"error": {"message": "no"}}') if is_broken else write_summary(request)

    provider.answer = answer
    with run_proxy(tmp_path, provider.url, CONFIG) as proxy, proxy.client() as client:
        assert ask(client, "first", 12).headers["x-compaction-status"] == "applied"
        is_broken = True
        kept = ask(client, "first", 40)  # the round before still applies to this
        fresh = [ask(client, f"other {number}", 12) for number in range(2)]
        assert [each.headers["x-compaction-status"] for each in (kept, *fresh)] == ["failed-open"] * 3
        assert int(kept.headers["x-compaction-tokens-saved"]) > 0

        def total() -> Any:
            return client.get("/admin/v1/stats").json()["total"]

        proxy.wait_for(lambda: total()["failed_open"] == 3, "all requests are counted")
        sums = total()
        overview, failures = read_text(client, "/ui"), read_text(client, "/ui/failures")
        metrics = client.get("/metrics").text

    counts = re.findall(r'^compaction_requests_total\{.*status="failed-open"\} (\S+)$', metrics, re.MULTILINE)
    assert [float(count) for count in counts] == [3]
    assert sums["failed_open_reasons"] == {"http-500": 1, "breaker-open": 2}
    told = (
        "went on without a compaction that was due: the summary model 2 (breaker-open), the summary model 1 "
    )
    told += "(http-500). Earlier compactions still applied to 1 of them. The others were sent unchanged."
    [(events, *parts)] = re.findall(
        r"Compaction failures (\d+) Events: compaction failed (\d+), sent without a due compaction (\d+)\.",
        overview,
    )
    assert sum(map(int, parts)) == int(events)
    assert f"Compaction {events} events" in failures
    assert "Requests sent without a due compaction: 3 of 4: " in overview
    assert told.partition(": ")[2] in overview
    assert f"Sent without a due compaction 3 requests 3 of 4 requests in the last 24 hours {told}" in failures
    assert failures.count("Earlier compactions still applied: ") == 1
    assert failures.count("The unchanged request.") == 2
    for group in ("2 events The summary model: ", "1 event The summary model: "):
        assert failures.count(f"Sent without a due compaction {group}") == 1
