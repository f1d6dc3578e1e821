"""Which clients are let in where not everybody is.

Where keys are named, those who show one. Where the proxy pays and names none, everybody but web pages: whatever
page is open on a machine can send requests to it, and would spend the key without being able to read it.
"""

import hashlib
from collections.abc import Iterable, Mapping
from secrets import token_bytes
from urllib.parse import urlsplit

from proxy.config.checks import is_loopback
from proxy.errors import RequestRefused
from proxy.relay.headers import CREDENTIALS

_KEY_BYTES = 32
_BEARER = b"bearer "


class KnownClients:
    """Who may have requests relayed.

    Keys are compared by digests under a random key, so that the time it takes tells nothing of them.

    Args:
        keys: Any of them lets in; none: everybody is let in.
        pays: Whether the proxy has a key of its own for the upstream.
    """

    __slots__ = ("_digests", "_pays", "_secret")

    def __init__(self, keys: Iterable[str], *, pays: bool = False) -> None:
        self._pays = pays
        self._secret = token_bytes(_KEY_BYTES)
        self._digests = frozenset(self._digest(key.encode()) for key in keys)

    def admit(self, first: Mapping[bytes, bytes]) -> None:
        """Let a request pass; `first` are the first values of its fields (`headers.first_values`).

        Raises:
            RequestRefused: 401, it shows no key, or none that is known; 403, a web page has sent it.
        """
        if self._digests:
            shown = {_key(first[name]) for name in CREDENTIALS.intersection(first)}
            if self._digests.isdisjoint(map(self._digest, shown)):
                raise RequestRefused(401, "Show a key that this proxy knows.", "invalid_api_key")
        elif self._pays and b"origin" in first and not _is_of_this_machine(first[b"origin"]):
            raise RequestRefused(
                403, "Pages of other machines need a key: server.client_keys.", "origin_not_allowed"
            )

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=_KEY_BYTES, key=self._secret).digest()


def _key(shown: bytes) -> bytes:
    """The key in a credential, whatever its scheme."""
    return shown[len(_BEARER) :].strip() if shown[: len(_BEARER)].lower() == _BEARER else shown.strip()


def _is_of_this_machine(origin: bytes) -> bool:
    """Whether a page is served by this machine, or belongs to a program (`app://`, `vscode-webview://`)."""
    try:
        parts = urlsplit(origin.decode("latin-1").strip().lower())
    except ValueError:
        return False
    host = parts.hostname or ""
    if parts.scheme in {"http", "https"}:
        return is_loopback(host) or host.endswith(".localhost")
    return parts.scheme != ""  # `null` is any page in a frame


EVERYBODY = KnownClients(())
