"""`watch`: a line for each message of the stream, and a stream taken up where it broke."""

import json
from collections.abc import Callable, Iterator
from itertools import islice

import pytest
from typer.testing import Result

from compaction_proxy.cli.admin_client import AdminClient
from compaction_proxy.cli.watch import StreamMessage, follow_events, format_event_line
from tests.helpers.scripted_admin import Scripted

Run = Callable[..., Result]
REFUSED = (401, {"error": {"message": "no"}})


def message(number: int, event: str, **fields: object) -> bytes:
    return f"id: {number}\nevent: {event}\ndata: {json.dumps(fields)}\n\n".encode()


@pytest.fixture
def told(script: Scripted) -> Scripted:
    """A stream that breaks in the middle of its second message; then one more; then the key is refused."""
    first = b": here\n\n" + message(1, "exchange", conversation="c_1", status="none", code=200)
    script.streams += [
        first + b"id: 2\nevent: compaction\nda",
        message(2, "compaction", kind="failed", conversation="c_1\x1b[2J", reason="summary-failed"),
    ]
    script.answers["GET", "/admin/v1/events/stream"] = REFUSED
    return script


def test_a_stream_that_broke_is_taken_up_where_it_broke(told: Scripted) -> None:
    found: Iterator[StreamMessage] = follow_events(AdminClient(told.url), lambda _: None)
    assert [(each.id, each.kind) for each in islice(found, 2)] == [("1", "exchange"), ("2", "compaction")]
    assert told.last_ids == [None, "1"]


def test_each_message_is_a_line_until_the_proxy_refuses(told: Scripted, run: Run) -> None:
    done = run("watch", "--url", told.url)
    assert done.exit_code == 1
    assert [line.split()[1:4] for line in done.stdout.splitlines()] == [
        ["exchange", "none", "c_1"],
        ["compaction", "failed", r"c_1\x1b[2J"],
    ]
    assert "the proxy rejects the admin key" in done.stderr


def test_failures_only_and_json_for_programs(told: Scripted, run: Run) -> None:
    done = run("watch", "--failures", "--json", "--url", told.url)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {
            "id": "2",
            "event": "compaction",
            "data": {"kind": "failed", "conversation": "c_1\x1b[2J", "reason": "summary-failed"},
        }
    ]


def test_a_line_says_sizes_and_why(script: Scripted) -> None:
    fields = {
        "at": 0, "kind": "compacted", "conversation": "c_1", "asked": "gpt-5.4", "tokens_before": 45000,
        "tokens_after": 12000, "strategy": "anchored", "round": 2, "reason": "tokens", "seconds": 1.23456,
    }  # fmt: skip
    assert format_event_line("compaction", fields).split()[1:] == [
        "compaction", "compacted", "c_1", "gpt-5.4", "45,000", "→", "12,000", "by", "anchored", "round", "2",
        "took", "s", "1.235", "because", "tokens",
    ]  # fmt: skip


def test_a_line_says_how_often_the_model_searched_where_it_did() -> None:
    fields = {"at": 0, "status": "reused", "conversation": "c_1", "model": "gpt-5.4", "code": 200}
    with_searches, without = (
        format_event_line("exchange", {**fields, **more}) for more in ({"recalls": 2}, {})
    )
    assert with_searches == f"{without}  searches 2"


def test_a_line_says_which_provider_fails_why_and_how_often() -> None:
    fields = {"at": 0, "target": "https://up.example:443", "cause": "answer-timeout", "count": 1}
    line = format_event_line("upstream", fields).partition("  ")[2]
    assert line == "upstream    failed       https://up.example:443  no answer in time (answer-timeout)"
    assert format_event_line("upstream", {**fields, "count": 1_200}).endswith("(answer-timeout)  1,200 times")


def test_an_exchange_without_an_answer_says_so() -> None:
    fields = {"at": 0, "status": "none", "conversation": "c_1", "model": "gpt-5.4", "code": 0}
    assert format_event_line("exchange", fields).endswith("c_1  gpt-5.4  no answer")


def test_what_came_too_fast_is_counted() -> None:
    assert format_event_line("lost", {"lost": 1_200}) == (
        "1,200 messages skipped: too many arrived at the same time"
    )


@pytest.mark.parametrize("data", [b"data: [1]\n\n", b"data: nonsense\n\n", b"data:\n\n", b"id: 9\n\n"])
def test_what_is_no_message_of_ours_does_no_harm(data: bytes, script: Scripted, run: Run) -> None:
    script.streams.append(data)
    script.answers["GET", "/admin/v1/events/stream"] = REFUSED
    done = run("watch", "--url", script.url)
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
