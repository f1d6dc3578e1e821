"""Bodies that have grown: clients send their list again with every request, so only its end is parsed.

What a body begins with, up to the end of its last message, is known by a keyed fingerprint of these bytes.
Of a later body that begins with the very same bytes nothing but the tail is looked at, as strictly as ever.
Whatever is not exactly so is read from its first byte.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple

from blake3 import blake3

from proxy.dialects.chat import MAX_MESSAGES, Body, Named, are_objects, cut, made, named_by, small_members
from proxy.dialects.json_slices import Slice, elements, members, skip
from proxy.errors import Unreadable

KEY_BYTES = 32
# Beginnings that are remembered, of one or two kilobytes each.
MAX_BEGINNINGS = 4_096
# Of one conversation, or of several without an id that begin alike.
MAX_ALIKE = 64
# How many of them are compared with a body in full.
MAX_TRIES = 3
# By these first bytes conversations without an id are told apart.
FIRST_BYTES = 256
# By these last bytes nearly every body is seen not to begin so.
ENDING_BYTES = 48
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

_Bucket = tuple[str, str | None, bytes]


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
        stop: Its length in bytes.
        ending: Its last bytes.
        start: Where in it the value of `messages` starts.
        held: Number of its messages.
        before: The members that stand before `messages`.
        since: The mark of the one that it grew from, or empty.
        closing: What stood behind it; None if that was much.
    """

    mark: bytes
    stop: int
    ending: bytes
    start: int
    held: int
    before: Mapping[str, Slice]
    since: bytes
    closing: _Closing | None


class _Tail(NamedTuple):
    """What stands behind a beginning.

    Attributes:
        place: Where in the body the value of `messages` stands.
        late: Messages that came behind the beginning.
        named: What the body's members say.
    """

    place: Slice
    late: tuple[bytes, ...]
    named: Named


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
        self._known: OrderedDict[_Bucket, dict[bytes, _Beginning]] = OrderedDict()
        self._beginnings = 0
        self._turns = asyncio.Semaphore(WORKERS)

    async def read_beside(self, raw: bytes, tenant: str, conversation: str | None = None) -> Body:
        """The same as `read`; nobody has to wait while a large body is read.

        Raises:
            Unreadable: See `chat.read`.
        """
        size = len(raw)
        if size <= LITTLE_BYTES:
            return self.read(raw, tenant, conversation)
        bucket = (tenant, conversation, raw[:FIRST_BYTES])
        found = self._grown(raw, bucket) if size <= GROWN_BYTES else None
        if found is None:
            async with self._turns:
                found = await asyncio.to_thread(self._found, raw, bucket)
        return self._noted(bucket, found)

    def read(self, raw: bytes, tenant: str, conversation: str | None = None) -> Body:
        """Cut a request body up, as `chat.read` does; the body has a mark, and may follow an earlier one.

        Raises:
            Unreadable: See `chat.read`.
        """
        bucket = (tenant, conversation, raw[:FIRST_BYTES])
        return self._noted(bucket, self._found(raw, bucket))

    def _noted(self, bucket: _Bucket, found: _Found) -> Body:
        if found.beginning is not None:
            self._remember(bucket, found.beginning)
        return found.body

    def _found(self, raw: bytes, bucket: _Bucket) -> _Found:
        """What is in a body. Changes nothing, so it may be done in a thread."""
        return self._grown(raw, bucket) or self._anew(raw, bucket)

    def _grown(self, raw: bytes, bucket: _Bucket) -> _Found | None:
        """The body, if it begins as an earlier one."""
        known = self._known.get(bucket)
        if not known:
            return None
        alike = [each for each in list(known.values()) if raw.endswith(each.ending, 0, each.stop)]
        for beginning in sorted(alike, key=_length, reverse=True)[:MAX_TRIES]:
            hasher = self._hasher(bucket).update(memoryview(raw)[: beginning.stop])
            if beginning.stop < len(raw) and hasher.digest() == beginning.mark:
                return self._continued(raw, beginning, hasher)
        return None

    def _continued(self, raw: bytes, known: _Beginning, hasher: blake3) -> _Found | None:
        """The body that begins so; None if what stands behind has to be looked at more closely."""
        tail = _alike(raw, known) or _tail(raw, known)
        if tail is None:
            return None
        if not tail.late:
            return _Found(made(raw, tail.place, (), tail.named, known.mark, known.mark), known)
        if not (stop := _end(raw, tail.place)):
            return None
        mark = hasher.update(memoryview(raw)[known.stop : stop]).digest()
        grown = known._replace(
            mark=mark,
            stop=stop,
            ending=_ending(raw, stop),
            held=known.held + len(tail.late),
            since=known.mark,
            closing=_closing(raw, stop, tail.place, tail.named),
        )
        return _Found(made(raw, tail.place, tail.late, tail.named, mark, known.mark), grown)

    def _anew(self, raw: bytes, bucket: _Bucket) -> _Found:
        found, late = cut(raw)
        place = found["messages"]
        named = named_by(small_members(raw, found))
        before = {key: at for key, at in found.items() if at.stop <= place.start}
        stop = _end(raw, place)
        if not stop or len(before) > MAX_KEYS or sum(map(len, before)) > MAX_KEY_CHARACTERS:
            return _Found(made(raw, place, late, named), None)
        mark = self._hasher(bucket).update(memoryview(raw)[:stop]).digest()
        closing = _closing(raw, stop, place, named)
        beginning = _Beginning(mark, stop, _ending(raw, stop), place.start, len(late), before, b"", closing)
        return _Found(made(raw, place, late, named, mark), beginning)

    def _hasher(self, bucket: _Bucket) -> blake3:
        return self._blank.copy().update(bucket[0].encode() + b"\0")

    def _remember(self, bucket: _Bucket, beginning: _Beginning) -> None:
        """Take a beginning up, in place of the one before the one that it grew from."""
        known = self._known.setdefault(bucket, {})
        self._known.move_to_end(bucket)
        self._beginnings -= len(known)
        known.pop(beginning.mark, None)
        older = known.get(beginning.since)
        if older is not None:
            known.pop(older.since, None)
        known[beginning.mark] = beginning
        for mark in list(islice(known, max(0, len(known) - MAX_ALIKE))):
            del known[mark]
        self._beginnings += len(known)
        while self._beginnings > self._max_beginnings:
            _, oldest = self._known.popitem(last=False)
            self._beginnings -= len(oldest)


def _ending(raw: bytes, stop: int) -> bytes:
    return raw[max(0, stop - ENDING_BYTES) : stop]


def _length(beginning: _Beginning) -> int:
    return beginning.stop


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
    if closing is None or raw[known.stop : known.stop + 1] != b"," or not raw.endswith(closing.raw):
        return None
    text = b"[%b]" % raw[known.stop + 1 : -len(closing.raw)]
    try:
        if not text.isascii():
            text.decode()
        late = elements(text)
    except (Unreadable, UnicodeDecodeError, RecursionError):
        return None
    if not late or known.held + len(late) > MAX_MESSAGES or not are_objects(late):
        return None
    stop = len(raw) - len(closing.raw) + closing.array
    return _Tail(Slice(known.start, stop), late, closing.named)


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
    return _Tail(Slice(known.start, place.stop + shift), late, named)
