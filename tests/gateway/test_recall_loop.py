"""How an answer goes on: searches that fail or take long, upstreams that are away, and its figures."""

import asyncio
import gzip
import json
from collections.abc import Iterable
from typing import Any

import pytest

from compaction_proxy.cli.demo import chat
from compaction_proxy.compaction.types import CompactionReport, CompactionStatus, FitResult
from compaction_proxy.core.errors import OverloadedError, UpstreamError
from compaction_proxy.gateway import recall_loop
from compaction_proxy.gateway.body_budget import BodyBudget
from compaction_proxy.gateway.control_headers import ControlHeaders
from compaction_proxy.gateway.identity import Identity
from compaction_proxy.gateway.recall_loop import NOT_NOW, RecallLoop, ToolOffer
from compaction_proxy.gateway.request_state import RequestState
from compaction_proxy.gateway.upstream import UpstreamResponse
from compaction_proxy.recall.tool import RecallContext
from compaction_proxy.wires.chat.search_tool import SEARCH_TOOL
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.usage import TokenUsage

BODY = b'{"messages":[{"role":"user","content":"?"}],"tools":[{}]}'
MESSAGE: Any = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "memory_search", "arguments": "{}"}}],
}
CALL = "{}"
ENVELOPE = chat.Envelope("chatcmpl-1", 1, "m")
SEARCHING = chat.Reply("", (chat.ToolCall("a", "memory_search", "{}"),), "tool_calls")
AWAY = UpstreamError(502, "The upstream cannot be reached.", "upstream_unreachable")


class Response:
    """An upstream's answer in memory."""

    reason = b"OK"

    def __init__(
        self,
        chunks: Iterable[bytes],
        kind: bytes = b"text/event-stream",
        status: int = 200,
        encoding: bytes = b"identity",
    ) -> None:
        self.status = status
        self.headers = [(b"content-type", kind), (b"content-encoding", encoding)]
        self.closed = False
        self._chunks = [*chunks]

    async def read(self) -> bytes:
        return self._chunks.pop(0) if self._chunks else b""

    async def aclose(self) -> None:
        self.closed = True


class Memory:
    """Answers as it is told to."""

    def __init__(self, outcome: Any = "Found.") -> None:
        self.outcome = outcome

    async def answer_call(self, asker: RecallContext, arguments: str) -> str:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        if self.outcome is None:
            await asyncio.sleep(60)
        return str(self.outcome)


def offer(memory: Any = None) -> ToolOffer:
    whole = {
        "raw_with_tool": BODY,
        "raw_without_tool": BODY,
        "has_tools": True,
        "max_hops": 4,
        "context": RecallContext("t", "c_1"),
    }
    whole |= {"wire": CHAT, "tool": CHAT.search_tool}
    return ToolOffer(recall_tool=memory or Memory(), **whole)  # type: ignore[arg-type]


def course(
    outcome: Any, memory: Any = None, *, kind: str = "text/event-stream"
) -> tuple[RecallLoop, list[Any]]:
    """One whose upstream answers so, or raises so; and the messages that it is asked to go on from."""
    asked: list[Any] = []

    async def ask(raw: bytes) -> UpstreamResponse:
        asked.extend(json.loads(raw)["messages"])
        if isinstance(outcome, Exception):
            raise outcome
        return UpstreamResponse(outcome)

    return RecallLoop(offer(memory), ask, kind), asked


class Client:
    """What a client gets."""

    def __init__(self) -> None:
        self.status = 0
        self.pieces: list[bytes] = []
        self.whole = False

    async def __call__(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        if message.get("body"):
            self.pieces.append(message["body"])
        self.whole = message.get("more_body") is False

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)


def streamed(reply: chat.Reply, *, usage: int = 0) -> Response:
    return Response(chat.encode_stream(ENVELOPE, reply, chat.DemoUsage(usage, 5, 2) if usage else None))


def plain(reply: chat.Reply) -> Response:
    return Response([chat.encode_completion(ENVELOPE, reply, chat.DemoUsage(1, 1, 0))], b"application/json")


@pytest.mark.virtual_time
@pytest.mark.parametrize("outcome", [RuntimeError("boom"), None])
async def test_a_search_that_fails_or_takes_long_is_answered_all_the_same(
    monkeypatch: pytest.MonkeyPatch, outcome: Any
) -> None:
    monkeypatch.setattr(recall_loop, "SEARCH_S", 0.05)
    going, made = course(streamed(chat.Reply("Sorry.")), Memory(outcome))
    await going.run_calls_and_continue(MESSAGE, [CALL])
    assert made[-1] == {"role": "tool", "tool_call_id": "a", "content": NOT_NOW}


@pytest.mark.virtual_time
async def test_several_searches_have_no_more_time_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall_loop, "SEARCH_S", 0.1)
    going, made = course(streamed(chat.Reply("Sorry.")), Memory(None))
    clock = asyncio.get_running_loop().time
    began_s = clock()
    await going.run_calls_and_continue({**MESSAGE, "tool_calls": MESSAGE["tool_calls"] * 8}, [CALL] * 8)
    assert clock() - began_s == pytest.approx(0.1)
    assert [each["content"] for each in made[-8:]] == [NOT_NOW] * 8


@pytest.mark.virtual_time
async def test_whoever_leaves_while_it_searches_ends_the_search() -> None:
    client, first = Client(), streamed(SEARCHING)
    going, _ = course(streamed(chat.Reply("Never.")), Memory(None))
    task = asyncio.create_task(going.relay_answer(UpstreamResponse(first), client, ()))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (first.closed, client.whole) == (True, False)


class Silent(Response):
    """An upstream's answer whose first byte does not come."""

    async def read(self) -> bytes:
        await asyncio.sleep(60)
        return b""


@pytest.mark.virtual_time
async def test_whoever_leaves_before_the_next_answer_begins_ends_it() -> None:
    client, silent = Client(), Silent([])
    task = asyncio.create_task(
        course(silent)[0].relay_answer(UpstreamResponse(streamed(SEARCHING)), client, ())
    )
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (silent.closed, client.whole) == (True, False)


class Endless(Response):
    """An upstream's answer that never stops telling that it is alive."""

    async def read(self) -> bytes:
        chunk = await super().read()
        if not chunk:
            await asyncio.sleep(0.01)
        return chunk or b": alive\n\n"


@pytest.mark.virtual_time
async def test_an_upstream_that_goes_on_after_its_end_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recall_loop, "LINGER_S", 0.1)
    endless = Endless(chat.encode_stream(ENVELOPE, SEARCHING, None))
    async with asyncio.timeout(100):
        assert await course(streamed(chat.Reply("Five.")))[0].relay_answer(
            UpstreamResponse(endless), Client(), ()
        )
    assert endless.closed


async def test_events_that_arrive_together_go_to_the_client_together() -> None:
    client, together = Client(), b"".join(chat.encode_stream(ENVELOPE, chat.Reply("one word " * 500), None))
    first = UpstreamResponse(Response([together]))
    assert await course(AWAY)[0].relay_answer(first, client, ())
    assert client.pieces == [together]


async def test_a_small_compressed_chunk_of_a_huge_stream_is_relayed_in_parts() -> None:
    client, events = Client(), (b": " + b"x" * 65_536 + b"\n\n") * 200
    first = UpstreamResponse(Response([gzip.compress(events)], encoding=b"gzip"))
    assert await course(AWAY)[0].relay_answer(first, client, ())
    assert client.body == events
    assert max(map(len, client.pieces)) < len(events) / 2


CLIENTS_TOOL, SEARCH = {"name": "read"}, {"name": "memory_search"}


@pytest.mark.parametrize(
    ("has_tools", "expected"),
    [
        (True, [([CLIENTS_TOOL, SEARCH], None), ([CLIENTS_TOOL], None)]),
        (False, [([SEARCH], None), ([SEARCH], "none")]),
    ],
)
async def test_the_last_request_offers_the_clients_tools_only_or_forbids_the_search(
    has_tools: Any, expected: list[Any]
) -> None:
    asked: list[Any] = []

    async def ask(raw: bytes) -> UpstreamResponse:
        asked.append(json.loads(raw))
        return UpstreamResponse(streamed(chat.Reply("Five.")))

    plain_body: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}]}
    own_tools = [CLIENTS_TOOL] if has_tools else []
    offered = offer()._replace(
        raw_with_tool=json.dumps({**plain_body, "tools": [*own_tools, SEARCH]}).encode(),
        raw_without_tool=json.dumps(plain_body | ({"tools": own_tools} if has_tools else {})).encode(),
        has_tools=has_tools,
        max_hops=2,
    )
    going = RecallLoop(offered, ask, "text/event-stream")
    for _ in range(2):
        await going.run_calls_and_continue(MESSAGE, [CALL])
    assert [(each["tools"], each.get("tool_choice")) for each in asked] == expected


@pytest.mark.parametrize(
    ("error", "code"), [(AWAY, "upstream_unreachable"), (OverloadedError(5), "overloaded")]
)
async def test_an_upstream_that_is_away_is_told_in_a_stream_which_is_cut(error: Any, code: str) -> None:
    client = Client()
    assert not await course(error)[0].relay_answer(UpstreamResponse(streamed(SEARCHING)), client, ())
    assert json.loads(client.body.split(b"data: ")[-1])["error"]["code"] == code
    assert (client.status, client.whole) == (200, False)


@pytest.mark.parametrize(("error", "status"), [(AWAY, 502), (OverloadedError(5), 503)])
async def test_an_upstream_that_is_away_is_the_answer_where_nothing_was_sent(error: Any, status: int) -> None:
    client, (going, _) = Client(), course(error, kind="application/json")
    assert not await going.relay_answer(UpstreamResponse(plain(SEARCHING)), client, ())
    assert (client.status, going.status, client.whole) == (status, status, True)


async def test_every_answer_is_closed() -> None:
    for made in (streamed, plain):
        first, second = made(SEARCHING), made(chat.Reply("Five."))
        assert await course(second)[0].relay_answer(UpstreamResponse(first), Client(), ())
        assert (first.closed, second.closed) == (True, True)


def passage(going: RecallLoop | None) -> RequestState:
    hold = BodyBudget().open_hold()
    made = RequestState(
        Identity("t", "c_1"), BODY, {"headers": []}, ControlHeaders(), len(BODY), "r_1", hold, status=200
    )
    made.fit_result = FitResult(BODY, 1_000, CompactionReport(CompactionStatus.REUSED, "c_1", "anchored", 1))
    made.recall_loop = going
    return made


async def test_the_figures_are_of_all_answers_and_what_is_learned_is_of_the_first() -> None:
    going, _ = course(streamed(chat.Reply("Five."), usage=130))
    assert await going.relay_answer(UpstreamResponse(streamed(SEARCHING, usage=100)), Client(), ())
    made = passage(going)
    made.record_upstream_wait(9.0)  # by a later answer, which is part of the first
    made.usage = usage = going.client_tap.result()
    told = made.build_exchange()
    assert usage == TokenUsage(230, 10, 4, "stop")
    assert (told.prompt_tokens, told.completion_tokens, told.cached_tokens) == (230, 10, 4)
    assert (told.recalls, told.recall_prompt_tokens, told.recall_cached_tokens) == (1, 130, 2)
    assert made.first_usage == TokenUsage(100, 5, 2, "tool_calls")
    assert told.first_byte_s is None


async def test_an_answer_that_went_on_by_itself_has_the_figures_it_always_had() -> None:
    going, _ = course(AWAY)
    assert await going.relay_answer(UpstreamResponse(streamed(chat.Reply("Five."), usage=100)), Client(), ())
    made = passage(going)
    made.usage = going.client_tap.result()
    told = made.build_exchange()
    assert (told.recalls, told.recall_prompt_tokens) == (None, None)
    assert made.first_usage == made.usage == TokenUsage(100, 5, 2, "stop")


def test_the_tool_is_part_of_what_was_sized() -> None:
    made = passage(None)
    assert made.fit_result is not None
    assert made.include_tool_tokens(made.fit_result) == made.fit_result
    made.tool_offer = offer()
    assert made.include_tool_tokens(made.fit_result).estimate == 1_000 + len(SEARCH_TOOL.definition_json) // 4
