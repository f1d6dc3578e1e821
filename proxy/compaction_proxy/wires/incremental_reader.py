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

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.wires.body import (
    MAX_MESSAGES,
    BodyOptions,
    RequestBody,
    are_objects,
    build_body,
    parse_options,
    pick_small_members,
    split_body,
)
from compaction_proxy.wires.json.slices import Slice, find_members, skip_space, split_elements
from compaction_proxy.wires.wire import Wire

# Beginnings are found by their length and these last bytes of theirs.
ENDING_BYTES = 48
# A body with more white space than this behind its last message is read anew each time, in bytes.
MAX_SPACE_BYTES = 256
# What stands behind the last message is remembered, with what the body's members say, in bytes.
MAX_CLOSING = 512

ConversationKey = tuple[str, str | None]  # tenant, conversation
BeginningKey = tuple[str, str | None, int, bytes]  # and the length and last bytes of a beginning


class BodyClosing(NamedTuple):
    """What stood behind the last message of a body; mostly the same stands behind that of the next.

    Attributes:
        raw: Its bytes.
        array: How many of them belong to the value of `messages`.
        options: What the members of that body say.
    """

    raw: bytes
    array: int
    options: BodyOptions


class BodyBeginning(NamedTuple):
    """A body up to the end of its last message, as later ones begin; offsets, and a few of its bytes.

    Attributes:
        mark: Its fingerprint.
        key: By what it is found.
        stop: Its length in bytes.
        start: Where in it the value of `messages` starts.
        element_count: Number of its elements.
        is_ended: Whether the last of them ends a piece.
        leading_members: The members that stand before `messages`.
        previous_key: The place of the one that it grew from.
        closing: What stood behind it; None if that was much.
    """

    mark: bytes
    key: BeginningKey
    stop: int
    start: int
    element_count: int
    is_ended: bool
    leading_members: Mapping[str, Slice]
    previous_key: BeginningKey | None
    closing: BodyClosing | None


class BodyTail(NamedTuple):
    """What stands behind a beginning.

    Attributes:
        messages_slice: Where in the body the value of `messages` stands.
        new_elements: Elements that came behind the beginning.
        options: What the body's members say.
        stop: Where the last message ends; 0 if not soon before the array does.
        closing: What stands behind it; None if that is much.
    """

    messages_slice: Slice
    new_elements: tuple[bytes, ...]
    options: BodyOptions
    stop: int
    closing: BodyClosing | None


def build_beginning_key(raw: bytes, stop: int, owner: ConversationKey) -> BeginningKey:
    """By what a beginning of so many bytes is found."""
    return (*owner, stop, raw[max(0, stop - ENDING_BYTES) : stop])


def find_last_message_end(raw: bytes, messages_slice: Slice) -> int:
    """Where the last message ends; 0 if not soon before the array does."""
    if not raw.startswith(b"[", messages_slice.start):  # a string, which stands for a list of one
        return 0
    stop = messages_slice.stop - 1
    near = raw[max(messages_slice.start, stop - MAX_SPACE_BYTES) : stop]
    message = near.rstrip(b" \t\n\r")
    return stop - len(near) + len(message) if message else 0


def build_closing(raw: bytes, stop: int, messages_slice: Slice, options: BodyOptions) -> BodyClosing | None:
    """What stands behind the last message, if it is little."""
    size = len(raw) - stop + len(options.model) + sum(map(len, options.prompt_members))
    return BodyClosing(raw[stop:], messages_slice.stop - stop, options) if size <= MAX_CLOSING else None


def match_closing(raw: bytes, known: BodyBeginning) -> BodyTail | None:
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
        late = split_elements(text)
    except (UnreadableBodyError, UnicodeDecodeError, RecursionError):
        return None
    if not late or known.element_count + len(late) > MAX_MESSAGES or not are_objects(late):
        return None
    if not text.endswith(b"}]"):  # something stands between
        return None
    return BodyTail(Slice(known.start, stop + closing.array), late, closing.options, stop, closing)


def parse_tail(raw: bytes, known: BodyBeginning, wire: Wire) -> BodyTail | None:
    """What stands behind a beginning; None unless it is all in order."""
    at = skip_space(raw, known.stop)
    more = raw.startswith(b",", at)
    if not more and not raw.startswith(b"]", at):
        return None
    opening = b'{"%b":[' % wire.member_names.messages.encode()
    text = opening + raw[at + more :]
    try:
        found = find_members(text)
        place = found.pop(wire.member_names.messages)
        late = split_elements(memoryview(text)[place.start : place.stop])
    except (UnreadableBodyError, RecursionError):
        return None
    if (
        more != bool(late)
        or known.element_count + len(late) > MAX_MESSAGES
        or not known.leading_members.keys().isdisjoint(found)
    ):
        return None
    if not are_objects(late) or any(key in found for key in wire.member_names.skip_indicators):
        return None
    shift = at + more - len(opening)
    named = parse_options(
        pick_small_members(raw, known.leading_members, wire) | pick_small_members(text, found, wire), wire
    )
    whole = Slice(known.start, place.stop + shift)
    stop = find_last_message_end(raw, whole)
    return BodyTail(whole, late, named, stop, build_closing(raw, stop, whole, named))


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


class _ReadResult(NamedTuple):
    """What was found in a body.

    Attributes:
        body: The body.
        beginning: How later ones may begin; None where that is not remembered.
    """

    body: RequestBody
    beginning: BodyBeginning | None


class IncrementalReader:
    """Reads bodies, and remembers how they begin.

    Args:
        key: 32 random bytes, so that nobody can make two beginnings with one fingerprint.
        wire: The wire of the bodies.
        max_beginnings: Size of the memory.
    """

    def __init__(self, key: bytes, wire: Wire, max_beginnings: int = MAX_BEGINNINGS) -> None:
        self._dialect = wire
        self._blank = blake3(key=key)
        self._max_beginnings = max_beginnings
        self._known: OrderedDict[BeginningKey, BodyBeginning] = OrderedDict()
        self._latest: OrderedDict[ConversationKey, BodyBeginning] = OrderedDict()
        self._turns = asyncio.Semaphore(WORKERS)

    async def read_without_blocking(
        self, raw: bytes, tenant: str, conversation: str | None = None
    ) -> RequestBody:
        """The same as `read`; nobody has to wait while a large body is read.

        Raises:
            Unreadable: See `body.read`.
        """
        size, owner = len(raw), (tenant, conversation)
        if size <= LITTLE_BYTES:
            return self._remember_result(owner, self._read_body(raw, owner))
        found = self._read_grown(raw, owner) if size <= GROWN_BYTES else None
        if found is None:
            async with self._turns:
                found = await asyncio.to_thread(self._read_body, raw, owner)
        return self._remember_result(owner, found)

    def read(self, raw: bytes, tenant: str, conversation: str | None = None) -> RequestBody:
        """Cut a request body up, as `body.read` does; the body has a mark, and may follow an earlier one.

        Raises:
            Unreadable: See `body.read`.
        """
        owner = (tenant, conversation)
        return self._remember_result(owner, self._read_body(raw, owner))

    def _remember_result(self, owner: ConversationKey, found: _ReadResult) -> RequestBody:
        if found.beginning is not None:
            self._remember_beginning(owner, found.beginning)
        return found.body

    def _read_body(self, raw: bytes, owner: ConversationKey) -> _ReadResult:
        """What is in a body. Changes nothing, so it may be done in a thread."""
        return self._read_grown(raw, owner) or self._read_whole(raw, owner)

    def _read_grown(self, raw: bytes, owner: ConversationKey) -> _ReadResult | None:
        """The body, if it begins as an earlier one."""
        for beginning in islice(self._iter_candidates(raw, owner), MAX_TRIES):
            hasher = self._start_hasher(owner).update(memoryview(raw)[: beginning.stop])
            if beginning.stop < len(raw) and hasher.digest() == beginning.mark:
                return self._extend_beginning(raw, beginning, hasher)
        return None

    def _iter_candidates(self, raw: bytes, owner: ConversationKey) -> Iterator[BodyBeginning]:
        """Beginnings that end as the body does at the same place: the latest first, then the longest."""
        latest = self._latest.get(owner)
        if latest is not None and raw.endswith(latest.key[3], 0, latest.stop):
            yield latest
        stop = len(raw)
        for _ in range(MAX_BRACES):
            if (brace := raw.rfind(b"}", 0, stop)) < 0:
                return
            found = self._known.get(build_beginning_key(raw, brace + 1, owner))
            if found is not None and found is not latest:
                yield found
            stop = brace

    def _extend_beginning(self, raw: bytes, known: BodyBeginning, hasher: blake3) -> _ReadResult | None:
        """The body that begins so; None if what stands behind has to be looked at more closely."""
        wire = self._dialect
        tail = match_closing(raw, known) or parse_tail(raw, known, wire)
        if tail is None:
            return None
        if not tail.new_elements:
            return _ReadResult(
                build_body(raw, tail.messages_slice, (), tail.options, wire, known.mark, known.mark), known
            )
        if not (stop := tail.stop) or not known.is_ended or wire.regroups_previous(tail.new_elements):
            return None
        mark = hasher.update(memoryview(raw)[known.stop : stop]).digest()
        place = build_beginning_key(raw, stop, known.key[:2])
        held = known.element_count + len(tail.new_elements)
        ended = not wire.may_continue(tail.new_elements[-1])
        grown = BodyBeginning(
            mark, place, stop, known.start, held, ended, known.leading_members, known.key, tail.closing
        )
        late = wire.to_pieces(tail.new_elements)
        return _ReadResult(
            build_body(raw, tail.messages_slice, late, tail.options, wire, mark, known.mark), grown
        )

    def _read_whole(self, raw: bytes, owner: ConversationKey) -> _ReadResult:
        wire = self._dialect
        found, listed = split_body(raw, wire)
        late = wire.to_pieces(listed)
        place = found[wire.member_names.messages]
        named = parse_options(pick_small_members(raw, found, wire), wire)
        before = {key: at for key, at in found.items() if at.stop <= place.start}
        stop = find_last_message_end(raw, place)
        if not stop or len(before) > MAX_KEYS or sum(map(len, before)) > MAX_KEY_CHARACTERS:
            return _ReadResult(build_body(raw, place, late, named, wire), None)
        mark = self._start_hasher(owner).update(memoryview(raw)[:stop]).digest()
        closing = build_closing(raw, stop, place, named)
        found_by = build_beginning_key(raw, stop, owner)
        ended = not wire.may_continue(listed[-1])
        beginning = BodyBeginning(
            mark, found_by, stop, place.start, len(listed), ended, before, None, closing
        )
        return _ReadResult(build_body(raw, place, late, named, wire, mark), beginning)

    def _start_hasher(self, owner: ConversationKey) -> blake3:
        return self._blank.copy().update(owner[0].encode() + b"\0")

    def _remember_beginning(self, owner: ConversationKey, beginning: BodyBeginning) -> None:
        """Take a beginning up, in place of the one before the one that it grew from."""
        older = self._known.get(beginning.previous_key) if beginning.previous_key else None
        if older is not None and older.previous_key is not None:
            self._known.pop(older.previous_key, None)
        self._known[beginning.key] = self._latest[owner] = beginning
        self._known.move_to_end(beginning.key)
        self._latest.move_to_end(owner)
        for held in (self._known, self._latest):
            while len(held) > self._max_beginnings:
                held.popitem(last=False)
