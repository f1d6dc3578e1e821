"""One conversation is one conversation: in the list, in its figures and in its archive.

Clients that send no id are recognised by their messages. Title calls are no conversations. Two conversations
that begin alike are apart as soon as they differ.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.helpers.redis_servers import RedisServer
from tests.system.black_box import Provider, Proxy, Received, Reply, chat_reply, run_proxy

ADMIN_KEY = "secret-key-for-tests"
KEY = {"authorization": f"Bearer {ADMIN_KEY}"}
LISTED_LIMIT = 50
TRIGGER_TOKENS = 3_000
LONG = "The worker reads the next job from the queue and writes its result into the table of reports. " * 60
TASK = "Find out why the nightly report is empty."
TITLE_PROMPTS = {
    "opencode": "You are a title generator. You output ONLY a thread title. Nothing else.",
    "claude-code": "Generate a concise, sentence-case title (3-7 words) that captures the main topic.",
    "qwen-code": "Generate a short title for this conversation. Answer with the title only.",
    "cline": "Create a title of at most five words for the chat that begins with the user's message.",
}

Turn = tuple[str, str]


class Wire:
    """Requests and answers of one wire."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path

    def request(self, turns: Sequence[Turn], system: str = "You are an agent.", *, tools: bool = True) -> Any:
        schema = {"type": "object", "properties": {"path": {"type": "string"}}}
        messages = [{"role": role, "content": text} for role, text in turns]
        body: dict[str, Any] = {"model": "m"}
        if self.name == "chat":
            body["messages"] = [{"role": "system", "content": system}, *messages]
            tool: Any = {"type": "function", "function": {"name": "read", "parameters": schema}}
        elif self.name == "messages":
            body |= {"system": system, "messages": messages, "max_tokens": 1_000}
            tool = {"name": "read", "input_schema": schema}
        else:
            body |= {"instructions": system, "input": messages, "store": False}
            tool = {"type": "function", "name": "read", "parameters": schema}
        return {**body, "tools": [tool]} if tools else body


WIRES = {
    "chat": Wire("chat", "/v1/chat/completions"),
    "messages": Wire("messages", "/v1/messages"),
    "responses": Wire("responses", "/v1/responses"),
}
SUMMARY = "\n".join(
    f"## {title}\nThe agent has read the queue and the table of reports."
    for title in ("Goal", "Decisions", "State", "Files", "Open points")
)


def answer(request: Received) -> Reply:
    """The answer of a model on each wire; the usage counts four bytes as a token."""
    used = len(request.body) // 4
    if request.path.endswith("/messages"):
        usage = {"input_tokens": used, "output_tokens": 1}
        body: dict[str, Any] = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "m",
            "usage": usage,
        }
        body |= {"content": [{"type": "text", "text": SUMMARY}], "stop_reason": "end_turn"}
        return Reply(body=json.dumps(body).encode())
    if request.path.endswith("/responses"):
        text = {"type": "output_text", "text": SUMMARY, "annotations": []}
        item = {"type": "message", "role": "assistant", "status": "completed", "id": "m1", "content": [text]}
        usage = {"input_tokens": used, "output_tokens": 1, "total_tokens": used + 1}
        body = {"id": "r1", "object": "response", "status": "completed", "model": "m", "output": [item]}
        return Reply(body=json.dumps({**body, "usage": usage}).encode())
    return chat_reply(request, SUMMARY)


CONFIG: dict[str, Any] = {
    "server": {"admin_key": ADMIN_KEY},
    "compaction": {"trigger": [{"tokens": TRIGGER_TOKENS}], "background": False},
    "summary": {"model": "m", "max_tokens": 400},
}


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider(answer)
    yield made
    made.close()


@pytest.fixture
def proxy(tmp_path: Path, provider: Provider) -> Iterator[Proxy]:
    with run_proxy(tmp_path, provider.url, CONFIG) as running:
        yield running


def send(proxy: Proxy, wire: Wire, body: Any, **headers: str) -> dict[str, str]:
    """Sends a request; returns the headers of its answer."""
    sent = {"authorization": "Bearer sk-one-for-all", **{k.replace("_", "-"): v for k, v in headers.items()}}
    with proxy.client() as client:
        found = client.post(wire.path, json=body, headers=sent)
    assert found.status_code == 200, found.text
    return dict(found.headers)


def list_conversations(proxy: Proxy) -> list[dict[str, Any]]:
    """The list; empty while the store rests, as it does for a second if a busy machine made it late."""
    with proxy.client(headers=KEY) as client:
        found = client.get("/admin/v1/conversations", params={"limit": LISTED_LIMIT})
    if found.status_code == 503:
        return []
    found.raise_for_status()
    listed: list[dict[str, Any]] = found.json()["conversations"]
    return listed


def await_listed(proxy: Proxy, is_done: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """The list once it is as wanted, else as it is once nothing moves any more."""
    found = list_conversations(proxy)
    for _ in range(40):
        if is_done(found):
            break
        proxy.wait_for_quiet()
        found = list_conversations(proxy)
    return found


def talk(start: Sequence[Turn], *later: str) -> Iterator[list[Turn]]:
    """The requests of a conversation that grows by one user message a time."""
    turns = list(start)
    yield list(turns)
    for text in later:
        turns += [("assistant", "I see."), ("user", text)]
        yield list(turns)


def sizes(listed: list[dict[str, Any]]) -> list[int]:
    return sorted(each["requests"] for each in listed)


def has_sizes(wanted: list[int], listed: list[dict[str, Any]]) -> bool:
    return sizes(listed) == wanted


every_wire = pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)


@every_wire
def test_a_client_without_an_id_is_listed_before_its_first_round(proxy: Proxy, wire: Wire) -> None:
    for turns in talk([("user", TASK)], "Look at the queue.", "Look at the table."):
        send(proxy, wire, wire.request(turns))
    listed = await_listed(proxy, lambda found: sizes(found) == [3])
    assert sizes(listed) == [3], "one conversation of three requests"


@every_wire
def test_a_conversation_keeps_its_name_from_its_first_request_to_its_rounds(proxy: Proxy, wire: Wire) -> None:
    texts = [f"Part {number}: {LONG}" for number in range(6)]
    names = set()
    for turns in talk([("user", TASK)], *texts):
        names.add(send(proxy, wire, wire.request(turns)).get("x-compaction-session"))
    listed = await_listed(proxy, lambda found: sizes(found) == [7])
    assert sizes(listed) == [7], "one conversation of seven requests"
    assert names - {None} == {listed[0]["id"]}
    assert listed[0]["rounds"] > 0


@every_wire
def test_conversations_that_begin_alike_are_apart_as_soon_as_they_differ(proxy: Proxy, wire: Wire) -> None:
    one = list(talk([("user", "Hello")], "My name is Ann.", "What is my name?"))
    other = list(talk([("user", "Hello")], "My name is Bob.", "What is my name?"))
    for turns in (one[0], other[0], one[1], other[1], other[2], one[2]):
        send(proxy, wire, wire.request(turns))
    listed = await_listed(proxy, lambda found: sum(sizes(found)) == 6)
    assert len(listed) == 2
    # Their first requests are the same byte for byte: nothing tells whose is whose.
    assert sizes(listed) in ([3, 3], [2, 4])


@every_wire
def test_a_conversation_that_begins_as_another_goes_on_is_counted_for_itself(
    proxy: Proxy, wire: Wire
) -> None:
    for name in ("Ann", "Bob", "Eve"):
        for turns in talk([("user", "Hello")], f"My name is {name}.", "What is my name?"):
            send(proxy, wire, wire.request(turns))
    listed = await_listed(proxy, lambda found: sum(sizes(found)) == 9)
    assert sizes(listed) == [3, 3, 3]


@every_wire
def test_conversations_that_share_a_round_have_archives_of_their_own(proxy: Proxy, wire: Wire) -> None:
    shared = [("user", TASK)]
    for number in range(4):
        shared += [("assistant", f"Read {number}. {LONG}"), ("user", f"Go on with part {number}.")]
    names = {}
    for who, word in (("ann", "aquamarine"), ("bob", "chartreuse")):
        said = [f"The colour is {word}. {LONG}", *(f"Step {number}: {LONG}" for number in range(4))]
        for turns in talk([*shared, ("assistant", "Whose is it?"), ("user", f"It is {who}'s.")], *said):
            names[who] = send(proxy, wire, wire.request(turns)).get("x-compaction-session")
    listed = await_listed(proxy, lambda found: sizes(found) == [6, 6])
    assert sizes(listed) == [6, 6], "two conversations of six requests"
    found = {}
    with proxy.client(headers=KEY) as client:
        for who, name in names.items():
            for word in ("aquamarine", "chartreuse"):
                hits = client.get(f"/admin/v1/conversations/{name}/search", params={"q": word}).json()
                found[who, word] = len(hits["hits"])
    assert found["ann", "chartreuse"] == found["bob", "aquamarine"] == 0
    assert found["ann", "aquamarine"] > 0
    assert found["bob", "chartreuse"] > 0


@pytest.mark.parametrize("session", [{}, {"x_session_id": "s1"}], ids=["no-id", "id"])
def test_a_name_that_is_added_later_changes_nothing(
    proxy: Proxy, provider: Provider, session: dict[str, str]
) -> None:
    wire = WIRES["chat"]
    requests = list(talk([("user", TASK)], *(f"Part {number}: {LONG}" for number in range(5))))
    for turns in requests[:-1]:
        send(proxy, wire, wire.request(turns), **session)
    body = wire.request(requests[-2])
    for message in body["messages"]:
        if message["role"] == "user":
            message["name"] = "ann"
    provider.received.clear()
    told = send(proxy, wire, body, **session)
    assert told["x-compaction-status"] == "reused"
    assert len(provider.received) == 1, "no summary is asked for anew"
    assert len(await_listed(proxy, lambda found: sizes(found) == [6])) == 1


def test_messages_of_other_names_are_other_messages(proxy: Proxy) -> None:
    wire = WIRES["chat"]
    turns = list(talk([("user", TASK)], *(f"Part {number}: {LONG}" for number in range(5))))[-1]
    statuses = []
    for name in ("ann", "bob"):
        body = wire.request(turns)
        for message in body["messages"]:
            if message["role"] == "user":
                message["name"] = name
        statuses.append(send(proxy, wire, body)["x-compaction-status"])
    assert statuses == ["applied", "applied"]


@pytest.mark.parametrize("named", ["no-id", "id"])
@every_wire
def test_a_title_call_is_no_conversation_and_part_of_none(proxy: Proxy, wire: Wire, named: str) -> None:
    played = [(prompt, when) for prompt in TITLE_PROMPTS for when in ("first", "beside", "second", "last")]
    for prompt, when in played:
        task = f"{TASK} It is report {prompt}/{when}."
        session = {"x_session_id": f"{prompt}-{when}"} if named == "id" else {}
        title = wire.request([("user", task)], TITLE_PROMPTS[prompt], tools=False)
        ask_for_title = partial(send, proxy, wire, title, **session)
        first, *later = map(wire.request, talk([("user", task)], "Look at the queue.", "Look at the table."))
        if when == "first":
            ask_for_title()
        beside = Thread(target=ask_for_title)
        if when == "beside":
            beside.start()
        send(proxy, wire, first, **session)
        if when == "beside":
            beside.join()
        if when == "second":
            ask_for_title()
        for body in later:
            send(proxy, wire, body, **session)
        if when == "last":
            ask_for_title()
    listed = await_listed(proxy, lambda found: sizes(found) == [3] * len(played))
    assert sizes(listed) == [3] * len(played), "each conversation has its own three requests"


@every_wire
def test_sub_agents_are_conversations_of_their_own(proxy: Proxy, wire: Wire) -> None:
    for system, task in (
        ("You are an agent.", TASK),
        ("You are a sub-agent that searches.", "Search the queue for failed jobs."),
        ("You are a sub-agent that searches.", "Search the table for empty rows."),
    ):
        for turns in talk([("user", task)], "Go on.", "Go on."):
            send(proxy, wire, wire.request(turns, system))
    listed = await_listed(proxy, lambda found: sizes(found) == [3, 3, 3])
    assert sizes(listed) == [3, 3, 3]


@every_wire
def test_an_edited_conversation_is_not_taken_for_another_that_says_the_same(proxy: Proxy, wire: Wire) -> None:
    greeting = [("user", "Hello"), ("assistant", "How can I help?")]
    bob = list(talk([*greeting, ("user", "I lost my card.")], "Today.", "Thanks."))
    ann = list(talk([*greeting, ("user", "Go on.")], "Go on."))
    edited = list(talk([*greeting, ("user", "My card was stolen.")], "Go on.", "Thanks."))
    for turns in (*bob, ann[0], *edited[1:], ann[1]):
        send(proxy, wire, wire.request(turns))
    listed = await_listed(proxy, lambda found: sum(sizes(found)) == 7)
    assert sizes(listed) == [2, 2, 3], "Ann's, the edited one and Bob's"


def test_agents_whose_tools_say_different_things_are_two_conversations(proxy: Proxy) -> None:
    wire = WIRES["chat"]
    for who in ("ann", "bob"):
        body = wire.request([("user", TASK)])
        for step in range(3):
            # Some models number their calls, so nothing but the results differs.
            call = {"id": f"read:{step}", "type": "function", "function": {"name": "read", "arguments": "{}"}}
            body["messages"] += [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": f"{step} for {who}"},
            ]
            send(proxy, wire, body)
    listed = await_listed(proxy, lambda found: sum(sizes(found)) == 6)
    assert sizes(listed) == [3, 3]


@every_wire
def test_a_restart_does_not_part_a_conversation(tmp_path: Path, provider: Provider, wire: Wire) -> None:
    config = {**CONFIG, "store": {"url": f"sqlite:///{tmp_path}/state.db"}}
    requests = list(talk([("user", TASK)], *(f"Part {number}: {LONG}" for number in range(5))))
    for some in (requests[:2], requests[2:4], requests[4:]):
        with run_proxy(tmp_path, provider.url, config) as proxy:
            for turns in some:
                send(proxy, wire, wire.request(turns))
            so_many = [requests.index(some[-1]) + 1]
            listed = await_listed(proxy, partial(has_sizes, so_many))
            proxy.process.terminate()
            proxy.process.wait()
    assert sizes(listed) == [6]


def test_replicas_agree_which_conversation_a_request_continues(tmp_path: Path, provider: Provider) -> None:
    wire = WIRES["chat"]
    folders = [tmp_path / name for name in ("redis", "one", "other")]
    for folder in folders:
        folder.mkdir()
    with RedisServer(folders[0]) as redis:
        config = {**CONFIG, "store": {"url": redis.url}}
        with (
            run_proxy(folders[1], provider.url, config) as one,
            run_proxy(folders[2], provider.url, config) as other,
        ):
            for name in ("Ann", "Bob"):
                texts = (f"My name is {name}.", *(f"Part {number}: {LONG}" for number in range(4)))
                for number, turns in enumerate(talk([("user", "Hello")], *texts)):
                    replica = (one, other)[number % 2]
                    send(replica, wire, wire.request(turns))
                    replica.wait_for_quiet()  # until the other one can know of it
            listed = await_listed(other, lambda found: sizes(found) == [6, 6])
    assert sizes(listed) == [6, 6]


def test_a_session_that_has_grown_below_the_gate_and_is_restored_is_one(
    tmp_path: Path, provider: Provider
) -> None:
    steps = 12
    repository = [
        ("user", "Here are summaries of some files present in my git repository.\nqueue.py"),
        ("assistant", "Ok, I won't try and edit those files without asking first."),
    ]
    config = {"server": {"admin_key": ADMIN_KEY}, "models": {"*": {"window": 400_000}}}
    with run_proxy(tmp_path, provider.url, config) as proxy:
        told: list[Turn] = []
        for step in range(1, steps + 1):
            told.append(("user", f"Go on with line {step}."))
            send(proxy, WIRES["chat"], WIRES["chat"].request(repository + told, tools=False))
            await_listed(proxy, partial(has_sizes, [step]))
            told.append(("assistant", f"Step {step}: {LONG}"))
        kept = [("user", "I spoke to you previously about a number of things.\nReports."), *told[-8:]]
        restored = [*repository, *kept, ("user", "Now write the tests.")]
        send(proxy, WIRES["chat"], WIRES["chat"].request(restored, tools=False))
        listed = await_listed(proxy, partial(has_sizes, [steps + 1]))
    assert sizes(listed) == [steps + 1]
