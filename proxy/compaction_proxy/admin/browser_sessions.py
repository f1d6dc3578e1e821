"""Signs the links and the sessions with which a browser gets access to the admin pages.

A link contains a code instead of the admin key, because links stay in histories and on screens. In exchange
for the code, a browser gets a cookie with the id of a session. Code and id are random, contain the time at
which they expire, and are signed with the admin key. So every worker and every replica can check them. The
proxy stores only that a code has been used. A new admin key ends all sessions.
"""

import hmac
import secrets
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from typing import Literal

from starlette.datastructures import Headers

from compaction_proxy.storage.keys import sign_in_code_key
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.support.net import parse_authority

# Seconds for which a link and a session are valid.
LINK_TTL_S = 60
SESSION_TTL_S = 7 * 86_400
SIGN_IN_PATH = "/sign-in"
"""Path of a link, below that of the dashboard. The query parameter `code` holds the code."""
DEFAULT_PORTS = {"http": 80, "https": 443}
_ID_BYTES = 16

Purpose = Literal["link", "session"]


def _sign_text(key: str, purpose: Purpose, text: str) -> str:
    digest = hmac.digest(key.encode(), f"{purpose} {text}".encode("utf-8", "surrogatepass"), "sha256")
    return urlsafe_b64encode(digest).decode().rstrip("=")


def create_token(key: str, purpose: Purpose, ttl_s: float) -> str:
    """Creates the code of a link or the id of a session, which is valid for `ttl_s` seconds from now.

    The token has the form `EXPIRES.RANDOM.SIGNATURE`. `key` is the admin key.
    """
    text = f"{int(time.time() + ttl_s):x}.{secrets.token_urlsafe(_ID_BYTES)}"
    return f"{text}.{_sign_text(key, purpose, text)}"


def is_valid_token(key: str, purpose: Purpose, token: str) -> bool:
    """Returns whether a token was created with the admin key `key` for this purpose, and has not expired.

    A link is also invalid if it expires more than `LINK_TTL_S` seconds from now, as if the clock of its
    machine is ahead. Otherwise the mark of `redeem_code` would expire before the link, and the
    link could be used twice.
    """
    text, _, signature = token.rpartition(".")
    expected = _sign_text(key, purpose, text).encode()
    if not hmac.compare_digest(signature.encode("utf-8", "surrogatepass"), expected):
        return False
    rest_s = int(text.partition(".")[0], 16) - time.time()
    return rest_s > 0 and (purpose == "session" or rest_s <= LINK_TTL_S)


def build_link(dashboard_url: str, key: str) -> str:
    """Builds a link that opens the dashboard in a browser once, within `LINK_TTL_S` seconds.

    `dashboard_url` is the URL of the dashboard without a slash at its end. `key` is the admin key.
    """
    return f"{dashboard_url}{SIGN_IN_PATH}?code={create_token(key, 'link', LINK_TTL_S)}"


async def redeem_code(records: RecordStore, code: str) -> bool:
    """Marks the code of a link as used, for all processes that share the store.

    Returns False if it was used before. The mark is a lease that nobody releases. It lasts as long as a code
    is valid.

    Raises:
        StoreUnavailableError: If the store does not answer.
    """
    return await records.acquire_lease(sign_in_code_key(code), LINK_TTL_S) is not None


def build_cookie_name(scheme: str, host: str) -> str:
    """Returns the name of the cookie that holds the id of a session.

    The name contains the port at which the browser reaches the proxy, because browsers send the cookies of a
    host to all of its ports. `host` is the value of the header `Host`.
    """
    authority = parse_authority(host, DEFAULT_PORTS[scheme])
    return f"compaction-proxy-{authority[1] if authority else ''}"


def has_session(key: str, scheme: str, headers: Headers) -> bool:
    """Returns whether a request has a cookie with the id of a session that is valid."""
    name = build_cookie_name(scheme, headers.get("host", ""))
    return any(is_valid_token(key, "session", value) for value in _find_cookies(headers, name))


def _find_cookies(headers: Headers, name: str) -> Iterator[str]:
    """Yields the values of all cookies with this name. Another port or path of the host may have set some."""
    for field in headers.getlist("cookie"):
        for pair in field.split(";"):
            found, _, value = pair.strip().partition("=")
            if found == name:
                yield value
