"""Which clients are let in where not everybody is.

Where keys are named, those who show one. Where the proxy pays and names none, everybody but web pages of
other machines: whatever page is open in a browser can send requests to this one, and would spend the key.
Browsers tell by `UrlOrigin` whose page it is, but not where a page reads from what it takes for its own
server. Such a page has had its own name pointed at this machine (DNS rebinding), and that name stands in
`Host`.
"""

import hashlib
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from secrets import token_bytes

from compaction_proxy.config.validation import is_loopback
from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.gateway.headers import CREDENTIALS, Headers, extract_key
from compaction_proxy.support.net import parse_authority

_KEY_BYTES = 32
# Origins of programs that show pages of their own; as Ollama's. Extensions of a browser are not among them,
# and neither is `null`: any page can have a frame of that origin.
_PROGRAMS = ("app://", "file://", "tauri://", "vscode-file://", "vscode-webview://")
# What public name servers never resolve (RFC 6761, RFC 6762, and `internal` by ICANN's resolution).
_PRIVATE = (".localhost", ".local", ".internal")


class ClientAuthenticator:
    """Who may have requests relayed.

    Keys are compared by digests under a random key, so that the time it takes tells nothing of them.

    Args:
        keys: Any of them lets in; none: everybody is let in.
        has_provider_key: Whether the proxy has a key of its own for a provider.
        loopback_only: Whether it is reached over a loopback address only. Elsewhere it may have any name.
        keys_identify_tenants: Whether credentials tell tenants apart (`session.tenant`).
    """

    __slots__ = ("_digests", "_loopback", "_pays", "_secret", "_telling")

    def __init__(
        self,
        keys: Iterable[str],
        *,
        has_provider_key: bool = False,
        loopback_only: bool = False,
        keys_identify_tenants: bool = True,
    ) -> None:
        self._telling = keys_identify_tenants
        self._pays = has_provider_key
        self._loopback = loopback_only
        self._secret = token_bytes(_KEY_BYTES)
        self._digests = frozenset(self._digest_key(key.encode()) for key in keys)

    def authorize_request(self, headers: Headers, header_map: Mapping[bytes, bytes]) -> Headers:
        """Let a request pass.

        Args:
            headers: Its fields, names in lower case.
            header_map: The first value of each (`headers.first_values`).

        Returns:
            Its fields. Where keys are named, and credentials tell tenants apart, they show the one that lets
            it in and no other: who knows one key cannot be many tenants by what else it shows.

        Raises:
            RequestRefused: 401, it shows no key, or none that is known; 403, a web page of another machine
                has sent it.
        """
        if self._digests:
            name = self._find_key_field(header_map)
            others = [field for field in headers if field[0] not in CREDENTIALS]
            return [*others, (name, header_map[name])] if self._telling else headers
        if self._pays:
            self._refuse_foreign_pages(header_map)
        return headers

    def _find_key_field(self, header_map: Mapping[bytes, bytes]) -> bytes:
        """The field that shows a key that is known."""
        for name in sorted(CREDENTIALS.intersection(header_map)):
            if self._digest_key(extract_key(header_map[name])) in self._digests:
                return name
        raise RequestRefusedError(401, "Show a key that this proxy knows.", "invalid_api_key")

    def _refuse_foreign_pages(self, header_map: Mapping[bytes, bytes]) -> None:
        if b"origin" in header_map and not _is_local_origin(header_map[b"origin"]):
            raise RequestRefusedError(
                403, "Pages of other machines need a key: server.client_keys.", "origin_not_allowed"
            )
        if self._loopback and b"host" in header_map and not _is_private_host(header_map[b"host"]):
            raise RequestRefusedError(
                403, "Under a public name clients need a key: server.client_keys.", "host_not_allowed"
            )

    def _digest_key(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=_KEY_BYTES, key=self._secret).digest()


def _decode_field(field: bytes) -> str:
    return field.decode("latin-1").strip().lower()


def _is_local_origin(origin: bytes) -> bool:
    """Whether a page is served by this machine, or belongs to a program (`app://obsidian.md`)."""
    text = _decode_field(origin)
    scheme, _, rest = text.partition("://")
    if scheme not in {"http", "https"}:
        return text.startswith(_PROGRAMS)
    named = parse_authority(rest)
    return named is not None and (is_loopback(named[0]) or named[0].endswith(".localhost"))


def _is_private_host(host: bytes) -> bool:
    """Whether a `Host` is an address, or a name that nobody elsewhere can point at this machine."""
    named = parse_authority(_decode_field(host))
    if named is None:
        return False
    name = named[0]
    return "." not in name or name.endswith(_PRIVATE) or _is_ip_address(name)


def _is_ip_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


ALLOW_ALL_CLIENTS = ClientAuthenticator(())
