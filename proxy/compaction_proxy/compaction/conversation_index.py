"""Finds the conversation that a request continues if its client sends no conversation id.

Each request leaves a head, which records how far its conversation has come. A request that continues a head
belongs to the same conversation. If another request has already continued that head, the conversations differ
from there on, and the later request starts a conversation of its own. All replicas append to the same lists
of heads and read them in the same order. So they reach the same result, even if two of them continue one head
at the same time.
"""

import asyncio
import hashlib
import re
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import cached_property
from itertools import chain, islice
from typing import NamedTuple

from compaction_proxy.core.digest import compute_outline_digest, compute_prefix_digests
from compaction_proxy.core.ledger.client_forms import drop_client_messages
from compaction_proxy.core.message import Message, find_latest_user_message
from compaction_proxy.core.title_request import is_title_request
from compaction_proxy.storage.keys import conversation_heads_key, tenant_prefix
from compaction_proxy.storage.records import Fields, RecordStore

# A head is stored in the list of the longest of these beginnings that its conversation has, in messages. It
# is also stored in the list of the first line of its first user message, because clients rewrite even their
# first messages.
BEGINNINGS = (1, 4, 16, 64)
KEPT_HEADS = 128
# Number of lists for which a process holds the heads that it has added itself, and number of heads in each.
MAX_HELD_LISTS = 1_000
MAX_HELD_HEADS = 16
# Number of these lists that are searched for a conversation that its client has compacted itself.
RECENT_LISTS = 64
# A client that moves or rewrites its last messages with each turn does so with at most this many.
MAX_MOVED_MESSAGES = 8
# A request that repeats this many different messages of a head continues it, whatever the request begins
# with.
LEAST_FOUND = 4
# Prefix digests start from these bytes if messages of the client itself were left out.
_PART = b"part"
# A list of heads is named after at most this many characters of the first line of a user message.
LINE_CHARACTERS = 64
# A user message to which its client has added text is recognised by its first and last paragraphs, this many
# of each.
MAX_PARAGRAPHS = 16
# A text longer than two ends of this size, in characters, is identified by its ends and its length.
END_CHARACTERS = 32_768
# A tool result is identified by this many characters. A shorter text may be the notice that it was cleared.
RESULT_CHARACTERS = 256
_DIGEST_BYTES = 8
_PARAGRAPH_END = re.compile(r"(?<!\n)\n\n")
# How a request relates to known conversations: it repeats the last request of one, continues one, forks off
# from all of them, begins like one that has been continued since, or belongs to none.
_AGAIN, _ON, _APART, _ANEW, _BESIDE = "again", "on", "apart", "anew", "beside"


class ConversationHead(NamedTuple):
    """Records how far a conversation has come. Digests are hex digits.

    Attributes:
        id: The conversation id.
        since: Prefix digest of the head that this one continues; empty if the conversation begins here.
        prefix: Prefix digest of all its messages.
        outline: The same without the text of tool results, because clients clear that text.
        tail: The last messages, oldest first: the prefix digest up to each message, and the message's own
            digest.
        openings: Digests of the beginnings of the latest user message, up to the end of each paragraph.
        has_tools: Whether the request brought tools.
    """

    id: str
    since: str
    prefix: str
    outline: str
    tail: tuple[tuple[str, str], ...]
    openings: tuple[str, ...]
    has_tools: bool


class _IndexedRequest:
    """A request with the lookup tables for comparing it with heads.

    The tables are built on first use, because long lists are seldom compared whole.

    Args:
        messages: The messages of the request that are not fixed, at least one.
        outlines: Their prefix digests, which leave out the text of tool results.
        has_tools: Whether the request brings tools.
        is_part: Whether messages that the client itself has added, such as aider's files, were left out.
    """

    def __init__(
        self, messages: Sequence[Message], outlines: Sequence[bytes], *, has_tools: bool, is_part: bool
    ) -> None:
        self._messages = messages
        self._outlines = outlines
        self._prefixes = _add_result_digests(messages, outlines)
        self.has_tools = has_tools
        self.is_part = is_part
        self.prefix = _shorten_digest(self._prefixes[-1])
        self.outline = _shorten_digest(outlines[-1])

    @cached_property
    def first_answer_index(self) -> int:
        """Index of the first message that is not the user's; the number of messages if all are."""
        answer_indices = (k for k, each in enumerate(self._messages) if each.role != "user" or each.answers)
        return next(answer_indices, len(self._messages))

    @property
    def has_answer(self) -> bool:
        """Whether the request holds any answer of the model."""
        return self.first_answer_index < len(self._messages)

    @cached_property
    def prefix_indices(self) -> dict[str, int]:
        """Indices of the messages, by the prefix digest up to each."""
        return {_shorten_digest(prefix): index for index, prefix in enumerate(self._prefixes)}

    @cached_property
    def outline_indices(self) -> dict[str, int]:
        """The same as `prefix_indices`, by prefix digests that leave out the text of tool results."""
        return {_shorten_digest(outline): index for index, outline in enumerate(self._outlines)}

    def iterate_earlier_prefixes(self) -> Iterator[str]:
        """Yields the prefix digests of all messages but the last, the longest prefix first."""
        return map(_shorten_digest, reversed(self._prefixes[:-1]))

    @property
    def first_line_digest(self) -> str:
        """Digest of the first line of the first user message; empty if there is none."""
        return next(filter(None, map(_digest_first_line, self._messages)), "")

    def iterate_digests(self, start: int, stop: int | None = None) -> Iterator[str]:
        """Yields the digests of the messages from index `start` up to `stop`."""
        return map(self._digest_message, self._messages[start:stop])

    @cached_property
    def earlier_digests(self) -> dict[str, int]:
        """Digests of all messages but the last, each with the index of its last occurrence."""
        return {digest: index for index, digest in enumerate(map(self._digest_message, self._messages[:-1]))}

    def _digest_message(self, message: Message) -> str:
        """Returns the digest of a message.

        If client messages were left out, white space at line ends is ignored, because aider adds some to what
        it restores from its history.
        """
        if message.answers:
            return _shorten_digest(_digest_result(message))
        if self.is_part and not (message.calls or message.answers):
            return _digest_text(f"{message.role} {_trim_text(message.text)}")
        return _shorten_digest(compute_outline_digest(message))

    @cached_property
    def user_texts(self) -> dict[str, list[int]]:
        """Indices of the user messages before the latest one, by the digests of their texts."""
        indices: dict[str, list[int]] = {}
        for index, message in enumerate(self._messages[: find_latest_user_message(self._messages)]):
            if _is_user_text(message):
                indices.setdefault(_digest_text(_trim_text(message.text)), []).append(index)
        return indices

    def find_cleared(self, head: ConversationHead) -> int | None:
        """Returns the index of a head's last message if tool results of the head have been cleared since.

        Returns None if the request lacks messages of the head, if nothing has been cleared, or if tool
        results differ in any other way.
        """
        last = self.outline_indices.get(head.outline)
        if last is None or last + 1 < len(head.tail) or _shorten_digest(self._prefixes[last]) == head.prefix:
            return None
        start = last + 1 - len(head.tail)
        for index, digest in zip(range(start, last + 1), self.iterate_digests(start, last + 1), strict=True):
            is_last = index >= self._last_results_index
            is_short = len(self._messages[index].text) <= RESULT_CHARACTERS
            if digest != head.tail[index - start][1] and (is_last or not is_short):
                return None
        return last

    @cached_property
    def _last_results_index(self) -> int:
        """Index of the first of the tool results at the end; the number of messages if there are none."""
        indices = range(len(self._messages) - 1, -1, -1)
        return next((k + 1 for k in indices if not self._messages[k].answers), 0)

    @property
    def late_line_digests(self) -> list[str]:
        """Digests of the first lines of the user messages, the latest first."""
        return [line for line in map(_digest_first_line, reversed(self._messages)) if line]

    def is_within(self, head: ConversationHead) -> bool:
        """Returns whether this request is an earlier state of a head's conversation."""
        return self.has_answer and any(prefix == self.prefix for prefix, _ in head.tail)

    def build_head(self, conversation: str, since: str) -> ConversationHead:
        """Builds the head that this request leaves."""
        start = max(0, len(self._messages) - MAX_MOVED_MESSAGES - 1)
        tail = tuple(
            zip(map(_shorten_digest, self._prefixes[start:]), self.iterate_digests(start), strict=True)
        )
        latest = find_latest_user_message(self._messages)
        openings = () if latest is None else _digest_openings(self._messages[latest].text)
        return ConversationHead(
            conversation, since, self.prefix, self.outline, tail, openings, self.has_tools
        )


class ConversationIndex:
    """Finds the conversations of requests without a conversation id, on one event loop.

    No method raises an error because of the store.

    Args:
        records: Stores the heads.
        mint: Builds a conversation id from a tenant and some bytes.
        ttl_s: How long heads are kept, in seconds.
    """

    def __init__(self, records: RecordStore, mint: Callable[[str, bytes], str], ttl_s: float) -> None:
        self._records = records
        self._mint = mint
        self._ttl_s = ttl_s
        # Heads that this process has added. The store returns them later, or not at all while it is
        # unavailable.
        self._added_heads: OrderedDict[str, tuple[ConversationHead, ...]] = OrderedDict()
        self._save_tasks: set[asyncio.Task[bool]] = set()
        records.on_delete_callbacks.append(self._forget_prefix)

    async def find_conversation(
        self,
        tenant: str,
        messages: Sequence[Message],
        prefixes: Sequence[bytes],
        *,
        has_tools: bool,
        find_recorded_conversation: Callable[[], Awaitable[str | None]] | None = None,
    ) -> str | None:
        """Returns the id of the conversation; None if the request belongs to none, as a title request does.

        Args:
            tenant: The tenant that sent the request.
            messages: The messages of the request that are not fixed, at least one.
            prefixes: Their prefix digests.
            has_tools: Whether the request brings tools.
            find_recorded_conversation: Returns the conversation of a stored checkpoint that matches the
                request. It decides if no head of the conversation is left.
        """
        latest = find_latest_user_message(messages)
        if not has_tools and latest is not None and is_title_request(messages[latest].text):
            return None
        conversation_messages = drop_client_messages(messages)
        is_part = 0 < len(conversation_messages) < len(messages)
        if is_part:
            messages, prefixes = conversation_messages, compute_prefix_digests(conversation_messages, _PART)
        request = _IndexedRequest(messages, prefixes, has_tools=has_tools, is_part=is_part)
        lengths = [length for length in BEGINNINGS if length <= len(prefixes)]
        beginnings = [conversation_heads_key(tenant, prefixes[length - 1]) for length in reversed(lengths)]
        keys = [
            *beginnings,
            *(
                [conversation_heads_key(tenant, bytes.fromhex(request.first_line_digest))]
                if request.first_line_digest
                else []
            ),
        ]
        own_keys = {keys[0], keys[-1]}
        # aider starts a restored session with a summary, followed by a part of the earlier messages.
        if is_part:
            late_keys = [
                conversation_heads_key(tenant, bytes.fromhex(line)) for line in request.late_line_digests[:2]
            ]
            own_keys.update(late_keys[:1])
            keys += late_keys[1:]
        counts: dict[str, int] = {}
        match, key = await self._search_lists(tenant, request, keys, counts)
        # The client may have compacted the conversation itself, so that only its end is left.
        if match is None and request.has_answer:
            match, key = (
                _match_heads(request, self._resolve_forks(tenant, self._list_recent_heads(tenant))),
                keys[0],
            )
        if match is not None:
            return self._follow_match(match, tenant, request, own_keys | {key})
        # If the lists of its longer beginnings hold heads, the conversation is none of those. Otherwise its
        # heads may have been lost, and a stored checkpoint can identify it.
        is_known = len(lengths) == 1 or any(counts[each] for each in beginnings[:-1])
        recorded = (
            None if is_known or find_recorded_conversation is None else await find_recorded_conversation()
        )
        if recorded is not None:
            self._add_head(own_keys, request.build_head(recorded, ""))
            return recorded
        return self._follow_match(_HeadMatch(_APART, None, counts[keys[-1]]), tenant, request, own_keys)

    async def _search_lists(
        self, tenant: str, request: _IndexedRequest, keys: Sequence[str], counts: dict[str, int]
    ) -> tuple["_HeadMatch | None", str]:
        """Finds how a request relates to the conversations in these lists, and the list that shows it.

        Stores the number of heads in each list that was read in `counts`.
        """
        cleared = None
        for key in keys:
            heads = self._resolve_forks(tenant, await self._read_heads(key))
            counts[key] = len(heads)
            match = _match_heads(request, heads)
            if match is not None and match.head is not None:
                return match, key
            if cleared is None and (found := _match_cleared_head(request, heads)) is not None:
                cleared = found, key  # another list may have a head with the same results
            if match is not None and cleared is None:
                return match, key
        return cleared or (None, "")

    async def close(self) -> None:
        """Waits until all added heads are written."""
        await asyncio.gather(*self._save_tasks, return_exceptions=True)

    def _follow_match(
        self, match: "_HeadMatch", tenant: str, request: "_IndexedRequest", keys: Iterable[str]
    ) -> str | None:
        """Returns the conversation that a match gives, and adds the request's head to these lists."""
        head = match.head
        if head is not None and match.kind == _AGAIN:
            return head.id
        if match.kind == _BESIDE:
            return None
        if head is not None:
            self._add_head(keys, request.build_head(head.id, head.prefix))
            return head.id
        # If heads may have been dropped from the list, an earlier conversation may have begun with the same
        # messages. Random bytes then make the id unique.
        seed = bytes.fromhex(request.prefix)
        is_known = match.kind == _ANEW or match.heads >= KEPT_HEADS
        conversation = self._mint(tenant, seed + (secrets.token_bytes(_DIGEST_BYTES) if is_known else b""))
        self._add_head(keys, request.build_head(conversation, ""))
        return conversation

    async def _read_heads(self, key: str) -> list[ConversationHead]:
        """Reads the heads of a list, oldest first."""
        stored = [_read_head(line) for line in await self._records.read_tail(key, KEPT_HEADS)]
        return list(dict.fromkeys([*filter(None, stored), *self._added_heads.get(key, ())]))

    def _list_recent_heads(self, tenant: str) -> list[ConversationHead]:
        """Lists the heads in those lists of the tenant to which this process has added most recently."""
        prefix = tenant_prefix(tenant)
        recent = (heads for key, heads in reversed(self._added_heads.items()) if key.startswith(prefix))
        return list(dict.fromkeys(chain.from_iterable(reversed(list(islice(recent, RECENT_LISTS))))))

    def _resolve_forks(self, tenant: str, heads: Iterable[ConversationHead]) -> list[ConversationHead]:
        """Gives a new id to each head that continues a head which an earlier one has continued already."""
        first_successors: dict[tuple[str, str], str] = {}
        resolved: list[ConversationHead] = []
        for head in heads:
            first = (
                first_successors.setdefault((head.id, head.since), head.prefix) if head.since else head.prefix
            )
            is_first = first == head.prefix
            resolved.append(head if is_first else head._replace(id=self._mint(tenant, head.prefix.encode())))
        return resolved

    def _add_head(self, keys: Iterable[str], head: ConversationHead) -> None:
        for key in keys:
            cached = self._added_heads.get(key, ())
            self._added_heads[key] = (*cached, head)[-MAX_HELD_HEADS:]
            self._added_heads.move_to_end(key)
            if len(self._added_heads) > MAX_HELD_LISTS:
                self._added_heads.popitem(last=False)
            write = self._records.append_line(key, _to_fields(head), ttl_s=self._ttl_s, max_lines=KEPT_HEADS)
            task = asyncio.create_task(write)
            self._save_tasks.add(task)
            task.add_done_callback(self._save_tasks.discard)

    def _forget_prefix(self, prefix: str) -> None:
        for key in [key for key in self._added_heads if key.startswith(prefix)]:
            del self._added_heads[key]


class _HeadMatch(NamedTuple):
    """Describes how a request relates to the conversations of a list.

    Attributes:
        kind: One of `_AGAIN`, `_ON`, `_APART`, `_ANEW` and `_BESIDE`.
        head: The head that the request repeats or continues; None if it starts a conversation or belongs to
            none.
        heads: Number of heads in the list.
    """

    kind: str
    head: ConversationHead | None
    heads: int


def _match_heads(request: _IndexedRequest, heads: Sequence[ConversationHead]) -> _HeadMatch | None:
    """Finds how a request relates to the conversations of a list; returns None if it relates to none."""
    extended = {(head.id, head.since) for head in heads}
    free = [head for head in heads if (head.id, head.prefix) not in extended]
    repeated = _match_repeated_head(request, heads, free)
    if repeated is not None:
        return repeated
    by_prefix: dict[str, list[ConversationHead]] = {}
    for head in heads:
        by_prefix.setdefault(head.prefix, []).append(head)
    earlier = next((by_prefix[each] for each in request.iterate_earlier_prefixes() if each in by_prefix), [])
    latest = _find_free_head(earlier, free) or _find_moved_head(request, free)
    if latest is not None:
        return _HeadMatch(_ON, latest, len(heads))
    return _HeadMatch(_APART, None, len(heads)) if earlier else None


def _match_cleared_head(request: _IndexedRequest, heads: Sequence[ConversationHead]) -> _HeadMatch | None:
    """Finds a head that the request repeats or continues after its client has cleared tool results."""
    extended = {(head.id, head.since) for head in heads}
    for head in reversed(heads):
        last = request.find_cleared(head)
        if last is not None and head.outline == request.outline:
            return _HeadMatch(_AGAIN, head, len(heads))
        if last is not None and (head.id, head.prefix) not in extended:
            return _HeadMatch(_ON, head, len(heads))
    return None


def _match_repeated_head(
    request: _IndexedRequest, heads: Sequence[ConversationHead], free: Sequence[ConversationHead]
) -> _HeadMatch | None:
    """Finds how a request relates to conversations that have already come as far; None if none has."""
    same_heads = [head for head in heads if head.prefix == request.prefix]
    if same_heads:
        latest = _find_free_head(same_heads, free)
        if latest is not None or request.has_answer:
            return _HeadMatch(_AGAIN, latest or same_heads[0], len(heads))
        is_beside = not request.has_tools and any(head.has_tools for head in same_heads)
        return _HeadMatch(_BESIDE if is_beside else _ANEW, None, len(heads))
    within = next((head for head in reversed(heads) if request.is_within(head)), None)
    # The request was sent before that head was left, but it is looked up only now.
    return None if within is None else _HeadMatch(_AGAIN, within, len(heads))


def _find_free_head(
    those: Iterable[ConversationHead], free: Sequence[ConversationHead]
) -> ConversationHead | None:
    return next((head for head in those if head in free), None)


def _find_moved_head(request: _IndexedRequest, free: Sequence[ConversationHead]) -> ConversationHead | None:
    """Finds the newest head that a request continues after its client has moved or rewritten messages."""
    owners: dict[str, set[str]] = {}
    for head in free:
        for _, digest in head.tail:
            owners.setdefault(digest, set()).add(head.id)
    for head in reversed(free):
        common = [index for index, (prefix, _) in enumerate(head.tail) if prefix in request.prefix_indices]
        if common:
            if common[-1] < len(head.tail) - 1 and _has_moved(head, request, common[-1]):
                return head
            continue
        is_first = request.is_part and len(head.tail) <= MAX_MOVED_MESSAGES
        # Messages that other conversations contain, too, prove nothing.
        unique_digests = {digest for _, digest in head.tail if len(owners[digest]) == 1}
        if (is_first and _has_moved(head, request, -1)) or _is_rewritten(head, request, unique_digests):
            return head
    return None


def _has_moved(head: ConversationHead, request: _IndexedRequest, last_common: int) -> bool:
    """Returns whether the latest user message of a head now stands where moved or rewritten messages stood.

    Args:
        head: The head.
        request: The request.
        last_common: Index in the head's tail of the last message up to which both are the same; -1 if there
            is none.
    """
    common_index = request.prefix_indices[head.tail[last_common][0]] if last_common >= 0 else -1
    moved = {digest for _, digest in head.tail[last_common + 1 :]}
    if 0 <= common_index < request.first_answer_index and not moved <= request.earlier_digests.keys():
        return False
    user_indices = (
        latest_index
        for each in head.openings
        for latest_index in request.user_texts.get(each, ())
        if latest_index > common_index
    )
    latest_index = min(user_indices, default=None)
    if (
        latest_index is None
        or latest_index - common_index > MAX_MOVED_MESSAGES
        or not moved.issuperset(request.iterate_digests(common_index + 1, latest_index))
    ):
        return False
    # At least one of the messages around that message must have moved behind it, unless there were none.
    return len(moved) == 1 or any(
        request.earlier_digests.get(each, common_index) > latest_index for each in moved
    )


def _is_rewritten(head: ConversationHead, request: _IndexedRequest, own: AbstractSet[str]) -> bool:
    """Returns whether a request continues a head although its client has rewritten the first messages.

    Args:
        head: The head.
        request: The request.
        own: Digests of those messages in the head's tail that no other conversation has.
    """
    if len(own) < LEAST_FOUND:
        return False
    has_user_text = any(each in request.user_texts for each in head.openings)
    found_count = len(own & request.earlier_digests.keys()) + has_user_text
    if request.is_part and found_count >= max(LEAST_FOUND, len(head.tail) // 2):
        return True
    *earlier, (_, last) = head.tail
    has_all_earlier = all(digest in request.earlier_digests for _, digest in earlier)
    return request.has_answer and has_all_earlier and (has_user_text or last in request.earlier_digests)


def _shorten_digest(digest: bytes) -> str:
    return digest[:_DIGEST_BYTES].hex()


def _digest_result(message: Message) -> bytes:
    """Returns the digest of a tool result: its outline and its first characters. Clients may cut the rest."""
    start = message.text[:RESULT_CHARACTERS].encode("utf-8", "surrogatepass")
    return hashlib.sha256(compute_outline_digest(message) + start).digest()


def _add_result_digests(messages: Sequence[Message], outlines: Sequence[bytes]) -> Sequence[bytes]:
    """Returns the prefix digests with the tool results included."""
    results_digest = b""
    prefixes = []
    for message, outline in zip(messages, outlines, strict=True):
        if message.answers:
            results_digest = hashlib.sha256(results_digest + _digest_result(message)).digest()
        prefixes.append(hashlib.sha256(outline + results_digest).digest() if results_digest else outline)
    return prefixes


def _digest_text(text: str) -> str:
    return _shorten_digest(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())


def _trim_text(text: str) -> str:
    """Removes white space at the ends of the lines. A long text becomes its two ends and its length."""
    if len(text) > 2 * END_CHARACTERS:
        text = f"{text[:END_CHARACTERS]}\n{len(text)}\n{text[-END_CHARACTERS:]}"
    return "\n".join(map(str.rstrip, text.strip().split("\n")))


def _is_user_text(message: Message) -> bool:
    return message.role == "user" and not message.answers


def _digest_first_line(message: Message) -> str:
    """Returns the digest of the first line of a user message; empty for any other message."""
    if not _is_user_text(message):
        return ""
    line = message.text.lstrip()[:LINE_CHARACTERS].partition("\n")[0].rstrip()
    return _digest_text(line) if line else ""


def _digest_openings(text: str) -> tuple[str, ...]:
    """Returns digests of the beginnings of a text, one per paragraph end; the last covers the whole text."""
    text = _trim_text(text)
    ends = [found.start() for found in _PARAGRAPH_END.finditer(text)]
    if len(ends) > 2 * MAX_PARAGRAPHS:
        ends[MAX_PARAGRAPHS:-MAX_PARAGRAPHS] = []
    hasher, start = hashlib.sha256(), 0
    openings = []
    for end in [*ends, len(text)] if text else []:
        hasher.update(text[start:end].encode("utf-8", "surrogatepass"))
        openings.append(_shorten_digest(hasher.digest()))
        start = end
    return tuple(openings)


def _to_fields(head: ConversationHead) -> Fields:
    tail = " ".join("".join(pair) for pair in head.tail)
    return {**head._asdict(), "tail": tail}


def _read_head(fields: Fields) -> ConversationHead | None:
    """Reads the head in a stored line; returns None if the line holds none."""
    with suppress(KeyError, TypeError, AttributeError, ValueError):
        digits = 2 * _DIGEST_BYTES
        tail = tuple((each[:digits], each[digits:]) for each in fields["tail"].split())
        openings = tuple(fields["openings"])
        values = [fields[name] for name in ("id", "since", "prefix", "outline")]
        if all(isinstance(word, str) for word in (*values, *openings)):
            identity, since, prefix, outline = values
            return ConversationHead(
                identity, since, prefix, outline, tail, openings, bool(fields["has_tools"])
            )
    return None
