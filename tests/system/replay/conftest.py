"""Growing requests made of conversations, and what must hold of each that reaches the provider."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.free_ports import find_free_port

JsonObject = dict[str, Any]
PRIVILEGED = ("system", "developer")
STEPS = 6
# What the scripted provider takes for a token, in bytes.
BYTES_PER_TOKEN = 4
# The least limit, and how much of what may be compacted it leaves room for.
LEAST_LIMIT_TOKENS = 2_000
ROOM_SHARE = 0.4
# How well any proxy can know what a provider will count.
ESTIMATE_ERROR = 0.015
# Where the irreducible part takes more of the room, a stand-in may have to be cut.
STAND_IN_SHARE = 0.85
# A task under this size stays whole; of a longer one at least this many characters stay at its head.
WHOLE_TASK_TOKENS = 1_500
TASK_HEAD_CHARACTERS = 1_000
# What marks the one stand-in of a privileged role, and what introduces the user's words in a stand-in.
SPLIT_OPENING = "[Previous conversation summary]"
REQUEST_OPENING = "Last request from user was: "
# `anchored` keeps a tenth of T of a task, and caps a new result over a fifth of it. T is half of the limit at
# least, and a token of the proxy's may be two bytes: below these shares of the limit both stay whole.
ANCHORED_TASK_SHARE = 0.025
ANCHORED_RESULT_SHARE = 0.05
# A latest result over this may be cut, where it is larger than the record of all that went before.
LARGE_RESULT_BYTES = 400 * BYTES_PER_TOKEN
ANCHORED_HEAD_CHARACTERS = 40
# Strategies under which the user's first message stays, in its place or inside a stand-in.
TASK_STAYS = frozenset({"anchored", "selective", "prune", "chained"})

# Where strategies compact whose own triggers these windows do not reach.
TRIGGERS = {"full": [{"percent": 70}], "selective": [{"percent": 70}], "iterations": [{"iterations": 8}]}


def text_of(message: JsonObject) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or () if isinstance(part, dict))


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def message_bytes(message: JsonObject) -> int:
    """Bytes that the scripted provider counts for a message."""
    calls = message.get("tool_calls")
    parts = [f"<|{message.get('role')}|>\n", text_of(message), "\n<|end|>\n"]
    parts += [_compact(calls)] if calls else []
    parts += [str(message["tool_call_id"])] if "tool_call_id" in message else []
    return sum(len(part.encode("utf-8", "surrogatepass")) for part in parts)


def cuts(messages: Sequence[JsonObject], steps: int = STEPS) -> list[int]:
    """Lengths at which a client would ask: after a user message or a result, before an assistant message."""
    at = [
        index
        for index in range(1, len(messages) + 1)
        if messages[index - 1]["role"] in ("user", "tool")
        and (index == len(messages) or messages[index]["role"] == "assistant")
    ]
    last = len(at) - 1
    return sorted(
        {at[min(last, round((step + 1) * len(at) / steps) - 1)] for step in range(steps)} if at else ()
    )


@dataclass(frozen=True)
class Step:
    """One request of a growing conversation.

    `narrowest` is the least limit of the requests before it: what a round of theirs has shortened stays so.
    """

    name: str
    messages: list[JsonObject]
    tools: list[JsonObject] | None
    narrowest: int = sys.maxsize

    def body(self, model: str, *, stream: bool) -> JsonObject:
        extra = {"tools": self.tools} if self.tools else {}
        return {"model": model, "messages": self.messages, "stream": stream, **extra}

    @property
    def task(self) -> JsonObject | None:
        return next((each for each in self.messages if each["role"] == "user"), None)

    @property
    def latest_user(self) -> JsonObject | None:
        return next((each for each in reversed(self.messages) if each["role"] == "user"), None)

    def irreducible(self) -> list[JsonObject]:
        kept = [self.task, self.latest_user, self.messages[-1]]
        return [
            each
            for each in self.messages
            if each["role"] in PRIVILEGED or any(each is other for other in kept)
        ]

    def frame(self) -> int:
        """Bytes that the last message brings along where it is a result: its call, and those beside it."""
        at = len(self.messages) - 1
        while at and self.messages[at]["role"] == "tool":
            at -= 1
        kept = {id(each) for each in self.irreducible()}
        return sum(message_bytes(each) for each in self.messages[at:] if id(each) not in kept)

    def needed(self) -> int:
        """Bytes of the irreducible part."""
        tools = len(_compact(self.tools).encode()) if self.tools else 0
        return tools + sum(map(message_bytes, self.irreducible()))

    def possible(self) -> bool:
        """Whether any list could fit, its last message cut to a mark where that is a result."""
        last = self.messages[-1]
        mark = {**last, "content": "[…]"} if last["role"] == "tool" else last
        cut = message_bytes(last) - message_bytes(mark)
        return self.ample() or self.needed() - cut + self.frame() <= self.known_room()

    def ample(self) -> bool:
        """Whether all that matters can stay whole.

        The limit does not count the call that a last result needs: where that or an estimate leaves no room,
        something must give. A request that fits as it is must of course stay as it is.
        """
        whole = (
            self.needed()
            - sum(map(message_bytes, self.irreducible()))
            + sum(map(message_bytes, self.messages))
        )
        fits = whole <= BYTES_PER_TOKEN * self.limit()
        return fits or self.needed() + self.frame() <= self.known_room()

    def roomy(self, strategy: str) -> bool:
        """Whether the task must be whole: in a stand-in that has to be cut it is not."""
        inside = strategy == "chained" and self.crowded(min(self.limit(), self.narrowest))
        return self.ample() and not inside

    def crowded(self, limit: int) -> bool:
        """Whether what must stay leaves hardly any room for a stand-in."""
        return self.needed() + self.frame() > STAND_IN_SHARE * self.known_room(limit)

    def known_room(self, limit: int | None = None) -> float:
        """Bytes of the limit less what an estimate may be wrong by."""
        return (1 - ESTIMATE_ERROR) * BYTES_PER_TOKEN * (limit or self.limit())

    def limit(self) -> int:
        """Tokens of the irreducible part and 40 % of the rest."""
        rest = sum(map(message_bytes, self.messages)) - sum(map(message_bytes, self.irreducible()))
        needed = (self.needed() + ROOM_SHARE * rest) / BYTES_PER_TOKEN
        return max(LEAST_LIMIT_TOKENS, ceil(needed))

    def wrongs(self, got: Sequence[JsonObject], strategy: str = "anchored") -> Iterator[str]:
        """What is wrong with the messages that the provider was sent in place of these."""
        theirs = [each for each in got if each["role"] in PRIVILEGED and not _is_stand_in(each, strategy)]
        if theirs != [each for each in self.messages if each["role"] in PRIVILEGED]:
            yield "privileged messages changed"
        if not self.ends_as_it_should(got, strategy):
            yield f"latest message changed ({message_bytes(self.messages[-1])} to {message_bytes(got[-1])})"
        if not _holds_request(got, self.latest_user, moved=strategy == "full"):
            yield "latest user message changed"
        if sum(map(message_bytes, got)) > sum(map(message_bytes, self.messages)):
            yield "grew"
        if strategy in TASK_STAYS and self.roomy(strategy) and self.task is not None:
            task, kept = text_of(self.task), self.kept_of_task(strategy)
            if not any(task[:kept] in text_of(each) for each in got):
                yield f"task not verbatim ({len(task)} characters, {kept} of them wanted)"

    def ends_as_it_should(self, got: Sequence[JsonObject], strategy: str) -> bool:
        """Whether the last message is the client's, as far as the strategy leaves it in its place."""
        last = self.messages[-1]
        if not self.ample() or got[-1] == last:
            return True
        if strategy == "full" and self.crowded(self.limit()):
            return True  # its stand-in holds the latest user message, and the last result gives way to it
        if strategy == "full" and last["role"] == "user":
            return _holds_request(got[-1:], last, moved=True)
        most = self.share_bytes(ANCHORED_RESULT_SHARE) if strategy == "anchored" else LARGE_RESULT_BYTES
        capped = last["role"] == "tool" and message_bytes(last) > min(most, LARGE_RESULT_BYTES)
        return capped and text_of(got[-1]).startswith(text_of(last)[:ANCHORED_HEAD_CHARACTERS])

    def kept_of_task(self, strategy: str) -> int:
        """Characters of the task that must still be there."""
        task = text_of(self.task) if self.task else ""
        size = len(task.encode("utf-8", "surrogatepass"))
        whole = WHOLE_TASK_TOKENS * BYTES_PER_TOKEN
        if strategy == "anchored" and self.task is not self.latest_user:
            most = min(whole, ANCHORED_TASK_SHARE * BYTES_PER_TOKEN * min(self.limit(), self.narrowest))
            return len(task) if size <= most else ANCHORED_HEAD_CHARACTERS
        return len(task) if size <= whole else TASK_HEAD_CHARACTERS

    def share_bytes(self, share: float) -> float:
        """Bytes of a share of the limit."""
        return share * BYTES_PER_TOKEN * self.limit()


def _is_stand_in(message: JsonObject, strategy: str) -> bool:
    return strategy == "split" and text_of(message).startswith(SPLIT_OPENING)


def _holds_request(got: Sequence[JsonObject], request: JsonObject | None, *, moved: bool) -> bool:
    """Whether the latest user message is there as it was, or at the end of a stand-in where it may move."""
    if request is None or request in got:
        return True
    return moved and any(text_of(each).endswith(REQUEST_OPENING + text_of(request)) for each in got)


def steps_of(row: JsonObject, steps: int = STEPS) -> list[Step]:
    found: list[Step] = []
    for cut in cuts(row["messages"], steps):
        narrowest = min((each.limit() for each in found), default=sys.maxsize)
        found.append(Step(f"{row['id']} @{cut}", row["messages"][:cut], row.get("tools"), narrowest))
    return found


def rows(path: Path) -> list[JsonObject]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def conversations(shared: Path) -> dict[str, list[JsonObject]]:
    folder = shared / "data" / "conversations"
    return {path.stem: rows(path) for path in sorted(folder.glob("*.jsonl")) if path.stem != "short_chat"}


@dataclass
class Replay:
    """What a replay has come to.

    Attributes:
        wrong: What was wrong with the answers.
        requests: How many were asked.
        rounds: Answers that a round of the strategy's was in force for.
    """

    wrong: list[str] = field(default_factory=list)
    requests: int = 0
    rounds: int = 0


async def replayed(
    proxied: Any,
    scripted: Any,
    steps: list[Any],
    *,
    strategy: str = "anchored",
    limited: Callable[[int], None] | None = None,
    **sections: Any,
) -> Replay:
    """What the answers to these steps are like.

    Each is asked twice, under a model name of its own: the first time the proxy learns the window from the
    refusal, the second time it knows it.
    """
    replay = Replay()
    compaction = {"strategy": strategy, "trigger": TRIGGERS.get(strategy), **sections.pop("compaction", {})}
    async with proxied(scripted.url, compaction=compaction, **sections) as client:
        for number, step in enumerate(steps):
            if limited is not None:
                limited(step.limit())
            model = f"replay-{number}"
            for stream in (number % 2 == 0, number % 2 == 1):
                scripted.forget()
                answer = await client.post(
                    "/v1/chat/completions",
                    json=step.body(model, stream=stream),
                    headers={
                        "x-fake-context-limit": str(step.limit()),
                        "x-session-id": step.name.partition(" ")[0],
                    },
                )
                replay.requests += 1
                if answer.status_code != 200:
                    if step.possible():
                        replay.wrong.append(f"{step.name}: {answer.status_code} {answer.text[:200]}")
                    continue
                replay.rounds += "x-compaction-round" in answer.headers
                [*_, last] = scripted.log(model)
                wrongs = step.wrongs(last["body"]["messages"], strategy)
                replay.wrong += [f"{step.name}: {each}" for each in wrongs]
    return replay


class Replaying:
    """What tests need, without an import between test files."""

    steps_of = staticmethod(steps_of)
    replayed = staticmethod(replayed)
    conversations = staticmethod(conversations)
    Step = Step


def _healthy(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    return False


@contextlib.contextmanager
def _started(command: Callable[[int], Sequence[str | Path]], limit_s: float) -> Iterator[str]:
    """Run a server of a real model while the block runs; gives its URL. Skips where it does not start."""
    port = find_free_port()
    process = subprocess.Popen(
        command(port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + limit_s
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() > until:
                pytest.skip("the model's server does not start here")
            time.sleep(0.2)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="session")
def model_server() -> Callable[..., contextlib.AbstractContextManager[str]]:
    """Runs a server of a real model, for a command by port and the seconds that it may take to start."""
    return _started


@pytest.fixture
def replaying() -> Replaying:
    return Replaying()
