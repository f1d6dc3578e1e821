"""Beside a large fixed part the model still sees recent work after a compaction, and compactions are rare."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.system.black_box import Provider, Received, Reply, chat_reply, run_proxy
from tests.system.test_output_reserve import WIRES, prose, texts

SUMMARY = """## Goal
The user wants all result files of the project read and reported in one table.

## State
The files read so far were in order. The worker reads jobs from the queue, writes results into the table of
reports, and moves jobs that fail three times aside.

## Decisions
The files are read one after the other, and nothing is changed in them.

## Next
Read the next file and go on with the report."""


def answer(request: Received) -> Reply:
    if request.method == "GET":
        return Reply(404)
    if request.json()["model"] == "summary":
        return chat_reply(request, SUMMARY)
    return WIRES["messages" if request.path.endswith("/messages") else "chat"].answer(request)


class Session(NamedTuple):
    """A tool loop that was played.

    Attributes:
        provider: What received the requests.
        statuses: The status of each request.
        whole: How many of the newest results were whole in each request.
    """

    provider: Provider
    statuses: list[str]
    whole: list[int]


def play(folder: Path, window: int, fixed: int, result: int, steps: int) -> Session:
    """Plays a tool loop on chat; all sizes are in tokens."""
    wire = WIRES["chat"]
    provider = Provider(answer)
    config = {"models": {"m-*": {"window": window}}, "summary": {"model": "summary"}}
    messages: list[Any] = [{"role": "user", "content": prose(300, "task")}]
    statuses, whole = [], []
    try:
        with run_proxy(folder, provider.url, config) as proxy, proxy.client() as client:
            for step in range(steps):
                messages += wire.unit(step, prose(result, f"part-{step}"))
                body = wire.request(f"m-{window // 1_000}k", 1_000, fixed, messages)
                reply = client.post(wire.path, json=body, headers={"x-session-id": "one"})
                assert reply.status_code == 200, reply.text
                statuses.append(reply.headers["x-compaction-status"])
                mains = [each for each in provider.received if json.loads(each.body)["model"] != "summary"]
                seen = texts(mains[-1].json())
                count = 0
                while count <= step and prose(result, f"part-{step - count}") in seen:
                    count += 1
                whole.append(count)
    finally:
        provider.close()
    return Session(provider, statuses, whole)


def test_the_newest_results_stay_whole_beside_a_large_fixed_part(tmp_path: Path) -> None:
    # Usable is 30,000 and T 27,000: a fifth of what T leaves beside the fixed part is 1,800 tokens.
    session = play(tmp_path, 40_000, 18_000, 300, 90)
    assert "applied" in session.statuses
    assert min(session.whole[5:]) >= 3, (session.whole, session.statuses)


@pytest.mark.parametrize("fixed", [3_000, 9_000])
def test_compactions_are_rare_in_a_small_window(fixed: int, tmp_path: Path) -> None:
    session = play(tmp_path, 24_000, fixed, 700, 82)
    calls = [each for each in session.provider.received if each.json()["model"] == "summary"]
    assert "applied" in session.statuses
    assert len(calls) <= 82 / 5
