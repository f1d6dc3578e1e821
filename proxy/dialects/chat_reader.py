"""Bodies that have grown: clients send their list again with every request, so only its end is parsed.

What a body begins with, up to the end of its last message, is known by a keyed fingerprint of these bytes.
Of a later body that begins with the very same bytes nothing but the tail is looked at, as strictly as ever.
Whatever is not exactly so is read from its first byte.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from blake3 import blake3

from proxy.dialects.chat import MAX_MESSAGES, Body, Named, are_objects, cut, made, named_by, small_members
from proxy.dialects.json_slices import Slice, elements, members, skip
from proxy.errors import Unreadable

KEY_BYTES = 32
# Beginnings that are remembered, of one or two kilobytes each.
MAX_BEGINNINGS = 4_096
# How many of them are compared with a body in full.
MAX_TRIES = 3
# Beginnings are found by their length and these last bytes of theirs.
ENDING_BYTES = 48
# Closing braces, from a body's end, behind which a known beginning may end; in a text there may be many.
MAX_BRACES = 256
# A body with more members before its messages, or longer names, is read anew each time.
MAX_KEYS = 32
MAX_KEY_CHARACTERS = 1_024
# Likewise one with more white space behind its last message, in bytes.
MAX_SPACE_BYTES = 256
# Larger bodies are read beside the loop; and larger ones yet, even if they have only grown.
LITTLE_BYTES = 256 * 1024
GROWN_BYTES = 1024 * 1024
# Bodies that are read beside it at once.
WORKERS = 2
# What stands behind the last message is remembered, with what the body's members say, in bytes.
MAX_CLOSING = 512
_OPENING = b'{"messages":['

_Whose = tuple[str, str | None]  # tenant, conversation
_Place = tuple[str, str | None, int, bytes]  # and the length and last bytes of a beginning


class _Closing(NamedTuple):
    """What stood behind the last message of a body; mostly the same stands behind that of the next.

    Attributes:
        raw: Its bytes.
        array: How many of them belong to the value of `messages`.
        named: What the members of that body say.
    """

    raw: bytes
    array: int
    named: Named


class _Beginning(NamedTuple):
    """A body up to the end of its last message, as later ones begin; offsets, and a few of its bytes.

    Attributes:
        mark: Its fingerprint.
        place: By what it is found.
        stop: Its length in bytes.
        start: Where in it the value of `messages` starts.
        held: Number of its messages.
        before: The members that stand before `messages`.
        since: The place of the one that it grew from.
        closing: What stood behind it; None if that was much.
    """

    mark: bytes
    place: _Place
    stop: int
    start: int
    held: int
    before: Mapping[str, Slice]
    since: _Place | None
    closing: _Closing | None


class _Tail(NamedTuple):
    """What stands behind a beginning.

    Attributes:
        place: Where in the body the value of `messages` stands.
        late: Messages that came behind the beginning.
        named: What the body's members say.
        stop: Where the last message ends; 0 if not soon before the array does.
        closing: What stands behind it; None if that is much.
    """

    place: Slice
    late: tuple[bytes, ...]
    named: Named
    stop: int
    closing: _Closing | None


class _Found(NamedTuple):
    """What was found in a body.

    Attributes:
        body: The body.
        beginning: How later ones may begin; None where that is not remembered.
    """

    body: Body
    beginning: _Beginning | None


class Reader:
    """Reads bodies, and remembers how they begin.

    Args:
        key: 32 random bytes, so that nobody can make two beginnings with one fingerprint.
        max_beginnings: Size of the memory.
    """

    def __init__(self, key: bytes, max_beginnings: int = MAX_BEGINNINGS) -> None:
        self._blank = blake3(key=key)
        self._max_beginnings = max_beginnings
        self._known: OrderedDict[_Place, _Beginning] = OrderedDict()
        self._latest: OrderedDict[_Whose, _Beginning] = OrderedDict()
        self._turns = asyncio.Semaphore(WORKERS)

    async def read_beside(self, raw: bytes, tenant: str, conversation: str | None = None) -> Body:
        """The same as `read`; nobody has to wait while a large body is read.

        Raises:
            Unreadable: See `chat.read`.
        """
        size, whose = len(raw), (tenant, conversation)
        if size <= LITTLE_BYTES:
            return self._noted(whose, self._found(raw, whose))
        found = self._grown(raw, whose) if size <= GROWN_BYTES else None
        if found is None:
            async with self._turns:
                found = await asyncio.to_thread(self._found, raw, whose)
        return self._noted(whose, found)

    def read(self, raw: bytes, tenant: str, conversation: str | None = None) -> Body:
        """Cut a request body up, as `chat.read` does; the body has a mark, and may follow an earlier one.

        Raises:
            Unreadable: See `chat.read`.
        """
        whose = (tenant, conversation)
        return self._noted(whose, self._found(raw, whose))

    def _noted(self, whose: _Whose, found: _Found) -> Body:
        if found.beginning is not None:
            self._remember(whose, found.beginning)
        return found.body

    def _found(self, raw: bytes, whose: _Whose) -> _Found:
        """What is in a body. Changes nothing, so it may be done in a thread."""
        return self._grown(raw, whose) or self._anew(raw, whose)

    def _grown(self, raw: bytes, whose: _Whose) -> _Found | None:
        """The body, if it begins as an earlier one."""
        for beginning in islice(self._likely(raw, whose), MAX_TRIES):
            hasher = self._hasher(whose).update(memoryview(raw)[: beginning.stop])
            if beginning.stop < len(raw) and hasher.digest() == beginning.mark:
                return self._continued(raw, beginning, hasher)
        return None

    def _likely(self, raw: bytes, whose: _Whose) -> Iterator[_Beginning]:
        """Beginnings that end as the body does at the same place: the latest first, then the longest."""
        latest = self._latest.get(whose)
        if latest is not None and raw.endswith(latest.place[3], 0, latest.stop):
            yield latest
        stop = len(raw)
        for _ in range(MAX_BRACES):
            if (brace := raw.rfind(b"}", 0, stop)) < 0:
                return
            found = self._known.get(_place(raw, brace + 1, whose))
            if found is not None and found is not latest:
                yield found
            stop = brace

    def _continued(self, raw: bytes, known: _Beginning, hasher: blake3) -> _Found | None:
        """The body that begins so; None if what stands behind has to be looked at more closely."""
        tail = _alike(raw, known) or _tail(raw, known)
        if tail is None:
            return None
        if not tail.late:
            return _Found(made(raw, tail.place, (), tail.named, known.mark, known.mark), known)
        if not (stop := tail.stop):
            return None
        mark = hasher.update(memoryview(raw)[known.stop : stop]).digest()
        place = _place(raw, stop, known.place[:2])
        held = known.held + len(tail.late)
        grown = _Beginning(mark, place, stop, known.start, held, known.before, known.place, tail.closing)
        return _Found(made(raw, tail.place, tail.late, tail.named, mark, known.mark), grown)

    def _anew(self, raw: bytes, whose: _Whose) -> _Found:
        found, late = cut(raw)
        place = found["messages"]
        named = named_by(small_members(raw, found))
        before = {key: at for key, at in found.items() if at.stop <= place.start}
        stop = _end(raw, place)
        if not stop or len(before) > MAX_KEYS or sum(map(len, before)) > MAX_KEY_CHARACTERS:
            return _Found(made(raw, place, late, named), None)
        mark = self._hasher(whose).update(memoryview(raw)[:stop]).digest()
        closing = _closing(raw, stop, place, named)
        found_by = _place(raw, stop, whose)
        beginning = _Beginning(mark, found_by, stop, place.start, len(late), before, None, closing)
        return _Found(made(raw, place, late, named, mark), beginning)

    def _hasher(self, whose: _Whose) -> blake3:
        return self._blank.copy().update(whose[0].encode() + b"\0")

    def _remember(self, whose: _Whose, beginning: _Beginning) -> None:
        """Take a beginning up, in place of the one before the one that it grew from."""
        older = self._known.get(beginning.since) if beginning.since else None
        if older is not None and older.since is not None:
            self._known.pop(older.since, None)
        self._known[beginning.place] = self._latest[whose] = beginning
        self._known.move_to_end(beginning.place)
        self._latest.move_to_end(whose)
        for held in (self._known, self._latest):
            while len(held) > self._max_beginnings:
                held.popitem(last=False)


def _place(raw: bytes, stop: int, whose: _Whose) -> _Place:
    return (*whose, stop, raw[max(0, stop - ENDING_BYTES) : stop])


def _end(raw: bytes, place: Slice) -> int:
    """Where the last message ends; 0 if not soon before the array does."""
    stop = place.stop - 1
    near = raw[max(place.start, stop - MAX_SPACE_BYTES) : stop]
    message = near.rstrip(b" \t\n\r")
    return stop - len(near) + len(message) if message else 0


def _closing(raw: bytes, stop: int, place: Slice, named: Named) -> _Closing | None:
    """What stands behind the last message, if it is little."""
    size = len(raw) - stop + len(named.model) + sum(map(len, named.prompt_members))
    return _Closing(raw[stop:], place.stop - stop, named) if size <= MAX_CLOSING else None


def _alike(raw: bytes, known: _Beginning) -> _Tail | None:
    """What stands behind a beginning, if it is messages and then the very bytes that once stood there.

    The earlier body was right, and stays so with more elements at the end of its array.
    """
    closing = known.closing
    if closing is None or not raw.startswith(b",", known.stop) or not raw.endswith(closing.raw):
        return None
    stop = len(raw) - len(closing.raw)
    text = b"[%b]" % raw[known.stop + 1 : stop]
    try:
        if not text.isascii():
            text.decode()
        late = elements(text)
    except (Unreadable, UnicodeDecodeError, RecursionError):
        return None
    if not late or known.held + len(late) > MAX_MESSAGES or not are_objects(late):
        return None
    if not text.endswith(b"}]"):  # something stands between
        return None
    return _Tail(Slice(known.start, stop + closing.array), late, closing.named, stop, closing)


def _tail(raw: bytes, known: _Beginning) -> _Tail | None:
    """What stands behind a beginning; None unless it is all in order."""
    at = skip(raw, known.stop)
    more = raw.startswith(b",", at)
    if not more and not raw.startswith(b"]", at):
        return None
    text = _OPENING + raw[at + more :]
    try:
        found = members(text)
        place = found.pop("messages")
        late = elements(memoryview(text)[place.start : place.stop])
    except (Unreadable, RecursionError):
        return None
    if (
        more != bool(late)
        or known.held + len(late) > MAX_MESSAGES
        or not known.before.keys().isdisjoint(found)
    ):
        return None
    if not are_objects(late):
        return None
    shift = at + more - len(_OPENING)
    named = named_by(small_members(raw, known.before) | small_members(text, found))
    whole = Slice(known.start, place.stop + shift)
    stop = _end(raw, whole)
    return _Tail(whole, late, named, stop, _closing(raw, stop, whole, named))
