"""A round that no request has used is called prepared everywhere, and an undo says what it takes back."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.system.black_box import Provider, Proxy, Received, Reply, chat_reply, run_proxy

ADMIN_KEY = "secret-key-for-tests"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
OWN_ID = "ticket-4711"
WINDOW, HARD_TOKENS = 16_000, 10_800  # 90 percent of the window less a quarter
CONFIG: dict[str, Any] = {
    "server": {"admin_key": ADMIN_KEY},
    "models": {"m": {"window": WINDOW}},
    "summary": {"model": "cheap"},
}
SUMMARY = (
    "## Goal\nMend the invoices.\n## Done\n- The files of January were read.\n## Open\n- The totals of March."
)


class Text(HTMLParser):
    """The text of a page, with single spaces."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.pieces.append(data)

    def __str__(self) -> str:
        return " ".join(" ".join(self.pieces).split())


def answer(request: Received) -> Reply:
    if request.method == "GET":
        return Reply(status=404)
    return chat_reply(request, SUMMARY if request.json()["model"] == "cheap" else "Looked at it.")


@pytest.fixture
def proxy(tmp_path: Path, provider: Provider) -> Iterator[Proxy]:
    provider.answer = answer
    with run_proxy(tmp_path, provider.url, CONFIG) as running:
        yield running


def send(proxy: Proxy, turns: int) -> tuple[str, str]:
    """Sends a conversation of so many turns of about 400 tokens; returns its status and round."""
    messages = [{"role": "user", "content": "Mend the invoices."}]
    for turn in range(turns):
        lines = " ".join(f"Item {turn}-{line} costs {line}.50 euros." for line in range(60))
        messages += [
            {"role": "assistant", "content": f"Invoice {turn} was read."},
            {"role": "user", "content": f"Check invoice {turn}. {lines}"},
        ]
    with proxy.client(headers={"x-session-id": OWN_ID, "authorization": "Bearer sk-one"}) as client:
        reply = client.post("/v1/chat/completions", json={"model": "m", "messages": messages})
    assert reply.status_code == 200, reply.text
    proxy.wait_for_quiet()
    return reply.headers["x-compaction-status"], reply.headers.get("x-compaction-round", "")


def list_states(proxy: Proxy, conversation: str) -> list[tuple[int, str]]:
    with proxy.client(headers=ADMIN) as client:
        found = client.get(f"/admin/v1/conversations/{conversation}/compactions").json()
    return [(each["round"], each["state"]) for each in found["compactions"]]


def read_page(proxy: Proxy, path: str) -> str:
    with proxy.client(auth=("admin", ADMIN_KEY)) as client:
        return str(Text(client.get(f"/ui{path}").text))


def run(proxy: Proxy, *arguments: str) -> str:
    done = proxy.run_command(ADMIN_KEY, "sessions", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def find_conversation(proxy: Proxy) -> str:
    with proxy.client(headers=ADMIN) as client:
        rows = client.get("/admin/v1/conversations").json()["conversations"]
    return rows[0]["id"] if rows else ""


def grow_until_prepared(proxy: Proxy) -> tuple[str, int]:
    """Sends requests until a round is in use and a later one is prepared; returns the id and the turns."""
    for turns in range(12, 80):
        send(proxy, turns)
        conversation = proxy.wait_for(lambda: find_conversation(proxy), "the conversation is listed")
        states = list_states(proxy, conversation)
        if [state for _, state in states[-2:]] == ["in-use", "prepared"]:
            return conversation, turns
    raise AssertionError(f"no round was prepared behind one in use: {states}")


def test_a_prepared_round_is_called_so_everywhere_and_an_undo_takes_the_one_in_use(proxy: Proxy) -> None:
    conversation, _ = grow_until_prepared(proxy)
    (used, _), (ahead, _) = list_states(proxy, conversation)[-2:]
    with proxy.client(headers=ADMIN) as client:
        made = client.get(f"/admin/v1/conversations/{conversation}/compactions").json()["compactions"][-1]

    shown = run(proxy, "show", OWN_ID).splitlines()
    assert shown[-1].endswith("prepared, not used yet")
    assert "in use since" in shown[-2]
    soft = [line for line in run(proxy, "events", OWN_ID).splitlines() if "soft" in line]
    assert "prepared" in soft[-1]
    assert "Prepared" in read_page(proxy, "")
    page = read_page(proxy, f"/conversations/{conversation}")
    assert f"The newest: prepared, not used yet. In use: Round {used} of anchored." in page
    assert f"Undo Round {used} of anchored" in page
    one = read_page(proxy, f"/conversations/{conversation}/compactions/{made['place']}")
    assert f"Round {ahead} of anchored" in one
    assert "prepared, not used yet" in one
    assert "messages would be replaced." in one
    assert "Seen by the model" not in one

    lines = run(proxy, "undo", OWN_ID).splitlines()
    assert lines[0].startswith(
        f"{conversation}: undid the latest compaction: round {used} of anchored, made "
    )
    assert lines[1] == f"Also discarded prepared compactions: round {ahead}."
    assert f"paused, except when a request exceeds about {HARD_TOKENS:,} tokens." in lines[2]
    assert "`x-compaction: bypass`" in lines[2]
    assert [state for _, state in list_states(proxy, conversation)[-2:]] == ["undone", "undone"]
    assert f"until a request exceeds about {HARD_TOKENS:,} tokens" in run(proxy, "show", OWN_ID)
    done = read_page(proxy, f"/conversations/{conversation}?done=undo")
    assert f"Round {used} of anchored, made" in done
    assert "is undone." in done


def test_after_an_undo_the_next_round_is_a_new_one_and_two_rounds_of_a_number_are_told_apart(
    proxy: Proxy,
) -> None:
    conversation, turns = grow_until_prepared(proxy)
    before = list_states(proxy, conversation)
    while True:  # take back every round in use
        run(proxy, "undo", OWN_ID)
        if "in-use" not in {state for _, state in list_states(proxy, conversation)}:
            break
    status, number = send(proxy, turns + 30)  # over the hard mark
    assert (status, number) == ("applied", "1")
    after = list_states(proxy, conversation)
    assert after[: len(before)] == [(each, "undone") for each, _ in before]
    assert after[len(before)] == (1, "in-use")
    page = read_page(proxy, f"/conversations/{conversation}")
    assert len(re.findall(r"\d\d:\d\d:\d\d Round 1 of anchored", page)) == 2


def test_an_undone_round_can_be_redone_until_a_new_one_is_made(proxy: Proxy) -> None:
    conversation, turns = grow_until_prepared(proxy)
    before = list_states(proxy, conversation)
    path = f"/admin/v1/conversations/{conversation}"
    with proxy.client(headers=ADMIN) as client:
        assert client.post(f"{path}/redo").status_code == 409
        undone = client.post(f"{path}/undo").json()
        assert "Redo Round" in read_page(proxy, f"/conversations/{conversation}")
        redone = client.post(f"{path}/redo").json()
        assert (redone["round"], redone["undone"]) == (undone["round"], False)
        assert list_states(proxy, conversation) == before
        assert "Redo Round" not in read_page(proxy, f"/conversations/{conversation}")
        assert send(proxy, turns) == ("reused", str(undone["round"]))
        assert client.get(path).json()["suppressed"] is False
