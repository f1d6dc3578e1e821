"""Identifies the tenant and the conversation of a request. Most store keys are derived from these two ids.

The proxy uses an id only to find stored data. It applies this data only to messages whose digests match. So
if an id is wrong, or two conversations share it, the worst effect is that the proxy finds no compaction. No
id reveals the credential or the client's own id from which it was derived. Do not change how the ids are
derived: the proxy could no longer find the data that is already stored.
"""

import hmac
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Final
from urllib.parse import unquote_to_bytes

from compaction_proxy.config.config import Config
from compaction_proxy.config.sections import WIRES, SessionSection, UpstreamSection
from compaction_proxy.config.types import DEFAULT_PORTS, parse_origin
from compaction_proxy.gateway.headers import CREDENTIALS, Headers, extract_key
from compaction_proxy.gateway.side_requests import (
    SideRequestDetector,
    SideRequestKind,
    may_ask_for_summary,
)
from compaction_proxy.support.offload import MAX_INLINE_BYTES, run_in_worker_if_large, run_short_work
from compaction_proxy.wires.prescan import BodyOutline, decode_member, scan_outline

# Several agents of one client may use the same session id, and each of them has its own conversation. This
# header field names the agent. This code calls the value a lane.
_LANE: Final = "x-claude-code-agent-id"
# The header field of W3C Baggage: a list of members, one of which may be the id of the session (`session.id`
# of OpenTelemetry).
_BAGGAGE: Final = "baggage"
_BAGGAGE_SESSION: Final = b"session.id"
_MAX_ID_CHARACTERS: Final = 256
_DIGEST_CHARACTERS: Final = 24
_VERSION: Final = b"\x01"
# The most identities that the proxy caches. If there are more, it drops the one that was used longest ago. It
# caches an identity only if the header fields from which it is derived have at most `_MAX_CACHED_BYTES`
# bytes.
_MAX_CACHED_CLIENTS: Final = 4_096
_MAX_CACHED_BYTES: Final = 1_024


def _compute_hmac(secret: bytes, *fields: bytes) -> str:
    """Returns the HMAC-SHA-256 of a version byte and length-prefixed fields, as 64 hex digits."""
    prefixed = (len(field).to_bytes(8, "big") + field for field in fields)
    return hmac.digest(secret, _VERSION + b"".join(prefixed), "sha256").hex()


def format_origin(url: str) -> str:
    """Returns scheme, host and port of a URL, such as `https://api.openai.com:443`.

    Raises:
        ValueError: If the URL is not an absolute URL of http or https.
    """
    origin = parse_origin(url)
    if origin.scheme not in DEFAULT_PORTS or not origin.host:
        raise ValueError(f"not an absolute http or https URL: {origin.scheme}://{origin.host}")
    return str(origin)


def map_wires_to_origins(upstream: UpstreamSection) -> dict[str, str]:
    """Returns the origin of the upstream of each wire. The keys are the names of the wires."""
    return {wire: format_origin(upstream.get_provider(wire)[0]) for wire in WIRES}


def list_tenant_fields(tenant_mode: str) -> frozenset[bytes]:
    """Returns the lower-case names of the header fields that identify the tenant (`session.tenant`).

    For the mode `none`, the only name is empty, so no header field has it.
    """
    kind, _, name = tenant_mode.partition(":")
    return CREDENTIALS if kind == "credential" else frozenset({name.lower().encode()})


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
        tenant_mode: Says which header fields identify the tenant (`session.tenant`): `credential`,
            `header:NAME` or `none`. All requests without such a field belong to one anonymous tenant.
        is_client_key: Whether the credential is one of `server.client_keys`. Such a key gives the same
            tenant, no matter in which header field the client sends it.
    """
    kind = tenant_mode.partition(":")[0]
    tenant_fields = list_tenant_fields(tenant_mode)
    # The fields are sorted, because the order of fields with different names has no meaning (RFC 9110 §5.3).
    identifying = sorted(
        (key.lower(), value) for key, value in headers if key.lower() in tenant_fields and value.strip()
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
    """Returns the first valid id in each of the named headers. Takes and returns names in lower case."""
    names_by_key = {name.encode(): name for name in names}
    ids: dict[str, bytes] = {}
    for key, value in headers:
        name = names_by_key.get(key.lower())
        if name is not None and name not in ids:
            parsed_id = parse_id(_find_baggage_session(value) if name == _BAGGAGE else value)
            if parsed_id is not None:
                ids[name] = parsed_id
    return ids


def derive_conversation_id(secret: bytes, tenant: str, source: str, *values: bytes) -> str:
    """Derives the id of a conversation (`c_` and 24 hex digits) from the client's own id.

    `source` says where the client's id was found, such as the name of a header. `values` are the client's id,
    and the name of the agent (`_LANE`) if there is one. Equal values from two sources give two conversations.
    """
    digest = _compute_hmac(secret, b"conversation", tenant.encode(), source.encode(), *values)
    return "c_" + digest[:_DIGEST_CHARACTERS]


def find_conversation_id(
    headers: Sequence[tuple[bytes, bytes]], names: Sequence[str], secret: bytes, tenant: str
) -> str | None:
    """Returns the id of the conversation that the headers name, or None if they name none.

    The first header of `names` that holds a valid id decides. A valid id has 1 to 256 printable characters,
    not counting white space around it. If a header names the agent (`_LANE`), each agent has its own
    conversation.
    """
    source, values = _find_named_id(headers, names)
    return derive_conversation_id(secret, tenant, source, *values) if values else None


def _find_named_id(
    headers: Sequence[tuple[bytes, bytes]], names: Sequence[str]
) -> tuple[str, Sequence[bytes]]:
    """Returns the header that names the conversation, and the id in it, before the agent (`_LANE`) if any.

    Returns empty values if the headers name no conversation.
    """
    ordered = [name.lower() for name in names]
    ids = _find_ids(headers, [*ordered, _LANE])
    name = next((name for name in ordered if name in ids), None)
    if name is None:
        return "", ()
    return name, [ids[name], *([ids[_LANE]] if _LANE in ids else [])]


def _format_name(*values: bytes) -> str:
    """Formats the client's own id, and the name of the agent if there is one, for people."""
    return " / ".join(map(bytes.decode, values))


@dataclass(frozen=True, slots=True)
class Identity:
    """The tenant and the conversation of a request.

    Attributes:
        tenant: The tenant, as a keyed digest (`derive_tenant`).
        conversation: The id of the conversation; None if neither a header nor the body names one.
        lane: The name of the agent within the session, as its client sends it; empty for the main agent.
        name: What the client calls the conversation, for people to recognise it; empty if neither a header
            nor the body names it.
    """

    tenant: str
    conversation: str | None
    lane: bytes = b""
    name: str = ""


def mint_conversation_id(secret: bytes, tenant: str, prefix_digest: bytes) -> str:
    """Returns a new id for a conversation whose client sends no id.

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
_LITELLM: Final = "x-litellm-session-id"
_CACHE_KEY: Final = "prompt_cache_key"
# All sources that `find_conversation_hint` may return.
_HINT_SOURCES: Final = (
    _LITELLM,
    *(f"metadata.{name}" for name in _METADATA_MEMBERS),
    _CLAUDE_CODE,
    *(f"client_metadata.{name}" for name in _CODEX_MEMBERS),
    _CACHE_KEY,
)
_LEGACY_USER_ID: Final = re.compile(r"user_.+_session_([0-9a-fA-F-]{36})")
# The form of a randomly generated id: a UUID, or 20 to 64 letters and digits with at least one digit. A short
# word may come before it, as in `conv_…`. Only such a `prompt_cache_key` names a conversation.
_RANDOM_ID: Final = re.compile(
    r"(?:[A-Za-z]{1,16}[_:-])?(?:[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|(?=\D*\d)[0-9A-Za-z]{20,64})"
)


def find_conversation_hint(raw: bytes) -> tuple[str, bytes] | None:
    """Returns the source of the client's own conversation id in a request body, and the id in UTF-8.

    The source says where the id was found. If clients also send this id as a header, the source is the name
    of that header, so that header and body give the same conversation. The result is None if the body holds
    no id. The function takes half a millisecond for each megabyte of the body.
    """
    members = scan_outline(raw)
    if members is None:
        return None
    for source, value in _iterate_hint_candidates(members):
        parsed_id = parse_id(value.encode("utf-8", "replace")) if isinstance(value, str) else None
        if parsed_id is not None:
            return source, parsed_id
    return None


def _iterate_hint_candidates(members: BodyOutline) -> Iterator[tuple[str, object]]:
    """Yields values that may be the conversation id, each with its source. The first valid one decides."""
    if members.litellm_session_id:
        yield _LITELLM, decode_member(members.litellm_session_id)
    if members.metadata:
        metadata = _decode_object(members.metadata)
        yield from (("metadata." + name, metadata.get(name)) for name in _METADATA_MEMBERS)
        yield _CLAUDE_CODE, _parse_user_session(metadata.get("user_id"))
    if members.client_metadata:
        client = _decode_object(members.client_metadata)
        yield from (("client_metadata." + name, client.get(name)) for name in _CODEX_MEMBERS)
    if members.prompt_cache_key:
        key = decode_member(members.prompt_cache_key)
        yield _CACHE_KEY, key if isinstance(key, str) and _RANDOM_ID.fullmatch(key) else None


def _decode_object(member: bytes) -> Mapping[str, object]:
    value = decode_member(member)
    return value if isinstance(value, dict) else {}


def _parse_user_session(user: object) -> object:
    """Returns the session id in Claude Code's `metadata.user_id`.

    The value is a JSON object. In older versions of Claude Code, it is one word that joins three ids.
    """
    if not isinstance(user, str):
        return None
    if user.startswith("{"):
        return _decode_object(user.encode("utf-8", "replace")).get("session_id")
    match = _LEGACY_USER_ID.fullmatch(user)
    return match[1] if match else None


def list_conversation_ids(session: SessionSection, secret: bytes, tenant: str, client_id: str) -> list[str]:
    """Lists the ids that conversations of a tenant have if their client calls them `client_id`.

    There is one id for each place at which a client may send its own id: each header of `session`, and each
    member of a body. So most of these ids belong to no conversation. Conversations of sub-agents are not
    included, because their ids depend on the names of the agents, too.
    """
    parsed_id = parse_id(client_id.encode("utf-8", "replace"))
    if parsed_id is None:
        return []
    sources = dict.fromkeys([*(name.lower() for name in session.headers), *_HINT_SOURCES])
    return [derive_conversation_id(secret, tenant, source, parsed_id) for source in sources]


class IdentityResolver:
    """Identifies the tenant and the conversation of requests. Caches the identities that it finds.

    Args:
        config: The configuration.
        origin: The origin of the upstream.
        get_secret: Returns the secret key of the digests that identify tenants.
    """

    def __init__(self, config: Config, origin: str, get_secret: Callable[[], bytes]) -> None:
        self._session = config.session
        self._has_client_keys = bool(config.server.client_keys)
        self._origin = origin
        self._get_secret = get_secret
        names = [name.lower().encode() for name in (*config.session.headers, _LANE)]
        self._identifying_fields = list_tenant_fields(config.session.tenant).union(names)
        self._side_requests = SideRequestDetector()
        self._cached_identity = lru_cache(maxsize=_MAX_CACHED_CLIENTS)(self._compute_identity)

    def identify_client(self, headers: Headers, secret: bytes | None = None) -> Identity:
        """Returns the tenant and the conversation that the header fields of a request name.

        Args:
            headers: The header fields of the request, as sent, with names in lower case.
            secret: The secret key of the digests. None selects the current key.
        """
        names = self._identifying_fields
        fields = tuple([field for field in headers if field[0] in names])
        size_bytes = sum([len(value) for _, value in fields])
        identify = self._cached_identity if size_bytes <= _MAX_CACHED_BYTES else self._compute_identity
        return identify(secret or self._get_secret(), fields)

    def _compute_identity(self, secret: bytes, fields: tuple[tuple[bytes, bytes], ...]) -> Identity:
        mode, has_client_keys = self._session.tenant, self._has_client_keys
        tenant = derive_tenant(fields, secret, self._origin, mode, is_client_key=has_client_keys)
        source, values = _find_named_id(fields, self._session.headers)
        conversation = derive_conversation_id(secret, tenant, source, *values) if values else None
        lane = _find_ids(fields, [_LANE]).get(_LANE, b"")
        return Identity(tenant, conversation, lane, _format_name(*values))

    async def complete_identity_and_classify(
        self, identity: Identity, raw: bytes, header_map: Mapping[bytes, bytes]
    ) -> tuple[Identity, SideRequestKind | None]:
        """Completes an identity with the conversation that the request body names.

        An id in the header fields takes precedence over one in the body. Returns the identity and the kind of
        side call. The kind is None if the request is no side call. (A side call is, for example, a request
        for a title.) If a side call does not contain the messages of its conversation
        (`SideRequestKind.ALONE`), its identity has no conversation.
        """
        if identity.conversation is None and self._session.body_hints:
            hint = await run_in_worker_if_large(len(raw), partial(find_conversation_hint, raw))
            if hint is not None:
                lane = [identity.lane] if identity.lane else []
                conversation = derive_conversation_id(self._get_secret(), identity.tenant, *hint, *lane)
                name = _format_name(hint[1], *lane)
                identity = replace(identity, conversation=conversation, name=name)
        classify = partial(self._side_requests.classify_request, raw, header_map, identity.conversation)
        must_parse = len(raw) > MAX_INLINE_BYTES and may_ask_for_summary(raw)
        side = await run_short_work(classify) if must_parse else classify()
        return (replace(identity, conversation=None) if side is SideRequestKind.ALONE else identity), side
