"""`sessions` and `search`, against a scripted admin server: what they ask for, print, and end with."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from typer.testing import Result

import compaction_proxy
from compaction_proxy.cli.sessions import format_conversation
from compaction_proxy.support.formatting import describe_missing_price
from tests.helpers.free_ports import find_free_port
from tests.helpers.scripted_admin import Scripted

ID = "c_" + "ab12" * 6
OTHER = "c_" + "ab99" * 6
Run = Callable[..., Result]
ROW = {
    "id": ID, "model": "gpt-5.4", "status": "applied", "requests": 12, "rounds": 2, "last_at": 0,
    "prompt_tokens": 1000, "cached_tokens": 640, "tokens_before": 45000, "tokens_after": 12000,
    "cost_usd": 1.5, "net_usd": None,
}  # fmt: skip


def test_list_shows_a_line_for_each_conversation_and_passes_on_what_is_asked(
    script: Scripted, run: Run
) -> None:
    script.put("GET", "/conversations", {"conversations": [ROW]})
    done = run("sessions", "list", "--sort", "net", "--limit", "7", "--search", "gpt x", "--url", script.url)
    titles, line = done.stdout.splitlines()
    assert (done.exit_code, done.stderr) == (0, "")
    assert titles.split("  ")[0] == "id"
    assert line.startswith(f"{ID}  gpt-5.4  applied")
    assert "requests  rounds  last sent  last read  cached" in titles
    assert line.split()[-7:] == ["2", "45,000", "12,000", "64", "%", "$1.50", "n/a"]
    assert script.asked[0][1] == "/admin/v1/conversations?limit=7&sort=net&q=gpt+x"


def test_list_and_show_say_of_how_many_requests_the_dollars_are(script: Scripted, run: Run) -> None:
    script.put("GET", "/conversations", {"conversations": [{**ROW, "priced": 9}, {**ROW, "priced": 12}]})
    titles, *lines = run("sessions", "list", "--url", script.url).stdout.splitlines()
    assert titles.split()[-4:] == ["priced", "cost", "net", "saved"]
    assert [line.split()[-3:] for line in lines] == [["9", "$1.50", "n/a"], ["12", "$1.50", "n/a"]]

    totals = {"requests": 12, "priced": 9, "counted": 10}
    show = put_conversation(script, {"totals": totals, "money": {"net_usd": 1.5}})
    figures = read_figures(run(*show).stdout)
    assert [figures[name] for name in ("tokens of", "dollars of", "net saved")] == [
        "10 of 12 requests", "9 of 12 requests", "$1.50",
    ]  # fmt: skip


def put_conversation(script: Scripted, record: Mapping[str, object], **last: object) -> list[str]:
    """Has the server answer for one conversation. Returns the command that shows it."""
    script.put("GET", f"/conversations/{ID}", {"id": ID, **record})
    script.put("GET", f"/conversations/{ID}/compactions", {"compactions": []})
    script.put("GET", f"/conversations/{ID}/exchanges", {"exchanges": [last] if last else []})
    return ["sessions", "show", ID, "--url", script.url]


def read_figures(shown: str) -> dict[str, str]:
    """The figures of a conversation, by their titles."""
    pairs = (line.split("  ", 1) for line in shown.partition("\n\n")[0].splitlines())
    return {title: value.strip() for title, value in pairs}


def test_show_has_tokens_and_the_reason_where_there_is_no_price(script: Scripted, run: Run) -> None:
    record = {
        "totals": {"requests": 3, "prompt_tokens": 9, "counted": 3},
        "money": None,
        "tokens": {"gross_tokens": 30_000, "summary_tokens": 1_500, "net_tokens": 28_500},
        "list_prices": False,
    }
    figures = read_figures(run(*put_conversation(script, record)).stdout)
    assert [figures[f"tokens {name}"] for name in ("saved, gross", "for summaries", "saved, net")] == [
        "30,000", "1,500", "28,500",
    ]  # fmt: skip
    assert figures["net saved"] == (
        "n/a: list prices do not apply to an upstream on this machine or network; set `upstream.prices: "
        "list` or `models.*.prices` in config.yaml"
    )
    assert not {"cost", "summaries"} & set(figures)


def test_show_says_that_all_requests_failed_and_why_the_last_one_did(script: Scripted, run: Run) -> None:
    totals = {"requests": 2, "failed": 2, "failure": "429 insufficient_quota"}
    figures = read_figures(run(*put_conversation(script, {"totals": totals, "money": None})).stdout)
    assert figures["failed"] == "2 of 2 requests failed: 429 insufficient_quota"
    assert figures["net saved"] == "n/a: all requests failed"


def test_show_says_with_what_a_small_request_was_compared(script: Scripted, run: Run) -> None:
    small = {"status": "none", "reason": "small", "request_bytes": 38_851, "prompt_tokens": 9_712}
    show = put_conversation(script, {"small_bytes": 73_453, "min_trigger": 88_500}, **small)
    figures = read_figures(run(*show).stdout)
    assert figures["last request"] == "not inspected (small), 38,851 bytes; up to 73,453 need no compaction"
    assert figures["context now"] == ("9,712 tokens (counted by the provider); compacts at 88,500 tokens")
    totals = {"tokens_after": 12_000, "window": 128_000, "trigger": 90_000}
    figures = read_figures(run(*put_conversation(script, {"totals": totals})).stdout)
    assert figures["context now"] == "12,000 tokens of 128,000; compacts at 90,000 tokens"
    assert figures["last request"] == "n/a"


def test_a_search_that_finds_nothing_says_how_a_session_is_found(script: Scripted, run: Run) -> None:
    script.put("GET", "/conversations", {"conversations": []})
    shown = run("sessions", "list", "--search", "invoice", "--url", script.url).stdout
    assert shown.splitlines()[-1] == (
        "Nothing found. Enter the client's own session id in full. A part of it is enough only if "
        "session.store_names is true."
    )
    assert "Nothing found" not in run("sessions", "list", "--url", script.url).stdout


def test_list_as_json_is_what_the_server_says(script: Scripted, run: Run) -> None:
    script.put("GET", "/conversations", {"conversations": [ROW]})
    done = run("sessions", "list", "--json", "--url", script.url)
    assert json.loads(done.stdout) == {"conversations": [ROW]}


def test_texts_of_a_server_cannot_steer_the_terminal(script: Scripted, run: Run) -> None:
    evil = {**ROW, "model": "\x1b]0;owned\x07\u202egpt\n\ud800"}
    script.put("GET", "/conversations", {"conversations": [evil]})
    done = run("sessions", "list", "--url", script.url)
    assert r"\x1b]0;owned\x07\u202egpt\n\ud800" in done.stdout
    assert len(done.stdout.splitlines()) == 2


def test_a_part_of_an_id_is_enough_where_one_conversation_begins_with_it(script: Scripted, run: Run) -> None:
    script.put("GET", "/conversations", {"conversations": [ROW, {**ROW, "id": OTHER}]})
    script.put("GET", "/conversations?limit=1000&session=ab12", {"conversations": []})
    script.put("POST", f"/conversations/{ID}/compact", {"id": ID, "compact": True}, 202)
    done = run("sessions", "compact", "ab12", "--url", script.url)
    assert (done.exit_code, done.stdout) == (0, f"{ID}: the proxy will compact the next request\n")
    several, none = (run("sessions", "undo", each, "--url", script.url) for each in ("c_ab", "c_zz"))
    assert (several.exit_code, several.stderr) == (1, "2 conversations match 'c_ab'\n")
    assert (none.exit_code, none.stderr) == (1, "no conversation has the id, prefix or session id 'c_zz'\n")


def test_an_id_that_is_one_conversation_s_own_and_another_s_beginning_is_refused(
    script: Scripted, run: Run
) -> None:
    script.put("GET", "/conversations", {"conversations": [ROW]})
    script.put("GET", "/conversations?limit=1000&session=ab", {"conversations": [{**ROW, "id": OTHER}]})
    done = run("sessions", "delete", "ab", "--yes", "--url", script.url)
    assert (done.exit_code, done.stderr) == (1, "2 conversations match 'ab'\n")
    assert {method for method, *_ in script.asked} == {"GET"}


@pytest.mark.parametrize("session", ["", "c_"])
def test_an_empty_id_names_no_conversation_even_if_there_is_only_one(
    session: str, script: Scripted, run: Run
) -> None:
    script.put("GET", "/conversations", {"conversations": [ROW]})
    done = run("sessions", "delete", session, "--yes", "--url", script.url)
    assert (done.exit_code, done.stdout, done.stderr) == (
        1, "", "ID: the conversation id is empty\n",
    )  # fmt: skip
    assert not any(method == "DELETE" for method, *_ in script.asked)


def test_an_id_of_a_server_that_is_none_is_not_taken(script: Scripted, run: Run) -> None:
    script.put("GET", "/conversations", {"conversations": [{**ROW, "id": "c_1\x1b[2J"}]})
    done = run("sessions", "compact", "c_1", "--url", script.url)
    assert (done.exit_code, done.stdout, done.stderr) == (
        1, "", "no conversation has the id, prefix or session id 'c_1'\n",
    )  # fmt: skip


def test_an_argument_that_is_no_text_is_no_traceback(script: Scripted, run: Run) -> None:
    script.put("GET", "/conversations", {"conversations": []})
    done = run("sessions", "list", "--search", "\udcff", "--url", script.url)
    assert (done.exit_code, done.exception) == (0, None)


def test_show_prints_figures_rounds_and_pins_and_unknown_money_as_such(script: Scripted, run: Run) -> None:
    seen = {
        "id": ID, "totals": {"model": "m", "requests": 3, "prompt_tokens": 10, "cached_tokens": 5},
        "money": None, "bypass": True, "compact": False, "suppressed": False,
        "pins": [{"id": "p_1", "text": "never push to main"}],
    }  # fmt: skip
    made = {
        "round": 1,
        "at": 0,
        "strategy": "anchored",
        "tokens_before": 9,
        "tokens_after": 4,
        "undone": True,
        "state": "undone",
        "used_at": 5.0,
    }
    script.put("GET", f"/conversations/{ID}", seen)
    script.put("GET", f"/conversations/{ID}/compactions", {"compactions": [made]})
    script.put("GET", f"/conversations/{ID}/exchanges", {"exchanges": []})
    lines = run("sessions", "show", ID, "--url", script.url).stdout.splitlines()
    figures = dict(line.split("  ", 1) for line in lines[: lines.index("")])
    assert {name: value.strip() for name, value in figures.items()}["cached"] == "50 %"
    assert [line for line in lines if line.startswith(("net saved", "user actions"))] == [
        f"net saved             n/a: {describe_missing_price(list_prices=True)}",
        "user actions          bypass: requests are forwarded unchanged until `sessions resume`",
    ]
    assert lines[-1] == "p_1  never push to main"
    assert not [line for line in lines if line.startswith("searches")]
    assert [line.split()[-1] for line in lines if "anchored" in line] == ["undone"]


def test_show_says_in_words_what_an_undo_has_left_and_which_round_is_in_use(
    script: Scripted, run: Run
) -> None:
    seen = {"id": ID, "totals": {"model": "m"}, "suppressed": True, "hard_tokens": 103_500}
    made = [
        {"round": 1, "at": 0, "strategy": "anchored", "outcome": "applied", "state": "in-use", "used_at": 5},
        {"round": 2, "at": 0, "strategy": "anchored", "outcome": "scheduled", "state": "prepared"},
    ]
    script.put("GET", f"/conversations/{ID}", seen)
    script.put("GET", f"/conversations/{ID}/compactions", {"compactions": made})
    script.put("GET", f"/conversations/{ID}/exchanges?limit=1", {"exchanges": []})
    lines = run("sessions", "show", ID, "--url", script.url).stdout.splitlines()
    assert (
        "user actions          paused after an undo, until a request exceeds about 103,500 tokens or "
        "`sessions compact`"
    ) in lines
    assert lines[-2].endswith("in use since 01 Jan 00:00:05")
    assert lines[-1].endswith("prepared, not used yet")


def test_undo_says_which_round_it_took_back_and_what_comes_next(script: Scripted, run: Run) -> None:
    answer = {"round": 1, "strategy": "full", "at": 0, "dropped": [2], "remaining": None}
    script.put("POST", f"/conversations/{ID}/undo", {**answer, "hard_tokens": 103_500})
    lines = run("sessions", "undo", ID, "--url", script.url).stdout.splitlines()
    assert lines[0].startswith(f"{ID}: undid the latest compaction: round 1 of full, made ")
    assert lines[1] == "Also discarded prepared compactions: round 2."
    assert lines[2] == (
        "The next request is sent in full. Compaction is paused, except when a request exceeds about 103,500 "
        "tokens. `sessions bypass`, or the request header `x-compaction: bypass`, prevents this."
    )


def test_undo_names_the_strategy_of_the_compaction_that_is_in_use_again(script: Scripted, run: Run) -> None:
    answer = {"round": 1, "strategy": "full", "remaining": 3, "remaining_strategy": "anchored"}
    script.put("POST", f"/conversations/{ID}/undo", answer)
    text = run("sessions", "undo", ID, "--url", script.url).stdout
    assert "The next request is sent with round 3 of anchored. Compaction is paused" in text


def test_a_time_of_the_last_request_that_is_unknown_is_not_that_of_the_epoch(
    script: Scripted, run: Run
) -> None:
    script.put("GET", "/conversations", {"conversations": [{**ROW, "last_at": 0}]})
    script.put("GET", f"/conversations/{ID}", {"id": ID, "totals": {"last_at": 0}})
    script.put("GET", f"/conversations/{ID}/compactions", {"compactions": []})
    script.put("GET", f"/conversations/{ID}/exchanges", {"exchanges": []})
    assert " d " not in run("sessions", "list", "--url", script.url).stdout
    assert "1970" not in run("sessions", "show", ID, "--url", script.url).stdout


def test_redo_says_which_round_is_in_use_again(script: Scripted, run: Run) -> None:
    script.put("POST", f"/conversations/{ID}/redo", {"round": 1, "strategy": "full", "at": 0})
    text = run("sessions", "redo", ID, "--url", script.url).stdout
    assert text.startswith(f"{ID}: redid round 1 of full, made ")


def test_events_call_a_round_that_no_request_has_used_prepared(script: Scripted, run: Run) -> None:
    made = [{"kind": "compacted", "at": 0, "outcome": each} for each in ("applied", "scheduled")]
    script.put("GET", f"/conversations/{ID}/events", {"events": made, "next": None})
    done = run("sessions", "events", ID, "--url", script.url).stdout
    assert ["prepared" in line for line in done.splitlines()[-2:]] == [False, True]


def test_show_tells_of_searches_where_the_model_has_searched(script: Scripted, run: Run) -> None:
    seen = {"id": ID, "totals": {"model": "m", "requests": 1_200, "recalls": 1_003}}
    script.put("GET", f"/conversations/{ID}", seen)
    script.put("GET", f"/conversations/{ID}/compactions", {"compactions": []})
    script.put("GET", f"/conversations/{ID}/exchanges", {"exchanges": []})
    lines = run("sessions", "show", ID, "--url", script.url).stdout.splitlines()
    assert "searches by the model  1,003" in lines


@pytest.mark.parametrize(
    ("arguments", "method", "path", "sent"),
    [
        (["undo", ID], "POST", "/undo", ""),
        (["redo", ID], "POST", "/redo", ""),
        (["pin", ID, "a text"], "POST", "/pins", '{"text": "a text"}'),
        (["unpin", ID, "p/1"], "DELETE", "/pins/p%2F1", ""),
        (["bypass", ID], "POST", "/bypass", ""),
        (["resume", ID], "POST", "/resume", ""),
        (["delete", ID, "--yes"], "DELETE", "", ""),
        (["delete", ID, "--tenant", "--yes"], "DELETE", "/tenant", ""),
    ],
)
def test_what_is_done_to_a_conversation_is_one_request(
    arguments: list[str], method: str, path: str, sent: str, script: Scripted, run: Run
) -> None:
    script.put(method, f"/conversations/{ID}{path}", {"deleted": 3, "round": 2, "pins": []})
    done = run("sessions", *arguments, "--url", script.url, COMPACTION_PROXY__SERVER__ADMIN_KEY="k3y")
    assert done.exit_code == 0, done.output
    assert script.asked == [(method, f"/admin/v1/conversations/{ID}{path}", sent, "Bearer k3y")]


def test_delete_asks_first_and_deletes_nothing_where_nobody_can_answer(script: Scripted, run: Run) -> None:
    done = run("sessions", "delete", ID, "--url", script.url)
    assert (done.exit_code, done.stderr) == (
        1,
        "nothing was deleted: without a terminal, --yes is required\n",
    )
    assert script.asked == []


@pytest.mark.parametrize(("number", "said"), [(1, "1 record"), (0, "0 records"), (2_000, "2,000 records")])
def test_delete_says_how_much_was_deleted(number: int, said: str, script: Scripted, run: Run) -> None:
    script.put("DELETE", f"/conversations/{ID}", {"deleted": number})
    done = run("sessions", "delete", ID, "--yes", "--url", script.url)
    assert done.stdout == f"{ID}: {said} deleted\n"


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (["compact", ID], {"id": ID, "compact": True}),
        (["undo", ID], {"round": 2, "undone": True}),
        (["redo", ID], {"round": 2, "undone": False}),
        (["pin", ID, "a text"], {"pins": [{"id": "p_1", "text": "a text"}]}),
        (["unpin", ID, "p_1"], {"pins": []}),
        (["bypass", ID], {"id": ID, "bypass": True}),
        (["resume", ID], {"id": ID, "bypass": False}),
        (["delete", ID, "--yes"], {"deleted": 3}),
        (["exchanges", ID], {"exchanges": [], "next": None}),
        (["events", ID], {"events": [], "next": None}),
    ],
)
def test_every_command_prints_the_answer_as_json_if_asked_to(
    command: list[str], answer: object, script: Scripted, run: Run
) -> None:
    paths = {"unpin": "/pins/p_1", "pin": "/pins", "delete": ""}
    path = f"/conversations/{ID}{paths.get(command[0], f'/{command[0]}')}"
    for method in ("GET", "POST", "DELETE"):
        script.put(method, path, answer)
    done = run("sessions", *command, "--json", "--url", script.url)
    assert (done.exit_code, json.loads(done.stdout)) == (0, answer)


def test_exchanges_are_a_page_of_lines_oldest_first(script: Scripted, run: Run) -> None:
    small = {"at": 0, "model": "m", "status": "none", "code": 0, "reason": "small", "request_bytes": 1_234}
    read = {
        "at": 1, "model": "m", "status": "reused", "code": 200, "reason": "", "request_bytes": 9_000,
        "tokens_before": 45_000, "tokens_after": 12_000, "prompt_tokens": 12_100, "cached_tokens": 9_000,
        "completion_tokens": 300, "overhead_s": 0.0021, "saving": {"net": -0.5},
    }  # fmt: skip
    script.put("GET", f"/conversations/{ID}/exchanges", {"exchanges": [small, read], "next": 4})
    done = run("sessions", "exchanges", ID, "--limit", "2", "--offset", "2", "--url", script.url)
    assert script.asked[0][1].endswith("/exchanges?limit=2&offset=2")
    assert (done.exit_code, done.stderr) == (0, "more with --offset 4\n")
    titles, *lines = (line.split("  ") for line in done.stdout.splitlines())
    assert [[word.strip() for word in line if word][1:] for line in (titles, *lines)] == [
        [
            "status", "code", "model", "sent", "forwarded", "counted", "cached", "answer", "overhead",
            "net saved",
        ],
        ["not inspected (small), 1,234 bytes", "none", "m", *["n/a"] * 7],
        [
            "reused", "200", "m", "45,000", "12,000", "12,100", "9,000", "300", "2.1 ms", "-$0.5000",
        ],
    ]  # fmt: skip


def test_an_exchange_below_the_trigger_says_so(script: Scripted, run: Run) -> None:
    row = {"at": 1, "model": "m", "status": "none", "code": 200, "tokens_after": 7_000, "trigger": 9_000}
    over = {**row, "tokens_after": 9_000}
    script.put("GET", f"/conversations/{ID}/exchanges", {"exchanges": [row, over], "next": None})
    done = run("sessions", "exchanges", ID, "--url", script.url)
    assert done.stdout.count("none, below the trigger of 9,000 tokens") == 1


def test_events_of_one_conversation_or_of_all_are_listed_oldest_first(script: Scripted, run: Run) -> None:
    made = {
        "kind": "compacted", "at": 0, "conversation": ID, "strategy": "anchored", "round": 1,
        "tokens_before": 9_000, "tokens_after": 4_000, "cost_usd": 0.25, "reason": "tokens",
    }  # fmt: skip
    failed = {"kind": "failed", "at": 1, "conversation": OTHER, "reason": "timeout"}
    script.put("GET", f"/conversations/{ID}/events", {"events": [made], "next": None})
    script.put("GET", "/events", {"events": [failed, made], "next": 2})
    of_one = run("sessions", "events", ID, "--url", script.url)
    assert of_one.stdout.split()[-7:] == [
        "compacted", "anchored", "1", "9,000", "4,000", "$0.2500", "tokens",
    ]  # fmt: skip
    assert of_one.stderr == ""
    of_all = run("sessions", "events", "--limit", "2", "--url", script.url)
    assert [line.split()[0] for line in of_all.stdout.splitlines()] == ["conversation", ID, OTHER]
    assert of_all.stdout.split()[-7:] == ["failed", "-", "-", "-", "-", "-", "timeout"]
    assert of_all.stderr == "more with --offset 2\n"


def test_export_goes_to_a_new_file_for_its_owner_only(script: Scripted, run: Run, tmp_path: Path) -> None:
    script.put("GET", f"/conversations/{ID}/export", {"messages": ["ä"]})
    target = tmp_path / "kept.json"
    arguments = ("sessions", "export", ID, "-o", str(target), "--url", script.url)
    assert run(*arguments).exit_code == 0
    assert json.loads(target.read_text()) == {"messages": ["ä"]}
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    again = run(*arguments)
    assert (again.exit_code, again.stderr) == (1, f"{target}: already exists and was not changed\n")


def test_search_quotes_phrases_and_fails_where_nothing_is_found(script: Scripted, run: Run) -> None:
    hit = {"message_id": "m_1", "turn": 4, "round": 1, "role": "user", "snippet": "two\nlines"}
    script.put("GET", f"/conversations/{ID}/search", {"hits": [hit]})
    found = run("search", ID, "two lines", "more", "--url", script.url)
    assert found.stdout.splitlines()[1:] == ["m_1         4      1  user  two lines"]
    assert script.asked[0][1].endswith("/search?q=%22two+lines%22+more&limit=20")
    script.put("GET", f"/conversations/{ID}/search", {"hits": [{**hit, "conversation": "c_2"}]})
    everywhere = run("search", ID, "x", "--all", "--url", script.url)
    assert everywhere.stdout.splitlines()[1:] == ["c_2           m_1         4      1  user  two lines"]
    assert script.asked[1][1].endswith("/search?q=x&limit=20&scope=tenant")
    run("search", ID, '"two lines" more', "--url", script.url)
    assert "/search?q=%22two+lines%22+more&" in script.asked[2][1]
    script.put("GET", f"/conversations/{ID}/search", {"hits": []})
    nothing = run("search", ID, "x", "--url", script.url)
    assert (nothing.exit_code, nothing.stdout) == (1, "nothing found\n")


def test_where_nothing_listens_one_line_says_so(run: Run) -> None:
    port = find_free_port()
    done = run("sessions", "list", COMPACTION_PROXY__SERVER__PORT=str(port))
    assert (done.exit_code, done.stdout) == (1, "")
    expected = (
        f"http://127.0.0.1:{port}: no server is running there; run `compaction-proxy serve`, or set `--url`\n"
    )
    assert done.stderr == expected


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, {"error": {"message": "no"}}, "the proxy rejects the admin key"),
        (403, {"error": {"message": "Set server.admin_key\x1b[2J"}}, r"Set server.admin_key\x1b[2J"),
        (200, b"<html>", "the server is not a compaction-proxy"),
        (302, b"", "the server is not a compaction-proxy"),
        (500, b"<html>", "the server is not a compaction-proxy (status 500)"),
    ],
)
def test_what_refuses_or_is_something_else_is_said_in_one_line(
    status: int, body: object, said: str, script: Scripted, run: Run
) -> None:
    script.put("GET", "/conversations", body, status)
    done = run("sessions", "list", "--url", script.url)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert said in done.stderr


@pytest.mark.parametrize("url", ["nonsense", "ftp://x", "http://[", "http://127.0.0.1:99999", "http://h\x1b"])
def test_a_url_that_is_none_is_wrong_usage(url: str, run: Run) -> None:
    done = run("sessions", "list", "--url", url)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--url:" in done.stderr
    assert "\x1b" not in done.stderr


def test_the_key_is_taken_from_a_file_and_never_shown(script: Scripted, run: Run, tmp_path: Path) -> None:
    script.put("GET", "/conversations", {"conversations": []})
    key = tmp_path / "key"
    key.write_text("hunter2\n")
    done = run("sessions", "list", "--url", script.url, "--admin-key-file", str(key))
    assert script.asked[0][3] == "Bearer hunter2"
    assert "hunter2" not in done.output
    missing = run("sessions", "list", "--url", script.url, "--admin-key-file", "/nowhere")
    assert (missing.exit_code, missing.stderr) == (
        2,
        "/nowhere: cannot read the file: No such file or directory\n",
    )


def test_a_pipe_that_closes_early_is_silent(script: Scripted, tmp_path: Path) -> None:
    rows = [{**ROW, "id": f"c_{number:024x}"} for number in range(3_000)]
    script.put("GET", "/conversations", {"conversations": rows})
    line = f"{sys.executable} -m compaction_proxy sessions list --url {script.url} | head -n 1"
    environ = {**os.environ, "PYTHONPATH": str(Path(compaction_proxy.__file__).parent.parent)}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr, done.stdout.split()[0]) == (0, "", "id")


@pytest.mark.parametrize(
    ("requests", "shown"), [(3.25, "3.2 requests"), (1.04, "1.0 request  "), (None, "n/a")]
)
def test_a_round_pays_back_after_a_number_of_requests(requests: float | None, shown: str) -> None:
    rounds = [{"round": 1, "strategy": "anchored", "pays_back_after": requests, "outcome": "applied"}]
    [line] = [each for each in format_conversation({}, {}, rounds, None) if "anchored" in each]
    assert shown in line
