"""Rehearsals for the pages: a process for each, bounded in number and time."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.admin.api.overview import rebuild_messages
from compaction_proxy.config.config import Config
from compaction_proxy.core.errors import ReplayFailedError, RequestRefusedError
from compaction_proxy.recall.archive import RemovedMessage
from compaction_proxy.recall.round_detail import KEPT, STAND_IN, VisibleMessage
from compaction_proxy.replay.jobs import COMMAND, ReplayJob, ReplayJobRunner, parse_job
from compaction_proxy.replay.runner import ReplayOptions

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
# Answers with what it was told.
ECHO = (
    sys.executable,
    "-c",
    "import json, sys; print(json.dumps({'results': sys.stdin.read().splitlines()}))",
)
ASLEEP = (sys.executable, "-c", "import time; time.sleep(600)")
SECRET = "sk-very-secret"


async def nothing(_: str) -> dict[str, Any]:
    raise RequestRefusedError(404, "This conversation does not exist.", "conversation_not_found")


async def kept(_: str) -> dict[str, Any]:
    return {"model": "kept-model", "messages": TALK}


def rehearsing(command: tuple[str, ...] = COMMAND, limit_s: float = 100.0) -> ReplayJobRunner:
    told = {"upstream": {"api_key": SECRET}, "server": {"admin_key": SECRET}}
    config = Config.model_validate({**told, "store": {"url": f"redis://:{SECRET}@store.test/0"}})
    return ReplayJobRunner(config, kept, command, timeout_s=limit_s)


def wish(**members: object) -> ReplayJob:
    return parse_job(json.dumps(members).encode())


async def test_a_conversation_is_played_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "compaction_proxy").mkdir()
    (tmp_path / "compaction_proxy/__init__.py").touch()  # somebody else's, where the server was started
    monkeypatch.chdir(tmp_path)
    results = await rehearsing().run_job(
        wish(messages=TALK, model="gpt-4o", strategies=["full"], window=9_000)
    )
    [told] = [{name: each[name] for name in ("strategy", "model", "window", "requests")} for each in results]
    assert told == {"strategy": "full", "model": "gpt-4o", "window": 9_000, "requests": 1}


async def test_the_process_is_told_no_secret_and_the_conversation_as_it_came() -> None:
    stored = await rehearsing(ECHO).run_job(wish(conversation="c_1", trigger_tokens=7))
    sent = await rehearsing(ECHO).run_job(wish(messages=TALK, tools=[]))
    assert [SECRET in str(each) for each in (stored, sent)] == [False, False]
    about = json.loads(str(stored[0]))
    assert (about["name"], about["strategies"], about["wanted"]["trigger_tokens"]) == ("c_1", ["anchored"], 7)
    assert json.loads(str(stored[1])) == {"model": "kept-model", "messages": TALK}
    assert json.loads(str(sent[1])) == {"messages": TALK, "tools": []}


async def test_no_more_than_two_are_under_way() -> None:
    rooms = rehearsing(ASLEEP)
    two = [asyncio.create_task(rooms.run_job(wish(messages=TALK))) for _ in range(2)]
    await asyncio.sleep(0.05)
    with pytest.raises(RequestRefusedError) as refused:
        await rooms.run_job(wish(messages=TALK))
    for each in two:
        each.cancel()
    ended = await asyncio.gather(*two, return_exceptions=True)
    assert refused.value.status == 429
    assert [type(each) for each in ended] == [asyncio.CancelledError] * 2


async def test_a_process_that_takes_too_long_is_ended() -> None:
    with pytest.raises(RequestRefusedError) as refused:
        await rehearsing(ASLEEP, limit_s=0.5).run_job(wish(messages=TALK))
    assert refused.value.status == 413


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise SystemExit(3)", "The replay failed: ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "The replay failed: ended by signal 9"),
        ("raise ValueError('no\\x1b[1m good')", "The replay failed: ValueError: no[1m good"),
        ("raise ValueError('x' * 999)", "The replay failed: ValueError: " + "x" * 288),
        ("pass", "The replay returned no result: ended with exit code 0"),
        ("import sys; print('[]'); sys.stderr.write('why')", "The replay returned no result: why"),
    ],
)
async def test_a_process_that_fails_is_quoted(program: str, said: str) -> None:
    with pytest.raises(ReplayFailedError) as failed:
        await rehearsing((sys.executable, "-c", program)).run_job(wish(messages=TALK))
    assert str(failed.value) == said


async def test_an_unknown_conversation_and_no_conversation_are_refused() -> None:
    with pytest.raises(RequestRefusedError, match="conversation does not exist"):
        await ReplayJobRunner(Config(), nothing).run_job(wish(conversation="c_1"))
    with pytest.raises(RequestRefusedError, match="the request has no message for a model to answer"):
        await rehearsing().run_job(wish(messages=[{"role": "system"}]))


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"[]", b"{}", b'{"conversation": 1}', b'{"messages": [], "conversation": "c_1"}',
        b'{"messages": [], "strategies": "full"}', b'{"messages": [], "strategies": ["best"]}',
        b'{"messages": [], "window": 0}', b'{"messages": [], "window": true}',
        b'{"messages": [], "model": 1}',
    ],
)  # fmt: skip
def test_a_body_that_makes_no_sense_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestRefusedError) as refused:
        parse_job(raw)
    assert refused.value.status == 400


def test_what_is_wanted_is_read() -> None:
    body = b'{"messages": [1], "model": "m", "strategies": ["full", "prune"], "target_tokens": 5}'
    assert parse_job(body) == ReplayJob(
        "", {"messages": b"[1]"}, ("full", "prune"), ReplayOptions("m", target_tokens=5)
    )


def test_a_conversation_is_put_together_from_what_was_taken_and_what_stayed() -> None:
    removed = [
        RemovedMessage("m_b", 1, "assistant", "Looking.\nfind({})"),
        RemovedMessage("m_c", 2, "tool", "found"),
        RemovedMessage("m_d", 3, "tool", "and that"),
    ]
    seen = [
        VisibleMessage("user", "Find it.", KEPT, "m_a"),
        VisibleMessage("user", "Summary", STAND_IN, ""),
        VisibleMessage("assistant", "Looking.\nfind({})", KEPT, "m_b"),
        VisibleMessage("user", "Thanks.", KEPT, "m_e"),
    ]

    def call(name: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "call", "arguments": "{}"}}

    calls = [call("call_2"), call("call_3")]
    assert rebuild_messages(removed, seen) == [
        {"role": "user", "content": "Find it."},
        {"role": "assistant", "content": "Looking.\nfind({})", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_2", "content": "found"},
        {"role": "tool", "tool_call_id": "call_3", "content": "and that"},
        {"role": "user", "content": "Thanks."},
    ]


@pytest.mark.parametrize("removed", [[], [RemovedMessage("m_c", 2, "user", "Hi")]])
def test_too_little_is_refused(removed: list[RemovedMessage]) -> None:
    with pytest.raises(RequestRefusedError) as refused:
        rebuild_messages(removed, [])
    assert refused.value.status == 409
