"""Reads request bodies. If a body extends an earlier body, parses only the new part.

Clients send their whole list of messages with every request. Here, the *beginning* of a body is all its bytes
up to the end of its last message. The reader remembers a keyed digest of each beginning, its fingerprint. If
a later body begins with exactly the same bytes, the reader parses only the rest of that body, with the same
checks. It parses any other body from its first byte (ADR 0018).
"""

import asyncio
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from blake3 import blake3

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.support.lru import BoundedDict
from compaction_proxy.support.offload import MAX_INLINE_BYTES, FairQueue
from compaction_proxy.wires.body import (
    MAX_MESSAGES,
    RequestBody,
    are_objects,
    parse_options,
    pick_small_members,
    split_body,
)
from compaction_proxy.wires.json.slices import Slice, find_members, skip_space, split_elements
from compaction_proxy.wires.wire import Wire

# The key under which the reader stores the beginning of a body contains this many bytes from the end of the
# beginning (`build_beginning_key`).
ENDING_BYTES = 48
# If more bytes of white space than this follow the last message of a body, the reader does not remember the
# beginning of the body for later bodies.
MAX_SPACE_BYTES = 256
ConversationKey = tuple[str, str | None]  # tenant, conversation
# The tenant, the conversation, the length of the beginning of a body in bytes, and the last `ENDING_BYTES`
# bytes of this beginning.
BeginningKey = tuple[str, str | None, int, bytes]


class BodyBeginning(NamedTuple):
    """Describes the beginning of a body, so that the reader recognises later bodies with the same beginning.

    The beginning is all bytes up to the end of the last message. This object contains only the last
    `ENDING_BYTES` of them, in its key.

    Attributes:
        fingerprint: A keyed digest of the beginning.
        key: The key under which the reader stores this object.
        stop: The length of the beginning in bytes.
        messages_start: The position at which the array of messages starts.
        element_count: The number of elements of the array of messages.
        is_ended: Whether the last element ends a piece (see `Wire`). If not, later elements may belong to the
            same piece.
        leading_members: The positions of the members before the array of messages, by name.
        previous_key: The key of the shorter beginning that this one extends; None if it extends none.
    """

    fingerprint: bytes
    key: BeginningKey
    stop: int
    messages_start: int
    element_count: int
    is_ended: bool
    leading_members: Mapping[str, Slice]
    previous_key: BeginningKey | None = None


# A body, and the beginning of the body, which the reader will remember. The second element is None if the
# reader will remember nothing.
ReadResult = tuple[RequestBody, BodyBeginning | None]


def build_beginning_key(raw: bytes, stop: int, owner: ConversationKey) -> BeginningKey:
    """Returns the key of the `BodyBeginning` that describes the first `stop` bytes of a body."""
    return (*owner, stop, raw[max(0, stop - ENDING_BYTES) : stop])


def find_last_message_end(raw: bytes, messages_slice: Slice) -> int:
    """Returns the position at which a body's last message ends.

    The result is 0 if the messages are not an array, or if more than `MAX_SPACE_BYTES` bytes of white space
    follow the last message.
    """
    if not raw.startswith(b"[", messages_slice.start):  # a string in place of a list of one message
        return 0
    stop = messages_slice.stop - 1
    ending = raw[max(messages_slice.start, stop - MAX_SPACE_BYTES) : stop]
    message = ending.rstrip(b" \t\n\r")
    return stop - len(ending) + len(message) if message else 0


KEY_BYTES = 32
# A reader remembers at most this many beginnings of bodies. If there are more, it forgets the oldest. Each
# takes one or two kilobytes of memory.
MAX_BEGINNINGS = 4_096
# The reader compares a body with at most this many remembered beginnings of earlier bodies by their
# fingerprints. If none of them matches, it parses the whole body.
MAX_CANDIDATES = 3
# The beginning of a body ends with the closing brace of its last message. So the reader checks, for each of
# the last closing braces of a body, whether a remembered beginning of an earlier body ends there. It tries at
# most this many braces, because texts may contain many.
MAX_BRACES = 256
# The reader does not remember the beginning of a body if more than `MAX_LEADING_MEMBERS` members precede its
# messages, or if the names of these members have more than `MAX_KEY_CHARACTERS` characters in total. The
# limits save memory.
MAX_LEADING_MEMBERS = 32
MAX_KEY_CHARACTERS = 1_024
# The reader reads bodies of at most `MAX_INLINE_BYTES` bytes on the event loop. If a body extends an earlier
# body, the reader reads it on the event loop up to a size of `MAX_INLINE_GROWN_BYTES` bytes. It reads all
# other bodies in a thread, so that they do not block the event loop.
MAX_INLINE_GROWN_BYTES = 1024 * 1024
# At most this many threads of a reader read bodies at the same time. Further bodies wait for a thread.
MAX_READ_THREADS = 2


class IncrementalReader:
    """Reads request bodies, and remembers their beginnings to parse only the new part of later bodies.

    Args:
        key: 32 random bytes, the secret key of the fingerprints. Without it, clients could construct two
            beginnings with the same fingerprint.
        wire: The wire of the bodies.
        max_beginnings: The largest number of beginnings to remember.
    """

    def __init__(self, key: bytes, wire: Wire, max_beginnings: int = MAX_BEGINNINGS) -> None:
        self._wire = wire
        self._empty_hasher = blake3(key=key)
        self._beginnings: BoundedDict[BeginningKey, BodyBeginning] = BoundedDict(max_beginnings)
        self._latest: BoundedDict[ConversationKey, BodyBeginning] = BoundedDict(max_beginnings)
        self._turns = FairQueue(MAX_READ_THREADS)
        self._thread_slots = asyncio.Semaphore(MAX_READ_THREADS)

    async def read_without_blocking(
        self, raw: bytes, tenant: str, conversation: str | None = None
    ) -> RequestBody:
        """Does the same as `read`, but reads large bodies in a thread (`MAX_INLINE_GROWN_BYTES`).

        Raises:
            UnreadableBodyError: In the same cases as `body.parse_body`.
        """
        if len(raw) <= MAX_INLINE_BYTES:
            return self.read(raw, tenant, conversation)
        owner = (tenant, conversation)
        result = self._read_from_known_beginning(raw, owner) if len(raw) <= MAX_INLINE_GROWN_BYTES else None
        if result is None:
            async with self._turns.wait_for_turn(), self._thread_slots:
                result = await asyncio.to_thread(self._read_body, raw, owner)
        return self._remember_result(owner, result)

    def read(self, raw: bytes, tenant: str, conversation: str | None = None) -> RequestBody:
        """Splits a request body like `body.parse_body`, and remembers its beginning for later bodies.

        The result has a `fingerprint` if the reader remembers the beginning of the body. It has a
        `previous_fingerprint` if the body extends an earlier body of the same tenant and conversation.

        Raises:
            UnreadableBodyError: In the same cases as `body.parse_body`.
        """
        owner = (tenant, conversation)
        return self._remember_result(owner, self._read_body(raw, owner))

    def _read_body(self, raw: bytes, owner: ConversationKey) -> ReadResult:
        """Reads a body. Changes no state, so it may run in a thread."""
        return self._read_from_known_beginning(raw, owner) or self._read_whole(raw, owner)

    def _read_from_known_beginning(self, raw: bytes, owner: ConversationKey) -> ReadResult | None:
        """Reads a body that extends an earlier body. Returns None if the caller must parse the whole body."""
        for beginning in islice(self._iter_candidates(raw, owner), MAX_CANDIDATES):
            hasher = self._start_hasher(owner).update(memoryview(raw)[: beginning.stop])
            if beginning.stop < len(raw) and hasher.digest() == beginning.fingerprint:
                return self._extend_beginning(raw, beginning, hasher)
        return None

    def _iter_candidates(self, raw: bytes, owner: ConversationKey) -> Iterator[BodyBeginning]:
        """Yields the remembered beginnings of earlier bodies with which this body may begin.

        Compares only the last bytes of a beginning with the bytes at the same position in the body. The
        newest beginning of this conversation comes first. The others follow, the longest first.
        """
        latest = self._latest.get(owner)
        if latest is not None and raw.endswith(latest.key[3], 0, latest.stop):
            yield latest
        stop = len(raw)
        for _ in range(MAX_BRACES):
            if (brace := raw.rfind(b"}", 0, stop)) < 0:
                return
            beginning = self._beginnings.get(build_beginning_key(raw, brace + 1, owner))
            if beginning is not None and beginning is not latest:
                yield beginning
            stop = brace

    def _extend_beginning(self, raw: bytes, beginning: BodyBeginning, hasher: blake3) -> ReadResult | None:
        """Parses those bytes of a body that follow `beginning`, the beginning of an earlier body.

        Returns None if the caller must parse the whole body.
        """
        wire, name = self._wire, self._wire.member_names.messages
        position = skip_space(raw, beginning.stop)
        has_more = raw.startswith(b",", position)
        if not has_more and not raw.startswith(b"]", position):
            return None
        opening = b'{"%b":[' % name.encode()
        rest = opening + raw[position + has_more :]
        try:
            members = find_members(rest)
            place = members.pop(name)
            elements = split_elements(memoryview(rest)[place.start : place.stop])
        except UnreadableBodyError:
            return None
        element_count = beginning.element_count + len(elements)
        if (
            has_more != bool(elements)
            or element_count > MAX_MESSAGES
            or not are_objects(elements)
            or not members.keys().isdisjoint((*beginning.leading_members, *wire.member_names.skip_indicators))
        ):
            return None
        messages_slice = Slice(beginning.messages_start, place.stop + position + has_more - len(opening))
        leading = pick_small_members(raw, beginning.leading_members, wire)
        options = parse_options(leading | pick_small_members(rest, members, wire), wire)
        known = beginning.fingerprint
        if not elements:
            return RequestBody(raw, messages_slice, (), *options, wire, known, known), beginning
        stop = find_last_message_end(raw, messages_slice)
        if not stop or not beginning.is_ended or wire.regroups_previous(elements):
            return None
        grown = beginning._replace(
            fingerprint=hasher.update(memoryview(raw)[beginning.stop : stop]).digest(),
            key=build_beginning_key(raw, stop, beginning.key[:2]),
            stop=stop,
            element_count=element_count,
            is_ended=not wire.may_continue_piece(elements[-1]),
            previous_key=beginning.key,
        )
        pieces = wire.group_into_pieces(elements)
        return RequestBody(raw, messages_slice, pieces, *options, wire, grown.fingerprint, known), grown

    def _read_whole(self, raw: bytes, owner: ConversationKey) -> ReadResult:
        wire = self._wire
        members, elements = split_body(raw, wire)
        pieces = wire.group_into_pieces(elements)
        messages_slice = members[wire.member_names.messages]
        options = parse_options(pick_small_members(raw, members, wire), wire)
        leading_members = {key: place for key, place in members.items() if place.stop <= messages_slice.start}
        stop = find_last_message_end(raw, messages_slice)
        if (
            not stop
            or len(leading_members) > MAX_LEADING_MEMBERS
            or sum(map(len, leading_members)) > MAX_KEY_CHARACTERS
        ):
            return RequestBody(raw, messages_slice, pieces, *options, wire), None
        beginning = BodyBeginning(
            self._start_hasher(owner).update(memoryview(raw)[:stop]).digest(),
            build_beginning_key(raw, stop, owner),
            stop,
            messages_slice.start,
            len(elements),
            not wire.may_continue_piece(elements[-1]),
            leading_members,
        )
        return RequestBody(raw, messages_slice, pieces, *options, wire, beginning.fingerprint), beginning

    def _start_hasher(self, owner: ConversationKey) -> blake3:
        return self._empty_hasher.copy().update(owner[0].encode() + b"\0")

    def _remember_result(self, owner: ConversationKey, result: ReadResult) -> RequestBody:
        """Stores the beginning of a body, and returns the body.

        If this beginning extends several shorter ones, keeps only the longest of these.
        """
        body, beginning = result
        if beginning is None:
            return body
        older = self._beginnings.get(beginning.previous_key) if beginning.previous_key else None
        if older is not None and older.previous_key is not None:
            self._beginnings.pop(older.previous_key, None)
        self._beginnings[beginning.key] = self._latest[owner] = beginning
        return body
