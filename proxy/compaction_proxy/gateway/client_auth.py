"""Checks client keys. Where no key is required, refuses requests of web pages from other machines.

If `server.client_keys` is set, a client must send one of these keys. If it is not set and the proxy has its
own provider key, every client is admitted except web pages from other machines. If these were admitted, any
page that is open in a browser on this machine could send requests to the proxy, and the owner of the provider
key would pay for them. The proxy recognises such requests by these header fields:

- `Origin`: a browser names the origin of the page in this field. It omits the field if a page reads from the
  server that the page itself came from.
- `Sec-Fetch-Site`: newer browsers say in this field whether another site caused the request. The proxy reads
  it if there is no `Origin`, such as for images and links.
- `Host`: the owner of a page can point the page's host name at this machine (DNS rebinding). The browser then
  takes this machine for the server of the page, and sends that host name in this field. The proxy checks the
  field only if it listens on a loopback address.
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
# How the field `Origin` begins in requests from the pages of desktop programs. Ollama accepts the same
# beginnings. Browser extensions are not in the list. Neither is `null`, because any page can contain a frame
# with that origin.
_PROGRAMS = ("app://", "file://", "tauri://", "vscode-file://", "vscode-webview://")
# Endings of host names that public name servers never resolve (RFC 6761, RFC 6762, and for `internal` a
# resolution of ICANN).
_PRIVATE = (".localhost", ".local", ".internal")


class ClientAuthenticator:
    """Checks client keys.

    The class compares digests of the keys, made with a random secret, so that the time of a comparison
    reveals nothing about the keys.

    Args:
        keys: The accepted keys; a client must send one of them. If there are none, no key is needed.
        has_provider_key: Whether the proxy has its own provider key. If so, and `keys` is empty, web pages
            from other machines are refused.
        loopback_only: Whether clients reach the proxy only over a loopback address. If not, any `Host` field
            is accepted.
        keys_identify_tenants: Whether the credential of a client decides its tenant (`session.tenant`).
    """

    def __init__(
        self,
        keys: Iterable[str],
        *,
        has_provider_key: bool = False,
        loopback_only: bool = False,
        keys_identify_tenants: bool = True,
    ) -> None:
        self._keys_identify_tenants = keys_identify_tenants
        self._has_provider_key = has_provider_key
        self._loopback_only = loopback_only
        self._secret = token_bytes(_KEY_BYTES)
        self._digests = frozenset(self._digest_key(key.encode()) for key in keys)

    def authorize_request(self, headers: Headers, header_map: Mapping[bytes, bytes]) -> Headers:
        """Checks the credential and the origin of a request, and refuses the request if they are not allowed.

        Args:
            headers: The header fields of the request, with names in lower case.
            header_map: The first value of each field (`headers.build_header_map`).

        Returns:
            The header fields to use from here on. If keys are configured and credentials decide the tenant,
            all credentials except the accepted key are removed. So a client that knows one key cannot pose as
            several tenants by adding other credentials.

        Raises:
            RequestRefusedError: With status 401 if keys are configured and the request has none of them. With
                status 403 if a web page from another machine has sent the request.
        """
        if self._digests:
            name = self._find_key_field(header_map)
            others = [field for field in headers if field[0] not in CREDENTIALS]
            return [*others, (name, header_map[name])] if self._keys_identify_tenants else headers
        if self._has_provider_key:
            self._refuse_foreign_pages(header_map)
        return headers

    def _find_key_field(self, header_map: Mapping[bytes, bytes]) -> bytes:
        """Returns the name of the field that holds an accepted key. Refuses the request if there is none."""
        for name in sorted(CREDENTIALS.intersection(header_map)):
            if self._digest_key(extract_key(header_map[name])) in self._digests:
                return name
        raise RequestRefusedError(
            401, "Send a client key of this proxy (server.client_keys).", "invalid_api_key"
        )

    def _refuse_foreign_pages(self, header_map: Mapping[bytes, bytes]) -> None:
        origin = header_map.get(b"origin")
        if not _is_local_origin(origin) if origin is not None else _is_cross_site(header_map):
            raise RequestRefusedError(
                403,
                "Web pages from other machines need a client key (server.client_keys).",
                "origin_not_allowed",
            )
        if self._loopback_only and b"host" in header_map and not _is_private_host(header_map[b"host"]):
            raise RequestRefusedError(
                403,
                "Clients that use a public host name need a client key (server.client_keys).",
                "host_not_allowed",
            )

    def _digest_key(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=_KEY_BYTES, key=self._secret).digest()


def _is_cross_site(header_map: Mapping[bytes, bytes]) -> bool:
    """Returns whether a browser says that another site caused the request."""
    return header_map.get(b"sec-fetch-site") == b"cross-site"


def _is_local_origin(origin: bytes) -> bool:
    """Returns whether a page comes from this machine, or from a desktop program (`app://obsidian.md`)."""
    text = origin.decode("latin-1").strip().lower()
    scheme, _, rest = text.partition("://")
    if scheme not in {"http", "https"}:
        return text.startswith(_PROGRAMS)
    authority = parse_authority(rest)
    return authority is not None and (is_loopback(authority[0]) or authority[0].endswith(".localhost"))


def _is_private_host(host: bytes) -> bool:
    """Returns whether a `Host` field holds an IP address, or a name that public name servers do not resolve.

    Such a name contains no dot, or has one of the endings in `_PRIVATE`.
    """
    authority = parse_authority(host.decode("latin-1").strip().lower())
    if authority is None:
        return False
    name = authority[0]
    if "." not in name or name.endswith(_PRIVATE):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


ALLOW_ALL_CLIENTS = ClientAuthenticator(())
