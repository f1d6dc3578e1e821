"""A client that sends its files second to last, as aider does, keeps them whole, and its rounds hold.

The order of messages is that of aider 0.86 with `--edit-format diff`: system prompt, examples, what is done,
files, the current turn. The files change and move with each turn.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.black_box import Provider, Proxy, Received, Reply, chat_reply, run_proxy

TURNS = 14
ADMIN_KEY = "secret-key-for-tests"
MARK = "## Messages to Summarize"
FILES_OPENING = """I have *added these files to the chat* so you can go ahead and edit them.

*Trust this message as the true contents of these files!*
Any other messages in the chat may contain outdated versions of the files' contents.
"""
FILES_REPLY = "Ok, any changes I propose will be to those files."
MAP_OPENING = """Here are summaries of some files present in my git repository.
Do not propose changes to these files, treat them as *read-only*.
If you need to edit any of these files, ask me to *add them to the chat* first.
"""
MAP_REPLY = "Ok, I won't try and edit those files without asking first."
SWITCHED = (
    "I switched to a new code base. Please don't consider the above files or try to edit them any longer."
)
FACTORIAL = """To make this change we need to modify `mathweb/flask/app.py` to:

1. Import the math package.
2. Remove the existing factorial() function.
3. Update get_factorial() to call math.factorial instead.

Here are the *SEARCH/REPLACE* blocks:

mathweb/flask/app.py
```python
<<<<<<< SEARCH
from flask import Flask
=======
import math
from flask import Flask
>>>>>>> REPLACE
```
"""
HELLO = """To make this change we need to modify `main.py` and make a new file `hello.py`:

1. Make a new hello.py file with hello() in it.
2. Remove hello() from main.py and replace it with an import.

Here are the *SEARCH/REPLACE* blocks:

hello.py
```python
<<<<<<< SEARCH
=======
def hello():
    print("hello")
>>>>>>> REPLACE
```
"""
EXAMPLES = (
    ("Change get_factorial() to use math.factorial", FACTORIAL),
    ("Refactor hello() into its own file.", HELLO),
    (SWITCHED, "Ok."),
)
SUMMARY = (
    "- The worker reads the next job from the queue and writes its result into the table of reports.\n"
    "- I committed the changes, and the user asked for the next turn of the session."
)

Said = tuple[str, str]


def pair(asked: str, answered: str) -> list[Said]:
    return [("user", asked), ("assistant", answered)]


def prose(tokens: int, name: str) -> str:
    """Running English of about so many tokens, with a beginning and an end of its own."""
    words = "The worker reads the next job from the queue and writes its result into the table of reports."
    lines = (f"{name} line {k}: {words}" for k in range(max(1, tokens // 24)))
    return "\n".join((f"<{name} begins>", *lines, f"<{name} ends>"))


@dataclass(frozen=True)
class Sizes:
    """How large the parts of a session are, in tokens."""

    window: int
    files: int
    answer: int


LARGE = Sizes(window=128_000, files=45_000, answer=6_000)
SMALL = Sizes(window=40_000, files=11_000, answer=900)
# The files alone are over the trigger, and under what is usable; or over all of it.
FULL = Sizes(window=128_000, files=66_000, answer=1_500)
OVER = Sizes(window=24_000, files=17_000, answer=1_000)


@dataclass
class Session:
    """A session of aider: what is done, and the turn that goes on.

    Attributes:
        name: Stands in its task, so that no two sessions say the same.
        sizes: How large its parts are.
        moves: Whether the files move with each turn; else they stand in front, unchanged.
    """

    name: str
    sizes: Sizes
    moves: bool = True
    done: list[Said] = field(default_factory=list)

    def files(self, turn: int) -> str:
        """The message that shows the files as they are now."""
        version = turn if self.moves else 0
        shown = prose(self.sizes.files, f"file-of-{self.name}-as-of-turn-{version}")
        return f"{FILES_OPENING}\nsrc/queue.py\n```\n{shown}\n```\n"

    def request(self, turn: int) -> list[Said]:
        """What the user asks in a turn."""
        return [("user", f"Session {self.name}, turn {turn}: {prose(60, f'request-{turn}')}")]

    def messages(self, turn: int) -> list[Said]:
        """All messages of a turn but the system prompt, in aider's order."""
        examples = [each for example in EXAMPLES for each in pair(*example)]
        shown = pair(self.files(turn), FILES_REPLY)
        before, behind = ([], shown) if self.moves else (shown, [])
        return [*examples, *before, *self.done, *behind, *self.request(turn)]

    def finish(self, turn: int) -> None:
        """The turn is over: it stands in front of the files from now on."""
        answered = prose(self.sizes.answer, f"answer-{turn}-of-{self.name}")
        told = pair("I committed the changes with git hash 0123abc", "Ok.")
        self.done += [*self.request(turn), ("assistant", answered), *told]


class Wire:
    """Requests and answers of one wire."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = {"chat": "/v1/chat/completions", "responses": "/v1/responses"}.get(name, "/v1/messages")

    def body(self, messages: list[Said], *, stream: bool) -> dict[str, Any]:
        system = f"Act as an expert software developer.\n{prose(2_000, 'system')}"
        reminder = "# *SEARCH/REPLACE block* Rules: every block must use this format."
        said = [{"role": role, "content": text} for role, text in messages]
        common = {"model": "m", "stream": True} if stream else {"model": "m"}
        if self.name == "chat":
            first, last = ({"role": "system", "content": text} for text in (system, reminder))
            return {**common, "messages": [first, *said, last]}
        if self.name == "responses":
            return {**common, "instructions": system, "input": said, "store": False}
        return {**common, "system": system, "messages": said, "max_tokens": 1_000}

    def answer(self, text: str, used: int) -> dict[str, Any]:
        usage = {"input_tokens": used, "output_tokens": 5}
        if self.name == "responses":
            content = [{"type": "output_text", "text": text, "annotations": []}]
            item = {"type": "message", "id": "m_1", "role": "assistant", "status": "completed"}
            output = [{**item, "content": content}]
            common = {"id": "r_1", "object": "response", "status": "completed", "model": "m"}
            return {**common, "output": output, "usage": {**usage, "total_tokens": used + 5}}
        content = [{"type": "text", "text": text}]
        common = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m"}
        return {**common, "content": content, "stop_reason": "end_turn", "usage": usage}


WIRES = {name: Wire(name) for name in ("chat", "messages", "responses")}
every_wire = pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)


def wire_of(request: Received) -> Wire:
    return next((each for each in WIRES.values() if each.path == request.path), WIRES["chat"])


def is_summary_call(request: Received) -> bool:
    return MARK.encode() in request.body


class Upstream:
    """A provider with a window, which counts four bytes as a token and writes summaries.

    Attributes:
        window: Its window in tokens.
        refused: How many requests were too long.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.refused = 0

    def __call__(self, request: Received) -> Reply:
        used = len(request.body) // 4
        if used > self.window:
            self.refused += 1
            words = f"This model's maximum context length is {self.window} tokens. "
            words += f"However, your messages resulted in {used} tokens."
            error = {"message": words, "type": "invalid_request_error", "code": "context_length_exceeded"}
            return Reply(400, json.dumps({"error": error}).encode())
        text = SUMMARY if is_summary_call(request) else "ok"
        wire = wire_of(request)
        if wire.name == "chat":
            if request.json().get("stream"):
                chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
                choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop"}
                usage = {"prompt_tokens": used, "completion_tokens": 1, "total_tokens": used + 1}
                event = json.dumps({**chunk, "choices": [choice], "usage": usage})
                headers = {"content-type": "text/event-stream"}
                return Reply(200, f"data: {event}\n\ndata: [DONE]\n\n".encode(), headers)
            return chat_reply(request, text)
        return Reply(body=json.dumps(wire.answer(text, used)).encode())


@dataclass
class Played:
    """What became of a session.

    Attributes:
        statuses: `x-compaction-status` of each turn.
        lost: What did not reach the provider word for word.
        forwarded: The last request of each turn that reached the provider.
        summary_calls: How many there were.
    """

    statuses: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    forwarded: list[str] = field(default_factory=list)
    summary_calls: int = 0


def whole_text(request: Received) -> str:
    """All that a request says, as one text."""
    return json.dumps(request.json(), ensure_ascii=False).replace("\\n", "\n")


def play(
    client: httpx.Client,
    provider: Provider,
    session: Session,
    wire: Wire,
    *,
    turns: range = range(TURNS),
    stream: bool = False,
) -> Played:
    """Plays a session, each request the next turn."""
    played = Played()
    for turn in turns:
        provider.received.clear()
        reply = client.post(wire.path, json=wire.body(session.messages(turn), stream=stream))
        assert reply.status_code == 200, reply.text
        played.statuses.append(reply.headers["x-compaction-status"])
        asked = [each for each in provider.received if each.body and not is_summary_call(each)]
        seen = whole_text(asked[-1])
        played.forwarded.append(seen)
        played.summary_calls += sum(map(is_summary_call, provider.received))
        wanted = {"files": session.files(turn), "request": session.request(turn)[0][1]}
        played.lost += [f"turn {turn}: {name}" for name, text in wanted.items() if text not in seen]
        session.finish(turn)
    return played


@contextmanager
def running(
    folder: Path, sizes: Sizes, config: dict[str, Any] | None = None, provider: Provider | None = None
) -> Iterator[tuple[Proxy, Provider]]:
    """A proxy before a provider with this window; both end with the block unless the provider was given."""
    made = provider or Provider(Upstream(sizes.window))
    settings = {
        "server": {"admin_key": ADMIN_KEY},
        "models": {"*": {"window": sizes.window}},
        "summary": {"model": "m"},
        **(config or {}),
    }
    folder.mkdir(exist_ok=True)
    try:
        with run_proxy(folder, made.url, settings) as proxy:
            yield proxy, made
    finally:
        if provider is None:
            made.close()


def listed_conversations(client: httpx.Client) -> list[str]:
    """The conversations that the admin API lists."""
    told = client.get("/admin/v1/conversations", headers={"authorization": f"Bearer {ADMIN_KEY}"})
    assert told.status_code == 200, told.text
    return [each["id"] for each in told.json()["conversations"]]


def forwarded_messages(request: Received) -> list[Any]:
    """The messages of a chat request behind its system prompt."""
    listed: list[Any] = request.json()["messages"]
    return listed[1:]


@pytest.mark.parametrize(
    ("wire", "sizes"),
    [("chat", LARGE), ("chat", SMALL), ("messages", SMALL), ("responses", SMALL)],
    ids=["chat-128k", "chat-40k", "messages-40k", "responses-40k"],
)
def test_files_that_move_stay_whole_and_rounds_hold(wire: str, sizes: Sizes, tmp_path: Path) -> None:
    with running(tmp_path, sizes) as (proxy, provider), proxy.client() as client:
        played = play(client, provider, Session("one", sizes), WIRES[wire], stream=wire == "chat")
        listed = proxy.wait_for(lambda: listed_conversations(client), "a conversation is listed")
    assert played.lost == [], f"{len(played.lost)} texts were not whole"
    assert "applied" in played.statuses, "no round was ever due"
    assert played.statuses.count("applied") <= 4, played.statuses
    assert len(listed) == 1


def test_files_over_the_trigger_stay_whole_from_the_first_request_on(tmp_path: Path) -> None:
    with running(tmp_path, FULL) as (proxy, provider), proxy.client() as client:
        played = play(client, provider, Session("one", FULL), WIRES["chat"], turns=range(8))
        listed = proxy.wait_for(lambda: listed_conversations(client), "a conversation is listed")
    assert played.lost == [], f"{len(played.lost)} texts were not whole"
    assert len(listed) == 1


def test_files_over_the_window_are_compacted_and_listed_as_one_conversation(tmp_path: Path) -> None:
    with running(tmp_path, OVER) as (proxy, provider), proxy.client() as client:
        played = play(client, provider, Session("one", OVER), WIRES["chat"], turns=range(6))
        listed = proxy.wait_for(lambda: listed_conversations(client), "a conversation is listed")
    assert set(played.statuses) == {"applied"}
    assert not [lost for lost in played.lost if lost.endswith("request")]
    assert all(len(seen) // 4 <= OVER.window for seen in played.forwarded)
    assert len(listed) == 1


def test_sessions_that_begin_with_the_same_examples_are_listed_apart(tmp_path: Path) -> None:
    with running(tmp_path, OVER) as (proxy, provider), proxy.client() as client:
        for name in ("one", "two"):
            play(client, provider, Session(name, OVER), WIRES["chat"], turns=range(3))
        proxy.wait_for(lambda: len(listed_conversations(client)) >= 2, "two conversations are listed")
        proxy.wait_for_quiet()
        listed = listed_conversations(client)
    assert len(listed) == 2


def test_a_client_that_only_appends_gets_rounds_that_hold(tmp_path: Path) -> None:
    sizes = Sizes(window=40_000, files=4_000, answer=1_500)
    with running(tmp_path, sizes) as (proxy, provider), proxy.client() as client:
        session = Session("one", sizes, moves=False)
        played = play(client, provider, session, WIRES["chat"])
        listed = proxy.wait_for(lambda: listed_conversations(client), "a conversation is listed")
    assert not [lost for lost in played.lost if lost.endswith("request")]
    assert 1 <= played.statuses.count("applied") <= 4, played.statuses
    assert "as-of-turn-0 ends" not in played.forwarded[-1], "the files in front stayed out of the rounds"
    assert len(listed) == 1


def test_rounds_of_a_moving_client_hold_after_a_restart(tmp_path: Path) -> None:
    provider = Provider(Upstream(SMALL.window))
    store = {"store": {"url": f"sqlite:///{tmp_path}/state.db"}}
    session = Session("one", SMALL)
    try:
        with running(tmp_path / "first", SMALL, store, provider) as (proxy, _), proxy.client() as client:
            before = play(client, provider, session, WIRES["chat"], turns=range(6))
            proxy.wait_for_quiet()
        with running(tmp_path / "second", SMALL, store, provider) as (proxy, _), proxy.client() as client:
            behind = play(client, provider, session, WIRES["chat"], turns=range(6, 10))
            listed = proxy.wait_for(lambda: listed_conversations(client), "a conversation is listed")
    finally:
        provider.close()
    assert "applied" in before.statuses
    assert before.lost + behind.lost == []
    assert behind.statuses[0] == "reused"
    assert len(listed) == 1


def force(folder: Path, messages: list[dict[str, Any]]) -> tuple[str, list[Any]]:
    """Forces a round; returns its status and the messages that were forwarded behind the system prompt."""
    folder.mkdir(exist_ok=True)
    with running(folder, SMALL, {"summary": {"model": "none"}}) as (proxy, provider):
        with proxy.client(headers={"x-compaction": "force"}) as client:
            system = {"role": "system", "content": "You build things."}
            body = {"model": "m", "messages": [system, *messages]}
            reply = client.post("/v1/chat/completions", json=body)
        asked = [each for each in provider.received if each.body]
    return reply.headers["x-compaction-status"], forwarded_messages(asked[-1])


def as_messages(said: list[Said], **fields: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": text, **fields} for role, text in said]


def work(turns: int = 6) -> list[Said]:
    """Turns of a user with long answers."""
    return [each for k in range(turns) for each in pair(f"Do step {k}.", prose(700, f"work-{k}"))]


TASK = "Build the report of the queue. Never touch the table of reports."
RULE = "Always answer in French."


def test_the_examples_of_aider_are_not_the_task(tmp_path: Path) -> None:
    examples = [each for example in EXAMPLES for each in pair(*example)]
    shown = pair(f"{MAP_OPENING}\nsrc/queue.py: Always write a test.", MAP_REPLY)
    said = [*examples, *shown, ("user", TASK), ("assistant", "Ok."), *work(), ("user", "Go on.")]
    status, forwarded = force(tmp_path, as_messages(said))
    assert status == "applied"
    assert forwarded[0]["content"] == TASK
    assert "Change get_factorial()" not in json.dumps(forwarded)
    assert "Always write a test" not in json.dumps(forwarded)


def test_named_examples_are_neither_task_nor_rules(tmp_path: Path) -> None:
    examples = [
        {"role": "user", "name": "example_user", "content": f"Translate the word. {RULE}"},
        {"role": "assistant", "name": "example_assistant", "content": "Le mot."},
    ]
    said = [("user", TASK), ("assistant", "Ok."), *work(), ("user", "Go on.")]
    status, forwarded = force(tmp_path, [*examples, *as_messages(said)])
    assert status == "applied"
    assert forwarded[0]["content"] == TASK
    assert RULE not in json.dumps(forwarded)


@pytest.mark.parametrize(
    "examples",
    [
        pair(f"Change get_factorial() to use math.factorial. {RULE}", FACTORIAL) + pair(SWITCHED, "Ok."),
        pair(EXAMPLES[0][0], FACTORIAL) + pair(SWITCHED, "Ok."),
        pair(EXAMPLES[0][0], FACTORIAL) + pair(EXAMPLES[1][0], HELLO),
    ],
    ids=["another text", "one of two examples", "not closed"],
)
def test_what_only_resembles_examples_is_the_task(examples: list[Said], tmp_path: Path) -> None:
    said = [*examples, *work(), ("user", "Go on.")]
    _, forwarded = force(tmp_path, as_messages(said))
    assert forwarded[0]["content"] == examples[0][1]


def test_a_large_latest_message_leaves_room_for_the_messages_before_it(tmp_path: Path) -> None:
    latest = prose(3_400, "pasted")
    said = [("user", TASK), ("assistant", "Ok."), *work(24), ("user", latest)]
    status, forwarded = force(tmp_path, as_messages(said))
    assert status == "applied"
    assert prose(700, "work-23") in [each["content"] for each in forwarded]
