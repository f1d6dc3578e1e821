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

from compaction_proxy.core.errors import Unreadable
from compaction_proxy.wires.body import (
    MAX_MESSAGES,
    Body,
    Named,
    are_objects,
    cut,
    made,
    named_by,
    small_members,
)
from compaction_proxy.wires.json.slices import Slice, elements, members, skip
from compaction_proxy.wires.wire import Dialect

# Beginnings are found by their length and these last bytes of theirs.
ENDING_BYTES = 48
# A body with more white space than this behind its last message is read anew each time, in bytes.
MAX_SPACE_BYTES = 256
# What stands behind the last message is remembered, with what the body's members say, in bytes.
MAX_CLOSING = 512

Whose = tuple[str, str | None]  # tenant, conversation
Place = tuple[str, str | None, int, bytes]  # and the length and last bytes of a beginning


class Closing(NamedTuple):
    """What stood behind the last message of a body; mostly the same stands behind that of the next.

    Attributes:
        raw: Its bytes.
        array: How many of them belong to the value of `messages`.
        named: What the members of that body say.
    """

    raw: bytes
    array: int
    named: Named


class Beginning(NamedTuple):
    """A body up to the end of its last message, as later ones begin; offsets, and a few of its bytes.

    Attributes:
        mark: Its fingerprint.
        place: By what it is found.
        stop: Its length in bytes.
        start: Where in it the value of `messages` starts.
        held: Number of its elements.
        ended: Whether the last of them ends a piece.
        before: The members that stand before `messages`.
        since: The place of the one that it grew from.
        closing: What stood behind it; None if that was much.
    """

    mark: bytes
    place: Place
    stop: int
    start: int
    held: int
    ended: bool
    before: Mapping[str, Slice]
    since: Place | None
    closing: Closing | None


class Tail(NamedTuple):
    """What stands behind a beginning.

    Attributes:
        place: Where in the body the value of `messages` stands.
        late: Elements that came behind the beginning.
        named: What the body's members say.
        stop: Where the last message ends; 0 if not soon before the array does.
        closing: What stands behind it; None if that is much.
    """

    place: Slice
    late: tuple[bytes, ...]
    named: Named
    stop: int
    closing: Closing | None


def place_of(raw: bytes, stop: int, whose: Whose) -> Place:
    """By what a beginning of so many bytes is found."""
    return (*whose, stop, raw[max(0, stop - ENDING_BYTES) : stop])


def end_of(raw: bytes, place: Slice) -> int:
    """Where the last message ends; 0 if not soon before the array does."""
    if not raw.startswith(b"[", place.start):  # a string, which stands for a list of one
        return 0
    stop = place.stop - 1
    near = raw[max(place.start, stop - MAX_SPACE_BYTES) : stop]
    message = near.rstrip(b" \t\n\r")
    return stop - len(near) + len(message) if message else 0


def closing_of(raw: bytes, stop: int, place: Slice, named: Named) -> Closing | None:
    """What stands behind the last message, if it is little."""
    size = len(raw) - stop + len(named.model) + sum(map(len, named.prompt_members))
    return Closing(raw[stop:], place.stop - stop, named) if size <= MAX_CLOSING else None


def alike(raw: bytes, known: Beginning) -> Tail | None:
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
    return Tail(Slice(known.start, stop + closing.array), late, closing.named, stop, closing)


def behind(raw: bytes, known: Beginning, dialect: Dialect) -> Tail | None:
    """What stands behind a beginning; None unless it is all in order."""
    at = skip(raw, known.stop)
    more = raw.startswith(b",", at)
    if not more and not raw.startswith(b"]", at):
        return None
    opening = b'{"%b":[' % dialect.members.messages.encode()
    text = opening + raw[at + more :]
    try:
        found = members(text)
        place = found.pop(dialect.members.messages)
        late = elements(memoryview(text)[place.start : place.stop])
    except (Unreadable, RecursionError):
        return None
    if (
        more != bool(late)
        or known.held + len(late) > MAX_MESSAGES
        or not known.before.keys().isdisjoint(found)
    ):
        return None
    if not are_objects(late) or any(key in found for key in dialect.members.telling):
        return None
    shift = at + more - len(opening)
    named = named_by(small_members(raw, known.before, dialect) | small_members(text, found, dialect), dialect)
    whole = Slice(known.start, place.stop + shift)
    stop = end_of(raw, whole)
    return Tail(whole, late, named, stop, closing_of(raw, stop, whole, named))


KEY_BYTES = 32
# Beginnings that are remembered, of one or two kilobytes each.
MAX_BEGINNINGS = 4_096
# How many of them are compared with a body in full.
MAX_TRIES = 3
# Closing braces, from a body's end, behind which a known beginning may end; in a text there may be many.
MAX_BRACES = 256
# A body with more members before its messages, or longer names, is read anew each time.
MAX_KEYS = 32
MAX_KEY_CHARACTERS = 1_024
# Larger bodies are read beside the loop; and larger ones yet, even if they have only grown.
LITTLE_BYTES = 256 * 1024
GROWN_BYTES = 1024 * 1024
# Bodies that are read beside it at once.
WORKERS = 2


class _Found(NamedTuple):
    """What was found in a body.

    Attributes:
        body: The body.
        beginning: How later ones may begin; None where that is not remembered.
    """

    body: Body
    beginning: Beginning | None


class Reader:
    """Reads bodies, and remembers how they begin.

    Args:
        key: 32 random bytes, so that nobody can make two beginnings with one fingerprint.
        dialect: The wire of the bodies.
        max_beginnings: Size of the memory.
    """

    def __init__(self, key: bytes, dialect: Dialect, max_beginnings: int = MAX_BEGINNINGS) -> None:
        self._dialect = dialect
        self._blank = blake3(key=key)
        self._max_beginnings = max_beginnings
        self._known: OrderedDict[Place, Beginning] = OrderedDict()
        self._latest: OrderedDict[Whose, Beginning] = OrderedDict()
        self._turns = asyncio.Semaphore(WORKERS)

    async def read_beside(self, raw: bytes, tenant: str, conversation: str | None = None) -> Body:
        """The same as `read`; nobody has to wait while a large body is read.

        Raises:
            Unreadable: See `body.read`.
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
        """Cut a request body up, as `body.read` does; the body has a mark, and may follow an earlier one.

        Raises:
            Unreadable: See `body.read`.
        """
        whose = (tenant, conversation)
        return self._noted(whose, self._found(raw, whose))

    def _noted(self, whose: Whose, found: _Found) -> Body:
        if found.beginning is not None:
            self._remember(whose, found.beginning)
        return found.body

    def _found(self, raw: bytes, whose: Whose) -> _Found:
        """What is in a body. Changes nothing, so it may be done in a thread."""
        return self._grown(raw, whose) or self._anew(raw, whose)

    def _grown(self, raw: bytes, whose: Whose) -> _Found | None:
        """The body, if it begins as an earlier one."""
        for beginning in islice(self._likely(raw, whose), MAX_TRIES):
            hasher = self._hasher(whose).update(memoryview(raw)[: beginning.stop])
            if beginning.stop < len(raw) and hasher.digest() == beginning.mark:
                return self._continued(raw, beginning, hasher)
        return None

    def _likely(self, raw: bytes, whose: Whose) -> Iterator[Beginning]:
        """Beginnings that end as the body does at the same place: the latest first, then the longest."""
        latest = self._latest.get(whose)
        if latest is not None and raw.endswith(latest.place[3], 0, latest.stop):
            yield latest
        stop = len(raw)
        for _ in range(MAX_BRACES):
            if (brace := raw.rfind(b"}", 0, stop)) < 0:
                return
            found = self._known.get(place_of(raw, brace + 1, whose))
            if found is not None and found is not latest:
                yield found
            stop = brace

    def _continued(self, raw: bytes, known: Beginning, hasher: blake3) -> _Found | None:
        """The body that begins so; None if what stands behind has to be looked at more closely."""
        dialect = self._dialect
        tail = alike(raw, known) or behind(raw, known, dialect)
        if tail is None:
            return None
        if not tail.late:
            return _Found(made(raw, tail.place, (), tail.named, dialect, known.mark, known.mark), known)
        if not (stop := tail.stop) or not known.ended or dialect.unsettles(tail.late):
            return None
        mark = hasher.update(memoryview(raw)[known.stop : stop]).digest()
        place = place_of(raw, stop, known.place[:2])
        held = known.held + len(tail.late)
        ended = not dialect.unended(tail.late[-1])
        grown = Beginning(
            mark, place, stop, known.start, held, ended, known.before, known.place, tail.closing
        )
        late = dialect.pieces(tail.late)
        return _Found(made(raw, tail.place, late, tail.named, dialect, mark, known.mark), grown)

    def _anew(self, raw: bytes, whose: Whose) -> _Found:
        dialect = self._dialect
        found, listed = cut(raw, dialect)
        late = dialect.pieces(listed)
        place = found[dialect.members.messages]
        named = named_by(small_members(raw, found, dialect), dialect)
        before = {key: at for key, at in found.items() if at.stop <= place.start}
        stop = end_of(raw, place)
        if not stop or len(before) > MAX_KEYS or sum(map(len, before)) > MAX_KEY_CHARACTERS:
            return _Found(made(raw, place, late, named, dialect), None)
        mark = self._hasher(whose).update(memoryview(raw)[:stop]).digest()
        closing = closing_of(raw, stop, place, named)
        found_by = place_of(raw, stop, whose)
        ended = not dialect.unended(listed[-1])
        beginning = Beginning(mark, found_by, stop, place.start, len(listed), ended, before, None, closing)
        return _Found(made(raw, place, late, named, dialect, mark), beginning)

    def _hasher(self, whose: Whose) -> blake3:
        return self._blank.copy().update(whose[0].encode() + b"\0")

    def _remember(self, whose: Whose, beginning: Beginning) -> None:
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
