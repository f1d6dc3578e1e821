"""Growing requests made of conversations, and what must hold of each that reaches the provider."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import pytest

JsonObject = dict[str, Any]
PRIVILEGED = ("system", "developer")
STEPS = 6
# What the scripted provider takes for a token, in bytes.
BYTES_PER_TOKEN = 4
# The least limit, and how much of what may be compacted it leaves room for.
LEAST_LIMIT_TOKENS = 2_000
ROOM_SHARE = 0.4
# How well any proxy can know what a provider will count.
ESTIMATE_ERROR = 0.005
# A task under this size stays whole; of a longer one at least this many characters stay at its head.
WHOLE_TASK_TOKENS = 1_500
TASK_HEAD_CHARACTERS = 1_000


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
    """One request of a growing conversation."""

    name: str
    messages: list[JsonObject]
    tools: list[JsonObject] | None

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

    def known_room(self) -> float:
        """Bytes of the limit less what an estimate may be wrong by."""
        return (1 - ESTIMATE_ERROR) * BYTES_PER_TOKEN * self.limit()

    def limit(self) -> int:
        """Tokens of the irreducible part and 40 % of the rest."""
        rest = sum(map(message_bytes, self.messages)) - sum(map(message_bytes, self.irreducible()))
        needed = (self.needed() + ROOM_SHARE * rest) / BYTES_PER_TOKEN
        return max(LEAST_LIMIT_TOKENS, ceil(needed))

    def wrongs(self, got: Sequence[JsonObject]) -> Iterator[str]:
        """What is wrong with the messages that the provider was sent in place of these."""
        privileged = [each for each in self.messages if each["role"] in PRIVILEGED]
        if [each for each in got if each["role"] in PRIVILEGED] != privileged:
            yield "privileged messages changed"
        ample = self.ample()
        if ample and got[-1] != self.messages[-1]:
            yield f"latest message changed ({message_bytes(self.messages[-1])} to {message_bytes(got[-1])})"
        if self.latest_user is not None and self.latest_user not in got:
            yield "latest user message changed"
        if sum(map(message_bytes, got)) > sum(map(message_bytes, self.messages)):
            yield "grew"
        if ample and self.task is not None:
            task = text_of(self.task)
            whole = len(task.encode("utf-8", "surrogatepass")) <= WHOLE_TASK_TOKENS * BYTES_PER_TOKEN
            wanted = task if whole else task[:TASK_HEAD_CHARACTERS]
            if not any(wanted in text_of(each) for each in got):
                yield "task not verbatim"


def steps_of(row: JsonObject, steps: int = STEPS) -> list[Step]:
    return [
        Step(f"{row['id']} @{cut}", row["messages"][:cut], row.get("tools"))
        for cut in cuts(row["messages"], steps)
    ]


class Replaying:
    """What tests need, without an import between test files."""

    steps_of = staticmethod(steps_of)
    Step = Step


@pytest.fixture
def replaying() -> Replaying:
    return Replaying()
