"""Finds which conversation a request continues whose client sends no id.

Each request leaves a head: how far its conversation has come. A request that goes on from a head is of that
conversation. Where another one has gone on from it already, the two differ from here on, and the later one is
a conversation of its own. All replicas add to the same lists of heads, and read them in their order. So they
come to one result, even if two of them went on from one head at the same time.
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

# A head stands in the list of the longest of these beginnings that its conversation has, in messages. It
# stands in the list of its first user message's first line, too: clients rewrite even their first messages.
BEGINNINGS = (1, 4, 16, 64)
KEPT_HEADS = 128
# Lists of which a process holds what it has added itself, and heads of each.
MAX_HELD_LISTS = 1_000
MAX_HELD_HEADS = 16
# So many of them are searched for a conversation that its client has compacted itself.
RECENT_LISTS = 64
# A client that moves or rewrites its last messages with each turn does so with so many at most.
MAX_MOVED_MESSAGES = 8
# So many different messages that are found again show that a request goes on, whatever it begins with.
LEAST_FOUND = 4
# What digests of lists begin with of which something was left out.
_PART = b"part"
# A list of conversations is named after so many characters of the first line of a user message.
LINE_CHARACTERS = 64
# A user message that its client has added to is known by its first and its last so many paragraphs.
MAX_PARAGRAPHS = 16
# A longer text than two such ends, in characters, is known by these and its length.
END_CHARACTERS = 32_768
# A tool's result is known by so many characters. A shorter one may be the notice that it was cleared.
RESULT_CHARACTERS = 256
_DIGEST_BYTES = 8
_PARAGRAPH_END = re.compile(r"(?<!\n)\n\n")
# How a request stands to conversations: it repeats the last request of one, goes on from it, differs from all
# from here on, begins as another did that has gone on since, or only stands beside one.
_AGAIN, _ON, _APART, _ANEW, _BESIDE = "again", "on", "apart", "anew", "beside"


class ConversationHead(NamedTuple):
    """How far a conversation has come. Digests are hex digits.

    Attributes:
        id: The conversation.
        since: The prefix digest that it went on from; empty where it begins.
        prefix: The prefix digest of all its messages.
        outline: The same without what tools have said, as clients clear that.
        tail: Its last messages, oldest first: the prefix digest up to each, and its own digest.
        openings: Digests of what its latest user message begins with, up to the ends of its paragraphs.
        has_tools: Whether its request brought tools.
    """

    id: str
    since: str
    prefix: str
    outline: str
    tail: tuple[tuple[str, str], ...]
    openings: tuple[str, ...]
    has_tools: bool


class _IndexedRequest:
    """What is asked of a request; worked out when it is asked for, as long lists are seldom compared whole.

    Args:
        messages: Its non-privileged messages, at least one.
        outlines: Their prefix digests, which tell nothing of what tools have said.
        has_tools: Whether it brings tools.
        is_part: Whether its client has put more around these messages.
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
        """Index of the first message that is not the user's; their number where all are."""
        spoken = (k for k, each in enumerate(self._messages) if each.role != "user" or each.answers)
        return next(spoken, len(self._messages))

    @property
    def has_answer(self) -> bool:
        """Whether the model has said anything in it."""
        return self.first_answer_index < len(self._messages)

    @cached_property
    def prefix_indices(self) -> dict[str, int]:
        """Indices of its messages, by the prefix digests up to them."""
        return {_shorten_digest(prefix): index for index, prefix in enumerate(self._prefixes)}

    @cached_property
    def outline_indices(self) -> dict[str, int]:
        """The same, by the prefix digests that tell nothing of what tools have said."""
        return {_shorten_digest(outline): index for index, outline in enumerate(self._outlines)}

    def iterate_earlier_prefixes(self) -> Iterator[str]:
        """Prefix digests of all that its last message comes after, the longest first."""
        return map(_shorten_digest, reversed(self._prefixes[:-1]))

    @property
    def first_line_digest(self) -> str:
        """Digest of the first line of its first user message; empty if it has none."""
        return next(filter(None, map(_digest_first_line, self._messages)), "")

    def iterate_digests(self, start: int, stop: int | None = None) -> Iterator[str]:
        """Digests of its messages from an index on, up to another one."""
        return map(self._digest_message, self._messages[start:stop])

    @cached_property
    def earlier_digests(self) -> dict[str, int]:
        """Digests of all its messages but the last, each with the index where it stands last."""
        return {digest: index for index, digest in enumerate(map(self._digest_message, self._messages[:-1]))}

    def _digest_message(self, message: Message) -> str:
        """The digest of a message. aider adds white space to what it reads from its history."""
        if message.answers:
            return _shorten_digest(_digest_result(message))
        if self.is_part and not (message.calls or message.answers):
            return _digest_text(f"{message.role} {_trim_text(message.text)}")
        return _shorten_digest(compute_outline_digest(message))

    @cached_property
    def user_texts(self) -> dict[str, list[int]]:
        """Indices of its user messages before the latest one, by the digests of their texts."""
        found: dict[str, list[int]] = {}
        for index, message in enumerate(self._messages[: find_latest_user_message(self._messages)]):
            if _is_user_text(message):
                found.setdefault(_digest_text(_trim_text(message.text)), []).append(index)
        return found

    def find_cleared(self, head: ConversationHead) -> int | None:
        """Returns the index of a head's last message, where results of tools may have been cleared since.

        None if it lacks messages of the head, nothing has been cleared, or tools have said something else.
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
        """Index of the first of the results that it ends with; the number of messages if there are none."""
        places = range(len(self._messages) - 1, -1, -1)
        return next((k + 1 for k in places if not self._messages[k].answers), 0)

    @property
    def late_line_digests(self) -> list[str]:
        """Digests of the first lines of its user messages, the latest first."""
        return [line for line in map(_digest_first_line, reversed(self._messages)) if line]

    def is_within(self, head: ConversationHead) -> bool:
        """Whether the conversation of a head has come past it."""
        return self.has_answer and any(prefix == self.prefix for prefix, _ in head.tail)

    def build_head(self, conversation: str, since: str) -> ConversationHead:
        """Returns what it leaves."""
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
    """Finds the conversations of requests without an id, on one event loop.

    No method raises because of the store.

    Args:
        records: Where heads are kept.
        mint: Makes a conversation's id for a tenant, of some bytes.
        ttl_s: Seconds that heads are kept.
    """

    def __init__(self, records: RecordStore, mint: Callable[[str, bytes], str], ttl_s: float) -> None:
        self._records = records
        self._mint = mint
        self._ttl_s = ttl_s
        # What this process has added: the store gives it back later, or not at all while it is away.
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
        """Returns the id of the conversation; None if the request stands beside one, as a title call does.

        Args:
            tenant: Whose request it is.
            messages: Its non-privileged messages, at least one.
            prefixes: Their prefix digests.
            has_tools: Whether it brings tools.
            find_recorded_conversation: Gives the conversation in which a stored round was made that stands
                for the request. It decides where no head is left of the conversation.
        """
        latest = find_latest_user_message(messages)
        if not has_tools and latest is not None and is_title_request(messages[latest].text):
            return None
        spoken = drop_client_messages(messages)
        is_part = 0 < len(spoken) < len(messages)
        if is_part:
            messages, prefixes = spoken, compute_prefix_digests(spoken, _PART)
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
        own = {keys[0], keys[-1]}
        if is_part:  # aider begins a restored session with a part of what was said before, behind a summary
            late = [
                conversation_heads_key(tenant, bytes.fromhex(line)) for line in request.late_line_digests[:2]
            ]
            own.update(late[:1])
            keys += late[1:]
        counts: dict[str, int] = {}
        match, key = await self._search_lists(tenant, request, keys, counts)
        if match is None and request.has_answer:  # its client may have compacted it: the end is left, alone
            match, key = (
                _match_heads(request, self._resolve_forks(tenant, self._list_recent_heads(tenant))),
                keys[0],
            )
        if match is not None:
            return self._follow_match(match, tenant, request, own | {key})
        # Where its list has heads, it is none of those.
        is_known = len(lengths) == 1 or any(counts[each] for each in beginnings[:-1])
        recalled = (
            None if is_known or find_recorded_conversation is None else await find_recorded_conversation()
        )
        if recalled is not None:
            self._add_head(own, request.build_head(recalled, ""))
            return recalled
        return self._follow_match(_HeadMatch(_APART, None, counts[keys[-1]]), tenant, request, own)

    async def _search_lists(
        self, tenant: str, request: _IndexedRequest, keys: Sequence[str], counts: dict[str, int]
    ) -> tuple["_HeadMatch | None", str]:
        """How a request stands to the conversations of these lists, and the list that tells.

        The number of heads in each list that was read goes to `counts`.
        """
        cleared = None
        for key in keys:
            heads = self._resolve_forks(tenant, await self._read_heads(key))
            counts[key] = len(heads)
            match = _match_heads(request, heads)
            if match is not None and match.head is not None:
                return match, key
            if cleared is None and (found := _match_cleared_head(request, heads)) is not None:
                cleared = found, key  # unless another list has a head with the very same results
            if match is not None and cleared is None:
                return match, key
        return cleared or (None, "")

    async def close(self) -> None:
        """Wait until what was added is written."""
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
        # Where heads may have left their list, the same messages may have begun a conversation before.
        made_of = bytes.fromhex(request.prefix)
        is_known = match.kind == _ANEW or match.heads >= KEPT_HEADS
        conversation = self._mint(tenant, made_of + (secrets.token_bytes(_DIGEST_BYTES) if is_known else b""))
        self._add_head(keys, request.build_head(conversation, ""))
        return conversation

    async def _read_heads(self, key: str) -> list[ConversationHead]:
        """The heads of a list, oldest first."""
        stored = [_read_head(line) for line in await self._records.read_tail(key, KEPT_HEADS)]
        return list(dict.fromkeys([*filter(None, stored), *self._added_heads.get(key, ())]))

    def _list_recent_heads(self, tenant: str) -> list[ConversationHead]:
        """Heads of the tenant's lists that this process added to last."""
        prefix = tenant_prefix(tenant)
        held = (heads for key, heads in reversed(self._added_heads.items()) if key.startswith(prefix))
        return list(dict.fromkeys(chain.from_iterable(reversed(list(islice(held, RECENT_LISTS))))))

    def _resolve_forks(self, tenant: str, heads: Iterable[ConversationHead]) -> list[ConversationHead]:
        """The heads. Of several that went on from one at the same time, all but the first get another id."""
        gone_on: dict[tuple[str, str], str] = {}
        resolved: list[ConversationHead] = []
        for head in heads:
            first = gone_on.setdefault((head.id, head.since), head.prefix) if head.since else head.prefix
            own = first == head.prefix
            resolved.append(head if own else head._replace(id=self._mint(tenant, head.prefix.encode())))
        return resolved

    def _add_head(self, keys: Iterable[str], head: ConversationHead) -> None:
        for key in keys:
            held = self._added_heads.get(key, ())
            self._added_heads[key] = (*held, head)[-MAX_HELD_HEADS:]
            self._added_heads.move_to_end(key)
            if len(self._added_heads) > MAX_HELD_LISTS:
                self._added_heads.popitem(last=False)
            saving = self._records.append_line(key, _to_fields(head), ttl_s=self._ttl_s, max_lines=KEPT_HEADS)
            task = asyncio.create_task(saving)
            self._save_tasks.add(task)
            task.add_done_callback(self._save_tasks.discard)

    def _forget_prefix(self, prefix: str) -> None:
        for key in [key for key in self._added_heads if key.startswith(prefix)]:
            del self._added_heads[key]


class _HeadMatch(NamedTuple):
    """How a request stands to the conversations of a list.

    Attributes:
        kind: One of the words above.
        head: The head that it repeats or goes on from; None: it begins a conversation, or is part of none.
        heads: How many heads the list has.
    """

    kind: str
    head: ConversationHead | None
    heads: int


def _match_heads(request: _IndexedRequest, heads: Sequence[ConversationHead]) -> _HeadMatch | None:
    """How a request stands to the conversations of a list; None if it has nothing to do with any."""
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
    """How a request goes on from a head, or repeats one, of which its client has cleared tools' results."""
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
    """How a request stands to conversations that have come as far before; None if none has."""
    known = [head for head in heads if head.prefix == request.prefix]
    if known:
        latest = _find_free_head(known, free)
        if latest is not None or request.has_answer:
            return _HeadMatch(_AGAIN, latest or known[0], len(heads))
        is_beside = not request.has_tools and any(head.has_tools for head in known)
        return _HeadMatch(_BESIDE if is_beside else _ANEW, None, len(heads))
    within = next((head for head in reversed(heads) if request.is_within(head)), None)
    # It was sent before that head was left, and is looked for only now.
    return None if within is None else _HeadMatch(_AGAIN, within, len(heads))


def _find_free_head(
    those: Iterable[ConversationHead], free: Sequence[ConversationHead]
) -> ConversationHead | None:
    return next((head for head in those if head in free), None)


def _find_moved_head(request: _IndexedRequest, free: Sequence[ConversationHead]) -> ConversationHead | None:
    """The newest head that a client goes on from which has moved or rewritten messages; None without one."""
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
        # What other conversations say, too, shows nothing.
        own = {digest for _, digest in head.tail if len(owners[digest]) == 1}
        if (is_first and _has_moved(head, request, -1)) or _is_rewritten(head, request, own):
            return head
    return None


def _has_moved(head: ConversationHead, request: _IndexedRequest, last_common: int) -> bool:
    """Whether the latest user message of a head now stands where messages stood that were moved or rewritten.

    Args:
        head: The head.
        request: The request.
        last_common: Index in the tail of the last message up to which both are the same; -1 if there is none.
    """
    at = request.prefix_indices[head.tail[last_common][0]] if last_common >= 0 else -1
    moved = {digest for _, digest in head.tail[last_common + 1 :]}
    if 0 <= at < request.first_answer_index and not moved <= request.earlier_digests.keys():
        return False
    places = (place for each in head.openings for place in request.user_texts.get(each, ()) if place > at)
    place = min(places, default=None)
    if (
        place is None
        or place - at > MAX_MOVED_MESSAGES
        or not moved.issuperset(request.iterate_digests(at + 1, place))
    ):
        return False
    # What stood around that message has moved behind it, at least a part of it; or there was nothing.
    return len(moved) == 1 or any(request.earlier_digests.get(each, at) > place for each in moved)


def _is_rewritten(head: ConversationHead, request: _IndexedRequest, own: AbstractSet[str]) -> bool:
    """Whether a client has rewritten its first messages, and goes on from a head of which it has the others.

    Args:
        head: The head.
        request: The request.
        own: Digests of the messages of its tail that no other conversation has.
    """
    if len(own) < LEAST_FOUND:
        return False
    said = any(each in request.user_texts for each in head.openings)
    found = len(own & request.earlier_digests.keys()) + said
    if request.is_part and found >= max(LEAST_FOUND, len(head.tail) // 2):
        return True
    *earlier, (_, last) = head.tail
    is_found = all(digest in request.earlier_digests for _, digest in earlier)
    return request.has_answer and is_found and (said or last in request.earlier_digests)


def _shorten_digest(digest: bytes) -> str:
    return digest[:_DIGEST_BYTES].hex()


def _digest_result(message: Message) -> bytes:
    """The digest of what a tool has said: clients shorten that, too."""
    start = message.text[:RESULT_CHARACTERS].encode("utf-8", "surrogatepass")
    return hashlib.sha256(compute_outline_digest(message) + start).digest()


def _add_result_digests(messages: Sequence[Message], outlines: Sequence[bytes]) -> Sequence[bytes]:
    """The prefix digests with what tools have said."""
    said = b""
    prefixes = []
    for message, outline in zip(messages, outlines, strict=True):
        if message.answers:
            said = hashlib.sha256(said + _digest_result(message)).digest()
        prefixes.append(hashlib.sha256(outline + said).digest() if said else outline)
    return prefixes


def _digest_text(text: str) -> str:
    return _shorten_digest(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())


def _trim_text(text: str) -> str:
    """The text without white space at the ends of its lines; of a long one its ends and its length."""
    if len(text) > 2 * END_CHARACTERS:
        text = f"{text[:END_CHARACTERS]}\n{len(text)}\n{text[-END_CHARACTERS:]}"
    return "\n".join(map(str.rstrip, text.strip().split("\n")))


def _is_user_text(message: Message) -> bool:
    return message.role == "user" and not message.answers


def _digest_first_line(message: Message) -> str:
    """Digest of the first line of a user message; empty for any other message."""
    if not _is_user_text(message):
        return ""
    line = message.text.lstrip()[:LINE_CHARACTERS].partition("\n")[0].rstrip()
    return _digest_text(line) if line else ""


def _digest_openings(text: str) -> tuple[str, ...]:
    """Digests of what a text begins with, up to the ends of its paragraphs; the last is that of all of it."""
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
    """The head in a line; None if it holds none."""
    with suppress(KeyError, TypeError, AttributeError, ValueError):
        digits = 2 * _DIGEST_BYTES
        tail = tuple((each[:digits], each[digits:]) for each in fields["tail"].split())
        openings = tuple(fields["openings"])
        words = [fields[name] for name in ("id", "since", "prefix", "outline")]
        if all(isinstance(word, str) for word in (*words, *openings)):
            identity, since, prefix, outline = words
            return ConversationHead(
                identity, since, prefix, outline, tail, openings, bool(fields["has_tools"])
            )
    return None
