"""Who is asking, and which conversation it is: the ids that every store key is made of.

Identity only locates: what is stored under an id is applied only to messages whose digests match, so a wrong
or shared id costs a miss. No id shows the credential or the client's own id that it was made from. The rules
are DESIGN.md §5.2; a change here orphans everything stored.
"""

import hmac
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit

from compaction_proxy.config.config import Config
from compaction_proxy.gateway.headers import CREDENTIALS, Headers, key_shown
from compaction_proxy.gateway.side_requests import Side, SideCalls
from compaction_proxy.support.offload import beside
from compaction_proxy.wires.incremental_reader import LITTLE_BYTES
from compaction_proxy.wires.prescan import Outline, held, outline

# Agents that run under one session id each hold a conversation of their own: a lane of the session.
_LANE: Final = "x-claude-code-agent-id"
# W3C Baggage: a list of members, of which one may be the session (OpenTelemetry's `session.id`).
_BAGGAGE: Final = "baggage"
_BAGGAGE_SESSION: Final = b"session.id"
_MAX_ID_CHARACTERS: Final = 256
_DIGEST_CHARACTERS: Final = 24
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_VERSION: Final = b"\x01"
# Clients whose digests are remembered, and the most bytes of header fields that are kept for one.
_REMEMBERED: Final = 4_096
_MAX_REMEMBERED_BYTES: Final = 1_024


def _keyed(secret: bytes, *fields: bytes) -> str:
    """HMAC-SHA-256 over length-prefixed fields, as 64 hex digits."""
    prefixed = (len(field).to_bytes(8, "big") + field for field in fields)
    return hmac.digest(secret, _VERSION + b"".join(prefixed), "sha256").hex()


def origin(url: str) -> str:
    """Scheme, host and port of a URL, such as `https://api.openai.com:443`.

    Raises:
        ValueError: It is no absolute URL of http or https.
    """
    parts = urlsplit(url)
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ValueError(f"not an absolute http or https URL: {parts.scheme}://{parts.hostname or ''}")
    port = _DEFAULT_PORTS[parts.scheme] if parts.port is None else parts.port
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


def tenant(
    headers: Sequence[tuple[bytes, bytes]], secret: bytes, origin: str, mode: str, *, known: bool = False
) -> str:
    """Whose request it is, as 64 hex digits.

    Args:
        headers: The request's, as sent.
        secret: `server.secret`; replicas that share a store share it.
        origin: The upstream's, so that equal keys of two providers stay apart.
        mode: `credential`, `header:NAME` or `none` (`session.tenant`). Where nothing is sent that could tell
            tenants apart, all are one: anonymous.
        known: Whether the credential is one of `server.client_keys`: it is the same however it is shown.
    """
    kind, _, name = mode.partition(":")
    wanted = CREDENTIALS if kind == "credential" else frozenset({name.lower().encode()})
    # Sorted, because the order of different headers means nothing (RFC 9110 §5.3).
    found = sorted((key.lower(), value) for key, value in headers if key.lower() in wanted and value.strip())
    if known and kind == "credential":
        found = [(b"authorization", b"Bearer " + key_shown(value)) for _, value in found]
    source = kind.encode() if found else b"anonymous"
    fields = (field for pair in found for field in pair)
    return _keyed(secret, b"tenant", source, origin.encode(), *fields)


def valid(value: bytes) -> bytes | None:
    """An id of 1 to 256 printable characters, stripped; None if it is none."""
    try:
        text = value.decode("utf-8").strip()
    except UnicodeDecodeError:
        text = value.decode("latin-1").strip()
    valid = 1 <= len(text) <= _MAX_ID_CHARACTERS and text.isprintable()
    return text.encode("utf-8") if valid else None


def _in_baggage(value: bytes) -> bytes:
    """The session id in a `baggage` field; empty if there is none."""
    for member in value.split(b","):
        key, _, rest = member.partition(b"=")
        if key.strip() == _BAGGAGE_SESSION:
            return unquote_to_bytes(rest.partition(b";")[0].strip())
    return b""


def _ids(headers: Sequence[tuple[bytes, bytes]], names: Iterable[str]) -> dict[str, bytes]:
    """The first valid id in each of the headers named, by lower-case name."""
    wanted = {name.encode(): name for name in names}
    found: dict[str, bytes] = {}
    for key, value in headers:
        name = wanted.get(key.lower())
        if name is None or name in found:
            continue
        told = valid(_in_baggage(value) if name == _BAGGAGE else value)
        if told is not None:
            found[name] = told
    return found


def named(secret: bytes, tenant: str, kind: str, *values: bytes) -> str:
    """The conversation that a source of ids gives `values`, as `c_` and 24 hex digits.

    `kind` is the source, such as a header's name: equal values of two sources are two conversations.
    """
    digest = _keyed(secret, b"conversation", tenant.encode(), kind.encode(), *values)
    return "c_" + digest[:_DIGEST_CHARACTERS]


def conversation(
    headers: Sequence[tuple[bytes, bytes]], names: Sequence[str], secret: bytes, tenant: str
) -> str | None:
    """The conversation that the headers name: the first of `names` that holds a valid id decides.

    A valid id has 1 to 256 printable characters, white space around it aside. None if there is none.
    """
    return _conversation(headers, names, secret, tenant)[0]


def _conversation(
    headers: Sequence[tuple[bytes, bytes]], names: Sequence[str], secret: bytes, tenant: str
) -> tuple[str | None, bytes]:
    """The conversation, and the lane that it is of whatever names its session; empty: the main one."""
    ordered = [name.lower() for name in names]
    found = _ids(headers, [*ordered, _LANE])
    lane = found.get(_LANE, b"")
    name = next((name for name in ordered if name in found), None)
    if name is None:
        return None, lane
    return named(secret, tenant, name, found[name], *filter(None, [lane])), lane


class Hint(NamedTuple):
    """What in a body names a conversation.

    Attributes:
        kind: Where it stood. What a client also sends as a header has that header's name.
        value: The id, 1 to 256 printable characters in UTF-8.
    """

    kind: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Who:
    """Whose request it is.

    Attributes:
        tenant: Digest of the credential.
        conversation: Id of the conversation, if a header or the body named one.
        lane: Which agent of the session it is, as it names itself; empty: the main one.
    """

    tenant: str
    conversation: str | None
    lane: bytes = b""


class Identities:
    """Tells whose requests are, looking only at the fields that matter; clients that return are remembered.

    Args:
        origin: The upstream's.
        mode: `session.tenant`.
        names: `session.headers`.
        known: Whether `server.client_keys` are named.
    """

    def __init__(self, origin: str, mode: str, names: Sequence[str], *, known: bool = False) -> None:
        self._known = known
        self._origin = origin
        self._mode = mode
        self._names = tuple(names)
        kind, _, name = mode.partition(":")
        showing = CREDENTIALS if kind == "credential" else frozenset({name.lower().encode()})
        self._telling = showing.union(name.lower().encode() for name in (*names, _LANE))
        self._remembered = lru_cache(maxsize=_REMEMBERED)(self._who)
        self._named = lru_cache(maxsize=_REMEMBERED)(named)

    def of(self, headers: Sequence[tuple[bytes, bytes]], first: Mapping[bytes, bytes], secret: bytes) -> Who:
        """Whose request this is.

        Args:
            headers: The request's, as sent, names in lower case.
            first: The first value of each (`headers.first_values`).
            secret: `server.secret`.
        """
        telling = self._telling.intersection(first)
        if len(first) == len(headers):
            fields = tuple([(name, first[name]) for name in telling])
        else:  # some field came twice
            fields = tuple([(name, held) for name, held in headers if name in telling])
        short = sum([len(field[1]) for field in fields]) <= _MAX_REMEMBERED_BYTES
        return self._remembered(secret, fields) if short else self._who(secret, fields)

    def hinted(self, who: Who, hint: Hint, secret: bytes) -> Who:
        """The same, of a request whose body names its conversation."""
        lane = (who.lane,) if who.lane else ()
        return replace(who, conversation=self._named(secret, who.tenant, hint.kind, hint.value, *lane))

    def _who(self, secret: bytes, fields: tuple[tuple[bytes, bytes], ...]) -> Who:
        whose = tenant(fields, secret, self._origin, self._mode, known=self._known)
        return Who(whose, *_conversation(fields, self._names, secret, whose))


def minted(secret: bytes, tenant: str, prefix_digest: bytes) -> str:
    """The id of a conversation that has none of its own, from the prefix with which it was first stored."""
    digest = _keyed(secret, b"minted", tenant.encode(), prefix_digest)
    return "c_" + digest[:_DIGEST_CHARACTERS]


# Members of `metadata` that name a conversation, the first that is valid decides.
_NAMES: Final = ("session_id", "conversation_id", "thread_id", "chat_id")
# A thread of Codex is one agent; its session is that of all of them.
_CODEX: Final = ("thread_id", "session_id")
_CLAUDE_CODE: Final = "x-claude-code-session-id"
_LEGACY: Final = re.compile(r"user_.+_session_([0-9a-fA-F-]{36})")
# A UUID, or twenty letters and digits or more with a digit among them; before it perhaps the kind of id.
_DRAWN: Final = re.compile(
    r"(?:[A-Za-z]{1,16}[_:-])?(?:[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|(?=\D*\d)[0-9A-Za-z]{20,64})"
)


def hint(raw: bytes) -> Hint | None:
    """The conversation that a body names; None if it names none. Half a millisecond a megabyte."""
    told = outline(raw)
    if told is None:
        return None
    for kind, value in _told(told):
        named = valid(value.encode("utf-8", "replace")) if isinstance(value, str) else None
        if named is not None:
            return Hint(kind, named)
    return None


def _told(told: Outline) -> Iterator[tuple[str, object]]:
    """What could name it, in the order that decides."""
    if told.litellm_session_id:
        yield "x-litellm-session-id", held(told.litellm_session_id)
    if told.metadata:
        metadata = _object(told.metadata)
        yield from (("metadata." + name, metadata.get(name)) for name in _NAMES)
        yield _CLAUDE_CODE, _session_of_user(metadata.get("user_id"))
    if told.client_metadata:
        client = _object(told.client_metadata)
        yield from (("client_metadata." + name, client.get(name)) for name in _CODEX)
    if told.prompt_cache_key:
        key = held(told.prompt_cache_key)
        yield "prompt_cache_key", key if isinstance(key, str) and _DRAWN.fullmatch(key) else None


def _object(member: bytes) -> Mapping[str, object]:
    value = held(member)
    return value if isinstance(value, dict) else {}


def _session_of_user(user: object) -> object:
    """The session in Claude Code's `metadata.user_id`: JSON, or in older versions one word of three ids."""
    if not isinstance(user, str):
        return None
    if user.startswith("{"):
        return _object(user.encode("utf-8", "replace")).get("session_id")
    found = _LEGACY.fullmatch(user)
    return found[1] if found else None


class Whose:
    """Tells whose requests are.

    Args:
        config: The configuration.
        origin: The upstream's.
        secret: Gives the key of the digests that tell tenants apart.
    """

    def __init__(self, config: Config, origin: str, secret: Callable[[], bytes]) -> None:
        session = config.session
        known = bool(config.server.client_keys)
        self._identities = Identities(origin, session.tenant, session.headers, known=known)
        self._body_hints = session.body_hints
        self._secret = secret
        self._side_calls = SideCalls()

    def of(self, headers: Headers, first: Mapping[bytes, bytes]) -> Who:
        """Whose a request is, as its header fields say; `first` is the first value of each."""
        return self._identities.of(headers, first, self._secret())

    async def placed(self, who: Who, raw: bytes, first: Mapping[bytes, bytes]) -> tuple[Who, Side | None]:
        """Whose it is now that its body has come, and whether it is a side call.

        One that has nothing of its conversation in it has none.
        """
        if who.conversation is None and self._body_hints:
            found = hint(raw) if len(raw) <= LITTLE_BYTES else await beside(partial(hint, raw))
            if found is not None:
                who = self._identities.hinted(who, found, self._secret())
        side = self._side_calls.told(raw, first, who.conversation)
        return (replace(who, conversation=None) if side is Side.ALONE else who), side
