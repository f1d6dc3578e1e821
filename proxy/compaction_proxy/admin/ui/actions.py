"""Actions of the buttons on a conversation's page. Each calls the admin API, then redirects to a page."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from compaction_proxy.admin.ui.api import InProcessAdminClient, PageError
from compaction_proxy.admin.ui.templates import HEADERS, Templates
from compaction_proxy.support.formatting import encode_path_segment

MAX_FORM_BYTES = 65_536
_MAX_FIELDS = 100
# Number of bytes of an encoded value that are decoded in one call. A single call for megabytes would hold the
# interpreter lock for seconds.
_PIECE_BYTES = 65_536


async def read_form(request: Request, limit_bytes: int = MAX_FORM_BYTES) -> dict[str, list[str]]:
    """Reads the fields of a form, `application/x-www-form-urlencoded`.

    Raises:
        PageError: The form is larger than the limit (413), of another content type (415), or unreadable
            (400).
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/x-www-form-urlencoded", ""):
        raise PageError(415, "This takes forms only.")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit_bytes:
            raise PageError(413, f"That is more than {limit_bytes:,} bytes.")
    try:
        return await asyncio.to_thread(_parse_fields, bytes(body))
    except ValueError as error:
        raise PageError(400, "The form cannot be read.") from error


def _parse_fields(body: bytes) -> dict[str, list[str]]:
    if body.count(b"&") >= _MAX_FIELDS:
        raise ValueError("too many fields")
    fields: dict[str, list[str]] = {}
    for pair in filter(None, body.split(b"&")):
        name, _, value = pair.partition(b"=")
        fields.setdefault(_decode_component(name), []).append(_decode_component(value))
    return fields


def _decode_component(raw: bytes) -> str:
    return b"".join(map(unquote_to_bytes, _split_pieces(raw.replace(b"+", b" ")))).decode("utf-8", "replace")


def _split_pieces(raw: bytes) -> Iterator[bytes]:
    """Splits encoded text into pieces. Never splits the three bytes of an escape such as `%20`."""
    start = 0
    while start < len(raw):
        stop = start + _PIECE_BYTES
        escaped = raw.rfind(b"%", stop - 2, stop)
        stop = stop if escaped < 0 else escaped
        yield raw[start:stop]
        start = stop


def get_field(fields: dict[str, list[str]], name: str) -> str:
    """Returns the first value of a field; empty if the field is missing."""
    return fields.get(name, [""])[0]


# Actions that need only the id of the conversation. Each name is also the action's path in the admin API.
ACTIONS = frozenset({"compact", "undo", "bypass", "resume"})
_SEE_OTHER = 303


@dataclass(frozen=True, slots=True)
class ActionRoutes:
    """Handles POST requests for a conversation.

    Attributes:
        api: Client of the admin API.
        templates: Templates. Redirects use their root path.
    """

    api: InProcessAdminClient
    templates: Templates

    async def run_action(self, request: Request) -> Response:
        """Runs the action in the path: `compact`, `undo`, `bypass` or `resume` (see the admin API)."""
        name, action = request.path_params["name"], request.path_params["action"]
        if action not in ACTIONS:
            raise PageError(404, "There is no such action.")
        await self.api.post(request, "conversations", name, action)
        return self._redirect_to_conversation(name, action)

    async def pin_text(self, request: Request) -> Response:
        """Pins a text."""
        name = request.path_params["name"]
        text = get_field(await read_form(request), "text")
        await self.api.post(request, "conversations", name, "pins", body=json.dumps({"text": text}).encode())
        return self._redirect_to_conversation(name, "pin")

    async def unpin_text(self, request: Request) -> Response:
        """Removes a pin."""
        name = request.path_params["name"]
        await self.api.delete(
            request, "conversations", name, "pins", get_field(await read_form(request), "pin")
        )
        return self._redirect_to_conversation(name, "unpin")

    async def remove_instruction(self, request: Request) -> Response:
        """Leaves the project instructions in the form out of all later requests that the proxy rewrites."""
        return await self._change_instruction(request, "remove")

    async def restore_instruction(self, request: Request) -> Response:
        """Undoes `remove_instruction` for the project instructions in the form."""
        return await self._change_instruction(request, "restore")

    async def _change_instruction(self, request: Request, action: str) -> Response:
        name = request.path_params["name"]
        ask = self.api.delete if action == "remove" else self.api.post
        await ask(
            request, "conversations", name, "instructions", get_field(await read_form(request), "instruction")
        )
        return self._redirect_to_conversation(name, action)

    async def delete_conversation(self, request: Request) -> Response:
        """Deletes everything that is stored about the conversation."""
        await self.api.delete(request, "conversations", request.path_params["name"])
        return self._redirect("/conversations?done=deleted")

    def _redirect_to_conversation(self, name: str, done: str) -> Response:
        return self._redirect(f"/conversations/{encode_path_segment(name)}?done={done}")

    def _redirect(self, path: str) -> Response:
        headers = {**HEADERS, "cache-control": "no-store"}
        return RedirectResponse(f"{self.templates.root}{path}", _SEE_OTHER, headers)
