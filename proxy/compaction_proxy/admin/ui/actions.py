"""Actions of the buttons on a conversation's page. Each runs a command, then redirects to a page."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from compaction_proxy.admin.ui.templates import HEADERS, Templates
from compaction_proxy.compaction.commands import ConversationCommands
from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.support.formatting import encode_path_segment

MAX_FORM_BYTES = 65_536
_MAX_FIELDS = 100
# Number of bytes of an encoded value that are decoded in one call. A single call for megabytes would hold the
# interpreter lock for seconds.
_PIECE_BYTES = 65_536


async def read_form(request: Request, limit_bytes: int = MAX_FORM_BYTES) -> dict[str, list[str]]:
    """Reads the fields of a form, `application/x-www-form-urlencoded`.

    Raises:
        RequestRefusedError: The form is larger than the limit (413), of another content type (415), or
            unreadable (400).
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/x-www-form-urlencoded", ""):
        raise RequestRefusedError(415, "This takes forms only.", "invalid_request")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit_bytes:
            raise RequestRefusedError(413, f"That is more than {limit_bytes:,} bytes.", "request_too_large")
    try:
        return await asyncio.to_thread(_parse_fields, bytes(body))
    except ValueError as error:
        raise RequestRefusedError(400, "The form cannot be read.", "invalid_request") from error


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


_SEE_OTHER = 303


@dataclass(frozen=True, slots=True)
class ActionRoutes:
    """Handles POST requests for a conversation.

    Attributes:
        commands: Commands on conversations.
        templates: Templates. Redirects use their root path.
    """

    commands: ConversationCommands
    templates: Templates

    async def run_action(self, request: Request) -> Response:
        """Runs the action in the path on the conversation in the path.

        Raises:
            RequestRefusedError: There is no such action (404), or the form or the command is refused.
        """
        name, action = request.path_params["name"], request.path_params["action"]
        commands = self.commands
        commands_without_fields: Mapping[str, Callable[[str], Awaitable[object]]] = {
            "compact": commands.request_compaction,
            "undo": commands.undo_round,
            "bypass": commands.bypass_compaction,
            "resume": commands.resume_compaction,
            "delete": commands.forget_conversation,
        }
        if action in commands_without_fields:
            await commands_without_fields[action](name)
        elif action == "pin":
            await commands.add_pin(name, get_field(await read_form(request), "text"))
        elif action == "unpin":
            await commands.remove_pin(name, get_field(await read_form(request), "pin"))
        elif action in {"remove", "restore"}:
            instruction = get_field(await read_form(request), "instruction")
            await commands.set_instruction_removed(name, instruction, removed=action == "remove")
        else:
            raise RequestRefusedError(404, "There is no such action.", "not_found")
        shown = "?done=deleted" if action == "delete" else f"/{encode_path_segment(name)}?done={action}"
        headers = {**HEADERS, "cache-control": "no-store"}
        return RedirectResponse(f"{self.templates.root}/conversations{shown}", _SEE_OTHER, headers)
