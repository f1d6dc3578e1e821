"""What messages say and show, worked out once for each.

Both follow from a message alone, and clients send the whole history with every request: a further round reads
only what has come since the last one.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from proxy.core.facts import Shown, shown
from proxy.core.message import Call, Message
from proxy.core.statements import Statement, statements

# Of texts, and of messages, so many characters are remembered; what they say and show takes about as much.
MAX_HELD_CHARACTERS = 6_000_000
# What remembering one takes beside its own characters; nearly all, where they are short.
RECORD_CHARACTERS = 300

_Known = TypeVar("_Known")
_Asked = TypeVar("_Asked", bound=Hashable)


class _Memory(Generic[_Asked, _Known]):
    """Answers of a function, those that were not asked for longest forgotten first."""

    def __init__(self, work_out: Callable[[_Asked], _Known], max_held: int) -> None:
        self._work_out = work_out
        self._max_held = max_held
        self._held: OrderedDict[_Asked, tuple[_Known, int]] = OrderedDict()
        self._size = 0

    def __call__(self, asked: _Asked, characters: int) -> _Known:
        if (found := self._held.get(asked)) is not None:
            self._held.move_to_end(asked)
            return found[0]
        known, size = self._work_out(asked), characters + RECORD_CHARACTERS
        self._held[asked] = known, size
        self._size += size
        while self._size > self._max_held:
            self._size -= self._held.popitem(last=False)[1][1]
        return known


_Content = tuple[str, str, tuple[Call, ...], tuple[str, ...]]


def _shown(content: _Content) -> tuple[Shown, ...]:
    role, text, calls, answers = content
    return shown(Message(role, text, calls=calls, answers=answers))


class Gleanings:
    """Remembers what users' texts state and what other messages show; to be asked by work `beside` the loop.

    Args:
        max_held: Size of each memory, in characters and `RECORD_CHARACTERS` for each text.
    """

    def __init__(self, max_held: int = MAX_HELD_CHARACTERS) -> None:
        self._said = _Memory(statements, max_held)
        self._seen = _Memory(_shown, max_held)
        self._turn = asyncio.Lock()
        self._alone = threading.Lock()

    async def beside(self, work: Callable[[], _Known]) -> _Known:
        """What `work` gives, in a thread and one at a time.

        Pure computing in several threads is no faster, but the event loop waits for each of them in turn.
        """

        def alone() -> _Known:
            with self._alone:  # who was cancelled has given up its turn, and its thread goes on
                return work()

        async with self._turn:
            return await asyncio.to_thread(alone)

    def said(self, text: str) -> tuple[Statement, ...]:
        """What a user's text states (`core.statements`)."""
        return self._said(text, len(text))

    def seen(self, message: Message) -> tuple[Shown, ...]:
        """What a message of a tool or of the assistant shows (`core.facts`)."""
        characters = len(message.text) + sum(len(call.arguments) for call in message.calls)
        return self._seen((message.role, message.text, message.calls, message.answers), characters)
