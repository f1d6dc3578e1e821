"""Identifies the tenant and the conversation of a request. Every store key contains these two ids.

An id only serves to find stored data. The data is applied only to messages whose digests match. So with a
wrong id, or with an id that two conversations share, at worst no compaction is found. No id reveals the
credential or the client's own id from which it was derived. Do not change how the ids are derived: data that
is already stored could no longer be found.
"""

import hmac
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit

from compaction_proxy.config.config import Config
from compaction_proxy.gateway.headers import CREDENTIALS, Headers, extract_key
from compaction_proxy.gateway.side_requests import SideRequestDetector, SideRequestKind
from compaction_proxy.support.offload import run_in_worker
from compaction_proxy.wires.incremental_reader import MAX_INLINE_BYTES
from compaction_proxy.wires.prescan import BodyOutline, decode_member, scan_outline

# Several agents may use the same session id, and each of them has a conversation of its own. This header
# field names the agent. Its value is called the lane of the session.
_LANE: Final = "x-claude-code-agent-id"
# The header field of W3C Baggage: a list of members, one of which may be the id of the session (`session.id`
# of OpenTelemetry).
_BAGGAGE: Final = "baggage"
_BAGGAGE_SESSION: Final = b"session.id"
_MAX_ID_CHARACTERS: Final = 256
_DIGEST_CHARACTERS: Final = 24
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_VERSION: Final = b"\x01"
# The largest number of cached identities. An identity is cached only if the header fields that it is derived
# from have at most `_MAX_CACHED_BYTES` bytes.
_MAX_CACHED_CLIENTS: Final = 4_096
_MAX_CACHED_BYTES: Final = 1_024


def _compute_hmac(secret: bytes, *fields: bytes) -> str:
    """Returns the HMAC-SHA-256 of length-prefixed fields as 64 hex digits."""
    prefixed = (len(field).to_bytes(8, "big") + field for field in fields)
    return hmac.digest(secret, _VERSION + b"".join(prefixed), "sha256").hex()


def format_origin(url: str) -> str:
    """Returns scheme, host and port of a URL, such as `https://api.openai.com:443`.

    Raises:
        ValueError: The URL is not an absolute URL of http or https.
    """
    parts = urlsplit(url)
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ValueError(f"not an absolute http or https URL: {parts.scheme}://{parts.hostname or ''}")
    port = _DEFAULT_PORTS[parts.scheme] if parts.port is None else parts.port
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


def derive_tenant(
    headers: Sequence[tuple[bytes, bytes]],
    secret: bytes,
    origin: str,
    tenant_mode: str,
    *,
    is_client_key: bool = False,
) -> str:
    """Returns the tenant that a request belongs to, as 64 hex digits.

    Args:
        headers: The header fields of the request, as sent.
        secret: The secret key of the digests (`server.secret`). Replicas that share a store also share the
            secret.
        origin: The origin of the upstream. Because of it, the same key at two providers gives two tenants.
        tenant_mode: `credential`, `header:NAME` or `none` (`session.tenant`): the header fields that identify
            the tenant. All requests without such a field belong to one anonymous tenant.
        is_client_key: Whether the credential is one of `server.client_keys`. Such a key gives the same
            tenant, no matter in which header field the client sends it.
    """
    kind, _, name = tenant_mode.partition(":")
    identifying_names = CREDENTIALS if kind == "credential" else frozenset({name.lower().encode()})
    # Sorted, because the order of header fields with different names has no meaning (RFC 9110 §5.3).
    identifying = sorted(
        (key.lower(), value) for key, value in headers if key.lower() in identifying_names and value.strip()
    )
    if is_client_key and kind == "credential":
        identifying = [(b"authorization", b"Bearer " + extract_key(value)) for _, value in identifying]
    source = kind.encode() if identifying else b"anonymous"
    fields = (field for pair in identifying for field in pair)
    return _compute_hmac(secret, b"tenant", source, origin.encode(), *fields)


def parse_id(value: bytes) -> bytes | None:
    """Returns an id in UTF-8 without white space around it, or None if the value is not a valid id.

    A valid id has 1 to 256 printable characters.
    """
    try:
        text = value.decode("utf-8").strip()
    except UnicodeDecodeError:
        text = value.decode("latin-1").strip()
    valid = 1 <= len(text) <= _MAX_ID_CHARACTERS and text.isprintable()
    return text.encode("utf-8") if valid else None


def _find_baggage_session(value: bytes) -> bytes:
    """Returns the session id in a `baggage` field; empty if there is none."""
    for member in value.split(b","):
        key, _, rest = member.partition(b"=")
        if key.strip() == _BAGGAGE_SESSION:
            return unquote_to_bytes(rest.partition(b";")[0].strip())
    return b""


def _find_ids(headers: Sequence[tuple[bytes, bytes]], names: Iterable[str]) -> dict[str, bytes]:
    """Returns the first valid id in each of the named headers, by lower-case name."""
    names_by_key = {name.encode(): name for name in names}
    ids: dict[str, bytes] = {}
    for key, value in headers:
        name = names_by_key.get(key.lower())
        if name is None or name in ids:
            continue
        parsed_id = parse_id(_find_baggage_session(value) if name == _BAGGAGE else value)
        if parsed_id is not None:
            ids[name] = parsed_id
    return ids


def derive_conversation_id(secret: bytes, tenant: str, source: str, *values: bytes) -> str:
    """Derives the id of a conversation, `c_` and 24 hex digits, from the client's own id.

    `source` says where the client's id was found, such as the name of a header. `values` are the client's id
    and the lane, if there is one. Equal values from two sources give two conversations.
    """
    digest = _compute_hmac(secret, b"conversation", tenant.encode(), source.encode(), *values)
    return "c_" + digest[:_DIGEST_CHARACTERS]


def find_conversation_id(
    headers: Sequence[tuple[bytes, bytes]], names: Sequence[str], secret: bytes, tenant: str
) -> str | None:
    """Returns the id of the conversation that the headers name, or None if they name none.

    The first header of `names` that holds a valid id decides. A valid id has 1 to 256 printable
    characters, not counting white space around it.
    """
    return _find_conversation_and_lane(headers, names, secret, tenant)[0]


def _find_conversation_and_lane(
    headers: Sequence[tuple[bytes, bytes]], names: Sequence[str], secret: bytes, tenant: str
) -> tuple[str | None, bytes]:
    """Returns the id of the conversation that the headers name, and the lane (see `_LANE`).

    The id is None if the headers name no conversation. The lane is empty for the main agent of a session.
    """
    ordered = [name.lower() for name in names]
    ids = _find_ids(headers, [*ordered, _LANE])
    lane = ids.get(_LANE, b"")
    name = next((name for name in ordered if name in ids), None)
    if name is None:
        return None, lane
    return derive_conversation_id(secret, tenant, name, ids[name], *filter(None, [lane])), lane


class ConversationHint(NamedTuple):
    """The client's own conversation id, found in a request body.

    Attributes:
        source: The source of the id. If clients also send the id as a header, `source` is the name of that
            header, so that header and body give the same conversation.
        value: The id, 1 to 256 printable characters in UTF-8.
    """

    source: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Identity:
    """The tenant and the conversation of a request.

    Attributes:
        tenant: The digest of the credential.
        conversation: The id of the conversation; None if neither a header nor the body names one.
        lane: The name of the agent within the session, as its client sends it; empty for the main agent.
    """

    tenant: str
    conversation: str | None
    lane: bytes = b""


class IdentityCache:
    """Derives the identity of a client from its header fields, and caches the identities.

    Args:
        origin: The origin of the upstream.
        tenant_mode: The value of `session.tenant`.
        header_names: The headers that may name the conversation (`session.headers`).
        has_client_keys: Whether `server.client_keys` is set. If so, every credential is one of these keys
            (see `is_client_key` of `derive_tenant`).
    """

    def __init__(
        self, origin: str, tenant_mode: str, header_names: Sequence[str], *, has_client_keys: bool = False
    ) -> None:
        self._has_client_keys = has_client_keys
        self._origin = origin
        self._mode = tenant_mode
        self._names = tuple(header_names)
        kind, _, name = tenant_mode.partition(":")
        credential_fields = CREDENTIALS if kind == "credential" else frozenset({name.lower().encode()})
        self._identifying_fields = credential_fields.union(
            name.lower().encode() for name in (*header_names, _LANE)
        )
        self._cached_identity = lru_cache(maxsize=_MAX_CACHED_CLIENTS)(self._compute_identity)
        self._cached_conversation_id = lru_cache(maxsize=_MAX_CACHED_CLIENTS)(derive_conversation_id)

    def identify_client(
        self, headers: Sequence[tuple[bytes, bytes]], header_map: Mapping[bytes, bytes], secret: bytes
    ) -> Identity:
        """Returns the tenant and the conversation that the header fields of a request name.

        Args:
            headers: The header fields of the request, as sent, with names in lower case.
            header_map: The first value of each field (`headers.build_header_map`).
            secret: The secret key of the digests (`server.secret`).
        """
        present_names = self._identifying_fields.intersection(header_map)
        if len(header_map) == len(headers):
            fields = tuple([(name, header_map[name]) for name in present_names])
        else:  # a field occurs more than once
            fields = tuple([(name, held) for name, held in headers if name in present_names])
        short = sum([len(field[1]) for field in fields]) <= _MAX_CACHED_BYTES
        return self._cached_identity(secret, fields) if short else self._compute_identity(secret, fields)

    def apply_conversation_hint(self, identity: Identity, hint: ConversationHint, secret: bytes) -> Identity:
        """Returns the identity with the conversation that the request body names."""
        lane = (identity.lane,) if identity.lane else ()
        return replace(
            identity,
            conversation=self._cached_conversation_id(
                secret, identity.tenant, hint.source, hint.value, *lane
            ),
        )

    def _compute_identity(self, secret: bytes, fields: tuple[tuple[bytes, bytes], ...]) -> Identity:
        tenant = derive_tenant(fields, secret, self._origin, self._mode, is_client_key=self._has_client_keys)
        return Identity(tenant, *_find_conversation_and_lane(fields, self._names, secret, tenant))


def mint_conversation_id(secret: bytes, tenant: str, prefix_digest: bytes) -> str:
    """Returns a new id for a conversation to which its client gives none.

    The id is derived from the prefix digest under which the conversation was first stored.
    """
    digest = _compute_hmac(secret, b"minted", tenant.encode(), prefix_digest)
    return "c_" + digest[:_DIGEST_CHARACTERS]


# Members of `metadata` that may name a conversation. The first one with a valid id decides.
_METADATA_MEMBERS: Final = ("session_id", "conversation_id", "thread_id", "chat_id")
# Members of `client_metadata` that Codex sends, in the order in which they are tried. All agents share a
# session, but each has its own thread. So the thread comes first.
_CODEX_MEMBERS: Final = ("thread_id", "session_id")
_CLAUDE_CODE: Final = "x-claude-code-session-id"
_LEGACY_USER_ID: Final = re.compile(r"user_.+_session_([0-9a-fA-F-]{36})")
# The form of a randomly generated id: a UUID, or 20 to 64 letters and digits with at least one digit. A short
# word may come before it, as in `conv_…`. Only such a `prompt_cache_key` names a conversation.
_RANDOM_ID: Final = re.compile(
    r"(?:[A-Za-z]{1,16}[_:-])?(?:[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|(?=\D*\d)[0-9A-Za-z]{20,64})"
)


def find_conversation_hint(raw: bytes) -> ConversationHint | None:
    """Returns the client's own conversation id in a request body, or None if the body holds none.

    Takes half a millisecond for each megabyte of the body.
    """
    members = scan_outline(raw)
    if members is None:
        return None
    for kind, value in _iterate_hint_candidates(members):
        parsed_id = parse_id(value.encode("utf-8", "replace")) if isinstance(value, str) else None
        if parsed_id is not None:
            return ConversationHint(kind, parsed_id)
    return None


def _iterate_hint_candidates(members: BodyOutline) -> Iterator[tuple[str, object]]:
    """Yields values that may be the conversation id, each with its source. The first valid one decides."""
    if members.litellm_session_id:
        yield "x-litellm-session-id", decode_member(members.litellm_session_id)
    if members.metadata:
        metadata = _decode_object(members.metadata)
        yield from (("metadata." + name, metadata.get(name)) for name in _METADATA_MEMBERS)
        yield _CLAUDE_CODE, _parse_user_session(metadata.get("user_id"))
    if members.client_metadata:
        client = _decode_object(members.client_metadata)
        yield from (("client_metadata." + name, client.get(name)) for name in _CODEX_MEMBERS)
    if members.prompt_cache_key:
        key = decode_member(members.prompt_cache_key)
        yield "prompt_cache_key", key if isinstance(key, str) and _RANDOM_ID.fullmatch(key) else None


def _decode_object(member: bytes) -> Mapping[str, object]:
    value = decode_member(member)
    return value if isinstance(value, dict) else {}


def _parse_user_session(user: object) -> object:
    """Returns the session id in Claude Code's `metadata.user_id`.

    The value is a JSON object. Older versions send one word instead, which joins three ids.
    """
    if not isinstance(user, str):
        return None
    if user.startswith("{"):
        return _decode_object(user.encode("utf-8", "replace")).get("session_id")
    match = _LEGACY_USER_ID.fullmatch(user)
    return match[1] if match else None


class IdentityResolver:
    """Identifies the tenant and the conversation of requests.

    Args:
        config: The configuration.
        origin: The origin of the upstream.
        get_secret: Returns the secret key of the digests that identify tenants.
    """

    def __init__(self, config: Config, origin: str, get_secret: Callable[[], bytes]) -> None:
        session = config.session
        has_client_keys = bool(config.server.client_keys)
        self._identities = IdentityCache(
            origin, session.tenant, session.headers, has_client_keys=has_client_keys
        )
        self._body_hints = session.body_hints
        self._secret = get_secret
        self._side_requests = SideRequestDetector()

    def identify_client(self, headers: Headers, header_map: Mapping[bytes, bytes]) -> Identity:
        """Returns the identity that the header fields show, without the request body.

        `header_map` holds the first value of each field (`headers.build_header_map`).
        """
        return self._identities.identify_client(headers, header_map, self._secret())

    async def complete_identity_and_classify(
        self, identity: Identity, raw: bytes, header_map: Mapping[bytes, bytes]
    ) -> tuple[Identity, SideRequestKind | None]:
        """Completes an identity with the conversation that the request body names.

        An id in the header fields takes precedence over one in the body. Returns the identity, and the kind
        of side call that the request is, or None if it is no side call. If a side call does not carry the
        messages of its conversation (`SideRequestKind.ALONE`), its identity has no conversation.
        """
        if identity.conversation is None and self._body_hints:
            hint = (
                find_conversation_hint(raw)
                if len(raw) <= MAX_INLINE_BYTES
                else await run_in_worker(partial(find_conversation_hint, raw))
            )
            if hint is not None:
                identity = self._identities.apply_conversation_hint(identity, hint, self._secret())
        side = self._side_requests.classify_request(raw, header_map, identity.conversation)
        return (replace(identity, conversation=None) if side is SideRequestKind.ALONE else identity), side
