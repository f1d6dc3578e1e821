"""How bodies begin that have grown: what is remembered of one, and what stands behind it in a later one.

Everything here is as strict as reading a body from its first byte; see `wires.incremental_reader`.
"""

from collections.abc import Mapping
from typing import NamedTuple

from compaction_proxy.core.errors import Unreadable
from compaction_proxy.wires.body import MAX_MESSAGES, Named, are_objects, named_by, small_members
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
