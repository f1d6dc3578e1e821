"""Summaries that are cut, or lack the marks of their runs or some of their sections, are put to use."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.system.black_box import Provider, Received, Reply, chat_reply, run_proxy

# What only summary calls hold: the two forms of a transcript, and the aligned form.
CALL_MARKS = (
    "## Messages to Summarize",
    "## Runs to Summarize",
    "The conversation is everything above this message.",
)
FACTS = (
    "I read src/app.py and found that the guard in load was missing.",
    "I added the guard and ran the tests, and all of them pass now.",
    "The port of the service stays as it was, and the database is unchanged.",
)
LINES = "\n".join(f"- {fact}" for fact in FACTS)
CHAINED = (
    "### Completed Work",
    "### Key Technical Decisions",
    "### Current State",
    "### Pending Work",
)
FULL = (
    "1. User's Primary Goals and Intent",
    "2. Conversation Timeline and Progress",
    "3. Technical Context and Decisions",
    "4. Files and Code Changes",
    "5. Active Work and Last Actions (CRITICAL)",
    "6. Unresolved Issues and Pending Tasks",
    "7. Immediate Next Step",
)

Write = Callable[[str], str]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def work(number: int) -> list[dict[str, Any]]:
    """A call, its result of some 300 tokens, and what the assistant says of it."""
    function = {"name": "read", "arguments": json.dumps({"path": "src/app.py"})}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": f"line {number} of the file; " * 60},
        {"role": "assistant", "content": f"Step {number} is done: " + "the guard was looked at. " * 20},
    ]


def conversation(requests: int) -> list[dict[str, Any]]:
    """So many requests of a user with some work behind each, and one more request."""
    turns = [each for k in range(requests) for each in (user(f"Request {k}: look at it."), *work(k))]
    return [{"role": "system", "content": "You build things."}, *turns, user("And now?")]


def asked_of(request: Received) -> str | None:
    """What a summary call asks; None for a request of the conversation."""
    asked = request.json()["messages"][-1]["content"] if request.body else None
    return asked if isinstance(asked, str) and any(mark in asked for mark in CALL_MARKS) else None


class Scripted:
    """A provider whose summary answers are what `write` makes of what they are asked.

    Args:
        write: The text of an answer.
        finish_reason: How each summary answer ends.
    """

    def __init__(self, write: Write, finish_reason: str = "stop") -> None:
        self.calls: list[str] = []
        self._write = write
        self._finish_reason = finish_reason

    def __call__(self, request: Received) -> Reply:
        asked = asked_of(request)
        if asked is None:
            return chat_reply(request)
        self.calls.append(asked)
        told = json.loads(chat_reply(request, self._write(asked)).body)
        told["choices"][0]["finish_reason"] = self._finish_reason
        told["usage"] = {"prompt_tokens": 400, "completion_tokens": 70, "total_tokens": 470}
        return Reply(body=json.dumps(told).encode())


class Round:
    """What became of one forced round.

    Attributes:
        status: `x-compaction-status` of the answer.
        reason: `x-compaction-reason`; None if there is none.
        text: All texts of the request that reached the model, joined.
        contents: The same, one by one.
        calls: What the summary calls asked, oldest first.
        event: The event of the round; empty if there is none.
    """

    def __init__(self, folder: Path, script: Scripted, strategy: str, requests: int) -> None:
        provider = Provider(script)
        config = {
            "server": {"admin_key": "secret-key-for-tests"},
            "summary": {"model": "m"},
            "compaction": {"trigger": [{"tokens": 600}]},
        }
        headers = {
            "authorization": "Bearer sk-test",
            "x-session-id": "one",
            "x-compaction-strategy": strategy,
        }
        body = {"model": "m", "messages": conversation(requests)}
        try:
            with run_proxy(folder, provider.url, config) as proxy, proxy.client() as client:
                reply = client.post(
                    "/v1/chat/completions", json=body, headers={**headers, "x-compaction": "force"}
                )
                assert reply.status_code == 200, reply.text
                name = reply.headers["x-compaction-session"]
                key = {"authorization": "Bearer secret-key-for-tests"}
                told = client.get(f"/admin/v1/conversations/{name}/events", headers=key)
                rounds = [each for each in told.json()["events"] if each["kind"] == "compacted"]
                forwarded = [each for each in provider.received if each.body and asked_of(each) is None]
        finally:
            provider.close()
        self.status = reply.headers["x-compaction-status"]
        self.reason = reply.headers.get("x-compaction-reason")
        self.contents = [str(each["content"]) for each in forwarded[-1].json()["messages"]]
        self.text = "\n".join(self.contents)
        self.calls = script.calls
        self.event: dict[str, Any] = rounds[-1] if rounds else {}


def sectioned(headings: tuple[str, ...]) -> str:
    return "\n\n".join(f"{heading}\n{LINES}" for heading in headings)


def behind_marks(asked: str, text: str) -> str:
    """The text behind each mark that a call names; the bare text where it names none."""
    marks = re.findall(r"^=== RUN \d+ ===$", asked, re.MULTILINE)
    return "\n".join(f"{mark}\n{text}" for mark in marks) or text


def cut_in_the_middle(text: str) -> str:
    """The text and the beginning of one more line, as an answer at its output limit ends."""
    return f"{text}\n- The next thing that I wanted to te"


@pytest.mark.parametrize(
    ("strategy", "text", "finish_reason"),
    [
        ("anchored", LINES, "length"),
        ("split", " ".join(FACTS), "max_tokens"),
        ("selective", " ".join(FACTS), "length"),
        ("chained", sectioned(CHAINED), "incomplete"),
        ("full", sectioned(FULL), "length"),
    ],
    ids=["anchored", "split", "selective", "chained", "full"],
)
def test_a_summary_cut_at_its_output_limit_is_in_force_up_to_its_last_whole_line(
    strategy: str, text: str, finish_reason: str, tmp_path: Path
) -> None:
    script = Scripted(lambda asked: cut_in_the_middle(behind_marks(asked, text)), finish_reason)
    made = Round(tmp_path, script, strategy, requests=8)
    assert (made.status, made.reason, FACTS[1] in made.text) == ("applied", None, True)
    assert "The next thing" not in made.text
    assert len(made.calls) <= 2


def size_of(asked: str) -> int:
    """The tokens that a summary call asks for."""
    found = re.search(r"At most (\d+) tokens", asked)
    assert found
    return int(found[1])


def test_a_summary_cut_before_its_last_section_is_asked_for_once_more_in_half_the_size(
    tmp_path: Path,
) -> None:
    script = Scripted(lambda _: cut_in_the_middle(sectioned(CHAINED[:1])), "length")
    made = Round(tmp_path, script, "chained", requests=8)
    sizes = [size_of(asked) for asked in made.calls]
    assert sizes == [sizes[0], sizes[0] // 2]
    assert (made.status, made.reason) == ("failed-open", "truncated")


def test_the_second_answer_is_in_force_and_both_are_booked(tmp_path: Path) -> None:
    def write(asked: str) -> str:
        return cut_in_the_middle(sectioned(CHAINED[: 2 if size_of(asked) == 800 else 4]))

    made = Round(tmp_path, Scripted(write, "length"), "chained", requests=8)
    assert (made.status, [size_of(asked) for asked in made.calls]) == ("applied", [800, 400])
    assert all(heading in made.text for heading in CHAINED)
    assert (made.event["calls"], made.event["completion_tokens"]) == (2, 140)


def test_runs_whose_marks_the_model_leaves_out_are_summarised_one_by_one(tmp_path: Path) -> None:
    script = Scripted(lambda asked: " ".join(FACTS) + f" {len(asked)} characters were read.")
    made = Round(tmp_path, script, "selective", requests=8)
    assert made.status == "applied"
    together, *alone = made.calls
    runs = len(re.findall(r"^=== RUN \d+ ===$", together, re.MULTILINE))
    assert runs > 1
    assert len(alone) == runs
    texts = [f"{FACTS[0]}" in each for each in made.contents]
    assert sum(texts) == runs
    assert [f"{len(asked)} characters" in made.text for asked in alone] == [True] * runs


@pytest.mark.parametrize(
    ("strategy", "headings"),
    [("chained", CHAINED), ("full", FULL)],
)
@pytest.mark.parametrize(
    "alter",
    [
        lambda heading: f"# {heading.lstrip('#1234567. ').upper()}:",
        lambda heading: f"**{heading.lstrip('#1234567. ')}**",
        lambda heading: f"## IV) {heading.lstrip('#1234567. ')}",
    ],
    ids=["level and case", "bold", "numbers"],
)
def test_headings_in_another_form_become_those_that_were_asked_for(
    strategy: str, headings: tuple[str, ...], alter: Write, tmp_path: Path
) -> None:
    written = sectioned(tuple(map(alter, headings)))
    made = Round(tmp_path, Scripted(lambda _: written), strategy, requests=8)
    lines = made.text.splitlines()
    assert (made.status, [heading for heading in headings if heading not in lines]) == ("applied", [])
    assert all(lines[lines.index(heading) + 1] == LINES.splitlines()[0] for heading in headings)


@pytest.mark.parametrize(("strategy", "headings"), [("chained", CHAINED), ("full", FULL)])
def test_sections_that_are_missing_are_added_in_their_order(
    strategy: str, headings: tuple[str, ...], tmp_path: Path
) -> None:
    written = sectioned((headings[3], headings[0], *headings[4:]))
    made = Round(tmp_path, Scripted(lambda _: written), strategy, requests=8)
    lines = made.text.splitlines()
    assert (made.status, [line for line in lines if line in headings]) == ("applied", list(headings))
    assert lines[lines.index(headings[1]) + 1] == "None"


@pytest.mark.parametrize(
    ("strategy", "headings"), [("chained", CHAINED[:1]), ("full", FULL[:3])], ids=["chained", "full"]
)
def test_a_summary_with_fewer_than_half_of_its_sections_is_not_used(
    strategy: str, headings: tuple[str, ...], tmp_path: Path
) -> None:
    made = Round(tmp_path, Scripted(lambda _: sectioned(headings)), strategy, requests=8)
    assert (made.status, made.reason) == ("failed-open", "garbage")
    assert FACTS[0] not in made.text
    assert len(made.calls) == 1
