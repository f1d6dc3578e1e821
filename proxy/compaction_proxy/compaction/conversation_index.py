"""Finds the conversation that a request continues if its client sends no conversation id.

For each request, the proxy stores a record with digests of the request's messages. This record is called a
head. A new request whose messages continue those of a head belongs to the same conversation. If an earlier
request has already continued the same head, the new request is a fork: it starts a new conversation. All
processes of the proxy append to the same lists of heads and read them in the same order. So they reach the
same result, even if two of them receive requests that continue the same head at the same time.
"""

import asyncio
import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import cached_property, partial
from itertools import chain, islice
from typing import NamedTuple, TypeVar

from compaction_proxy.core.digest import compute_outline_digest, compute_prefix_digests
from compaction_proxy.core.ledger.client_forms import drop_client_messages
from compaction_proxy.core.message import Message, find_latest_user_message
from compaction_proxy.core.title_request import is_title_request
from compaction_proxy.storage.keys import conversation_heads_key, tenant_prefix
from compaction_proxy.storage.records import Fields, RecordStore
from compaction_proxy.support.lru import BoundedDict
from compaction_proxy.support.offload import run_in_worker_if_large

# Conversations with the same first 1, 4, 16 or 64 messages share a list of heads. A head is stored in the
# list for the largest of these numbers that its conversation has reached. It is also stored in a list for the
# first line of the first user message, because some clients rewrite their first messages.
BEGINNINGS = (1, 4, 16, 64)
# Largest number of heads in a list. If there are more, the oldest are dropped.
KEPT_HEADS = 128
# A process also keeps in memory the heads that it has added itself, for at most `MAX_HELD_LISTS` lists and at
# most `MAX_HELD_HEADS` heads for each list. If there are more, the oldest are dropped.
MAX_HELD_LISTS = 1_000
MAX_HELD_HEADS = 16
# If no stored list identifies the conversation, the client itself may have compacted the conversation. Then
# the lists in memory are searched, but only the tenant's lists to which heads were added last, at most this
# many.
RECENT_LISTS = 64
# Some clients move or rewrite their last messages with each turn. The conversation is still recognised if the
# client has moved or rewritten at most this many messages.
MAX_MOVED_MESSAGES = 8
# A client may rewrite the first messages of a conversation. Then the proxy compares its request with the last
# messages of each head (`ConversationHead.tail_digests`). The request continues the head if both of these are
# true:
# - At least this many messages of the tail occur in no other conversation.
# - The request repeats all messages of the tail. In place of the last one, it may repeat the latest user
#   message of the head.
# Some clients, such as aider, add messages of their own. For such a client, the second condition is weaker:
# the request must repeat at least this many messages of the tail, and at least half of them.
LEAST_COMMON_MESSAGES = 4
# A client such as aider adds messages of its own, for example with files. If the proxy leaves such messages
# out, each prefix digest also covers these bytes. So it differs from the digest of a list with all messages.
_PART = b"part"
# Conversations whose first user message begins with the same line share one stored list of heads. The key of
# the list is a digest of at most this many characters of that line.
LINE_CHARACTERS = 64
# The line is searched in this many characters at the beginning of the message.
SEARCHED_CHARACTERS = 4_096
# Some clients append text to the latest user message and omit that text in later requests. So a head contains
# several digests of this message. Each digest covers the text from its start to the end of a paragraph. If
# the message has many paragraphs, only the ends of this many first and this many last paragraphs are used.
MAX_PARAGRAPHS = 16
# A text longer than twice this number of characters is identified by its length, its first characters and its
# last characters, this many of each.
END_CHARACTERS = 32_768
# A tool result is identified by this many characters at the beginning of its text. A text that is not longer
# may also be a notice that the client has put in place of the text of a tool result, to clear the result.
RESULT_CHARACTERS = 256
_DIGEST_BYTES = 8
_Result = TypeVar("_Result")
_PARAGRAPH_END = re.compile(r"(?<!\n)\n\n")
# How a request relates to the known conversations:
# `_REPEATS`: it repeats the last request of a conversation.
# `_CONTINUES`: it continues a conversation.
# `_STARTS`: it starts a new conversation, because another request has already continued the same head, or
# because it continues no known head.
# `_RESTARTS`: it repeats the first request of a conversation that has been continued, so it starts a new one.
# `_UNRELATED`: it belongs to no conversation, because it repeats the messages of a request that defined
# tools, but defines no tools itself.
_REPEATS, _CONTINUES, _STARTS, _RESTARTS, _UNRELATED = (
    "repeats",
    "continues",
    "starts",
    "restarts",
    "unrelated",
)


class ConversationHead(NamedTuple):
    """The digests of one request, by which a later request of the same conversation is recognised.

    All digests are hex strings. They cover only messages that are not fixed.

    Attributes:
        id: The conversation id.
        since: `prefix` of the head that this head continues; empty if this head is the first of its
            conversation.
        prefix: Prefix digest of all messages of the request.
        outline: Prefix digest of all messages without the text of tool results, because clients clear that
            text.
        tail_prefixes: The prefix digests up to each of the last messages, oldest first, at most
            `MAX_MOVED_MESSAGES` + 1. These messages are called the tail.
        tail_digests: The digests of the same messages themselves.
        openings: Digests of the latest user message. Each covers its text from the start to the end of a
            paragraph.
        has_tools: Whether the request defined tools.
    """

    id: str
    since: str
    prefix: str
    outline: str
    tail_prefixes: tuple[str, ...]
    tail_digests: tuple[str, ...]
    openings: tuple[str, ...]
    has_tools: bool


class _IndexedRequest:
    """A request, with lookup tables for comparing it with heads.

    Each table is built when it is first used, because most requests are recognised without it.

    Args:
        messages: The messages of the request that are not fixed, at least one.
        outlines: The prefix digests of the messages, without the text of tool results.
        has_tools: Whether the request defines tools.
        is_part: Whether `messages` lacks messages that the client program has added, such as aider's files.

    Attributes:
        outlines: The same object as the argument.
    """

    def __init__(
        self, messages: Sequence[Message], outlines: Sequence[bytes], *, has_tools: bool, is_part: bool
    ) -> None:
        self._messages = messages
        self.outlines = outlines
        self._prefixes = _add_result_digests(messages, outlines)
        self.has_tools = has_tools
        self.excludes_client_messages = is_part
        self.prefix = _shorten_digest(self._prefixes[-1])
        self.outline = _shorten_digest(outlines[-1])

    async def run_large(self, work: Callable[[], _Result]) -> _Result:
        """Runs `work`, which compares the request, in a thread if the request has very many messages."""
        return await run_in_worker_if_large(0, work, message_count=len(self._messages))

    @cached_property
    def first_answer_index(self) -> int:
        """Index of the first assistant message or tool result; the number of messages if there is none."""
        answer_indices = (
            k for k, each in enumerate(self._messages) if each.role != "user" or each.answered_call_ids
        )
        return next(answer_indices, len(self._messages))

    @property
    def has_answer(self) -> bool:
        """Whether the request contains an assistant message or a tool result."""
        return self.first_answer_index < len(self._messages)

    @cached_property
    def prefix_indices(self) -> dict[str, int]:
        """Maps the prefix digest up to each message to the index of the message."""
        return {_shorten_digest(prefix): index for index, prefix in enumerate(self._prefixes)}

    @cached_property
    def outline_indices(self) -> dict[str, int]:
        """Maps the outline digest up to each message to the index of the message.

        An outline digest is a prefix digest that ignores the text of tool results.
        """
        return {_shorten_digest(outline): index for index, outline in enumerate(self.outlines)}

    def iterate_earlier_prefixes(self) -> Iterator[str]:
        """Yields the prefix digests of all messages except the last one, the longest prefix first."""
        return map(_shorten_digest, reversed(self._prefixes[:-1]))

    @property
    def first_line_digest(self) -> str:
        """Digest of the first line of the first user message with text; empty if there is none."""
        return next(filter(None, map(_digest_first_line, self._messages)), "")

    def iterate_digests(self, start: int, stop: int | None = None) -> Iterator[str]:
        """Yields the digests of the messages from index `start` up to, but not including, index `stop`.

        If `stop` is None, continues to the last message.
        """
        return map(self._digest_message, self._messages[start:stop])

    @cached_property
    def earlier_digests(self) -> dict[str, int]:
        """Maps the digest of each message except the last one to the index of its last occurrence."""
        return {digest: index for index, digest in enumerate(map(self._digest_message, self._messages[:-1]))}

    def _digest_message(self, message: Message) -> str:
        """Returns the digest of a message.

        For a client such as aider, which adds messages of its own, the digest ignores white space at line
        ends. The reason is that aider adds such white space to messages that it restores from its history.
        """
        if message.answered_call_ids:
            return _shorten_digest(_digest_result(message))
        if self.excludes_client_messages and not (message.calls or message.answered_call_ids):
            return _digest_text(f"{message.role} {_trim_text(message.text)}")
        return _shorten_digest(compute_outline_digest(message))

    @cached_property
    def user_texts(self) -> dict[str, list[int]]:
        """Maps a digest of each user text to the indices of the user messages with this text.

        The latest user message is not included.
        """
        indices: dict[str, list[int]] = {}
        for index, message in enumerate(self._messages[: find_latest_user_message(self._messages)]):
            if _is_user_text(message):
                indices.setdefault(_digest_text(_trim_text(message.text)), []).append(index)
        return indices

    def find_last_index_despite_clearing(self, head: ConversationHead) -> int | None:
        """Finds the last message of a head in this request, although the client has cleared tool results.

        A tool result whose digest differs from its digest in the head counts as cleared if its text has at
        most `RESULT_CHARACTERS` characters and it is not among the results at the end of the request. Returns
        the index of the head's last message in this request. Returns None if the request lacks messages of
        the head, if no tool result differs, or if a tool result differs but does not count as cleared.
        """
        last, size = self.outline_indices.get(head.outline), len(head.tail_digests)
        if last is None or last + 1 < size or _shorten_digest(self._prefixes[last]) == head.prefix:
            return None
        start = last + 1 - size
        for index, digest in zip(range(start, last + 1), self.iterate_digests(start, last + 1), strict=True):
            is_last = index >= self._last_results_index
            is_short = len(self._messages[index].text) <= RESULT_CHARACTERS
            if digest != head.tail_digests[index - start] and (is_last or not is_short):
                return None
        return last

    @cached_property
    def _last_results_index(self) -> int:
        """Index of the first of the tool results at the end of the request.

        If the last message is no tool result, this is the number of messages.
        """
        indices = range(len(self._messages) - 1, -1, -1)
        return next((k + 1 for k in indices if not self._messages[k].answered_call_ids), 0)

    @property
    def late_line_digests(self) -> list[str]:
        """Digests of the first lines of the user messages, the latest message first."""
        return [line for line in map(_digest_first_line, reversed(self._messages)) if line]

    def is_beginning_of(self, head: ConversationHead) -> bool:
        """Returns whether the request of the head begins with all messages of this request.

        Returns False if this request has neither a reply nor a tool result, or if its last message comes
        before the messages of the head's tail.
        """
        return self.has_answer and self.prefix in head.tail_prefixes

    def build_head(self, conversation: str, since: str) -> ConversationHead:
        """Builds the head to store for this request.

        `since` is the prefix digest of the head that the request continues; empty if it continues none.
        """
        start = max(0, len(self._messages) - MAX_MOVED_MESSAGES - 1)
        tail_prefixes = tuple(map(_shorten_digest, self._prefixes[start:]))
        latest = find_latest_user_message(self._messages)
        openings = () if latest is None else _digest_up_to_paragraph_ends(self._messages[latest].text)
        return ConversationHead(
            id=conversation,
            since=since,
            prefix=self.prefix,
            outline=self.outline,
            tail_prefixes=tail_prefixes,
            tail_digests=tuple(self.iterate_digests(start)),
            openings=openings,
            has_tools=self.has_tools,
        )


def _build_indexed_request(
    messages: Sequence[Message], prefixes: Sequence[bytes], *, has_tools: bool
) -> _IndexedRequest:
    """Leaves out the messages that the client program has added, and builds the tables for the others."""
    own_messages = drop_client_messages(messages)
    if not 0 < len(own_messages) < len(messages):
        return _IndexedRequest(messages, prefixes, has_tools=has_tools, is_part=False)
    prefixes = compute_prefix_digests(own_messages, _PART)
    return _IndexedRequest(own_messages, prefixes, has_tools=has_tools, is_part=True)


class ConversationIndex:
    """Finds the conversations of requests without a conversation id.

    Not thread-safe: use it on one event loop. No method raises an error if the store fails.

    Args:
        records: Stores the heads.
        mint_conversation: Builds a conversation id from a tenant and bytes that identify the conversation.
        ttl_s: How long heads are kept, in seconds.
    """

    def __init__(
        self, records: RecordStore, mint_conversation: Callable[[str, bytes], str], ttl_s: float
    ) -> None:
        self._records = records
        self._mint = mint_conversation
        self._ttl_s = ttl_s
        # Maps the key of each list to the heads that this process has added to it. They are needed until the
        # store has written them, and while the store is unavailable.
        self._added_heads: BoundedDict[str, tuple[ConversationHead, ...]] = BoundedDict(MAX_HELD_LISTS)
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
        """Returns the id of the conversation that a request continues or starts.

        Returns None if the request belongs to no conversation, for example because it only asks for a title.

        Args:
            tenant: The tenant that sent the request.
            messages: The messages of the request that are not fixed, at least one.
            prefixes: Their prefix digests.
            has_tools: Whether the request defines tools.
            find_recorded_conversation: Returns the conversation id from a stored checkpoint that matches the
                request. It is called if the store may have lost the heads of the conversation.
        """
        latest = find_latest_user_message(messages)
        if not has_tools and latest is not None and is_title_request(messages[latest].text):
            return None
        build_request = partial(_build_indexed_request, messages, prefixes, has_tools=has_tools)
        request = await run_in_worker_if_large(0, build_request, message_count=len(messages))
        prefixes = request.outlines
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
        last_own_key = keys[-1]
        own_keys = {keys[0], last_own_key}
        # A session that aider restores begins with a summary in place of the first user message. So the head
        # is also stored in the list of heads for the first line of the latest user message. The list for the
        # first line of the user message before the latest one is searched, too.
        if request.excludes_client_messages:
            late_keys = [
                conversation_heads_key(tenant, bytes.fromhex(line)) for line in request.late_line_digests[:2]
            ]
            own_keys.update(late_keys[:1])
            keys += late_keys[1:]
        counts: dict[str, int] = {}
        match, key = await self._search_lists(tenant, request, keys, counts)
        # The client itself may have compacted the conversation. The request then contains only the end of the
        # conversation, so none of the lists searched above identifies the conversation. For this case, the
        # request is compared with the heads that this process has recently added to any list of the tenant.
        if match is None and request.has_answer:
            recent = self._resolve_forks(tenant, self._list_recent_heads(tenant))
            match, key = await request.run_large(partial(_match_heads, request, recent)), keys[0]
        if match is not None:
            return self._follow_match(match, tenant, request, own_keys | {key})
        # The request continues no known head. So it starts a conversation, or the store has lost the heads.
        # If a list for the first 4 or more messages contains heads, the store has lost nothing. If all these
        # lists are empty, a stored checkpoint may identify the conversation. A request with fewer than 4
        # messages has no checkpoint.
        is_known = len(lengths) == 1 or any(counts[each] for each in beginnings[:-1])
        recorded = (
            None if is_known or find_recorded_conversation is None else await find_recorded_conversation()
        )
        if recorded is not None:
            self._add_head(own_keys, request.build_head(recorded, ""))
            return recorded
        return self._follow_match(_HeadMatch(_STARTS, None, counts[last_own_key]), tenant, request, own_keys)

    async def _search_lists(
        self, tenant: str, request: _IndexedRequest, keys: Sequence[str], head_counts: dict[str, int]
    ) -> tuple["_HeadMatch | None", str]:
        """Finds how a request relates to the conversations in the lists with these keys.

        Returns the match and the key of the list in which it was found. Returns None and an empty key if
        there is no match. For each list that it reads, the method writes the number of heads to
        `head_counts`, under the key of the list.
        """
        cleared = None
        for key in keys:
            heads = self._resolve_forks(tenant, await self._read_heads(key))
            head_counts[key] = len(heads)
            match = await request.run_large(partial(_match_heads, request, heads))
            if match is not None and match.head is not None:
                return match, key
            if cleared is None and heads:
                found = await request.run_large(partial(_match_cleared_head, request, heads))
                # The search continues: another list may have a head with the same tool results.
                cleared = None if found is None else (found, key)
            if match is not None and cleared is None:
                return match, key
        return cleared or (None, "")

    async def close(self) -> None:
        """Waits until all heads that this process has added are written to the store."""
        await asyncio.gather(*self._save_tasks, return_exceptions=True)

    def _follow_match(
        self, match: "_HeadMatch", tenant: str, request: "_IndexedRequest", keys: Iterable[str]
    ) -> str | None:
        """Returns the id of the request's conversation; None if the request belongs to no conversation.

        Adds the head of the request to the lists with these keys. Adds no head if the request repeats an
        earlier request or belongs to no conversation.
        """
        head = match.head
        if head is not None and match.kind == _REPEATS:
            return head.id
        if match.kind == _UNRELATED:
            return None
        if head is not None:
            self._add_head(keys, request.build_head(head.id, head.prefix))
            return head.id
        # The id of the new conversation is made from the messages. If an earlier conversation began with the
        # same messages, random bytes are added to make the new id unique. If the list of heads is full, the
        # heads of such an earlier conversation may have been dropped. So random bytes are added in this case,
        # too.
        seed = bytes.fromhex(request.prefix)
        is_known = match.kind == _RESTARTS or match.head_count >= KEPT_HEADS
        conversation = self._mint(tenant, seed + (secrets.token_bytes(_DIGEST_BYTES) if is_known else b""))
        self._add_head(keys, request.build_head(conversation, ""))
        return conversation

    async def _read_heads(self, key: str) -> list[ConversationHead]:
        """Reads the list of heads under `key`: the stored ones, oldest first, then those not stored yet."""
        stored = [_read_head(line) for line in await self._records.read_tail(key, KEPT_HEADS)]
        return _drop_duplicates([*filter(None, stored), *self._added_heads.get(key, ())])

    def _list_recent_heads(self, tenant: str) -> list[ConversationHead]:
        """Lists the heads that this process has added to lists of the tenant.

        Only the `RECENT_LISTS` lists to which it has added heads last are considered.
        """
        prefix = tenant_prefix(tenant)
        recent = (heads for key, heads in reversed(self._added_heads.items()) if key.startswith(prefix))
        return _drop_duplicates(chain.from_iterable(reversed(list(islice(recent, RECENT_LISTS)))))

    def _resolve_forks(self, tenant: str, heads: Iterable[ConversationHead]) -> list[ConversationHead]:
        """Gives each head that is a fork a conversation id of its own. Returns all heads.

        A head is a fork if it continues a head that a different, earlier head in the list also continues.
        """
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
            write = self._records.append_line(key, _to_fields(head), ttl_s=self._ttl_s, max_lines=KEPT_HEADS)
            task = asyncio.create_task(write)
            self._save_tasks.add(task)
            task.add_done_callback(self._save_tasks.discard)

    def _forget_prefix(self, prefix: str) -> None:
        for key in [key for key in self._added_heads if key.startswith(prefix)]:
            del self._added_heads[key]


def _drop_duplicates(heads: Iterable[ConversationHead]) -> list[ConversationHead]:
    # Heads with these values in common have all values in common. A hash of all of them takes longer.
    return list({(head.id, head.since, head.prefix, head.has_tools): head for head in heads}.values())


class _HeadMatch(NamedTuple):
    """Describes how a request relates to the conversations in a list of heads.

    Attributes:
        kind: One of `_REPEATS`, `_CONTINUES`, `_STARTS`, `_RESTARTS` and `_UNRELATED`.
        head: The head that the request repeats or continues; None if the request starts a conversation or
            belongs to none.
        head_count: Number of heads in the list.
    """

    kind: str
    head: ConversationHead | None
    head_count: int


def _match_heads(request: _IndexedRequest, heads: Sequence[ConversationHead]) -> _HeadMatch | None:
    """Finds how a request relates to the conversations in a list of heads.

    Returns None if the request relates to none of them.
    """
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
        return _HeadMatch(_CONTINUES, latest, len(heads))
    return _HeadMatch(_STARTS, None, len(heads)) if earlier else None


def _match_cleared_head(request: _IndexedRequest, heads: Sequence[ConversationHead]) -> _HeadMatch | None:
    """Finds the newest head that the request repeats or continues after its client has cleared tool results.

    Returns None if there is no such head.
    """
    extended = {(head.id, head.since) for head in heads}
    for head in reversed(heads):
        last = request.find_last_index_despite_clearing(head)
        if last is not None and head.outline == request.outline:
            return _HeadMatch(_REPEATS, head, len(heads))
        if last is not None and (head.id, head.prefix) not in extended:
            return _HeadMatch(_CONTINUES, head, len(heads))
    return None


def _match_repeated_head(
    request: _IndexedRequest, heads: Sequence[ConversationHead], free: Sequence[ConversationHead]
) -> _HeadMatch | None:
    """Finds how a request relates to conversations that already begin with all its messages.

    Returns None if no conversation begins with all of them.

    Args:
        request: The request.
        heads: The known heads, oldest first.
        free: Those heads that no other head continues.
    """
    same_heads = [head for head in heads if head.prefix == request.prefix]
    if same_heads:
        latest = _find_free_head(same_heads, free)
        if latest is not None or request.has_answer:
            return _HeadMatch(_REPEATS, latest or same_heads[0], len(heads))
        is_unrelated = not request.has_tools and any(head.has_tools for head in same_heads)
        return _HeadMatch(_UNRELATED if is_unrelated else _RESTARTS, None, len(heads))
    within = next((head for head in reversed(heads) if request.is_beginning_of(head)), None)
    # If there is such a head, the client sent the head's request after this request, but the proxy looked for
    # the conversation of the head's request first. So both requests belong to one conversation.
    return None if within is None else _HeadMatch(_REPEATS, within, len(heads))


def _find_free_head(
    candidates: Iterable[ConversationHead], free: Sequence[ConversationHead]
) -> ConversationHead | None:
    return next((head for head in candidates if head in free), None)


def _find_moved_head(request: _IndexedRequest, free: Sequence[ConversationHead]) -> ConversationHead | None:
    """Finds the newest head that a request continues after its client has moved or rewritten messages.

    Returns None if there is no such head. `free` contains the heads that no other head continues.
    """
    owners: dict[str, set[str]] = {}
    for head in reversed(free):
        last = len(head.tail_prefixes) - 1
        common = next(
            (k for k in range(last, -1, -1) if head.tail_prefixes[k] in request.prefix_indices), None
        )
        if common is not None:
            if common < last and _has_moved_last_messages(head, request, common):
                return head
            continue
        owners = owners or _list_owners(free)
        is_first = request.excludes_client_messages and len(head.tail_digests) <= MAX_MOVED_MESSAGES
        # A message that other conversations also contain does not show that this conversation is continued.
        unique_digests = {digest for digest in head.tail_digests if len(owners[digest]) == 1}
        if (is_first and _has_moved_last_messages(head, request, -1)) or _is_rewritten(
            head, request, unique_digests
        ):
            return head
    return None


def _list_owners(heads: Iterable[ConversationHead]) -> dict[str, set[str]]:
    """Lists, for the digest of each message in the tails of heads, the ids of these heads."""
    owners: dict[str, set[str]] = {}
    for head in heads:
        for digest in head.tail_digests:
            owners.setdefault(digest, set()).add(head.id)
    return owners


def _has_moved_last_messages(head: ConversationHead, request: _IndexedRequest, last_common: int) -> bool:
    """Returns whether a request continues a head although its client has moved or rewritten messages.

    The request may begin like the one that the head was made from, up to a message in the head's tail.
    The messages up to this one are called common, and the later messages in the tail are called moved. The
    function returns True if all of these are true:

    - After the common messages, the request contains the latest user message that the head was made from.
    - Between the common messages and this user message, there are only moved messages, and fewer than
      `MAX_MOVED_MESSAGES`.
    - If there are common messages, but no reply or tool result among them, the request contains all moved
      messages.
    - One of the moved messages comes after the user message, unless only one message was moved.

    Args:
        head: The head.
        request: The request.
        last_common: Index in the head's tail of the last common message; -1 if there is none.
    """
    common_index = request.prefix_indices[head.tail_prefixes[last_common]] if last_common >= 0 else -1
    moved = set(head.tail_digests[last_common + 1 :])
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
    # At least one other message that was moved must now come after the user message. This is not required if
    # the user message is the only message that was moved.
    return len(moved) == 1 or any(
        request.earlier_digests.get(each, common_index) > latest_index for each in moved
    )


def _is_rewritten(head: ConversationHead, request: _IndexedRequest, unique_digests: AbstractSet[str]) -> bool:
    """Returns whether a request continues a head although its client has rewritten the first messages.

    The comment on `LEAST_COMMON_MESSAGES` describes the conditions.

    Args:
        head: The head.
        request: The request.
        unique_digests: Digests of the messages in the head's tail that occur in no other conversation.
    """
    if len(unique_digests) < LEAST_COMMON_MESSAGES:
        return False
    has_user_text = any(each in request.user_texts for each in head.openings)
    found_count = len(unique_digests & request.earlier_digests.keys()) + has_user_text
    least_count = max(LEAST_COMMON_MESSAGES, len(head.tail_digests) // 2)
    if request.excludes_client_messages and found_count >= least_count:
        return True
    *earlier, last = head.tail_digests
    has_all_earlier = all(digest in request.earlier_digests for digest in earlier)
    return request.has_answer and has_all_earlier and (has_user_text or last in request.earlier_digests)


def _shorten_digest(digest: bytes) -> str:
    return digest[:_DIGEST_BYTES].hex()


def _digest_result(message: Message) -> bytes:
    """Returns the digest of a tool result, including the first `RESULT_CHARACTERS` characters of its text.

    The rest of the text is ignored, because clients may cut it.
    """
    start = message.text[:RESULT_CHARACTERS].encode("utf-8", "surrogatepass")
    return hashlib.sha256(compute_outline_digest(message) + start).digest()


def _add_result_digests(messages: Sequence[Message], outlines: Sequence[bytes]) -> Sequence[bytes]:
    """Returns prefix digests that also cover the beginning of the text of each tool result.

    `outlines` are prefix digests of the same messages, without the text of tool results.
    """
    results_digest = b""
    prefixes = []
    for message, outline in zip(messages, outlines, strict=True):
        if message.answered_call_ids:
            results_digest = hashlib.sha256(results_digest + _digest_result(message)).digest()
        prefixes.append(hashlib.sha256(outline + results_digest).digest() if results_digest else outline)
    return prefixes


def _digest_text(text: str) -> str:
    return _shorten_digest(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())


def _trim_text(text: str) -> str:
    """Removes white space at line ends. Of a long text, keeps only the start, the length and the end.

    A text is long if it has more than twice `END_CHARACTERS` characters.
    """
    if len(text) > 2 * END_CHARACTERS:
        text = f"{text[:END_CHARACTERS]}\n{len(text)}\n{text[-END_CHARACTERS:]}"
    return "\n".join(map(str.rstrip, text.strip().split("\n")))


def _is_user_text(message: Message) -> bool:
    return message.role == "user" and not message.answered_call_ids


def _digest_first_line(message: Message) -> str:
    """Returns the digest of the first line of a user message.

    Returns an empty string for any other message, and for a message without text.
    """
    if not _is_user_text(message):
        return ""
    line = message.text[:SEARCHED_CHARACTERS].lstrip()[:LINE_CHARACTERS].partition("\n")[0].rstrip()
    return _digest_text(line) if line else ""


def _digest_up_to_paragraph_ends(text: str) -> tuple[str, ...]:
    """Returns digests of a text. Each covers the text from its start to the end of a paragraph.

    The last digest covers the whole text. If the text has more than twice `MAX_PARAGRAPHS` paragraph ends,
    only the first `MAX_PARAGRAPHS` and the last `MAX_PARAGRAPHS` of them are used. Returns no digests for an
    empty text.
    """
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
    fields = head._asdict()
    prefixes, digests = fields.pop("tail_prefixes"), fields.pop("tail_digests")
    return {**fields, "tail": " ".join(map(str.__add__, prefixes, digests))}


def _read_head(fields: Fields) -> ConversationHead | None:
    """Reads a head from a line in the store. Returns None if the line is not a valid head."""
    with suppress(KeyError, TypeError, AttributeError, ValueError):
        digits = 2 * _DIGEST_BYTES
        words = fields["tail"].split()
        openings = tuple(fields["openings"])
        identity, since, prefix, outline = (fields[name] for name in ("id", "since", "prefix", "outline"))
        if all(isinstance(word, str) for word in (identity, since, prefix, outline, *openings)):
            prefixes = tuple([word[:digits] for word in words])
            digests = tuple([word[digits:] for word in words])
            return ConversationHead(
                identity, since, prefix, outline, prefixes, digests, openings, bool(fields["has_tools"])
            )
    return None
