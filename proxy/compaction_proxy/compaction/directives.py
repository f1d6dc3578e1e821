"""Stores the directives that users give for a conversation.

Examples are pins, requests for a compaction, and undone compactions. The directives of a conversation are
stored as one small record. Each process caches the record for two seconds (`FRESH_S`), so it notices a change
by another process within two seconds. If a request uses a cached record that is more than one second old
(`AGING_S`), the process reads the record again in the background. So the requests of a busy conversation
seldom wait for the store. A process locks the record while it reads, changes and writes the record, so that
no change is lost. While the store is unavailable, each process uses the copy that it read last.
"""

import asyncio
import hashlib
import math
import time
import unicodedata
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self
from weakref import WeakValueDictionary

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.core.message import Instruction
from compaction_proxy.core.project_instructions import compute_instruction_id
from compaction_proxy.storage.keys import directives_key, lease_key
from compaction_proxy.storage.records import Fields, RecordStore
from compaction_proxy.storage.store import Lease
from compaction_proxy.support.lru import BoundedDict

MAX_PINS = 50
MAX_PIN_CHARACTERS = 2_000
# The directives of a conversation (what a user or an operator has decided about it) contain two lists: its
# project instructions, and the project instructions that were removed. Each list has at most this many
# entries. If there are more, the oldest entries are dropped.
MAX_INSTRUCTIONS = 64
# Largest number of undone compactions that are remembered for one conversation. If there are more, the oldest
# are forgotten. That does no harm, because later compactions do not build on the undone ones.
MAX_UNDONE = 100
CHECKPOINT_ID_BYTES = 64
# For this many seconds after a record was read, requests use the cached record. After that, the next request
# waits until the record is read again.
FRESH_S = 2.0
# If a request uses a cached record that was read at least this many seconds ago, the process also reads the
# record again in the background.
AGING_S = 1.0
# Largest number of records in the cache. If there are more, the record that was read longest ago is dropped.
MAX_CONVERSATIONS = 10_000
# How long the lease that locks a record lasts, in seconds. A change takes only two calls of the store. So a
# process that holds the lease for longer has probably died, and other processes may then change the record.
LEASE_S = 1.0
# Time between two attempts to get the lease, in seconds.
POLL_S = 0.02
_PIN_DIGITS = 12
# Unicode categories of the characters that a pin must not contain: control characters, halves of surrogate
# pairs, line separators and paragraph separators.
_UNFIT_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})


class NotedInstruction(NamedTuple):
    """Identifies project instructions in a conversation (`core.message.Instruction`), and gives their size.

    Attributes:
        client: The name of the client program that sends the instructions.
        kind: `instructions`, `memory` or `environment`.
        path: A file path or similar text that distinguishes instructions of the same kind.
        tokens: Counted tokens of the newest version of the instructions.
    """

    client: str
    kind: str
    path: str
    tokens: int

    @property
    def id(self) -> str:
        """The id of the instructions, `i_…`."""
        return compute_instruction_id(Instruction(self.client, self.kind, self.path))


@dataclass(frozen=True, slots=True)
class Directives:
    """The directives that users have given for a conversation.

    Attributes:
        compact: Whether the next request must be compacted, as if it had the header `x-compaction: force`.
        pins: Texts that no compaction may lose, oldest first.
        undone: Ids of the checkpoints (`core.planner`) that must not be applied, oldest first.
        suppressed: Whether automatic compactions are suppressed because one was undone. A request that has
            reached the hard mark, or would not fit, is compacted nevertheless.
        bypass: Whether requests are forwarded unchanged, even if checkpoints are stored or a request does not
            fit.
        instructions: The project instructions of the conversation that users can remove, oldest first.
        removed: Ids of the project instructions that the proxy omits when it rewrites a request.
    """

    compact: bool = False
    pins: tuple[str, ...] = ()
    undone: tuple[bytes, ...] = ()
    suppressed: bool = False
    bypass: bool = False
    instructions: tuple[NotedInstruction, ...] = ()
    removed: tuple[str, ...] = ()

    def with_pin(self, text: str) -> Self:
        """Returns the directives with the pin `text` added.

        Returns them unchanged if they contain this pin, or if they already contain `MAX_PINS` pins.
        """
        is_refused = text in self.pins or len(self.pins) >= MAX_PINS
        return self if is_refused else replace(self, pins=(*self.pins, text))

    def without_pin(self, text: str) -> Self:
        """Returns the directives without the pin `text`."""
        return replace(self, pins=tuple(pin for pin in self.pins if pin != text))

    def with_instructions(self, instructions: Iterable[NotedInstruction]) -> Self:
        """Adds project instructions to the directives, or replaces older versions of them.

        Returns the new directives. They list at most `MAX_INSTRUCTIONS` project instructions: those that were
        added last.
        """
        noted = {each[:3]: each for each in (*self.instructions, *instructions)}
        return replace(self, instructions=tuple(noted.values())[-MAX_INSTRUCTIONS:])

    def with_removed_instruction(self, instruction_id: str, *, removed: bool) -> Self:
        """Returns the directives after a user has removed project instructions.

        If `removed` is False, returns the directives after the user has restored the instructions.
        """
        others = [each for each in self.removed if each != instruction_id]
        ids = [*others, instruction_id] if removed else others
        return replace(self, removed=tuple(ids[-MAX_INSTRUCTIONS:]))

    def with_undone_round(self, checkpoint_id: bytes, prepared_ids: Iterable[bytes] = ()) -> Self:
        """Returns the directives with a compaction undone, and automatic compactions suppressed.

        `prepared_ids` are the ids of prepared checkpoints, which must not be applied either. The id of the
        undone compaction becomes the last one in `undone`.
        """
        added = (*prepared_ids, checkpoint_id)
        others = [each for each in self.undone if each not in added]
        return replace(self, undone=(*others, *added)[-MAX_UNDONE:], suppressed=True)

    def without_undone_rounds(self, checkpoint_ids: Iterable[bytes], *, suppressed: bool) -> Self:
        """Returns the directives after compactions were redone. Their checkpoints may be applied again.

        `suppressed` says whether automatic compactions stay suppressed.
        """
        redone = frozenset(checkpoint_ids)
        return replace(
            self, undone=tuple(each for each in self.undone if each not in redone), suppressed=suppressed
        )


NO_DIRECTIVES = Directives()
_NEVER_READ = (-math.inf, NO_DIRECTIVES)


def parse_pin(text: str) -> str | None:
    """Returns the text without surrounding white space if it is a valid pin; else None.

    A valid pin is a single line of 1 to 2,000 characters without control characters.
    """
    pin = text.strip()
    fits = 1 <= len(pin) <= MAX_PIN_CHARACTERS
    return pin if fits and not any(unicodedata.category(each) in _UNFIT_CATEGORIES for each in pin) else None


def build_pin_id(text: str) -> str:
    """Builds the id of a pin from its text. The id has the form `p_…`."""
    return "p_" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_PIN_DIGITS]


def _to_fields(directives: Directives) -> dict[str, Any]:
    return {
        "compact": directives.compact,
        "pins": list(directives.pins),
        "undone": [place.hex() for place in directives.undone],
        "suppressed": directives.suppressed,
        "bypass": directives.bypass,
        "instructions": [list(each) for each in directives.instructions],
        "removed": list(directives.removed),
    }


def _from_fields(fields: Fields | None) -> Directives:
    """Reads directives from a record.

    Skips invalid entries of lists, and uses the default for any other value that is missing or invalid.
    """
    data = fields or {}
    return Directives(
        compact=data.get("compact") is True,
        pins=tuple(each for each in _parse_strings(data.get("pins")) if parse_pin(each) == each)[:MAX_PINS],
        undone=tuple(filter(None, map(_parse_checkpoint_id, _parse_strings(data.get("undone")))))[
            -MAX_UNDONE:
        ],
        suppressed=data.get("suppressed") is True,
        bypass=data.get("bypass") is True,
        instructions=tuple(_parse_instructions(data.get("instructions")))[-MAX_INSTRUCTIONS:],
        removed=tuple(_parse_strings(data.get("removed")))[-MAX_INSTRUCTIONS:],
    )


def _parse_instructions(value: object) -> Iterator[NotedInstruction]:
    for row in value if isinstance(value, list | tuple) else ():
        match row:
            case [str(client), str(kind), str(path), int(tokens)]:
                yield NotedInstruction(client, kind, path, tokens)


def _parse_strings(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list | tuple) else []


def _parse_checkpoint_id(digits: str) -> bytes | None:
    try:
        place = bytes.fromhex(digits)
    except ValueError:
        return None
    return place if len(place) == CHECKPOINT_ID_BYTES else None


class DirectiveStore:
    """Stores directives. Not thread-safe: use it on one event loop.

    No method raises an error if the store fails.

    Args:
        records: Accesses the store.
        ttl_s: How long directives are kept after the last change or compaction, in seconds.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self, records: RecordStore, ttl_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._records = records
        self._ttl_s = ttl_s
        self._clock = clock
        self._cache: BoundedDict[str, tuple[float, Directives]] = BoundedDict(MAX_CONVERSATIONS)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        records.on_delete_callbacks.append(self._forget_prefix)

    async def get(self, tenant: str, conversation: str | None) -> Directives:
        """Returns the directives of a conversation, from the cache if they were read in the last two seconds.

        A conversation without an id (None) has no directives.
        """
        cached = self.get_cached(tenant, conversation)
        if cached is not None or conversation is None:
            return cached or NO_DIRECTIVES
        return await self._read_record(directives_key(tenant, conversation))

    def get_cached(self, tenant: str, conversation: str | None) -> Directives | None:
        """Returns the cached directives; None if they were not read in the last `FRESH_S` seconds.

        If they were read at least `AGING_S` seconds ago, also starts to read them again in the background.
        """
        if conversation is None:
            return NO_DIRECTIVES
        key = directives_key(tenant, conversation)
        read_at, directives = self._cache.get(key, _NEVER_READ)
        age_s = self._clock() - read_at
        if age_s >= FRESH_S:
            return None
        if age_s >= AGING_S:
            self._records.background_tasks.start_once(key, lambda: self._read_record(key))
        return directives

    def is_compaction_requested(self, tenant: str, conversation: str) -> bool:
        """Returns whether a user has asked for a compaction, according to the cached directives.

        Uses the cached directives even if they are old. Does not ask the store.
        """
        _, directives = self._cache.get(directives_key(tenant, conversation), _NEVER_READ)
        return directives.compact

    async def add_pin(self, tenant: str, conversation: str, text: str) -> bool:
        """Adds a pin, so that all later compactions keep the text.

        Returns whether the conversation now has the pin. Returns False if the text is not a valid pin, if
        there are already `MAX_PINS` pins, or if the store does not save the pin. If the pin already exists,
        nothing is written.
        """
        pin = parse_pin(text)
        if pin is None:
            return False
        if pin in (await self.get(tenant, conversation)).pins:
            return True
        saved = await self.update(tenant, conversation, lambda known: known.with_pin(pin))
        return saved and pin in (await self.get(tenant, conversation)).pins

    async def record_instructions(
        self, tenant: str, conversation: str, instructions: Sequence[NotedInstruction]
    ) -> None:
        """Records which project instructions a conversation contains.

        Writes nothing if the stored directives already list them with the same sizes.
        """
        known = await self.get(tenant, conversation)
        if known.with_instructions(instructions) != known:
            await self.update(tenant, conversation, lambda current: current.with_instructions(instructions))

    async def clear_compaction_request(
        self, tenant: str, conversation: str, checkpoint_id: bytes | None = None
    ) -> bool:
        """Withdraws the user's request for a compaction, and allows automatic compactions again.

        Call this method after a compaction was made, or if a compaction would have nothing to remove.
        Returns whether the store has saved the change.

        Args:
            tenant: The tenant of the conversation.
            conversation: The conversation id.
            checkpoint_id: The id of the new checkpoint; None if there is none. If this checkpoint was undone
                before, it may now be applied again. If there is a new checkpoint, the record is written even
                if it is unchanged, so that the store keeps pins and undone ids as long as the checkpoint.
        """
        directives = await self.get(tenant, conversation)
        if directives == NO_DIRECTIVES:
            return True

        def clear_request(known: Directives) -> Directives:
            undone = tuple(each for each in known.undone if each != checkpoint_id)
            return replace(known, compact=False, suppressed=False, undone=undone)

        is_new = checkpoint_id is not None
        return await self.update(tenant, conversation, clear_request, always_write=is_new)

    def _forget_prefix(self, prefix: str) -> None:
        for key in [key for key in self._cache if key.startswith(prefix)]:
            del self._cache[key]

    async def _read_record(self, key: str) -> Directives:
        [fields] = await self._records.get_many([key], bypass_cache=True)
        return self._cache_directives(key, _from_fields(fields))

    def _cache_directives(self, key: str, directives: Directives) -> Directives:
        self._cache[key] = (self._clock(), directives)
        return directives

    async def update(
        self,
        tenant: str,
        conversation: str,
        change: Callable[[Directives], Directives],
        *,
        always_write: bool = False,
    ) -> bool:
        """Changes the directives of a conversation. Returns whether the store has saved them.

        If `change` changes nothing and `always_write` is False, writes nothing. The result is then True if
        the store is in use.

        Args:
            tenant: The tenant of the conversation.
            conversation: The conversation id.
            change: Takes the present directives and returns the changed ones.
            always_write: Whether the record is written even if it is unchanged, so that its lifetime starts
                again.
        """
        key = directives_key(tenant, conversation)
        async with self._lock_record(key):
            current = await self._read_record(key)
            changed = change(current)
            if changed == current and not always_write:
                return self._records.is_in_use
            saved = await self._records.overwrite(key, _to_fields(changed), ttl_s=self._ttl_s)
            self._cache_directives(key, changed)
            return saved

    @asynccontextmanager
    async def _lock_record(self, key: str) -> AsyncIterator[None]:
        """Locks a record: no other task changes it while the `async with` block runs.

        If the store grants no lease, other processes can still change the record.
        """
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            lease = await self._acquire_lease(lease_key(key))
            try:
                yield
            finally:
                if lease is not None:
                    await self._records.release_lease(lease)

    async def _acquire_lease(self, key: str) -> Lease | None:
        limit = self._clock() + 2 * LEASE_S
        while self._clock() < limit:
            try:
                lease = await self._records.acquire_lease(key, LEASE_S)
            except StoreUnavailableError:
                return None
            if lease is not None:
                return lease
            await asyncio.sleep(POLL_S)
        return None
