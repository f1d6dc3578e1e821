"""Finds which conversation a request continues whose client sends no id.

Each request leaves a head: how far its conversation has come. A request that goes on from a head is of that
conversation. Where another one has gone on from it already, the two differ from here on, and the later one is
a conversation of its own. All replicas add to the same lists of heads, and read them in their order. So they
come to one result, even if two of them went on from one head at the same time.
"""

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

from proxy.core.client_forms import drop_shown
from proxy.core.digest import outline_digest, prefix_digests
from proxy.core.keys import heads_key
from proxy.core.message import Message, latest_user
from proxy.core.title_request import is_title_request
from proxy.storage.records import Fields, Records

# A head stands in the list of the longest of these beginnings that its conversation has, in messages. It
# stands in the list of its first user message's first line, too: clients rewrite even their first messages.
BEGINNINGS = (1, 4, 16, 64)
KEPT_HEADS = 128
# Lists of which a process holds what it has added itself, and heads of each.
MAX_HELD_LISTS = 1_000
MAX_HELD_HEADS = 16
# A client that moves or rewrites its last messages with each turn does so with so many at most.
MAX_MOVED_MESSAGES = 8
# So many messages of which each is found again show that a request goes on, whatever it begins with.
LEAST_FOUND = 4
# What digests of lists begin with of which something was left out.
_PART = b"part"
# A user message that its client has added to is known by so many characters of its first line.
LINE_CHARACTERS = 64
_DIGEST_BYTES = 8
# How a request stands to conversations: it repeats the last request of one, goes on from it, differs from all
# from here on, begins as another did that has gone on since, or only stands beside one.
_AGAIN, _ON, _APART, _ANEW, _BESIDE = "again", "on", "apart", "anew", "beside"


class Head(NamedTuple):
    """How far a conversation has come. Digests are hex digits.

    Attributes:
        id: The conversation.
        since: The prefix digest that it went on from; empty where it begins.
        prefix: The prefix digest of all its messages.
        tail: Its last messages, oldest first: the prefix digest up to each, and its own digest.
        line: Digest of the first line of its latest user message; empty if it has none.
        has_tools: Whether its request brought tools.
    """

    id: str
    since: str
    prefix: str
    tail: tuple[tuple[str, str], ...]
    line: str
    has_tools: bool


class _Request:
    """What is asked of a request; worked out when it is asked for, as long lists are seldom compared whole.

    Args:
        messages: Its non-privileged messages, at least one.
        prefixes: Their prefix digests.
        has_tools: Whether it brings tools.
        is_part: Whether its client has put more around these messages.
    """

    def __init__(
        self, messages: Sequence[Message], prefixes: Sequence[bytes], *, has_tools: bool, is_part: bool
    ) -> None:
        self._messages = messages
        self._prefixes = prefixes
        self.has_tools = has_tools
        self.is_part = is_part
        self.prefix = _short(prefixes[-1])

    @cached_property
    def answered_at(self) -> int:
        """Index of the first message that is not the user's; their number where all are."""
        spoken = (k for k, each in enumerate(self._messages) if each.role != "user" or each.answers)
        return next(spoken, len(self._messages))

    @property
    def has_answer(self) -> bool:
        """Whether the model has said anything in it."""
        return self.answered_at < len(self._messages)

    @cached_property
    def places(self) -> dict[str, int]:
        """Indices of its messages, by the prefix digests up to them."""
        return {_short(prefix): index for index, prefix in enumerate(self._prefixes)}

    def earlier(self) -> Iterator[str]:
        """Prefix digests of all that its last message comes after, the longest first."""
        return map(_short, reversed(self._prefixes[:-1]))

    @property
    def line(self) -> str:
        """Digest of the first line of its first user message; empty if it has none."""
        return next(filter(None, map(_line, self._messages)), "")

    def digests(self, start: int) -> Iterator[str]:
        """Digests of its messages from an index on."""
        return map(self._digest, self._messages[start:])

    def _digest(self, message: Message) -> str:
        """The digest of a message. aider adds white space to what it reads from its history."""
        if self.is_part and not (message.calls or message.answers):
            text = f"{message.role} {message.text.strip()}"
            return _short(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
        return _short(outline_digest(message))

    def lines(self, start: int) -> Iterator[str]:
        """Digests of the first lines of its user messages, from an index on and before the latest one."""
        return map(_line, self._messages[start : latest_user(self._messages)])

    @property
    def late_lines(self) -> list[str]:
        """Digests of the first lines of its user messages, the latest first."""
        return [line for line in map(_line, reversed(self._messages)) if line]

    def is_within(self, head: Head) -> bool:
        """Whether the conversation of a head has come past it."""
        return self.has_answer and any(prefix == self.prefix for prefix, _ in head.tail)

    def head(self, conversation: str, since: str) -> Head:
        """Returns what it leaves."""
        start = max(0, len(self._messages) - MAX_MOVED_MESSAGES - 1)
        tail = tuple(zip(map(_short, self._prefixes[start:]), self.digests(start), strict=True))
        latest = latest_user(self._messages)
        line = "" if latest is None else _line(self._messages[latest])
        return Head(conversation, since, self.prefix, tail, line, self.has_tools)


class ConversationIndex:
    """Finds the conversations of requests without an id, on one event loop.

    No method raises because of the store.

    Args:
        records: Where heads are kept.
        mint: Makes a conversation's id for a tenant, of some bytes.
        ttl_s: Seconds that heads are kept.
    """

    def __init__(self, records: Records, mint: Callable[[str, bytes], str], ttl_s: float) -> None:
        self._records = records
        self._mint = mint
        self._ttl_s = ttl_s
        # What this process has added: the store gives it back later, or not at all while it is away.
        self._held: OrderedDict[str, tuple[Head, ...]] = OrderedDict()
        self._saving: set[asyncio.Task[bool]] = set()
        records.forgetters.append(self._forget)

    async def find(
        self,
        tenant: str,
        messages: Sequence[Message],
        prefixes: Sequence[bytes],
        *,
        has_tools: bool,
        recall: Callable[[], Awaitable[str | None]] | None = None,
    ) -> str | None:
        """Returns the id of the conversation; None if the request stands beside one, as a title call does.

        Args:
            tenant: Whose request it is.
            messages: Its non-privileged messages, at least one.
            prefixes: Their prefix digests.
            has_tools: Whether it brings tools.
            recall: Gives the conversation in which a stored round was made that stands for the request. It
                decides where no head is left of the conversation.
        """
        latest = latest_user(messages)
        if not has_tools and latest is not None and is_title_request(messages[latest].text):
            return None
        spoken = drop_shown(messages)
        is_part = 0 < len(spoken) < len(messages)
        if is_part:
            messages, prefixes = spoken, prefix_digests(spoken, _PART)
        request = _Request(messages, prefixes, has_tools=has_tools, is_part=is_part)
        lengths = [length for length in BEGINNINGS if length <= len(prefixes)]
        beginnings = [heads_key(tenant, prefixes[length - 1]) for length in reversed(lengths)]
        keys = [*beginnings, *([heads_key(tenant, bytes.fromhex(request.line))] if request.line else [])]
        own = {keys[0], keys[-1]}
        if is_part:  # aider begins a restored session with a part of what was said before, behind a summary
            late = [heads_key(tenant, bytes.fromhex(line)) for line in request.late_lines[:2]]
            own.update(late[:1])
            keys += late[1:]
        heads: list[Head] = []
        is_known = len(lengths) == 1
        for key in keys:
            heads = self._resolve(tenant, await self._read(key))
            match = _match(request, heads)
            if match is not None:
                return self._follow(match, tenant, request, own | {key})
            is_known = is_known or (bool(heads) and key in beginnings[:-1])  # of those it is none
        recalled = None if is_known or recall is None else await recall()
        if recalled is not None:
            self._add(own, request.head(recalled, ""))
            return recalled
        return self._follow(_Match(_APART, None, len(heads)), tenant, request, own)

    async def close(self) -> None:
        """Wait until what was added is written."""
        await asyncio.gather(*self._saving, return_exceptions=True)

    def _follow(self, match: "_Match", tenant: str, request: "_Request", keys: Iterable[str]) -> str | None:
        """Returns the conversation that a match gives, and adds the request's head to these lists."""
        head = match.head
        if head is not None and match.kind == _AGAIN:
            return head.id
        if match.kind == _BESIDE:
            return None
        if head is not None:
            self._add(keys, request.head(head.id, head.prefix))
            return head.id
        # Where heads may have left their list, the same messages may have begun a conversation before.
        made_of = bytes.fromhex(request.prefix)
        is_known = match.kind == _ANEW or match.heads >= KEPT_HEADS
        conversation = self._mint(tenant, made_of + (secrets.token_bytes(_DIGEST_BYTES) if is_known else b""))
        self._add(keys, request.head(conversation, ""))
        return conversation

    async def _read(self, key: str) -> list[Head]:
        """The heads of a list, oldest first."""
        stored = [_read_head(line) for line in await self._records.tail(key, KEPT_HEADS)]
        return list(dict.fromkeys([*filter(None, stored), *self._held.get(key, ())]))

    def _resolve(self, tenant: str, heads: Iterable[Head]) -> list[Head]:
        """The heads. Of several that went on from one at the same time, all but the first get another id."""
        gone_on: dict[tuple[str, str], str] = {}
        resolved: list[Head] = []
        for head in heads:
            first = gone_on.setdefault((head.id, head.since), head.prefix) if head.since else head.prefix
            own = first == head.prefix
            resolved.append(head if own else head._replace(id=self._mint(tenant, head.prefix.encode())))
        return resolved

    def _add(self, keys: Iterable[str], head: Head) -> None:
        for key in keys:
            held = self._held.get(key, ())
            self._held[key] = (*held, head)[-MAX_HELD_HEADS:]
            self._held.move_to_end(key)
            if len(self._held) > MAX_HELD_LISTS:
                self._held.popitem(last=False)
            saving = self._records.append(key, _to_fields(head), ttl_s=self._ttl_s, keep=KEPT_HEADS)
            task = asyncio.create_task(saving)
            self._saving.add(task)
            task.add_done_callback(self._saving.discard)

    def _forget(self, prefix: str) -> None:
        for key in [key for key in self._held if key.startswith(prefix)]:
            del self._held[key]


class _Match(NamedTuple):
    """How a request stands to the conversations of a list.

    Attributes:
        kind: One of the words above.
        head: The head that it repeats or goes on from; None: it begins a conversation, or is part of none.
        heads: How many heads the list has.
    """

    kind: str
    head: Head | None
    heads: int


def _match(request: _Request, heads: Sequence[Head]) -> _Match | None:
    """How a request stands to the conversations of a list; None if it has nothing to do with any."""
    extended = {(head.id, head.since) for head in heads}
    by_prefix: dict[str, list[Head]] = {}
    for head in heads:
        by_prefix.setdefault(head.prefix, []).append(head)

    def find_free(those: Iterable[Head]) -> Head | None:
        return next((head for head in those if (head.id, head.prefix) not in extended), None)

    known = by_prefix.get(request.prefix, [])
    if known:
        free = find_free(known)
        if free is not None or request.has_answer:
            return _Match(_AGAIN, free or known[0], len(heads))
        is_beside = not request.has_tools and any(head.has_tools for head in known)
        return _Match(_BESIDE if is_beside else _ANEW, None, len(heads))
    within = next((head for head in reversed(heads) if request.is_within(head)), None)
    if within is not None:  # it was sent before that head was left, and is looked for only now
        return _Match(_AGAIN, within, len(heads))
    earlier = next((by_prefix[each] for each in request.earlier() if each in by_prefix), [])
    latest = find_free(earlier) or next(
        (head for head in reversed(heads) if _has_moved(head, request, extended)), None
    )
    if latest is not None:
        return _Match(_ON, latest, len(heads))
    return _Match(_APART, None, len(heads)) if earlier else None


def _has_moved(head: Head, request: _Request, extended: set[tuple[str, str]]) -> bool:
    """Whether a request is the next of a client that has moved or rewritten its last messages."""
    if (head.id, head.prefix) in extended:
        return False
    common = [index for index, (prefix, _) in enumerate(head.tail) if prefix in request.places]
    if not common:  # the client has rewritten the first messages
        every = set(request.digests(0))
        is_rewritten = bool(head.line) and head.line in request.lines(0)
        found = sum(digest in every for _, digest in head.tail) + is_rewritten
        if request.is_part and found >= max(LEAST_FOUND, len(head.tail) // 2):
            return True
        is_enough = request.has_answer and (request.is_part or len(head.tail) >= LEAST_FOUND)
        *earlier, (_, last) = head.tail
        return is_enough and all(digest in every for _, digest in earlier) and (last in every or is_rewritten)
    if common[-1] == len(head.tail) - 1:
        return False
    at = request.places[head.tail[common[-1]][0]]
    later = set(request.digests(at + 1))
    if all(digest in later for _, digest in head.tail[common[-1] + 1 :]):
        return True
    return at >= request.answered_at and bool(head.line) and head.line in request.lines(at + 1)


def _short(digest: bytes) -> str:
    return digest[:_DIGEST_BYTES].hex()


def _line(message: Message) -> str:
    """Digest of the first line of a user message; empty for any other message."""
    if message.role != "user" or message.answers:
        return ""
    line = message.text.lstrip()[:LINE_CHARACTERS].partition("\n")[0].rstrip()
    return _short(hashlib.sha256(line.encode("utf-8", "surrogatepass")).digest()) if line else ""


def _to_fields(head: Head) -> Fields:
    tail = " ".join("".join(pair) for pair in head.tail)
    return {**head._asdict(), "tail": tail}


def _read_head(fields: Fields) -> Head | None:
    """The head in a line; None if it holds none."""
    with suppress(KeyError, TypeError, AttributeError, ValueError):
        digits = 2 * _DIGEST_BYTES
        tail = tuple((each[:digits], each[digits:]) for each in fields["tail"].split())
        words = [fields[name] for name in ("id", "since", "prefix", "line")]
        if all(isinstance(word, str) for word in words):
            identity, since, prefix, line = words
            return Head(identity, since, prefix, tail, line, bool(fields["has_tools"]))
    return None
