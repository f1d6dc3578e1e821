"""Forms that pages send: read within bounds, as browsers without scripts send them."""

import asyncio
from collections.abc import Iterator
from urllib.parse import unquote_to_bytes

from starlette.requests import Request

from compaction_proxy.admin.ui.api import Refused

MAX_FORM_BYTES = 65_536
_MAX_FIELDS = 100
# Signs are decoded in pieces: one call for megabytes of them would hold the interpreter for seconds.
_PIECE_BYTES = 65_536


async def form(request: Request, limit_bytes: int = MAX_FORM_BYTES) -> dict[str, list[str]]:
    """The fields of a form, `application/x-www-form-urlencoded`.

    Raises:
        Refused: 413, it is larger than the limit; 415, it is none; 400, it cannot be read.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/x-www-form-urlencoded", ""):
        raise Refused(415, "This takes forms only.")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit_bytes:
            raise Refused(413, f"That is more than {limit_bytes:,} bytes.")
    try:
        return await asyncio.to_thread(_fields, bytes(body))
    except ValueError as error:
        raise Refused(400, "The form cannot be read.") from error


def _fields(body: bytes) -> dict[str, list[str]]:
    if body.count(b"&") >= _MAX_FIELDS:
        raise ValueError("too many fields")
    found: dict[str, list[str]] = {}
    for pair in filter(None, body.split(b"&")):
        name, _, value = pair.partition(b"=")
        found.setdefault(_decoded(name), []).append(_decoded(value))
    return found


def _decoded(raw: bytes) -> str:
    return b"".join(map(unquote_to_bytes, _pieces(raw.replace(b"+", b" ")))).decode("utf-8", "replace")


def _pieces(raw: bytes) -> Iterator[bytes]:
    """Cut between signs: never within the three bytes of one that is escaped."""
    start = 0
    while start < len(raw):
        stop = start + _PIECE_BYTES
        escaped = raw.rfind(b"%", stop - 2, stop)
        stop = stop if escaped < 0 else escaped
        yield raw[start:stop]
        start = stop


def one(fields: dict[str, list[str]], name: str) -> str:
    """A field's first value; empty: there is none."""
    return fields.get(name, [""])[0]
