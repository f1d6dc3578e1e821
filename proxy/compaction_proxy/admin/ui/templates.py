"""Renders templates into responses, and serves static files.

Templates escape all text that they insert. Rendering fails if a template uses a name that has no value. Each
response has headers that restrict what the browser may do with the page.
"""

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from compaction_proxy import __version__
from compaction_proxy.admin.api.routing import STORE_UNAVAILABLE
from compaction_proxy.admin.auth import is_cross_site
from compaction_proxy.admin.browser_sessions import LINK_TTL_S
from compaction_proxy.core.errors import (
    OverloadedError,
    ReplayFailedError,
    RequestRefusedError,
    SearchUnavailableError,
    StoreUnavailableError,
)
from compaction_proxy.core.event import find_failed_part, is_shortened
from compaction_proxy.gateway.paths import DASHBOARD_PATH
from compaction_proxy.support import formatting

# Matches characters that a browser does not show, or that change how a browser shows the text around them:
# control characters except tab and line feed; soft hyphen; direction marks; zero-width characters except the
# joiners that some writing systems need; line and paragraph separators; tag characters. The pattern also
# matches lone surrogates, which UTF-8 cannot encode.
_MISLEADING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def _format_code_point(match: re.Match[str]) -> str:
    return f"\N{MATHEMATICAL LEFT ANGLE BRACKET}U+{ord(match[0]):04X}\N{MATHEMATICAL RIGHT ANGLE BRACKET}"


def escape_misleading_characters(text: str) -> str:
    """Replaces each character that `_MISLEADING` matches by text such as `⟨U+202E⟩`, and CRLF by LF."""
    return _MISLEADING.sub(_format_code_point, text.replace("\r\n", "\n"))


def finalize_value(value: object) -> object:
    """Escapes misleading characters in a text before a template inserts it.

    Returns a text that is marked as HTML, and a value of any other type, unchanged.
    """
    return (
        escape_misleading_characters(value)
        if isinstance(value, str) and not hasattr(value, "__html__")
        else value
    )


ADMIN_FOLDER = Path(__file__).resolve().parent.parent
STATIC_FOLDER = ADMIN_FOLDER / "static"
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    # With `same-origin`, browsers do not send the address of a page to other sites. The value `no-referrer`
    # would do the same. But browsers would then send `Origin: null` with the forms of these pages, and
    # `check_access` would refuse the forms.
    "referrer-policy": "same-origin",
    "x-frame-options": "DENY",
}
# URL of a proxy with the default configuration, at which `compaction-proxy ui` asks without options.
DEFAULT_URL = "http://127.0.0.1:4141"
_HASH_DIGITS = 12
_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}


def _describe_failed_part(reason: str) -> str:
    """Returns the text for the part that failed, by the code of the reason."""
    return formatting.FAILED_PART_TEXTS[find_failed_part(reason)]


_FILTERS = {
    "segment": formatting.encode_path_segment,
    "usd": formatting.format_usd,
    "rate": formatting.format_price_per_million,
    "count": formatting.format_count,
    "quantity": formatting.format_quantity,
    "short": formatting.format_short_number,
    "milliseconds": formatting.format_milliseconds,
    "duration": formatting.format_duration,
    "stamp": formatting.format_iso_time,
    "when": formatting.format_display_time,
    "reason": formatting.describe_reason,
    "cause": formatting.describe_due_reasons,
    "setting": formatting.format_setting,
    "kind": formatting.describe_event_kind,
    "upstream_cause": formatting.describe_upstream_cause,
    "failed_part": _describe_failed_part,
}


@cache
def _create_environment() -> Environment:
    """Returns the template environment of Jinja. The first call creates it."""
    environment = Environment(
        loader=FileSystemLoader(ADMIN_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=finalize_value,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= _FILTERS
    environment.globals |= {
        "percent": formatting.format_percent,
        "ago": formatting.format_age,
        "describe_status": formatting.describe_status,
        "describe_failed_requests": formatting.describe_failed_requests,
        "describe_missing_dollars": formatting.describe_missing_dollars,
        "describe_missing_price": formatting.describe_missing_price,
        "describe_request_after_undo": formatting.describe_request_after_undo,
        "describe_round_state": formatting.describe_round_state,
        "is_shortened": is_shortened,
        "whole_id_hint": formatting.WHOLE_ID_HINT,
        "version": __version__,
    }
    return environment


@cache
def _load_files() -> Mapping[str, tuple[bytes, str]]:
    """Returns the content of each static file and the first digits of the content's hash, by file name."""
    contents = {path.name: path.read_bytes() for path in STATIC_FOLDER.iterdir() if path.suffix in _TYPES}
    return {name: (data, sha256(data).hexdigest()[:_HASH_DIGITS]) for name, data in contents.items()}


_ERROR_TITLES = {
    404: "Not found", 409: "Not possible now", 413: "Too large", 503: "The store is away",
}  # fmt: skip


def describe_error(error: Exception) -> tuple[int, str]:
    """Returns the status of the response and the message with which a page reports `error`.

    Raises `error` itself if its type is not one of those that pages report.
    """
    match error:
        case HTTPException():
            return error.status_code, "There is no such page."
        case StoreUnavailableError():
            return 503, STORE_UNAVAILABLE
        case SearchUnavailableError():
            return 501, str(error)
        case RequestRefusedError() | ReplayFailedError() | OverloadedError():
            return error.status, str(error)
    raise error


@dataclass(frozen=True, slots=True)
class Templates:
    """Renders pages and serves their static files.

    Attributes:
        root: Prefix of the paths of all pages and static files.
    """

    root: str

    async def render_page(self, template: str, status: int = 200, **variables: Any) -> Response:  # noqa: ANN401 - any values
        """Renders a page in a thread, because a long page on the event loop would delay other requests."""
        text = await asyncio.to_thread(self._render_template, template, variables)
        return HTMLResponse(text, status, {**HEADERS, "cache-control": "no-store"})

    async def render_error(self, error: Exception) -> Response:
        """Renders a page that explains an error."""
        status, message = describe_error(error)
        title = _ERROR_TITLES.get(status, "This did not work")
        return await self.render_page("trouble.html", status, at="", title=title, message=message)

    async def render_refusal(self, scope: Scope, refused: RequestRefusedError) -> Response:
        """Renders the page for a request without access.

        If a session is missing, the page says which command prints a link. The page needs no other file,
        because the browser has no access to any. If the user has followed a link on a page of another site,
        the browser has sent no cookie. The page then has the browser open the address again, as from a page
        of ours.
        """
        command = self._build_link_command(scope) if refused.status == HTTPStatus.UNAUTHORIZED else ""
        message = "This browser has no session." if refused.code == "invalid_admin_key" else str(refused)
        is_repeated = refused.code == "invalid_admin_key" and is_cross_site(Headers(scope=scope))
        page = await self.render_page(
            "no_access.html", refused.status, command=command, message=message, link_ttl_s=LINK_TTL_S
        )
        if is_repeated:
            page.headers["refresh"] = "0"
        return page

    def _build_link_command(self, scope: Scope) -> str:
        """Returns the command that prints a link for the address on which the proxy got a request."""
        host, port = scope.get("server") or ("", None)
        here = f"[{host}]" if ":" in host else host
        url = f"{scope.get('scheme', 'http')}://{here}:{port}{self.root.removesuffix(DASHBOARD_PATH)}"
        is_default = port is None or url == DEFAULT_URL
        return "compaction-proxy ui" if is_default else f"compaction-proxy ui --url {url}"

    def _render_template(self, template: str, shown: Mapping[str, Any]) -> str:
        page = _create_environment().get_template(template)
        return page.render(now=time.time(), root=self.root, asset=self._build_asset_url, **shown)

    def _build_asset_url(self, name: str) -> str:
        return f"{self.root}/static/{name}?v={_load_files()[name][1]}"

    async def serve_static(self, request: Request) -> Response:
        """Serves a static file.

        Pages add a hash of the file's content to its URL, as the parameter `v`. If a request has this
        parameter, the response allows browsers to cache the file for a year.

        Raises:
            RequestRefusedError: If there is no such file (404).
        """
        name = request.path_params["name"]
        if name not in _load_files():
            raise RequestRefusedError(404, "There is no such file.", "not_found")
        cache_control = "public, max-age=31536000, immutable" if "v" in request.query_params else "no-cache"
        headers = {**HEADERS, "cache-control": cache_control}
        return Response(_load_files()[name][0], 200, headers, _TYPES[Path(name).suffix])
